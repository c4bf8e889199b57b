"""The examples of the flops profiler's tutorial."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from tests.tools.launcher.programs import REPOSITORY

FOLDER = REPOSITORY / "examples/flops_profiler"


def main_of(name: str) -> Any:
    return runpy.run_path(str(FOLDER / name))["main"]


def test_alexnet(capsys: pytest.CaptureFixture[str]) -> None:
    """0.714 GMACs and 61.1 million parameters, as the model is known for."""
    flops, macs, params = main_of("alexnet.py")(["--batch-size", "1", "--warm-up", "0"])
    assert (macs, params) == ("714.19 MMACs", "61.1 M") and flops.startswith("1.43 G")
    assert "(classifier): Sequential(" in capsys.readouterr().out


def test_bert_large(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    batch, length, hidden, layers = 2, 64, 1024, 3
    macs = main_of("bert.py")(
        ["--large", "--layers", "3", "--batch-size", "2", "--seq-length", "64", "--device", "meta"]
    )[1]
    tokens = batch * length
    one = 12 * tokens * hidden**2 + 2 * tokens * length * hidden
    assert macs == layers * one + batch * (hidden**2 + 2 * hidden)
    assert "BertEncoder" in capsys.readouterr().out
