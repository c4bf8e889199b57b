"""The rendezvous port: is it free, and which one is."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

LOWEST_OPEN_PORT = 1024
HIGHEST = 65535
CANDIDATES = 4096


def is_free(address: str, port: int) -> bool:
    """Whether a server could listen at ``address``:``port`` now. An address of another machine counts as
    free.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return True
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as the store does: what lingers does not count
        try:
            probe.bind(where)
            probe.listen(1)
        except OSError as error:
            return error.errno not in (errno.EADDRINUSE, errno.EACCES)
    return True


def find_free(address: str) -> int:
    """A port that is free now, and likely to be so some seconds later, when rank 0 has started.

    Ports that the kernel gives to outgoing connections would not be: those below its range come first.
    """
    try:
        lowest_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        lowest_given = 32768
    below = range(max(LOWEST_OPEN_PORT, lowest_given - CANDIDATES), lowest_given)
    for port in random.sample(below, len(below)):
        if is_free(address, port):
            return port
    with socket.create_server((address, 0)) as probe:
        return probe.getsockname()[1]
