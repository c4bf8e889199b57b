"""A mean in few bits, piece by piece: the same bits as in one piece."""

from __future__ import annotations

import pytest
import torch

from deepspeed.comm import compressed
from deepspeed.comm.collectives import Communicator
from deepspeed.comm.compressed import Concatenated
from deepspeed.ops.formats.codecs import codec_named
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
        lain, owed = (None if flat is None else Concatenated([flat]) for flat in (mine, worker))
        assert lain is not None
        compressed.compressed_mean(lain, owed, server, PART, comm, codec_named(name))
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


def test_end_to_end():
    tensors = [torch.arange(4.0), torch.arange(10.0, 16.0).view(2, 3)]
    lain = Concatenated(tensors, [5, 9])  # nothing before 5
    assert lain.read(0, 17).tolist() == [0] * 5 + [0, 1, 2, 3, 10, 11, 12, 13, 14, 15] + [0] * 2
    assert lain.read(6, 8).data_ptr() == tensors[0][1:].data_ptr()  # its own memory
    across = lain.read(7, 11)
    assert across.tolist() == [2, 3, 10, 11]
    lain.write(7, 11, across.neg_())
    assert tensors[0].tolist() == [0, 1, -2, -3]
    assert tensors[1].flatten().tolist() == [-10, -11, 12, 13, 14, 15]
    room = lain.buffer(13, 20)
    lain.write(13, 20, room.fill_(7.0))
    assert tensors[1].flatten().tolist() == [-10, -11, 12, 13, 7, 7]
    assert lain.read(15, 20).tolist() == [0] * 5
