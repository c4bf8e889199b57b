"""``ds serve``: what it refuses before anything is loaded."""

from __future__ import annotations

import pytest

from deepspeed.tools import ds, parsers
from deepspeed.tools import serve as command


def test_beyond_this_host_a_token_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(parsers.TOKEN_VARIABLE, raising=False)
    assert ds.main(["serve", "model", "--host", "0.0.0.0"]) == 2
    assert "set --token or $DS_SERVE_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv(parsers.TOKEN_VARIABLE, "secret")
    args = parsers.serve().parse_args(["model", "--host", "0.0.0.0"])
    assert args.token == "secret" and "reached from other hosts" not in (command.problem_of(args) or "")


def test_a_token_that_clients_cannot_send(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty variable is none, as usual; an empty option was meant to be something."""
    monkeypatch.setenv(parsers.TOKEN_VARIABLE, "")
    assert parsers.serve().parse_args(["model"]).token is None
    assert ds.main(["serve", "model", "--host", "0.0.0.0"]) == 2
    assert "set --token or $DS_SERVE_TOKEN" in capsys.readouterr().err
    assert ds.main(["serve", "model", "--token", ""]) == 2
    assert "the token is empty" in capsys.readouterr().err
    for token in ("Schlüssel", "two words", "line\n"):
        monkeypatch.setenv(parsers.TOKEN_VARIABLE, token)
        assert ds.main(["serve", "model"]) == 2
        assert "$DS_SERVE_TOKEN: the token contains a space or" in capsys.readouterr().err
