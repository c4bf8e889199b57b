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


def part_numel(numel: int, ranks: int) -> int:
    """Elements that each of ``ranks`` serves, of ``numel`` and padding."""
    return -(-numel // (ranks * ALIGNMENT)) * ALIGNMENT


def compressed_mean(
    values: Tensor, worker_error: Tensor, server_error: Tensor, ranks: Communicator, codec: Codec
) -> None:
    """``values`` [ranks * part] become their mean over ``ranks``, the same on all of them. Collective.

    Args:
        values: fp32, this rank's own, in place.
        worker_error: [ranks * part] fp32, what encoding took from this rank's values, in place.
        server_error: [part] fp32, what encoding took from the average that this rank serves, in place.
    """
    part = server_error.numel()
    wanted = values.add_(worker_error).view(ranks.size, part)
    sent = codec.encode(wanted)
    worker_error.view(ranks.size, part).copy_(wanted).sub_(codec.decode(sent, part))
    received = torch.empty_like(sent)
    ranks.all_to_all(received.view(-1), sent.view(-1)).wait()
    average = torch.zeros_like(server_error)
    for packet in received:
        average.add_(codec.decode(packet, part))
    average.mul_(1.0 / ranks.size).add_(server_error)
    mine = codec.encode(average)
    server_error.copy_(average).sub_(codec.decode(mine, part))
    everyone = mine.new_empty(ranks.size * mine.numel())
    ranks.all_gather(everyone, mine).wait()
    wanted.copy_(codec.decode(everyone.view(ranks.size, -1), part))
