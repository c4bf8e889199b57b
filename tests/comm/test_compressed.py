"""A mean in few bits, piece by piece: the same bits as in one piece."""

from __future__ import annotations

import pytest
import torch

from deepspeed.comm import compressed
from deepspeed.comm.codecs import codec_named
from deepspeed.comm.collectives import Communicator
from tests.comm.transports import same_bits, two_hosts, using, values
from tests.pool import distributed

PART = 3 * 4096 + 1000


def after_two_means(
    comm: Communicator, name: str, errors: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """The means, and what is owed in the end; the second one's feedback is of the first."""
    monkeypatch.setattr(compressed, "PIECE", piece)
    worker, server = (torch.zeros(comm.size * PART), torch.zeros(PART)) if errors else (None, None)
    found = []
    for round in range(2):
        mine = values(comm.size * PART, torch.float32, comm.rank + 10 * round)
        compressed.compressed_mean(mine, worker, server, comm, codec_named(name))
        found.append(mine)
    return [*found, *(owed for owed in (worker, server) if owed is not None)]


@pytest.mark.parametrize("transport", ["gloo", "hierarchical"])
@pytest.mark.parametrize(("name", "errors"), [("signs", True), ("int8", True), ("int4", False)])
@distributed(world_size=4)
def test_pieces(transport, name, errors, monkeypatch):
    with two_hosts(), using(transport) as comm:
        whole = after_two_means(comm, name, errors, PART, monkeypatch)
        pieces = after_two_means(comm, name, errors, 4096, monkeypatch)
        assert all(same_bits(a, b) for a, b in zip(pieces, whole, strict=True))
        first = [torch.empty_like(whole[0]) for _ in range(comm.size)]
        torch.distributed.all_gather(first, whole[0])
        assert all(same_bits(a, whole[0]) for a in first)
