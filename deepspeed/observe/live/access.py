"""Access rules of the HTTP servers of this package: addresses and names of this machine, tokens."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from urllib.parse import urlsplit


def is_local(host: str) -> bool:
    """Return whether an address or name can be reached from this machine only."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def names_this_machine(header: str) -> bool:
    """Return whether a request with this header ``Host`` was meant for this machine.

    A server without a token refuses others: a page of elsewhere can give its own name this machine's address, and its
    script may then read what a browser here fetches.
    """
    try:
        return is_local(urlsplit(f"//{header}").hostname or "")
    except ValueError:
        return False


def check_token(token: str, origin: str) -> None:
    """ValueError: no client could send this token in a header; ``origin`` says where it comes from."""
    if not re.fullmatch(r"[!-~]+", token):
        what = "is empty" if not token else "contains a space or a character that is not ASCII"
        raise ValueError(
            f"{origin}: the token {what}; clients send it in a header: use letters, digits and signs"
        )
