"""The rendezvous port: is it free, and which one is."""

from __future__ import annotations

import errno
import socket


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
    """A port that is free now. It may be taken before it is used, which is rare: the kernel hands them out in
    turn.
    """
    family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
