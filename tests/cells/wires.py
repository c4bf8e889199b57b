"""What wires of few bits make of weights and gradients, as formulas in plain PyTorch.

Blocks share a scale, so the result depends on how parameters lie end to end: ranks say it (``Wire``), and the oracle
lays its own gradients out alike. Codes are recomputed here, in torch alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.cells.cell import Cell

BLOCK = 256
"""Elements that share a scale."""
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Wire:
    """One bucket. ``kind``: "plain"; "bf16": sums of that dtype; "parts": each rank encodes what another one keeps;
    "both ways": sums are encoded too; "weights": what is gathered, not gradients."""

    kind: str
    names: tuple[str, ...]
    starts: tuple[int, ...]
    numel: int
    """With padding."""
    rows: int
    """Parts that are encoded separately."""
    bits: int = 8
    feedback: bool = False
    groups: int = 0
    """Whose sums are encoded; 0: every rank's gradient."""
    often: bool = False
    """Whether the gradient of each micro-batch is sent separately."""

    def flat(self, values: Gradients) -> Tensor:
        """End to end [numel] in fp32; zeros where there is none."""
        whole = torch.zeros(self.numel)
        for name, start in zip(self.names, self.starts, strict=True):
            if name in values:
                whole[start : start + values[name].numel()] = values[name].flatten()
        return whole

    def parted(self, whole: Tensor, like: Gradients) -> Gradients:
        """The inverse, of the names in ``like``."""
        places = [each for each in zip(self.names, self.starts, strict=True) if each[0] in like]
        return {name: whole[start : start + like[name].numel()].view_as(like[name]) for name, start in places}


def rounded(values: Tensor, bits: int) -> Tensor:
    """Each ``BLOCK`` of the last dimension as integers from 1 - 2^(bits - 1) to 2^(bits - 1) - 1 times a scale."""
    length = values.shape[-1]
    blocks = functional.pad(values.float(), (0, -length % BLOCK)).unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    codes = (blocks / scale.where(scale > 0, 1.0)).round()
    return (codes * scale).flatten(-2)[..., :length]


class Wires:
    """The wires of one layout, with what earlier sums of gradients left to send."""

    def __init__(self, wires: Sequence[Wire]) -> None:
        self.all = list(wires)
        sums = [wire for wire in wires if wire.kind != "weights"]
        self.gradients = sums if any(wire.kind != "plain" for wire in sums) else []
        self.weights = [wire for wire in wires if wire.kind == "weights"]
        self.owed: dict[tuple[int, str], Tensor] = {}

    def rounds(self, cell: Cell, count: int) -> int:
        """Sums over ranks of a step of ``count`` micro-batches."""
        return count if cell.backward != "no_sync" and any(wire.often for wire in self.gradients) else 1

    @torch.no_grad()
    def publish(self, weights: Gradients) -> None:
        """``weights``, in place, as they arrive."""
        for wire in self.weights:
            arrived = rounded(wire.flat(weights).view(wire.rows, -1), wire.bits).flatten()
            for name, value in wire.parted(arrived, weights).items():
                weights[name].copy_(value)

    def total(self, rounds: list[list[Gradients]]) -> Gradients:
        """The sum over rounds of what ranks' gradients (one dict of each) sum up to."""
        found: Gradients = {}
        like = {name: value for each in rounds for own in each for name, value in own.items()}
        for at, wire in enumerate(self.gradients):
            whole = torch.stack(
                [self._sum(at, wire, [wire.flat(own) for own in each]) for each in rounds]
            ).sum(0)
            found |= wire.parted(whole, like)
        assert found.keys() == like.keys(), f"in no bucket: {like.keys() - found.keys()}"
        return found

    def _sum(self, at: int, wire: Wire, own: list[Tensor]) -> Tensor:
        if wire.kind == "plain":
            return torch.stack(own).sum(0)
        if wire.kind == "bf16":
            return torch.stack([each.bfloat16().float() for each in own]).sum(0).bfloat16().float()
        size = len(own) // (wire.groups or len(own))
        summed = torch.stack(own).unflatten(0, (-1, size)).sum(1)
        rows = summed.unflatten(1, (wire.rows, -1))
        total = self._encoded((at, "worker"), wire, rows).sum(0)
        if wire.kind == "both ways":
            total = self._encoded((at, "server"), wire, total / len(own)) * len(own)
        return total.flatten()

    def _encoded(self, key: tuple[int, str], wire: Wire, values: Tensor) -> Tensor:
        wanted = values + self.owed.get(key, torch.zeros(())) if wire.feedback else values
        sent = rounded(wanted, wire.bits)
        self.owed[key] = wanted - sent
        return sent


def has_formula(cell: Cell) -> bool:
    """Return whether the oracle can reproduce the payloads of the ranks closely enough: 16 bits change many codes."""
    axes = {axis for axis in ("tp", "sp", "pp", "ep") if cell.axis(axis) > 1}
    if cell.wire == "qwz":
        axes -= {"sp"}
    # sums of groups are rounded again; deferred micro-batches may be added in 16 bits
    own_order = cell.wire == "bf16" and (cell.shards == "mics" or cell.backward == "no_sync")
    # ranks say it before their first update; later gradients are summed within groups alone
    unknown = cell.sends_signs and (cell.parameters == "late" or cell.shards == "mics")
    unknown = unknown or cell.steps_alone
    # the step in which weights begin to be trained sums their gradients once, not with each micro-batch
    if cell.wire != "qwz" and cell.parameters == "late":
        unknown = unknown or cell.accumulation > 1 or cell.batch_change
    return (
        cell.wire in ("qwz", "qgz", "int8", "bf16")
        and not axes
        and cell.precision == "fp32"
        and not (own_order or unknown)
    )


def imagined(cell: Cell, named: Gradients, seed: int) -> list[Wire]:
    """Wires like the cell's, with tensors in an order drawn from ``seed``: for what their codes change where the
    engine's layout is not known."""
    kind = {"qgz": "parts", "int8": "both ways", "bf16": "bf16", "qwz": "weights"}.get(cell.wire)
    rows = (
        cell.ranks // cell.axis("tp") // cell.axis("pp")
    )  # ranks that share a sequence sum their gradients too
    if kind is None or rows == 1:
        return []
    order = random.Random(seed).sample(list(named), len(named))
    *starts, end = itertools.accumulate((named[name].numel() for name in order), initial=0)
    end += -end % rows
    bits = 4 if cell.wire == "qgz" else 8
    often = cell.stage >= 2
    feedback = cell.wire == "int8"
    return [Wire(kind, tuple(order), tuple(starts), end, rows, bits, feedback, often=often)]


def wires_of(cell: Cell, engine: Any, name_of: Callable[[str], str]) -> list[Wire]:
    """The wires of an engine on this rank; names as the oracle knows them."""
    named: dict[nn.Parameter, str] = {
        param: name_of(name) for name, param in engine.module.named_parameters()
    }
    found = []
    params = {bucket.layout.index: bucket.params for bucket in engine.core.store.param_buckets}
    often = engine.core.reducer.cadence.name == "EVERY_MICRO_BATCH"
    for bucket in engine.core.reducer.buckets if cell.wire != "qwz" else ():
        wire = _gradient_wire(bucket, tuple(named[each] for each in params[bucket.layout.index]))
        found.append(dataclasses.replace(wire, often=often))
    for bucket in engine.sharded.buckets if engine.sharded is not None else ():
        if bucket.lossy:
            found.append(_wire("weights", bucket.layout, tuple(named[each] for each in bucket.params)))
    return found


def _wire(kind: str, layout: Any, names: tuple[str, ...], **more: Any) -> Wire:
    starts = tuple(slot.offset for slot in layout.slots)
    return Wire(kind, names, starts, layout.padded_numel, **{"rows": layout.num_shards, **more})


def _gradient_wire(bucket: Any, names: tuple[str, ...]) -> Wire:
    from deepspeed.comm.compressed import part_numel
    from deepspeed.zero.gradients.quantized_sum import CompressedSum, QuantizedSum

    kind = bucket.over_ranks
    while hasattr(kind, "inner"):
        kind = kind.inner
    if isinstance(kind, CompressedSum):
        rows = kind.ranks.size
        numel = rows * part_numel(bucket.layout.padded_numel, rows)
        wire = _wire("both ways", bucket.layout, names, rows=rows, bits=kind.codec.bits)
        return dataclasses.replace(wire, numel=numel, feedback=kind.feedback is not None)
    if isinstance(kind, QuantizedSum):
        groups = kind.levels.across.size if kind.levels else 0
        return _wire(
            "parts",
            bucket.layout,
            names,
            bits=kind.codec.bits,
            feedback=kind.feedback is not None,
            groups=groups,
        )
    return _wire("bf16" if bucket.layout.wire_dtype is torch.bfloat16 else "plain", bucket.layout, names)
