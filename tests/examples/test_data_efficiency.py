"""The example of less data and less time: what it counts, and its short form."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.examples.scripts import script
from tests.pool import distributed

pytest.importorskip("tokenizers")
pytest.importorskip("matplotlib")

SMALL = "--steps 12 --batch 4 --layers 3 --heads 2 --width 32 --context 32 --evaluate_every 4".split()


def example() -> Any:
    return script("data_efficiency")


@distributed(world_size=1)
def test_the_short_form(tmp_path: Path) -> None:
    train = example()
    data = sys.modules["data"]
    data.TEXT_LIMIT_BYTES = 1_000_000
    options = [*SMALL, "--text", str(tmp_path / "text"), "--out", str(tmp_path / "out")]
    options += ["--same_steps", "--seeds", "0", "--runs", "plain", "random-LTD", "both"]
    runs = train.main(options)
    plain, dropping, both = (runs[name][0] for name in ("plain", "random-LTD", "both"))
    assert plain[-1]["validation_loss"] < plain[0]["validation_loss"]
    assert [row["tokens"] for row in plain] == [32] * 3
    grown = [(row["kept"], row["tokens"]) for row in both]
    assert grown == [(8, 16), (16, 24), (24, 32)]
    assert both[-1]["operations"] < dropping[-1]["operations"] < plain[-1]["operations"]
    # one of three layers drops; embedding and head do not
    assert dropping[-1]["operations"] / plain[-1]["operations"] > 0.5
    assert (tmp_path / "out/loss.png").stat().st_size > 5000


@distributed(world_size=1)
def test_finished_runs_are_kept(tmp_path: Path) -> None:
    train = example()
    text = train.Text(np.arange(20_000, dtype=np.uint16) % 4096, np.arange(200, dtype=np.uint16), None)
    options = train.parse_arguments([*SMALL, "--out", str(tmp_path), "--runs", "plain"])
    first = train.measure(options, "plain", text, 0)
    other = train.measure(options, "plain", text, 1)
    assert first[-1]["validation_loss"] != other[-1]["validation_loss"]
    trained: list[int] = []
    train.train = lambda *_: trained.append(1) or [{"step": 1}]
    assert train.measure(options, "plain", text, 0) == first
    assert train.measure(options, "plain", text, 1) == other
    assert not trained
    options.steps = 13
    assert train.measure(options, "plain", text, 0) == [{"step": 1}]


@pytest.mark.parametrize("run", ["curriculum", "random-LTD", "both"])
@distributed(world_size=1)
def test_every_run_keeps_to_the_budget(tmp_path: Path, run: str) -> None:
    train = example()
    text = train.Text(np.arange(20_000, dtype=np.uint16) % 4096, np.arange(200, dtype=np.uint16), None)
    sizes = "--steps 30 --batch 1 --layers 4 --heads 2 --width 64 --context 64 --evaluate_every 100".split()
    for budget in (0.65, 1.0):
        options = train.parse_arguments([*sizes, "--budget", str(budget)])
        rows = {kind: train.train(options, kind, text)[-1] for kind in ("plain", run)}
        assert rows[run]["step"] > budget * rows["plain"]["step"]
        assert rows["plain"]["step"] == 30
        share = rows[run]["operations"] / rows["plain"]["operations"]
        assert budget - 0.06 < share < budget + 0.02


@distributed(world_size=1)
def test_a_curriculum_by_a_metric(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    metric = script("data_efficiency", "by_metric")
    random = np.random.default_rng(0)
    tokens = (4000 * random.random(20_000) ** 4).astype(np.uint16)  # some are common, most are rare
    tokens[10_000:] //= 100
    np.savez(tmp_path / "tokens.npz", train=tokens, validation=tokens[5000:15_000])
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    small = ["--steps", "20", "--layers", "1", "--context", "16", "--workers", "2"]
    runs = metric.main(["--text", str(tmp_path), *small])
    (plain, _), (ordered, loss) = runs["plain"], runs["by rarity"]
    assert max(plain) - min(plain) < 1.0
    assert ordered[0] < plain[0] - 1.0 and ordered[0] < ordered[1] <= ordered[-1]
    assert ordered[-1] == pytest.approx(plain[-1], abs=0.8)
    assert 0 < loss < 9
