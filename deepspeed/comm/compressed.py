"""Average values over ranks in a few bits per element, with error feedback on both sides.

H. Tang et al. 2021 (1-bit Adam: Communication efficient large-scale training with Adam's convergence speed),
algorithm 1, lines 7 to 11: each rank encodes its values and sends every other rank the part that it *serves*, which
averages what it receives, encodes the average, and sends it to all. The error of either encoding is kept and added to
the next message.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed.comm.collectives import Communicator
from deepspeed.ops.formats.codecs import Codec

ALIGNMENT = 8
"""Elements to which parts are aligned, so that bytes of signs do not straddle them."""
PIECE = 1 << 20
"""Elements of a part per message: one piece is encoded or decoded while another is on the wire."""


def part_numel(numel: int, ranks: int) -> int:
    """Return the elements that each of ``ranks`` serves, of ``numel`` elements and padding."""
    return -(-numel // (ranks * ALIGNMENT)) * ALIGNMENT


class Concatenated:
    """Contiguous fp32 tensors in one virtual flat range, each at its start, with zeros in between."""

    def __init__(self, tensors: Sequence[Tensor], starts: Sequence[int] = (0,)) -> None:
        order = sorted(range(len(starts)), key=lambda i: starts[i])
        self.starts = [starts[i] for i in order]
        self.flat = [tensors[i].view(-1) for i in order]

    def buffer(self, start: int, stop: int) -> Tensor:
        """Return a tensor for elements [start, stop), for ``write``: a view if one tensor has them all, else
        uninitialized."""
        at = bisect_right(self.starts, start) - 1
        if at >= 0 and stop <= self.starts[at] + self.flat[at].numel():
            return self.flat[at][start - self.starts[at] : stop - self.starts[at]]
        return self.flat[0].new_empty(stop - start)

    def read(self, start: int, stop: int) -> Tensor:
        values = self.buffer(start, stop)
        pieces = self._overlaps(start, stop)
        if sum(own.numel() for own, _ in pieces) < stop - start:
            values.zero_()
        for own, place in pieces:
            if own.data_ptr() != values.data_ptr():
                values[place].copy_(own)
        return values

    def write(self, start: int, stop: int, values: Tensor) -> None:
        """Store ``values``, the modified result of ``buffer`` or ``read``."""
        for own, place in self._overlaps(start, stop):
            if own.data_ptr() != values.data_ptr():
                own.copy_(values[place])

    def _overlaps(self, start: int, stop: int) -> list[tuple[Tensor, slice]]:
        """Return the parts of tensors in [start, stop), with their positions in that range."""
        found = []
        at = max(0, bisect_right(self.starts, start) - 1)
        while at < len(self.flat) and self.starts[at] < stop:
            first, flat = self.starts[at], self.flat[at]
            low, high = max(start, first), min(stop, first + flat.numel())
            if low < high:
                found.append((flat[low - first : high - first], slice(low - start, high - start)))
            at += 1
        return found


def compressed_mean(
    values: Concatenated,
    worker_error: Concatenated | None,
    server_error: Tensor | None,
    part: int,
    ranks: Communicator,
    codec: Codec,
) -> None:
    """Replace ``values`` [ranks * part] by their mean over ``ranks``, the same on all of them. Collective.

    Without error tensors, encoding errors are lost.

    Args:
        values: this rank's values, in place.
        worker_error: [ranks * part] error of encoding this rank's values, in place.
        server_error: [part] fp32, error of encoding the average that this rank serves, in place.
        part: elements that a rank serves.
    """
    pieces = [slice(start, min(start + PIECE, part)) for start in range(0, part, PIECE)]
    firsts = range(0, ranks.size * part, part)  # start of each rank's part
    arriving, gathering = [], []
    for piece in pieces:
        payloads = [
            _encode(values, worker_error, first + piece.start, first + piece.stop, codec) for first in firsts
        ]
        sent = torch.stack(payloads)
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
        for first, payload in zip(firsts, everyone, strict=True):
            start, stop = first + piece.start, first + piece.stop
            means = codec.decode(payload, stop - start, out=values.buffer(start, stop))
            values.write(start, stop, means)


def _encode(values: Concatenated, errors: Concatenated | None, start: int, stop: int, codec: Codec) -> Tensor:
    """Return the payload of a range, and update its errors."""
    if errors is None:
        return codec.encode(values.read(start, stop))
    error = errors.read(start, stop)
    payload = codec.encode(values.read(start, stop), error)
    errors.write(start, stop, error)
    return payload
