"""Rendezvous ports: probing, search for a free one, and reservation against other launchers."""

from __future__ import annotations

import errno
import itertools
import random
import socket
from collections.abc import Iterator
from pathlib import Path

from deepspeed.tools.launcher.shim import LINUX

MIN_OPEN_PORT = 1024
MAX_PORT = 65535
CANDIDATES = 4096


def is_free(address: str, port: int) -> bool:
    """Tell whether a server could listen on ``address``:``port`` now; always true for another machine's address."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return True
    with socket.socket(family, kind, protocol) as probe:
        # As the store does: connections in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(where)
            probe.listen(1)
        except OSError as error:
            return error.errno not in (errno.EADDRINUSE, errno.EACCES)
    return True


def free_ports(address: str) -> Iterator[int]:
    """Yield, without end, ports that are free now and likely still free when rank 0 starts, seconds later.

    Ports of the kernel's ephemeral range might be taken by then: those below that range come first.
    """
    try:
        lowest_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        lowest_given = 32768
    below = range(max(MIN_OPEN_PORT, lowest_given - CANDIDATES), lowest_given)
    for port in random.sample(below, len(below)):
        if is_free(address, port):
            yield port
    while True:
        with socket.create_server((address, 0)) as probe:
            port = probe.getsockname()[1]
        yield port


def find_free(address: str) -> int:
    """Return the first of ``free_ports``."""
    return next(free_ports(address))


class PortReservation:
    """Keeps other launchers on this host from choosing ``port`` until the reservation is closed or this process ends.

    Seconds pass between choosing a port and rank 0 listening on it; a launcher started in between would also find
    it free. An abstract Unix socket with the port in its name prevents that: such names belong to the network
    namespace, as ports do, are shared by all users, and disappear with their process, however it ends. They exist
    only on Linux; elsewhere nothing is reserved.

    Attributes:
        is_ours: False if another process has reserved the port.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.is_ours = True
        self._name: socket.socket | None = None
        if not LINUX:
            return
        self._name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._name.bind(f"\0deepspeed.launcher.port.{port}")
        except OSError as error:  # any other error: a sandbox without such names; nothing is reserved
            self.is_ours = error.errno != errno.EADDRINUSE

    def close(self) -> None:
        if self._name is not None:
            self._name.close()

    def __enter__(self) -> PortReservation:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def reserve(address: str, preferred: int) -> PortReservation:
    """Reserve ``preferred`` if it is free and unreserved, else another such port."""
    for port in itertools.chain([preferred], free_ports(address)):
        reservation = PortReservation(port)
        if reservation.is_ours and is_free(address, port):
            return reservation
        reservation.close()
    raise AssertionError("free_ports ended")
