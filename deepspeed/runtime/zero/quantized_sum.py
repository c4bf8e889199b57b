"""Wire formats of gradients in a few bits (ZeRO++'s qgZ, G. Wang et al. 2023, section 3.3), with feedback of errors.

Every rank encodes the part of its gradient that another rank keeps and sends it there; each decodes what it received
and adds in rank order, in fp32. There is one encoding between a gradient and its sum, not one per hop of a ring.

[Note: levels] Where ranks are in groups (``Levels``), the sum is first taken within the group, over the fast link and
without loss, and only the group's sums are encoded and exchanged with the ranks that have the same place in other
groups: a slow link between groups then carries as many bytes as with one rank per group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from deepspeed.comm.codecs import BLOCK, BlockCodec, Codec
from deepspeed.comm.collectives import Communicator, Pending
from deepspeed.runtime.zero.gradient_sums import InFlight
from deepspeed.runtime.zero.layout import BucketLayout
from deepspeed.runtime.zero.scopes import Levels


class Encoder(Protocol):
    """Makes packets of what this rank sends."""

    def __call__(self, values: Tensor) -> Tensor:
        """Packets [rows, bytes] of ``values`` [rows, n]."""
        ...


class ErrorFeedback:
    """LoCo (X. Xie et al. 2024, LoCo: Low-bit communication adaptor for large-scale model training): what encoding took
    away is added to what is encoded next.

    The kept error is a moving average, ``beta`` times the old one plus ``1 - beta`` times the new, and is dropped every
    ``reset`` sums. ``error`` [rows, n] fp32 is this rank's own.
    """

    def __init__(self, codec: Codec, beta: float, reset: int) -> None:
        self.codec, self.beta, self.reset = codec, beta, reset
        self.error: Tensor | None = None
        self.sums = 0

    def __call__(self, values: Tensor) -> Tensor:
        if self.error is None or self.sums % self.reset == 0:
            self.error = torch.zeros(values.shape, dtype=torch.float32, device=values.device)
        self.sums += 1
        wanted = values.float() + self.error
        packets = self.codec.encode(wanted)
        lost = wanted.sub_(self.codec.decode(packets, values.shape[-1]))
        self.error.lerp_(lost.nan_to_num_(0.0, 0.0, 0.0), 1.0 - self.beta)
        return packets


class QuantizedSum:
    """Replaces ``DenseSum`` where each rank of ``ranks`` keeps one slice."""

    def __init__(
        self,
        layout: BucketLayout,
        ranks: Communicator,
        codec: Codec,
        *,
        levels: Levels | None = None,
        encode: Encoder | None = None,
    ) -> None:
        self.ranks = ranks
        self.codec = codec
        self.levels = levels
        self.encode = encode or codec.encode
        self.mine = slice(*layout.shard_range(ranks.rank))
        self.numel = layout.shard_numel

    def start(
        self, local: Tensor, kept: Callable[[], Tensor] | None, before: float, after: float
    ) -> InFlight:
        if before != 1.0:
            local.mul_(before)
        out = local[self.mine] if kept is None else kept()
        finish = (
            self._exchange(out, local.view(self.ranks.size, -1), self.ranks, after)
            if self.levels is None
            else self._by_levels(out, local, self.levels, after)
        )
        return InFlight(Pending(finish), out, local, kept is None)

    def _exchange(self, out: Tensor, parts: Tensor, ranks: Communicator, after: float) -> Callable[[], None]:
        """``out`` = the sum of this rank's row of ``parts`` [ranks, n] over the ranks, times ``after``."""
        sent = self.encode(parts)
        received = torch.empty_like(sent)
        pending = ranks.all_to_all(received.view(-1), sent.view(-1))

        def finish() -> None:
            pending.wait()
            total = torch.zeros(self.numel, dtype=torch.float32, device=out.device)
            for packet in received:
                total.add_(self.codec.decode(packet, self.numel))
            out.copy_(total.mul_(after))

        return finish

    def _by_levels(self, out: Tensor, local: Tensor, levels: Levels, after: float) -> Callable[[], None]:
        """Slice r = g * s + i belongs to place i of group g: each place sums the slices of its own place."""
        near, across = levels
        by_place = local.view(across.size, near.size, self.numel).transpose(0, 1).reshape(-1)
        own = torch.empty(across.size * self.numel, dtype=torch.float32, device=local.device)
        nearby = near.reduce_scatter(own, by_place)

        def finish() -> None:
            # Buckets are collected in the order in which they were launched, which all ranks share.
            nearby.wait()
            self._exchange(out, own.view(across.size, self.numel), across, after)()

        return finish


def codec_for(layout: BucketLayout, bits: int) -> BlockCodec | None:
    """How slices of a bucket travel in ``bits`` per element; None: as they are. Norms and biases would lose more than
    they save."""
    worth_it = layout.num_shards > 1 and layout.dtype.is_floating_point and layout.shard_numel >= BLOCK
    return BlockCodec(bits) if bits and worth_it else None
