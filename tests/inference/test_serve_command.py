"""``ds serve``: what it refuses before anything is loaded."""

from __future__ import annotations

import pytest

from deepspeed.tools import ds
from deepspeed.tools import serve as command


def test_beyond_this_host_a_token_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(command.TOKEN_VARIABLE, raising=False)
    assert ds.main(["serve", "model", "--host", "0.0.0.0"]) == 2
    assert "set --token or $DS_SERVE_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv(command.TOKEN_VARIABLE, "secret")
    args = command.parse(["model", "--host", "0.0.0.0"])
    assert args.token == "secret" and "reached from other hosts" not in (command.problem_of(args) or "")


def test_addresses_of_this_host() -> None:
    local = {host: command.is_local(host) for host in ("localhost", "127.0.0.1", "127.3.2.1", "::1")}
    assert all(local.values()), local
    assert not any(map(command.is_local, ("0.0.0.0", "::", "10.0.0.1", "example.org")))
