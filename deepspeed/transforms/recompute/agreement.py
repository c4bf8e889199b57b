"""Ranks that run one model decide alike: each counts its own batch, and the largest numbers of all count."""

from __future__ import annotations

import zlib
from dataclasses import replace

import torch
from torch import nn

from deepspeed.comm.collectives import Communicator
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.transforms.recompute.choosing import Counted
from deepspeed.transforms.recompute.recorded import BlockRecord


class AgreeingRanks:
    """Those with the same layers: replicas, and those that share each layer or sequence."""

    def __init__(self, mesh: ProcessMesh, module: nn.Module) -> None:
        self._mesh = mesh
        self._module = module

    def __deepcopy__(self, memo: object) -> AgreeingRanks:
        return self

    @property
    def groups(self) -> list[Communicator]:
        """The largest of all is the largest along one axis after the other: a model-parallel unit may have no group
        of all."""
        axes = (("dp", "sp"), ("tp",))
        return [self._mesh.communicator(*names) for names in axes if self._mesh.size(*names) > 1]

    def largest(self, numbers: list[int]) -> list[int]:
        """Elementwise, over all ranks. Collective."""
        device = next((p.device for p in self._module.parameters()), torch.device("cpu"))
        values = torch.tensor(numbers, dtype=torch.int64, device=device)
        for group in self.groups:
            group.all_reduce_max(values).wait()
        return values.tolist()

    def alike(self, number: int) -> bool:
        """Return whether ``number`` is the same on all ranks. Collective."""
        high, low = self.largest([number, -number])
        return high == -low


def agree(counted: Counted, ranks: AgreeingRanks) -> Counted:
    """The largest bytes and FLOPs of all ranks, which may have batches of different sizes. Where their blocks do not
    run the same operations (experts without tokens), only whole blocks are chosen from.

    Raises:
        RuntimeError: their blocks run in different orders.
    """
    if not ranks.groups:
        return counted
    if not ranks.alike(_digest(counted.blocks)):
        raise RuntimeError(
            "activation_checkpointing.memory_budget: the ranks run the blocks of the model in different orders, or of "
            "different kinds, in the first forward; it needs the same ones on every rank"
        )
    kinds = list(counted.kinds)
    if not ranks.alike(_digest([[str(op.key) for op in record.ops] for record in kinds])):
        kinds = [_without_choices(record) for record in kinds]
    outside, before = ranks.largest([counted.outside, counted.before])
    return replace(counted, kinds=[_largest(each, ranks) for each in kinds], outside=outside, before=before)


def _digest(value: object) -> int:
    return zlib.crc32(repr(value).encode())


def _without_choices(record: BlockRecord) -> BlockRecord:
    """One operation that does everything."""
    ops = record.ops[: record.needed]
    if not ops:
        return record
    flops, cost = sum(op.flops for op in ops), sum(op.cost for op in ops)
    return replace(record, ops=(replace(ops[0], flops=flops, cost=cost, keepable=False),), needed=1)


def _largest(record: BlockRecord, ranks: AgreeingRanks) -> BlockRecord:
    numbers = [record.needed, record.inputs, record.saved]
    for op in record.ops:
        numbers += [op.flops, op.cost, op.out, not op.keepable, op.saved]
    needed, inputs, saved, *rest = ranks.largest([int(number) for number in numbers])
    ops = [
        replace(
            op,
            flops=rest[place],
            cost=rest[place + 1],
            out=rest[place + 2],
            keepable=not rest[place + 3],
            saved=bool(rest[place + 4]),
        )
        for op, place in zip(record.ops, range(0, len(rest), 5), strict=True)
    ]
    return replace(record, ops=tuple(ops), needed=needed, inputs=inputs, saved=saved)
