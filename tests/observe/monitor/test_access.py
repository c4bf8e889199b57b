"""Access to a server: addresses, names and tokens."""

from __future__ import annotations

import pytest

from deepspeed.observe.live.access import check_token, is_local, names_this_machine


def test_addresses_of_this_host() -> None:
    local = {host: is_local(host) for host in ("localhost", "127.0.0.1", "127.3.2.1", "::1")}
    assert all(local.values()), local
    assert not any(map(is_local, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


def test_names_of_this_host_in_a_header() -> None:
    for header in ("localhost", "localhost:80", "LOCALHOST", "127.0.0.1:1", "[::1]:80"):
        assert names_this_machine(header), header
    for header in (
        "",
        "[",
        "[::1",
        "evil.example",
        "localhost.evil.example",
        "localhost@evil.example",
        "10.0.0.1",
    ):
        assert not names_this_machine(header), header


def test_tokens_that_a_header_can_hold() -> None:
    check_token("sk-0123456789_./+=~", "it")
    for token in ("", " ", "a b", "a\n", "a\t", "ü", "\x7f"):
        with pytest.raises(ValueError, match="it: the token"):
            check_token(token, "it")
