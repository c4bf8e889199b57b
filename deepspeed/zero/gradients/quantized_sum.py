"""Quantized wire formats of gradients (ZeRO++'s qgZ, G. Wang et al. 2023, section 3.3), with error feedback.

Every rank encodes the shard of its gradient that another rank keeps and sends it there; each decodes what it received
and adds in rank order, in fp32. There is one encoding between a gradient and its sum, not one per hop of a ring.

[Note: levels] Where ranks are in groups (``Levels``), the sum is first taken within the group, over the fast link and
without loss, and only the group's sums are encoded and exchanged with the ranks at the same position in other groups:
a slow link between groups then carries as many bytes as with one rank per group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from deepspeed.comm.collectives import Communicator, Pending
from deepspeed.comm.compressed import Concatenated, compressed_mean, part_numel
from deepspeed.config.plan import Plan
from deepspeed.ops.formats.codecs import BLOCK, BlockCodec, Codec, seed_of
from deepspeed.zero.gradients.sums import GradientSum, InFlight, MakeOut
from deepspeed.zero.layout import BucketLayout
from deepspeed.zero.replica_groups import Levels, ReplicaGroup


class ErrorFeedback:
    """Error feedback of LoCo (X. Xie et al. 2024, LoCo: Low-bit communication adaptor for large-scale model
    training): adds what encoding lost to the next message.

    The kept error is a moving average, ``beta`` times the old one plus ``1 - beta`` times the new, and is reset every
    ``reset`` sums. ``error`` [rows, n] fp32 belongs to this rank.
    """

    parts = frozenset({"sums", "error"})

    def __init__(self, codec: Codec, beta: float, reset: int) -> None:
        self.codec, self.beta, self.reset = codec, beta, reset
        self.error: Tensor | None = None
        self.sums = 0

    def encode(self, values: Tensor) -> Tensor:
        """Return payloads [rows, bytes] of ``values`` [rows, n]."""
        if self.error is None or self.sums % self.reset == 0:
            self.error = torch.zeros(values.shape, dtype=torch.float32, device=values.device)
        self.sums += 1
        lost = self.error.clone()
        payloads = self.codec.encode(values, lost)
        self.error.lerp_(lost.nan_to_num_(0.0, 0.0, 0.0), 1.0 - self.beta)
        return payloads

    def saved(self) -> dict[str, Any] | None:
        return None if self.error is None else {"sums": self.sums, "error": self.error}

    def forget(self) -> None:
        self.error, self.sums = None, 0

    def restore(self, saved: Mapping[str, Any], device: torch.device) -> None:
        self.sums, self.error = int(saved["sums"]), saved["error"].to(device)


class QuantizedSum:
    """Replaces ``DenseSum`` where each rank of ``ranks`` keeps one shard."""

    def __init__(
        self,
        layout: BucketLayout,
        ranks: Communicator,
        codec: Codec,
        levels: Levels | None,
        feedback: ErrorFeedback | None,
    ) -> None:
        self.ranks = ranks
        self.codec = codec
        self.levels = levels
        self.feedback = feedback
        self.mine = slice(*layout.shard_range(ranks.rank))
        self.numel = layout.shard_numel

    def start(self, local: Tensor, make_out: MakeOut | None, prescale: float, postscale: float) -> InFlight:
        if prescale != 1.0:
            local.mul_(prescale)
        out = local[self.mine] if make_out is None else make_out()
        finish = (
            self._exchange(out, local.view(self.ranks.size, -1), self.ranks, postscale)
            if self.levels is None
            else self._by_levels(out, local, self.levels, postscale)
        )
        return InFlight(Pending(finish), out, local, make_out is None)

    def _exchange(
        self, out: Tensor, parts: Tensor, ranks: Communicator, postscale: float
    ) -> Callable[[], None]:
        """Sum this rank's row of ``parts`` [ranks, n] over the ranks into ``out``, times ``postscale``; return the
        function that waits."""
        sent = (self.feedback or self.codec).encode(parts)
        received = torch.empty_like(sent)
        pending = ranks.all_to_all(received.view(-1), sent.view(-1))

        def finish() -> None:
            pending.wait()
            out.copy_(self.codec.total(received, self.numel).mul_(postscale))

        return finish

    def _by_levels(self, out: Tensor, local: Tensor, levels: Levels, postscale: float) -> Callable[[], None]:
        """Sum within the group first, then across groups: each position sums the shards r = g * s + i of its own i."""
        near, across = levels
        by_place = local.view(across.size, near.size, self.numel).transpose(0, 1).reshape(-1)
        own = torch.empty(across.size * self.numel, dtype=torch.float32, device=local.device)
        nearby = near.reduce_scatter(own, by_place)

        def finish() -> None:
            # Buckets are collected in the order in which they were launched, which all ranks share.
            nearby.wait()
            self._exchange(out, own.view(across.size, self.numel), across, postscale)()

        return finish


class CompressedSum:
    """Replaces ``DenseSum`` where every rank keeps the whole sum (stage 0): each rank serves a part, and both
    directions are encoded (``compressed_mean``). ``keeps_errors``: whether the errors of either are added to the next
    sum."""

    parts = frozenset({"worker", "server"})

    def __init__(self, ranks: Communicator, codec: Codec, *, keeps_errors: bool) -> None:
        self.ranks = ranks
        self.codec = codec
        self.feedback = self if keeps_errors else None
        self.worker_error: Tensor | None = None
        self.server_error: Tensor | None = None

    def start(self, local: Tensor, make_out: MakeOut | None, prescale: float, postscale: float) -> InFlight:
        def finish() -> None:
            # Buckets are collected in the order in which they were launched, which all ranks share.
            numel, ranks = local.numel(), self.ranks.size
            part = part_numel(numel, ranks)
            wanted = torch.zeros(part * ranks, dtype=torch.float32, device=local.device)
            wanted[:numel] = local
            if prescale != 1.0:
                wanted.mul_(prescale)
            if self.feedback is not None and self.worker_error is None:
                self.worker_error, self.server_error = torch.zeros_like(wanted), wanted.new_zeros(part)
            errors = None if self.worker_error is None else Concatenated([self.worker_error])
            compressed_mean(Concatenated([wanted]), errors, self.server_error, part, self.ranks, self.codec)
            for error in (self.worker_error, self.server_error):
                if error is not None:  # non-finite in a step that will be skipped
                    error.nan_to_num_(0.0, 0.0, 0.0)
            local.copy_(wanted[:numel].mul_(postscale * ranks))

        return InFlight(Pending(finish), local, local, True)

    def saved(self) -> dict[str, Any] | None:
        if self.worker_error is None:
            return None
        return {"worker": self.worker_error, "server": self.server_error}

    def forget(self) -> None:
        self.worker_error = self.server_error = None

    def restore(self, saved: Mapping[str, Any], device: torch.device) -> None:
        self.worker_error, self.server_error = saved["worker"].to(device), saved["server"].to(device)


def codec_for(layout: BucketLayout, bits: int, *, random: bool = False, rank: int = 0) -> BlockCodec | None:
    """Return the codec for shards of a bucket in ``bits`` per element; None: they travel unencoded, as norms and
    biases would lose more than they save. ``random``: stochastic rounding, seeded differently on each ``rank``."""
    worth_it = layout.num_shards > 1 and layout.dtype.is_floating_point and layout.shard_numel >= BLOCK
    if not bits or not worth_it:
        return None
    codec = BlockCodec(bits)
    return codec.seeded(seed_of(layout.index, rank)) if random else codec


def encoded_sum(layout: BucketLayout, replica_group: ReplicaGroup, plan: Plan) -> GradientSum | None:
    """Return the quantized sum of a bucket; None: it is too small, or its dtype has no such format."""
    packing, codec = plan.packing, plan.packing.codec
    shard, rank = replica_group.shard, replica_group.all_ranks.rank
    if codec is None:
        codec = codec_for(layout, packing.gradients, random=packing.random, rank=rank)
        if codec is None:
            return None
        kept = packing.feedback
    else:
        if shard.size == 1 or layout.padded_numel < BLOCK * shard.size:
            return None
        if packing.random:
            codec = codec.seeded(seed_of(layout.index, rank)) or codec
        if not plan.zero.shard_state:
            return CompressedSum(shard, codec, keeps_errors=packing.keeps_errors)
        kept = (0.0, sys.maxsize) if packing.keeps_errors else None
    feedback = ErrorFeedback(codec, *kept) if kept is not None else None
    return QuantizedSum(layout, shard, codec, replica_group.levels, feedback)
