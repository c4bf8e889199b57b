"""Host-memory copies of a checkpoint's content, so that training continues while files are written."""

from __future__ import annotations

import copy
import itertools
import mmap
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.checkpoint.files.archive_writer import LazyTensor
from deepspeed.checkpoint.files.round_trip import is_strided
from deepspeed.ops.native import copy_bytes

_ALIGNMENT = 64
SLACK_BYTES = 1 << 20
"""Slack of prepared memory for client state, in bytes; untouched pages are never allocated."""
_UNCHANGING = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device, type)
)
_TENSORS = frozenset((Tensor, torch.nn.Parameter, torch.nn.Buffer, LazyTensor))


class Snapshot:
    """Copies nested containers of tensors. The memory is reused for the next copy: page faults cost more than copying.

    ``allocations`` counts allocations, ``copied`` the bytes of the last copy.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._preparing: threading.Thread | None = None
        self.allocations = 0
        self.copied = 0

    @property
    def nbytes(self) -> int:
        """Size of the kept memory in bytes."""
        return self._memory.numel()

    def prepare(self, contents: Mapping[str, Any]) -> None:
        """Allocate memory for a copy of ``contents`` and a little more, in a thread, so that ``take`` only copies."""
        needed = _size(contents)
        if needed <= self.nbytes or _on_a_device(contents):
            return
        self.release()
        self._memory = _host_memory(needed + SLACK_BYTES, for_device=False)
        self.allocations += 1
        self._preparing = threading.Thread(
            target=_touch_pages, args=(self._memory[:needed],), name="checkpoint-memory", daemon=True
        )
        self._preparing.start()

    def take(self, contents: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``contents`` with each tensor copied; valid until the next call. Tensors of identical memory share
        one copy."""
        self._prepared()
        try:
            return self._take(contents)
        except _TooSmall:
            needed = _size(contents)
            self.release()
            self._memory = _host_memory(needed, for_device=_on_a_device(contents))
            self.allocations += 1
            return self._take(contents)

    def _prepared(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def _take(self, contents: Mapping[str, Any]) -> dict[str, Any]:
        copier = _Copier(self._memory)
        with torch.no_grad():
            taken = {name: copier.copied(content) for name, content in contents.items()}
        copier.finish()
        self.copied = copier.nbytes
        return taken

    def release(self) -> None:
        """Free the memory; earlier copies become invalid."""
        self._prepared()
        self._memory = torch.empty(0, dtype=torch.uint8)


class _TooSmall(Exception):
    """The kept memory is too small for the copy."""


class _Copier:
    """One walk over the containers that copies all mutable values; contiguous host tensors are copied by ``finish``,
    in one call."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._end = 0
        self._copies: dict[Any, Tensor] = {}
        self.nbytes = 0
        self._runs: list[tuple[int, int, int]] = []
        self._sources: list[Tensor] = []  # keeps the tensors of _runs alive until they are copied
        self._from_devices = False

    def copied(self, value: Any) -> Any:
        kind = type(value)
        if kind in _UNCHANGING:
            return value
        if kind in _TENSORS and _is_plain(value):
            return self._once(value)
        if kind is list or kind is tuple:
            if _UNCHANGING.issuperset(map(type, value)):
                return kind(value)
            return kind([self.copied(item) for item in value])
        if isinstance(value, dict):
            made = copy.copy(value)
            for key, item in value.items():
                made[key] = self.copied(item)
            return made
        return copy.deepcopy(value)

    def _once(self, tensor: Tensor | LazyTensor) -> Tensor:
        key = _key(tensor)
        found = self._copies.get(key)
        if found is None:
            found = self._copies[key] = self._copy(tensor)
        return found

    def _copy(self, tensor: Tensor | LazyTensor) -> Tensor:
        offset, nbytes = self._end, tensor.nbytes
        if offset + nbytes > self._memory.numel():
            raise _TooSmall
        self._end += _aligned(nbytes)
        self.nbytes += nbytes
        place = self._memory[offset : offset + nbytes].view(tensor.dtype)
        if isinstance(tensor, LazyTensor):
            start = 0
            for part in tensor.parts():
                self._fill(place[start : start + part.numel()], part.reshape(-1))
                start += part.numel()
            return place.view(tensor.shape)
        copied = place.view(tensor.shape)
        self._fill(copied, tensor)
        if type(tensor) is not Tensor:
            return type(tensor)(copied, tensor.requires_grad)
        return copied.requires_grad_(tensor.requires_grad)

    def _fill(self, place: Tensor, tensor: Tensor) -> None:
        if tensor.is_cpu and tensor.is_contiguous():
            self._runs.append((place.data_ptr(), tensor.data_ptr(), tensor.nbytes))
            self._sources.append(tensor)
        else:
            self._from_devices |= not tensor.is_cpu
            place.copy_(tensor, non_blocking=True)

    def finish(self) -> None:
        copy_bytes(self._runs)
        if self._from_devices:
            get_accelerator().synchronize()


def _size(contents: Any) -> int:
    """Return bytes that a copy takes."""
    found = {_key(tensor): tensor.nbytes for tensor in _tensors(contents)}
    return sum(map(_aligned, found.values()))


def _on_a_device(contents: Any) -> bool:
    parts = (
        part
        for tensor in _tensors(contents)
        for part in (itertools.islice(tensor.parts(), 1) if isinstance(tensor, LazyTensor) else (tensor,))
    )
    return any(not part.is_cpu for part in parts)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _host_memory(nbytes: int, *, for_device: bool) -> Tensor:
    """Allocate pinned memory for a device's copies, else memory that forks do not inherit: after a fork, writing to
    an inherited page would fault (copy-on-write)."""
    if for_device:
        with suppress(RuntimeError):  # out of pinned memory
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if not hasattr(mmap, "MADV_DONTFORK"):
        return torch.empty(nbytes, dtype=torch.uint8)
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(region, dtype=torch.uint8)


def _touch_pages(memory: Tensor) -> None:
    """Touch each page with a distinct value: the host of a virtual machine may merge equal pages."""
    pages = memory.numel() // mmap.PAGESIZE
    first_words = memory[: pages * mmap.PAGESIZE].view(torch.int64)[:: mmap.PAGESIZE // 8]
    torch.arange(1, pages + 1, out=first_words)


def _is_plain(value: Any) -> bool:
    return isinstance(value, LazyTensor) or (is_strided(value) and not value.is_conj() and not value.is_neg())


def _key(value: Tensor | LazyTensor) -> Any:
    if isinstance(value, LazyTensor):
        return id(value)
    return (
        type(value), value.device, value.data_ptr() or id(value), value.dtype, value.shape, value.stride(),
        value.requires_grad,
    )  # fmt: skip


def _tensors(value: Any) -> Iterator[Tensor | LazyTensor]:
    if type(value) in _TENSORS:
        if _is_plain(value):
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif type(value) in (list, tuple) and not _UNCHANGING.issuperset(map(type, value)):
        for item in value:
            yield from _tensors(item)
