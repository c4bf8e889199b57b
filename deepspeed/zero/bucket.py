"""Hold the parameters of a bucket as views of one flat buffer, of which each rank owns one shard; and pool flat
scratch buffers.

[Note: parameters as views] The caller's own ``Parameter`` objects are kept: their ``.data`` becomes a view of the
flat buffer. ``nn.Parameter(view)`` would share the buffer's version counter, so the next gather would make backward
fail; assigning ``.data`` does not. The price is that autograd no longer notices a weight that changed between forward
and backward. So every publish bumps the versions, which makes a stale graph an error again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.comm.collectives import Communicator, Pending
from deepspeed.zero.layout import BucketLayout, Fragment

_address = Tensor.data_ptr
_NO_ADDRESS = -1
"""An address that no parameter has."""


class ParamBucket:
    """Owner of the flat weights of one bucket.

    ``full`` is [padded_numel] in the bucket's dtype and holds the parameters; this rank owns ``shard`` of it.
    With one shard per bucket there is nothing to gather: unless ``flat`` is requested, the parameters stay where the
    caller put them and ``full`` and ``shard`` are None.
    """

    def __init__(
        self, layout: BucketLayout, params: Sequence[nn.Parameter], communicator: Communicator
    ) -> None:
        self.layout = layout
        self.params = tuple(params[slot.param] for slot in layout.slots)
        self.communicator = communicator
        self.rank = communicator.rank
        self.fragments: tuple[Fragment, ...] = layout.owned(self.rank)
        self.full: Tensor | None = None
        self.shard: Tensor | None = None
        self._addresses: list[int] = []

    def evict(self) -> None:
        """Free a gathered copy that can be gathered again; a no-op for weights that are not sharded."""

    def renumber(self, layout: BucketLayout) -> None:
        """Replace the layout by an equal one with different parameter indices."""
        self.layout = layout
        self.fragments = layout.owned(self.rank)

    def flatten(self, *, flat: bool = False) -> None:
        """Move the weights into one buffer, parameter by parameter; each old storage is freed immediately."""
        self.record_addresses()
        if self.layout.num_shards == 1 and not flat:
            return
        device = self.params[0].device
        self.full = torch.zeros(self.layout.padded_numel, dtype=self.layout.dtype, device=device)
        start, stop = self.layout.shard_range(self.rank)
        self.shard = self.full[start:stop]
        for slot, param in zip(self.layout.slots, self.params, strict=True):
            self._link(slot.offset, slot.numel, param)
        self.record_addresses()

    def _link(self, offset: int, numel: int, param: nn.Parameter) -> None:
        assert self.full is not None
        view = self.full[offset : offset + numel].view(param.shape)
        view.copy_(param.data)
        param.data = view

    def record_addresses(self, skip: Container[int] = ()) -> None:
        """Record the current addresses of the parameters as attached, except at the positions ``skip``."""
        addresses = map(_address, self.params)
        self._addresses = [_NO_ADDRESS if i in skip else address for i, address in enumerate(addresses)]

    def detached(self) -> list[int]:
        """Return the positions of parameters whose memory was replaced (``module.to``, a LoRA merge,
        ``assign=True``)."""
        addresses = list(map(_address, self.params))
        if addresses == self._addresses:
            return []
        return [i for i, address in enumerate(addresses) if address != self._addresses[i]]

    def relink(self, positions: Sequence[int]) -> None:
        """Copy the detached parameters' current values into the buffer and make them views again."""
        for i in positions:
            slot, param = self.layout.slots[i], self.params[i]
            if param.numel() != slot.numel:
                raise RuntimeError(
                    f"a parameter of {slot.numel} elements was replaced by one of shape {tuple(param.shape)} after "
                    "deepspeed.initialize; change shapes (resize_token_embeddings, adapters) before it."
                )
            if self.full is not None:
                self._link(slot.offset, slot.numel, param)
            self._addresses[i] = param.data_ptr()

    def local_weights(self, fragment: Fragment) -> Tensor:
        """Return the live weights of one of this rank's fragments, or of a piece of one: 1-D in the bucket's dtype."""
        if self.shard is None:
            start = fragment.param_offset
            return self.param_of(fragment).data.view(-1)[start : start + fragment.numel]
        return self.shard[fragment.shard_offset : fragment.shard_offset + fragment.numel]

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor object on the memory of the weights, which is freed once all of them have moved."""
        yield from (flat for flat in (self.full, self.shard) if flat is not None)
        yield from self.params

    def param_of(self, fragment: Fragment) -> nn.Parameter:
        for slot, param in zip(self.layout.slots, self.params, strict=True):
            if slot.param == fragment.param:
                return param
        raise KeyError(fragment.param)

    def publish(self) -> Pending | None:
        """Start to all-gather the shards; None if there is nothing to move."""
        if self.full is None or self.shard is None or self.layout.num_shards == 1:
            return None
        return self.communicator.all_gather(self.full, self.shard)

    def destroy(self) -> None:
        """Give every parameter its own storage again, except those whose memory was replaced."""
        if self.full is None:
            return
        replaced = set(self.detached())
        for position, param in enumerate(self.params):
            if position not in replaced:
                param.data = param.data.clone()
        self.full = self.shard = None


class WeightPublisher:
    """Sends updated shards to the other ranks and marks the weights as changed; then calls ``after``."""

    def __init__(self, buckets: Sequence[ParamBucket], after: Sequence[Callable[[], None]] = ()) -> None:
        self.buckets = list(buckets)
        self.after = list(after)

    def publish(self, buckets: Sequence[ParamBucket] | None = None) -> None:
        """Gather the changed buckets (default: all). Collective."""
        chosen = self.buckets if buckets is None else buckets
        for pending in [bucket.publish() for bucket in chosen]:
            if pending is not None:
                pending.wait()
        torch.autograd.graph.increment_version([param for bucket in chosen for param in bucket.params])
        for notify in self.after:
            notify()


_PARTS = "_ds_parts"  # attribute of a buffer


class BufferPool:
    """Pool of flat scratch buffers, reused so that memory is paged in only once."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._read_until: dict[int, Any] = {}  # address of a free buffer -> event after its last use

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized buffer of exactly ``numel`` elements."""
        free = self._free.setdefault((dtype, device), [])
        if free and free[-1].numel() == numel:
            buffer = free.pop()
            if self._read_until:
                self._wait_for_reader(buffer)
            return buffer
        fitting = [i for i, buffer in enumerate(free) if buffer.numel() >= numel]
        if fitting:
            buffer = free.pop(min(fitting, key=lambda i: free[i].numel()))
            self._wait_for_reader(buffer)
            return buffer if buffer.numel() == numel else buffer[:numel]
        for buffer in free:  # all too small: replace them by a larger one
            self._wait_for_reader(buffer)
        free.clear()
        return torch.empty(numel, dtype=dtype, device=device)

    def parts(self, buffer: Tensor, user: Hashable, cut: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
        """Return the views that ``cut`` makes of a lent buffer for this user. Cached on the buffer, since steps
        repeat, and freed with it."""
        known = vars(buffer).setdefault(_PARTS, {})
        parts = known.get(user)
        if parts is None:
            # of ``data``, not of the buffer: views keep their base alive, which would hold them in a cycle
            parts = known[user] = cut(buffer.data)
        return parts

    def parts_of(self, buffer: Tensor) -> list[Tensor]:
        """Return the views of a buffer for all users."""
        known: dict[Hashable, list[Tensor]] = vars(buffer).get(_PARTS, {})
        return [part for parts in known.values() for part in parts]

    def give(self, buffer: Tensor, read_until: Any = None) -> None:
        """Return a buffer to the pool. ``read_until``: an event after its last use on another stream."""
        whole = buffer if buffer._base is None else buffer._base
        if read_until is not None:
            self._read_until[whole.data_ptr()] = read_until
        self._free.setdefault((whole.dtype, whole.device), []).append(whole)

    def _wait_for_reader(self, buffer: Tensor) -> None:
        """Make the current stream wait for the buffer's last use on another stream."""
        event = self._read_until.pop(buffer.data_ptr(), None)
        if event is not None:
            event.wait()

    def devices(self) -> set[torch.device]:
        """Return the devices of the free buffers."""
        return {device for (_, device), free in self._free.items() if free}

    def clear(self) -> None:
        """Release the free buffers."""
        for free in self._free.values():
            for buffer in free:
                self._wait_for_reader(buffer)
        self._free.clear()
