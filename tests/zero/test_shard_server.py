"""Connections between shard servers that end in the middle of a message."""

from __future__ import annotations

import socket
import struct
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed.comm.collectives import CommunicationError
from deepspeed.zero.gathering.rendezvous import Arrival, Rendezvous
from deepspeed.zero.gathering.shard_server import ShardServer, pack_message

TOKEN = b"0123456789abcdef"


def server_of(rank: int, peers: dict[int, socket.socket]) -> Any:
    server: Any = object.__new__(ShardServer)
    server.communicator = SimpleNamespace(rank=rank, ranks=(0, 1), size=2)
    server.timeout_s, server._peers, server._token = 5.0, peers, TOKEN
    server.rendezvous = Rendezvous(2)
    return server


@pytest.mark.parametrize("sent", [0, 4, 8, 12])
def test_an_answer_that_breaks_off_is_an_error(sent: int) -> None:
    """A rank that took what it got for an empty order would gather alone, while the others wait for it."""
    ours, theirs = socket.socketpair()
    theirs.sendall(pack_message([3, 1, 2])[:sent])
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(CommunicationError, match="rank 0 exited before it could announce"):
        server_of(1, {0: ours}).meet(Arrival("intent"))
    ours.close()
    theirs.close()


@pytest.mark.parametrize("message", [b"", TOKEN, TOKEN + struct.pack("<qqqq", 1, -2, 0, 100) + b"cut off"])
def test_a_rank_that_is_gone_ends_its_thread_quietly(message: bytes) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(message)
    theirs.close()
    server_of(0, {})._serve(ours)
    assert ours.fileno() == -1
