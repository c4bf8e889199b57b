"""The example of slow links: what each run asks for, its short form over a link, and what it says without one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.examples.scripts import script
from tests.tools.launcher.programs import REPOSITORY

pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")

SCRIPT = REPOSITORY / "examples/slow_links/train.py"
SHORT = "--mbits 100 --steps 20 --layers 1 --heads 2 --width 32 --context 32 --precision fp32".split()


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return script("slow_links")


def make_text(folder: Path) -> None:
    """Repeating tokens, with a tokenizer that is never called."""
    from tokenizers import Tokenizer, models

    folder.mkdir()
    tokens = np.tile(np.arange(50, dtype=np.uint16), 100)
    np.savez(folder / "tokens.npz", train=tokens, validation=tokens)
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))


def test_the_short_form_over_a_link(example: ModuleType, tmp_path: Path) -> None:
    reason = sys.modules["links"].why_not()
    if reason is not None:
        pytest.skip(f"no network namespaces here: {reason}")
    make_text(tmp_path / "text")
    places = ["--text", str(tmp_path / "text"), "--out", str(tmp_path / "out")]
    runs = example.main([*SHORT, *places, "--runs", "0/1 Adam", "--add"])
    rows = runs["0/1 Adam"]
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert 0 < rows[0]["seconds"] < rows[-1]["seconds"]
    assert (tmp_path / "out/loss.png").stat().st_size > 5000


def test_runs_differ_in_what_travels(example: ModuleType) -> None:
    options = example.parse_arguments([])
    configs = {run: example.settings(options, run) for run in example.RUNS}
    assert configs["ZeRO++"]["zero_optimization"].items() > configs["ZeRO-3"]["zero_optimization"].items()
    assert configs["0/1 Adam"]["optimizer"]["type"] == "ZeroOneAdam"
    for run in ("ZeRO-3", "ZeRO++"):
        assert configs[run]["optimizer"] == configs["Adam"]["optimizer"]


def test_without_namespaces_it_says_what_to_do(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the tools are missing."""
    monkeypatch.setattr(sys.modules["links"], "_search_path", lambda path=None: str(tmp_path))
    with pytest.raises(SystemExit, match=r"No namespaces can be made(.|\n)*--no_limit"):
        example.main(["--out", str(tmp_path)])
