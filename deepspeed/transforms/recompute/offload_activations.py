"""Offload of the inputs of self-checkpointing layers to host memory, for models that use non-reentrant
``torch.utils.checkpoint``, such as Transformers models. Regions of ``checkpointing.py`` are handled there.

A marked tensor is copied to the host when autograd saves it, overlapping computation. The newest few stay, as backward
needs them first. When it requests one, the copy of the preceding one starts.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from deepspeed.transforms.recompute.side_stream import SideStream
from deepspeed.zero.offload.host_copies import has_own_memory


@dataclass
class CheckpointActivationOffloadStats:
    """Statistics since the start or the last ``reset``."""

    saved_tensors_seen: int = 0
    marked_tensors: int = 0
    offloaded_tensors: int = 0
    restored_tensors: int = 0
    skipped_marked_tensors: int = 0
    kept_last_tensors: int = 0
    offloaded_bytes: int = 0
    restored_bytes: int = 0


class _Input:
    """A saved input: on the device, in host memory, or both. Its host buffer returns to the pool on deletion."""

    def __init__(self, tensor: Tensor, before: _Input | None, release: Callable[[Tensor], None]) -> None:
        self.tensor: Tensor | None = tensor
        self.host: Tensor | None = None
        self.fetched: Tensor | None = None
        self.device, self.size, self.stride = tensor.device, tensor.size(), tensor.stride()
        self.before = None if before is None else weakref.ref(before)
        self._release = release

    def __del__(self) -> None:
        if self.host is not None:
            self._release(self.host)


class CheckpointHiddenStatesOffload(saved_tensors_hooks):
    """Context manager around forward (and backward) that offloads marked tensors to host memory in between.

    Inside it, self-checkpointing layers of Transformers mark their hidden states automatically; other code calls
    ``mark``. On a CPU nothing is moved.

    Args:
        use_pin_memory: use pinned host memory, so that copies overlap computation.
        use_streams: copy on a separate stream.
        min_offload_bytes: smaller tensors stay on the device.
        max_fwd_stash_count: number of most recently sent tensors whose device memory is not freed yet.
        max_cpu_buffer_pool_count: maximum number of free host buffers kept for reuse.
        keep_last_count: number of newest tensors that are not moved.

    ValueError: one of the numbers is negative.
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_bytes: int = 1024,
        max_fwd_stash_count: int = 2,
        max_cpu_buffer_pool_count: int = 64,
        keep_last_count: int = 1,
    ) -> None:
        numbers = {
            "min_offload_bytes": min_offload_bytes,
            "max_fwd_stash_count": max_fwd_stash_count,
            "max_cpu_buffer_pool_count": max_cpu_buffer_pool_count,
            "keep_last_count": keep_last_count,
        }
        for name, value in numbers.items():
            if value < 0:
                raise ValueError(f"{name}={value}: must not be negative")
        super().__init__(self._pack, self._unpack)
        self.use_pin_memory, self.use_streams = use_pin_memory, use_streams
        self.min_offload_bytes, self.keep_last_count = min_offload_bytes, keep_last_count
        self.max_fwd_stash_count = max_fwd_stash_count
        self.max_cpu_buffer_pool_count = max_cpu_buffer_pool_count
        self._stream = SideStream()
        self._active = False
        self.reset()

    def reset(self) -> None:
        """Clear marks and statistics, and free host memory that no graph needs."""
        self.stats = CheckpointActivationOffloadStats()
        self._marks: dict[Any, weakref.ref[Tensor]] = {}
        self._pool: dict[Any, list[Tensor]] = {}
        self._pooled = 0
        self._forget_order()

    def _forget_order(self) -> None:
        self._newest: deque[_Input] = deque()
        self._offloading: deque[_Input] = deque()
        self._last: weakref.ref[_Input] | None = None

    def mark(self, tensor: Tensor) -> None:
        """Offload this tensor when it is next saved."""
        self.stats.marked_tensors += 1
        self._marks[_storage_key(tensor)] = weakref.ref(tensor)

    # Context ------------------------------------------------------------------------------------------------

    def __enter__(self) -> CheckpointHiddenStatesOffload:
        if self._active:
            raise RuntimeError(
                "CheckpointHiddenStatesOffload is not re-entrant: create another one for an inner context"
            )
        _contexts.enter(self)
        try:
            super().__enter__()
        except BaseException:
            _contexts.leave(self)
            raise
        self._active = True
        return self

    def __exit__(self, *details: Any) -> None:
        self._active = False
        try:
            super().__exit__(*details)
        finally:
            _contexts.leave(self)
            self._marks.clear()
            self._forget_order()  # graphs keep what they need alive

    # Saved tensors ------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Any:
        self.stats.saved_tensors_seen += 1
        if not self._marks or not self._take_mark(tensor):
            return tensor
        if not self._can_move(tensor):
            self.stats.skipped_marked_tensors += 1
            return tensor
        saved = _Input(tensor, self._last() if self._last is not None else None, self._take_back)
        self._last = weakref.ref(saved)
        self._newest.append(saved)
        while len(self._newest) > self.keep_last_count:
            self._send(self._newest.popleft())
        return saved

    def _take_mark(self, tensor: Tensor) -> bool:
        marked = self._marks.pop(_storage_key(tensor), None)
        return marked is not None and marked() is not None  # else its memory may have been reused

    def _can_move(self, tensor: Tensor) -> bool:
        overlaps = tensor.numel() > 1 and 0 in tensor.stride()
        is_weight = isinstance(tensor, (nn.Parameter, nn.Buffer))
        return (
            has_own_memory(tensor.device)
            and tensor.nbytes >= self.min_offload_bytes
            and not (overlaps or is_weight)
        )

    def _send(self, saved: _Input) -> None:
        source = saved.tensor
        assert source is not None
        key = (saved.size, source.dtype)
        waiting = self._pool.get(key)
        if waiting:
            saved.host, self._pooled = waiting.pop(), self._pooled - 1
        else:
            pinned = self.use_pin_memory and source.device.type == "cuda"
            saved.host = torch.empty(saved.size, dtype=source.dtype, device="cpu", pin_memory=pinned)
        self._copy(source, saved.host)
        self.stats.offloaded_tensors += 1
        self.stats.offloaded_bytes += source.nbytes
        self._offloading.append(saved)
        while len(self._offloading) > self.max_fwd_stash_count:
            self._offloading.popleft().tensor = None

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Input):
            return saved
        if saved.host is None:
            assert saved.tensor is not None
            self.stats.kept_last_tensors += 1
            return saved.tensor
        found = saved.tensor
        if found is None:
            found = saved.fetched if saved.fetched is not None else self._fetch(saved)
            found, saved.fetched = self._stream.arrived(found), None
        before = saved.before() if saved.before is not None else None
        if before is not None and before.host is not None and before.tensor is None is before.fetched:
            before.fetched = self._fetch(before)
        self.stats.restored_tensors += 1
        self.stats.restored_bytes += found.nbytes
        return found

    def _fetch(self, saved: _Input) -> Tensor:
        assert saved.host is not None
        target = torch.empty_strided(saved.size, saved.stride, dtype=saved.host.dtype, device=saved.device)
        return self._copy(saved.host, target)

    def _copy(self, source: Tensor, target: Tensor) -> Tensor:
        return self._stream.copy(source, target) if self.use_streams else target.copy_(source)

    def _take_back(self, host: Tensor) -> None:
        """Return a host buffer to the pool. Copies run in order, so the next one into it follows the last one out."""
        if self._pooled < self.max_cpu_buffer_pool_count:
            self._pool.setdefault((host.size(), host.dtype), []).append(host)
            self._pooled += 1


def _storage_key(tensor: Tensor) -> Any:
    """Return a key that identifies a tensor's memory: autograd saves another tensor object for it."""
    return tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype


def get_checkpoint_hidden_states_offloading_ctx_manager(
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_bytes: int = 1024,
    max_fwd_stash_count: int = 2,
    max_cpu_buffer_pool_count: int = 64,
    keep_last_count: int = 1,
) -> CheckpointHiddenStatesOffload:
    return CheckpointHiddenStatesOffload(
        use_pin_memory,
        use_streams,
        min_offload_bytes,
        max_fwd_stash_count,
        max_cpu_buffer_pool_count,
        keep_last_count,
    )


# Layers of Transformers -----------------------------------------------------------------------------------------


class _Contexts:
    """The active contexts, innermost last, and the patch of Transformers' layer class while there are any."""

    def __init__(self) -> None:
        self.open: list[CheckpointHiddenStatesOffload] = []
        self._plain_call: Any = None

    def enter(self, context: CheckpointHiddenStatesOffload) -> None:
        self.open.append(context)
        self.patch()

    def leave(self, context: CheckpointHiddenStatesOffload) -> None:
        self.open.remove(context)
        if not self.open and self._plain_call is not None:
            _layer_class().__call__, self._plain_call = self._plain_call, None

    def patch(self) -> None:
        """Patch ``__call__`` of the layer class, if it has been imported."""
        kind = _layer_class()
        if kind is None or self._plain_call is not None:
            return
        self._plain_call = plain = kind.__call__

        @functools.wraps(plain)
        def marking(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if self.open and layer.training and getattr(layer, "gradient_checkpointing", False):
                hidden = args[0] if args else kwargs.get("hidden_states")
                if isinstance(hidden, Tensor):
                    self.open[-1].mark(hidden)
            return plain(layer, *args, **kwargs)

        kind.__call__ = marking


_contexts = _Contexts()


def _layer_class() -> Any:
    return getattr(sys.modules.get("transformers.modeling_layers"), "GradientCheckpointingLayer", None)
