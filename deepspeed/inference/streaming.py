"""ZeRO-Inference: a model whose weights are kept in a file or in host memory, and streamed to the device by layer.

A block's weights are contiguous in one region of a store. The device only has a few buffers, each as large as the
largest block: before a block runs, its weights become views of the buffer that holds it, and while it runs the next
blocks are read ahead. The order is predicted from the previous pass, so the first block of the next token is read while
the last ones of this token run.

Weights are treated as bytes: integers with their scales, and parts of tensor-parallel layers, stream like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.tracing import untraced
from deepspeed.config.sections.zero import DeepSpeedZeroConfig
from deepspeed.inference.weight_stores import WeightStore
from deepspeed.zero.partitioning import blocks_of

ALIGN = 4096
"""Alignment of regions in bytes, for reads that bypass the page cache; of tensors within: ``_TENSOR_ALIGN``."""
_TENSOR_ALIGN = 64
MIN_BYTES = 1024
"""Buffers of at least this many bytes (quantized weights, for example) stream with their layer's parameters."""


@dataclass(eq=False, slots=True)
class Unit:
    """Weights that are read together. ``offsets``: byte offset of each tensor in ``region``."""

    module: nn.Module
    tensors: list[Tensor]
    offsets: list[int]
    region: Tensor
    stored: list[Tensor]
    running: int = 0


@dataclass(eq=False, slots=True)
class _Slot:
    """A device buffer; ``views[n]`` are the tensors of unit n in it. ``ticket``: handle of the read that fills it."""

    buffer: Tensor
    views: list[list[Tensor]] = field(default_factory=list)
    unit: int | None = None
    ticket: Any = None
    pending: bool = False


class StreamedWeights:
    """Moves the weights of ``module`` to ``store``, and streams them to the device around every forward.

    Args:
        module: in evaluation mode, on the host or wherever its weights are now.
        store: keeps the weights.
        device: runs the forwards.
        ahead: number of blocks to read ahead.
        least: elements; layers outside of blocks with fewer stay on the device.
        prepare: called with each block before it is stored, and finally with the module: casts, quantization.
    """

    def __init__(
        self,
        module: nn.Module,
        store: WeightStore,
        device: torch.device,
        *,
        ahead: int = 1,
        least: int = 100_000,
        prepare: Callable[[nn.Module], None] = lambda _: None,
    ) -> None:
        self.module = module
        self.store = store
        self.device = device
        self.units: list[Unit] = []
        self._placed: set[int] = set()
        for block in blocks_of(module):
            prepare(block)
            self._add(block, _tensors(block))
        prepare(module)
        for layer in module.modules():
            own = _tensors(layer, recurse=False)
            if sum(each.numel() for each in own) >= least:
                self._add(layer, own)
        self._keep_the_rest()
        count = max(1, min(ahead, len(self.units) - 1)) + 1
        self._slots = [self._new_slot() for _ in range(count if self.units else 0)]
        self._after = {n: (n + 1) % len(self.units) for n in range(len(self.units))}
        self._last: int | None = None
        self._handles: list[Any] = []
        for number, unit in enumerate(self.units):
            self._hook(number, unit)

    def describe(self) -> str:
        """Return a line for the log."""
        return (
            f"{len(self.units)} parts of the model, {self.bytes_streamed / 1e6:.1f} MB, pass through "
            f"{len(self._slots)} buffers of {self.bytes_held / 1e6:.1f} MB"
        )

    @property
    def bytes_streamed(self) -> int:
        """Return the bytes read in one pass over the model."""
        return sum(unit.region.numel() for unit in self.units)

    @property
    def bytes_held(self) -> int:
        """Return the bytes of the buffers on the device."""
        return sum(slot.buffer.numel() for slot in self._slots)

    def destroy(self) -> None:
        """Restore the module for use without this: weights on the device, or mapped from the file if it can be read in
        place."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for slot in self._slots:
            self._finish(slot)
        for unit in self.units:
            for tensor, stored in zip(unit.tensors, unit.stored, strict=True):
                tensor.data = stored if self.store.readable else stored.to(self.device, copy=True)
        self._slots, self.units = [], []
        self.store.close()

    # --------------------------------------------------------------------------------------------- at the start

    def _add(self, module: nn.Module, tensors: Sequence[Tensor]) -> None:
        """Store a unit. A layer whose only tensor is stored already streams from that region."""
        if isinstance(module, nn.Embedding) and self.store.readable:
            self._put(module, [each for each in tensors if id(each) not in self._placed])
            return  # a lookup reads only a few rows, directly from the store
        new = [each for each in tensors if id(each) not in self._placed]
        unit = self._put(module, new) if new else self._of_others(module, tensors)
        if unit is not None:
            self.units.append(unit)

    def _put(self, module: nn.Module, tensors: Sequence[Tensor]) -> Unit:
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-tensor.nbytes // _TENSOR_ALIGN) * _TENSOR_ALIGN
        region = self.store.region(max(ALIGN, -(-end // ALIGN) * ALIGN))
        stored = _views(region, tensors, offsets)
        for tensor, rest in zip(tensors, stored, strict=True):
            rest.copy_(tensor.detach())
            tensor.data = rest
            self._placed.add(id(tensor))
        return Unit(module, list(tensors), offsets, region, stored)

    def _of_others(self, module: nn.Module, tensors: Sequence[Tensor]) -> Unit | None:
        if len(tensors) != 1:
            return None
        stored = tensors[0].data
        return Unit(module, list(tensors), [0], stored.view(-1).view(torch.uint8), [stored])

    def _keep_the_rest(self) -> None:
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            if id(tensor) not in self._placed:
                tensor.data = tensor.data.to(self.device)

    def _new_slot(self) -> _Slot:
        """Allocate a buffer. Views are made outside of inference mode: ``param.data`` takes no inference tensor."""
        largest = max(unit.region.numel() for unit in self.units)
        with torch.inference_mode(False), torch.no_grad():
            buffer = _aligned(largest, self.device)
            return _Slot(buffer, [_views(buffer, unit.tensors, unit.offsets) for unit in self.units])

    def _hook(self, number: int, unit: Unit) -> None:
        def before(*_: Any) -> None:
            self._enter(number)

        def after(*_: Any) -> None:
            self._exit(number)

        self._handles += [
            unit.module.register_forward_pre_hook(before),
            unit.module.register_forward_hook(after, always_call=True),
        ]

    # -------------------------------------------------------------------------------------------------- running

    @untraced
    def _enter(self, number: int) -> None:
        unit = self.units[number]
        unit.running += 1
        if unit.running > 1:
            return
        if self._last is not None:
            self._after[self._last] = number
        self._last = number
        slot = self._slot_of(number) or self._start(number, needed=True)
        assert slot is not None
        self._finish(slot)
        for tensor, view in zip(unit.tensors, slot.views[number], strict=True):
            tensor.data = view
        self._read_ahead(number)

    @untraced
    def _exit(self, number: int) -> None:
        unit = self.units[number]
        unit.running -= 1
        if unit.running:
            return
        for tensor, stored in zip(unit.tensors, unit.stored, strict=True):
            tensor.data = stored
        slot = self._slot_of(number)
        if slot is not None and len(self._slots) < len(self.units):
            slot.unit = None
        self._read_ahead(number)

    def _read_ahead(self, number: int) -> None:
        for _ in range(len(self._slots) - 1):
            number = self._after[number]
            if self._slot_of(number) is None and self._start(number, needed=False) is None:
                return

    def _start(self, number: int, *, needed: bool) -> _Slot | None:
        """Start a read into a free buffer. If ``needed`` now and none is free, take an idle one or allocate one."""
        slot = next((slot for slot in self._slots if slot.unit is None), None)
        if slot is None and needed:
            idle = [
                each for each in self._slots if each.unit is not None and not self.units[each.unit].running
            ]
            slot = idle[0] if idle else self._new_slot()
            if not idle:
                self._slots.append(slot)
        if slot is None:
            return None
        self._finish(slot)
        slot.unit = None
        slot.ticket = self.store.start(slot.buffer, self.units[number].region)
        slot.unit, slot.pending = number, True
        return slot

    def _finish(self, slot: _Slot) -> None:
        if slot.pending:
            unit, slot.unit, slot.pending = slot.unit, None, False
            self.store.finish(slot.ticket)
            slot.unit = unit  # not after an error: the buffer does not have its weights

    def _slot_of(self, number: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.unit == number), None)


def blocks_ahead(module: nn.Module, zero: DeepSpeedZeroConfig) -> int:
    """Return the number of blocks to read ahead: ``stage3_prefetch_bucket_size`` elements' worth if given, else 1."""
    if "prefetch_bucket_size" not in zero.model_fields_set:
        return 1
    largest = max((sum(each.numel() for each in _tensors(block)) for block in blocks_of(module)), default=1)
    return max(1, int(zero.prefetch_bucket_size) // max(1, largest))


def _tensors(module: nn.Module, *, recurse: bool = True) -> list[Tensor]:
    """Return the parameters of a layer and its larger buffers, each once."""
    buffers = [each for each in module.buffers(recurse) if each.nbytes >= MIN_BYTES]
    return list({id(each): each for each in (*module.parameters(recurse), *buffers)}.values())


def _views(flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int]) -> list[Tensor]:
    return [
        flat[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]


def _aligned(nbytes: int, device: torch.device) -> Tensor:
    """Allocate uint8 [nbytes] at an address that is a multiple of ``ALIGN``."""
    raw = torch.empty(nbytes + ALIGN, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % ALIGN
    return raw[start : start + nbytes]
