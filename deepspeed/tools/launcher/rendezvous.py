"""Rendezvous of an elastic job's machines: torch's dynamic rendezvous over a store that outlives each of them.

    python -m deepspeed.tools.launcher.rendezvous PORT PARENT_PID

runs that store as a separate process next to the `deepspeed` command. If machines are started by hand, the first
one hosts the store, and the job does not survive the loss of that machine.
"""

from __future__ import annotations

import datetime
import inspect
import os
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from deepspeed.tools.launcher import ports
from deepspeed.tools.launcher.agent import NodeJob
from deepspeed.tools.launcher.errors import LaunchError
from deepspeed.tools.launcher.processes import ElasticMemory
from deepspeed.tools.launcher.shim import die_with_parent
from deepspeed.tools.launcher.supervision import RESTART_SIGNAL

RUN_ID = "deepspeed"
JOIN_S = 600  # timeout until the minimum number of machines has joined
LAST_CALL_S = 2  # wait for machines beyond the minimum
HEARTBEAT_S, HEARTBEATS = 1, 3  # interval, and how many a machine may miss before it counts as lost
CONNECT_S = 60
STEP_S = 60.0  # longest time that a joining machine waits for the end of a step


class StepAlignedRendezvous(DynamicRendezvousHandler):
    """Hides waiting machines from the agent until a step has finished since they arrived."""

    memory: ElasticMemory
    _seen: tuple[int, float] | None = None  # step and time at which a waiting machine was first seen
    _lost = False

    def follow(self, memory: ElasticMemory) -> None:
        """Take the finished steps from ``memory``, and the loss of machines from ``RESTART_SIGNAL``."""
        self.memory = memory
        signal.signal(RESTART_SIGNAL, self._on_loss)

    @property
    def use_agent_store(self) -> bool:
        return False  # torch keys it by restart count, which differs on machines that join later

    def next_rendezvous(self) -> RendezvousInfo:
        self._seen, self._lost = None, False
        return super().next_rendezvous()

    def num_nodes_waiting(self) -> int:
        if self._lost:
            return 1
        waiting = super().num_nodes_waiting()
        if waiting == 0:
            self._seen = None
            return 0
        step = self.memory.step
        if self._seen is None:
            self._seen = step, time.monotonic()
        first, since = self._seen
        return waiting if step > first or time.monotonic() > since + STEP_S else 0

    def _on_loss(self, signum: int, frame: FrameType | None) -> None:
        self._lost = True


def meet(job: NodeJob, memory: ElasticMemory) -> RendezvousHandler:
    """Return this machine's rendezvous handler. Raises LaunchError if the store cannot be reached."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # each start of the ranks creates a new store
    keeps_store = job.node_rank == 0 and ports.is_free(job.master_addr, job.master_port)
    try:
        store = TCPStore(
            job.master_addr,
            job.master_port,
            is_master=keeps_store,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=CONNECT_S),
        )
    except (DistNetworkError, DistStoreError) as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(f"no rendezvous at {job.master_addr}:{job.master_port}: {reason}") from None
    second = datetime.timedelta(seconds=1)
    handler = StepAlignedRendezvous.from_backend(
        RUN_ID,
        store,
        C10dRendezvousBackend(store, RUN_ID),
        job.min_nodes,
        job.max_nodes,
        local_addr=own_address(job.master_addr, job.master_port),
        timeout=RendezvousTimeout(JOIN_S * second, LAST_CALL_S * second, 5 * second, 5 * second),
        **_heartbeats(),
    )
    handler.follow(memory)
    return handler


def _heartbeats() -> dict[str, Any]:
    """Return the settings by which lost machines are detected; empty for torch before 2.7, which has none."""
    known = inspect.signature(DynamicRendezvousHandler.from_backend).parameters
    wanted = {"keep_alive_interval": HEARTBEAT_S, "keep_alive_max_attempt": HEARTBEATS}
    return {name: value for name, value in wanted.items() if name in known}


def own_address(master_addr: str, master_port: int) -> str:
    """Return the source address of packets to ``master_addr``: other machines reach this one at it."""
    family, _, _, _, where = socket.getaddrinfo(master_addr, master_port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # a datagram socket: nothing is sent
        return probe.getsockname()[0]


def main(port: int, parent: int) -> None:
    die_with_parent(parent, signal.SIGTERM)
    store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    print("ready", flush=True)
    while store:  # served by its own thread until this process ends
        signal.pause()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
