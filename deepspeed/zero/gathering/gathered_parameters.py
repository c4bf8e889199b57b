"""``GatheredParameters``: gather parameters for the duration of a block of code; ``KeepGathered``: keep what is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.logging import logger
from deepspeed.base.tracing import outside_transforms
from deepspeed.comm.collectives import CommunicationError, Communicator
from deepspeed.zero import params as zero_params
from deepspeed.zero.gathering.phases import Phase
from deepspeed.zero.gathering.sharded_bucket import ShardedBucket, Status
from deepspeed.zero.parameter_offload import DeepSpeedZeRoOffload, register_external_parameter

_COUNT = zero_params.GATHER_COUNT


class GatheredParameters:
    """Gather partitioned parameters on entry and partition them again on exit. Collective on both.

    Single tensors exchange only their own bytes; if every parameter of a bucket is requested, the bucket itself is
    gathered, so that a forward inside the block uses it. Blocks may nest and overlap.

    Args:
        params: a parameter, or any iterable; unpartitioned tensors (plain parameters, buffers) are skipped.
        modifier_rank: rank whose changes are kept: they are broadcast on exit and written to the shards and to the
            fp32 master weights. None: changes are dropped, and with ``zero_optimization.enable_sanity_checks`` a
            change raises RuntimeError. If a rank leaves the block with an error, no change is kept and every rank
            raises: that rank its own error, the others one that names it.
        fwd_module: module that will use the parameters in its forward (``register_external_parameter``).
        enabled: False makes it do nothing.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Any],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        self.modifier_rank = modifier_rank
        given = [params] if torch.is_tensor(params) else list(params) if enabled else []
        unique = {id(p): p for p in given if zero_params.is_zero_param(p)}
        self.params: list[Any] = list(unique.values())
        if fwd_module is not None and enabled:
            for param in self.params:
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> None:
        if not self.enabled:
            return
        with outside_transforms():
            self._gather()

    def _gather(self) -> None:
        first = [param for param in self.params if getattr(param, _COUNT, 0) == 0]
        for bucket in _buckets_of(first):  # before the gather counts rise, which would keep them whole
            bucket.transitions.discard_lossy_copy(bucket.layout.index)
        for param in self.params:
            setattr(param, _COUNT, getattr(param, _COUNT, 0) + 1)
        asked = {id(param) for param in first}
        self._held: list[ShardedBucket] = []
        try:
            for bucket in _buckets_of(first):
                if all(id(param) in asked for param in bucket.params):
                    self._held.append(bucket)
                    bucket.transitions.hold(bucket.layout.index)
            held = set(self._held)
            zero_params.all_gather(None, param_list=[param for param in first if param.ds_owner not in held])
        except BaseException:
            self._partition(kept=False)
            raise
        checked = [p for p in self.params if getattr(p, zero_params.CHECKS_WRITES, False)]
        self._versions = [
            (p, p._version) for p in checked if self.modifier_rank is None and not p.is_inference()
        ]

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if not self.enabled:
            return
        kept = False
        try:
            if self.modifier_rank is None or not self.params:
                kept = error is None
            else:
                with torch.no_grad():
                    kept = self._keep_changes(error)
        finally:
            self._partition(kept)
        written = [p for p, version in self._versions if p._version != version]
        if written and error is None:
            raise RuntimeError(
                f"in-place modification of {len(written)} parameters inside GatheredParameters(modifier_rank=None), "
                f"which discards it, such as one of shape {tuple(written[0].ds_shape)}: set modifier_rank to the rank "
                "whose values to keep. (Found by zero_optimization.enable_sanity_checks.)"
            )

    def _partition(self, kept: bool) -> None:
        last = []
        for param in self.params:
            setattr(param, _COUNT, getattr(param, _COUNT) - 1)
            if getattr(param, _COUNT) == 0:
                last.append(param)
        zero_params.partition(None, param_list=last)
        for bucket in self._held:
            bucket.transitions.release_hold(bucket.layout.index)
        if not kept:  # buckets that are gathered still contain the dropped changes
            for transitions in dict.fromkeys(owner.transitions for owner in _buckets_of(self.params)):
                transitions.reshard_all()

    def _keep_changes(self, error: BaseException | None) -> bool:
        """Publish the modifier's values; if any rank left with an error, all ranks raise and keep nothing."""
        if isinstance(error, CommunicationError):
            return False  # the ranks have lost contact and cannot agree any more
        misshapen = self._wrong_shapes() if error is None else None
        first = self.params[0]
        failure = _agree_on_failure(first.ds_owner.all_ranks, first.device, error or misshapen)
        if failure is None:
            self._publish()
            return True
        for owner in _buckets_of(self.params):
            if owner.persistent and owner.full is not None:
                owner.refresh().wait()
        if misshapen is not None:
            raise misshapen
        if error is None:
            rank, text = failure
            raise RuntimeError(
                f"GatheredParameters: rank {rank} left the block with an error, so all changes were discarded: {text}"
            )
        return False

    def _wrong_shapes(self) -> Exception | None:
        for param in self.params:
            if tuple(param.shape) != tuple(param.ds_shape):
                return RuntimeError(
                    f"a parameter of shape {tuple(param.ds_shape)} has shape {tuple(param.shape)} at the end of "
                    "GatheredParameters; a changed shape needs a new parameter."
                )
        return None

    def _publish(self) -> None:
        assert self.modifier_rank is not None
        for param in self.params:
            communicator = param.ds_owner.all_ranks
            source = _position(self.modifier_rank, communicator)
            value = param.data if param.data.is_contiguous() else param.data.contiguous()
            communicator.broadcast(value.view(-1), src=source).wait()
            zero_params.sync_shard_dtype(param)
            param.ds_owner.write_param(param.ds_position, value)
            access = getattr(param, "_ds_state_access", None)
            if access is not None:
                access.weights_written(param)
        for owner in _buckets_of(self.params):
            owner.shards_written()


_TEXT_BYTES = 512


def _agree_on_failure(
    communicator: Communicator, device: torch.device, error: BaseException | None
) -> tuple[int, str] | None:
    """Return the first rank with an error and its text, or None if there is none. Collective: one
    number, and the text of the error."""
    text = "" if error is None else f"{type(error).__name__}: {error}"
    # Log first: this rank hangs below if the others never arrive.
    if error is not None and communicator.size > 1:
        logger.error(f"{text} (inside GatheredParameters; notifying the other ranks)")
    # The lowest rank that failed wins the maximum.
    mine = 0 if error is None else communicator.size - communicator.rank
    first = torch.tensor([mine], dtype=torch.int64, device=device)
    communicator.all_reduce_max(first).wait()
    if not first.item():
        return None
    position = communicator.size - int(first.item())
    encoded = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    message = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(device)
    communicator.broadcast(message, src=position).wait()
    text = bytes(message.tolist()).rstrip(b"\0").decode(errors="replace")
    return communicator.ranks[position], text


def _buckets_of(params: Iterable[Any]) -> list[ShardedBucket]:
    owners = (getattr(param, "ds_owner", None) for param in params)
    return list(dict.fromkeys(owner for owner in owners if isinstance(owner, ShardedBucket)))


class KeepGathered:
    """Context that, on entry and at each ``take``, takes hold of those of ``params`` that are whole, until its exit.
    For modules that run many times in a row.

    It gathers nothing and is therefore not collective: the use of a parameter gathers it. Without stage 3 it does
    nothing.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._waiting = _buckets_of(params)
        self._held: list[ShardedBucket] = []

    def take(self) -> None:
        if not self._waiting:
            return
        whole = [owner for owner in self._waiting if owner.status is Status.GATHERED]
        for owner in whole:
            with owner.transitions.lock:
                owner.transitions.take((owner.layout.index,), Phase.MANUAL)
        self._held += whole
        self._waiting = [owner for owner in self._waiting if owner not in whole]

    def __enter__(self) -> KeepGathered:
        self.take()
        return self

    def __exit__(self, *exc: object) -> None:
        for owner in self._held:
            with owner.transitions.lock:
                owner.transitions.release((owner.layout.index,))
        self._waiting += self._held
        self._held = []


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """Yield the engine's bare module, with every parameter gathered and no hooks, for token-by-token generation."""
    optimizer = getattr(model, "optimizer", None)
    offload = getattr(optimizer, "parameter_offload", None) or optimizer
    if not isinstance(offload, DeepSpeedZeRoOffload):
        yield getattr(model, "module", model)
        return
    with GatheredParameters(list(model.module.parameters())):
        offload.remove_hooks()
        try:
            yield model.module
        finally:
            offload._register_deepspeed_module(offload.module)


def _position(rank: int, communicator: Communicator) -> int:
    """Return the position of the global ``rank`` among the ranks that hold a parameter; if it is none of them,
    ``rank`` is taken as a position. ValueError: it is neither."""
    if rank in communicator.ranks:
        return communicator.ranks.index(rank)
    if rank < communicator.size:
        return rank
    raise ValueError(f"modifier_rank={rank}, but only ranks {list(communicator.ranks)} hold the parameter")
