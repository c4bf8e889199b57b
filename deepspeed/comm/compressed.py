"""The mean over ranks of what each rank sends in a few bits, with feedback of errors on both sides.

H. Tang et al. 2021 (1-bit Adam: Communication efficient large-scale training with Adam's convergence speed), algorithm
1, lines 7 to 11: each rank encodes its values and sends every other rank the part that it *serves*; that one averages
what it receives, encodes the average, and sends it to all. What either encoding takes away is kept and added to the
next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.comm.codecs import Codec
from deepspeed.comm.collectives import Communicator

ALIGNMENT = 8
"""Elements: bytes of signs begin where parts do."""
PIECE = 1 << 21
"""Elements of a part that travel together: while a link carries one piece, the next is encoded or decoded."""


def part_numel(numel: int, ranks: int) -> int:
    """Elements that each of ``ranks`` serves, of ``numel`` and padding."""
    return -(-numel // (ranks * ALIGNMENT)) * ALIGNMENT


def compressed_mean(
    values: Tensor,
    worker_error: Tensor | None,
    server_error: Tensor | None,
    ranks: Communicator,
    codec: Codec,
) -> None:
    """``values`` [ranks * part] become their mean over ``ranks``, the same on all of them. Collective.

    Without errors, what encoding takes away is lost.

    Args:
        values: fp32, this rank's own, in place.
        worker_error: [ranks * part] fp32, what encoding took from this rank's values, in place.
        server_error: [part] fp32, what encoding took from the average that this rank serves, in place.
    """
    rows = values.view(ranks.size, -1)
    errors = None if worker_error is None else worker_error.view(ranks.size, -1)
    part = rows.shape[-1]
    pieces = [slice(start, min(start + PIECE, part)) for start in range(0, part, PIECE)]
    arriving, gathering = [], []
    for piece in pieces:
        sent = _encoded(rows, errors, piece, codec)
        received = torch.empty_like(sent)
        arriving.append((sent, received, ranks.all_to_all(received.view(-1), sent.view(-1))))
    for piece, (_, received, pending) in zip(pieces, arriving, strict=True):
        pending.wait()
        average = codec.total(received, piece.stop - piece.start).mul_(1.0 / ranks.size)
        mine = codec.encode(average, None if server_error is None else server_error[piece])
        everyone = mine.new_empty(ranks.size, mine.numel())
        gathering.append((everyone, ranks.all_gather(everyone.view(-1), mine)))
    for piece, (everyone, pending) in zip(pieces, gathering, strict=True):
        pending.wait()
        for row, packet in zip(rows, everyone, strict=True):
            codec.decode(packet, piece.stop - piece.start, out=row[piece])


def _encoded(rows: Tensor, errors: Tensor | None, piece: slice, codec: Codec) -> Tensor:
    """Packets [ranks, nbytes] of a piece of each row."""
    if piece.stop - piece.start == rows.shape[-1]:
        return codec.encode(rows, errors)
    owed = [None] * len(rows) if errors is None else [row[piece] for row in errors]
    return torch.stack([codec.encode(row[piece], own) for row, own in zip(rows, owed, strict=True)])
