"""Access rules of this package's HTTP servers: local addresses, host names, tokens."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from urllib.parse import urlsplit


def is_local(host: str) -> bool:
    """Tell whether an address or name is reachable from this machine only."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def names_this_machine(header: str) -> bool:
    """Tell whether a request's ``Host`` header names this machine.

    A server without a token refuses other names, against DNS rebinding: a foreign page may resolve its own name to this
    machine's address, and its script could then read the answers.
    """
    try:
        return is_local(urlsplit(f"//{header}").hostname or "")
    except ValueError:
        return False


def check_token(token: str, origin: str) -> None:
    """Raise ValueError if clients cannot send this token in a header; ``origin``: its source, for the message."""
    if not re.fullmatch(r"[!-~]+", token):
        what = "is empty" if not token else "contains a space or a character that is not ASCII"
        raise ValueError(
            f"{origin}: the token {what}; clients send it in a header: use letters, digits and punctuation only"
        )
