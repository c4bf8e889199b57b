"""``engine.offload_states``: free device memory for other work (generation, evaluation), and move the states back
after it.

[Note: moving a storage] Masters, shards and weights are views of a few large buffers, and memory is freed only when
the last view is gone. So a move copies storages: every tensor object of the engine on a storage becomes the same view
of the copy. The objects stay, so the optimizer's state and every reference to them remain valid.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.config.sections.offload import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.zero.bucket import ParamBucket
from deepspeed.zero.gradients.bucket import GradBucket
from deepspeed.zero.offload.host_copies import has_own_memory, host_empty
from deepspeed.zero.states.store import StateStore

Kind = OffloadStateTypeEnum


@dataclass(eq=False)
class StateMover:
    """Moves kinds of training state between the device and host memory. A no-op on CPU.

    ``weights``: buckets of the model's weights, trained and frozen, the only state of an engine without optimizer.
    Both lists of buckets are shared with their owners, and may grow.
    """

    weights: Sequence[ParamBucket]
    grad_buckets: Sequence[GradBucket] = ()
    store: StateStore | None = None

    def __post_init__(self) -> None:
        self.offloaded: dict[Kind, list[Tensor]] = {}
        self.device: torch.device | None = None

    def offload(
        self, include: Container[Any] | None, device: OffloadDeviceEnum, pin: bool, non_blocking: bool
    ) -> None:
        if OffloadDeviceEnum(device) is not OffloadDeviceEnum.cpu:
            raise ValueError(f"offload_states(device={device!r}): states can only be moved to 'cpu'")
        if self.weights and self.device is None:
            self.device = self.weights[0].params[0].device
        for kind in Kind:
            if (include is None or kind in include or kind.value in include) and kind not in self.offloaded:
                self.offloaded[kind] = self._offload(kind, pin, non_blocking)

    def _offload(self, kind: Kind, pin: bool, non_blocking: bool) -> list[Tensor]:
        if kind is Kind.contiguous_grad_buffer:
            for pool in {id(bucket.pool): bucket.pool for bucket in self.grad_buckets}.values():
                pool.clear()  # scratch memory: reallocated when needed
            return []
        if kind is Kind.lp_params:
            for bucket in self.weights:
                bucket.evict()
        tensors = [tensor for tensor in self._tensors(kind) if has_own_memory(tensor.device)]
        with self._keep_links():
            for group in by_storage(tensors):
                size = group[0].untyped_storage().nbytes()
                move_storage(group, host_empty(size, torch.uint8, pin=pin), non_blocking)
        return tensors

    def reload(self, non_blocking: bool) -> None:
        offloaded, self.offloaded = self.offloaded, {}
        with self._keep_links():
            for group in by_storage(tensor for tensors in offloaded.values() for tensor in tensors):
                size = group[0].untyped_storage().nbytes()
                target = torch.empty(size, dtype=torch.uint8, device=self.device)
                move_storage(group, target, non_blocking)

    @contextlib.contextmanager
    def _keep_links(self) -> Iterator[None]:
        """Keep moves inside the block from looking like parameters that the client has replaced."""
        detached = [bucket.detached() for bucket in self.weights]
        yield
        for bucket, positions in zip(self.weights, detached, strict=True):
            bucket.record_addresses(positions)

    def _tensors(self, kind: Kind) -> Iterator[Tensor]:
        fragments = self.store.fragments if self.store is not None else []
        if kind is Kind.hp_params:
            yield from (owned.master for owned in fragments if owned.low is not None)
        elif kind is Kind.optim_states and self.store is not None:
            for owned in fragments:
                values = self.store.state_of(owned).values()
                yield from (v for v in values if isinstance(v, Tensor) and v.shape == owned.master.shape)
        elif kind is Kind.lp_params:
            for bucket in self.weights:
                yield from bucket.tensors()
            # Without separate masters, the optimizer updates the weights themselves.
            yield from (owned.master if owned.low is None else owned.low for owned in fragments)
        elif kind is Kind.lp_grads:
            for grads in self.grad_buckets:
                yield from grads.held()

    def devices(self, kind: Kind) -> set[torch.device]:
        """Return the current devices of the states of a kind."""
        if kind is Kind.contiguous_grad_buffer:
            return {device for bucket in self.grad_buckets for device in bucket.pool.devices()}
        return {tensor.device for tensor in self._tensors(kind) if tensor.numel()}

    def check_not_offloaded(self, **_: Any) -> None:
        """Raise RuntimeError if states are offloaded; the engine calls this before it computes."""
        if self.offloaded:
            kinds = ", ".join(kind.value for kind in self.offloaded)
            raise RuntimeError(f"{kinds} of this engine are offloaded: call engine.reload_states() first")


class HasMovableStates:
    """Owner of states that ``engine.offload_states`` moves: the optimizer, or the sharded model of an engine without
    one."""

    mover: StateMover

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum] | None = None,
        device: OffloadDeviceEnum = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """See ``DeepSpeedEngine.offload_states``."""
        self.mover.offload(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Undo ``offload_states``."""
        self.mover.reload(non_blocking)


def by_storage(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by storage, each object once. A view keeps its base alive, even if its data is replaced, so bases
    belong to the group, too; and so do empty views."""
    groups: dict[int, dict[int, Tensor]] = {}
    for tensor in tensors:
        if tensor.untyped_storage().nbytes():
            group = groups.setdefault(tensor.untyped_storage().data_ptr(), {})
            for member in (tensor, tensor._base):
                if member is not None:
                    group[id(member)] = member
    return [list(group.values()) for group in groups.values()]


def move_storage(tensors: list[Tensor], target: Tensor, non_blocking: bool) -> None:
    """Copy the storage that ``tensors`` share to ``target`` [nbytes] uint8 and make them views of it."""
    source = tensors[0].untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(
        source, 0, (source.nbytes(),), (1,)
    )
    target.copy_(raw, non_blocking=non_blocking)
    for tensor in tensors:
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        empty = torch.empty(0, dtype=tensor.dtype, device=target.device)
        tensor.data = empty.set_(target.untyped_storage(), *place)
