"""Tensor and sequence parallelism in combination with everything: each cell trains as one rank does."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.clients.parallel_cells import (
    AXES,
    REFUSED,
    STAGES,
    Cell,
    cells,
    every_feature_once,
    pairs_of_features,
    run_all,
    table,
)
from tests.pool import distributed

pytest.importorskip("transformers", reason="the clients extra is not installed")
pytest.importorskip("peft", reason="the clients extra is not installed")

PAGE = Path(__file__).parents[2] / "docs/compatibility.md"


def assert_right(chosen: Iterable[Cell], folder: Path, backend: str = "aot_eager") -> None:
    wrong = run_all(chosen, folder, backend)
    assert not wrong, "\n".join(f"{cell}: {what}" for cell, what in wrong.items())


@pytest.mark.parametrize("axis", ["TP", "SP"])
@distributed(world_size=2)
def test_every_feature_on_two_ranks(axis: str, tmp_path: Path) -> None:
    assert_right(every_feature_once(axis), tmp_path, "eager")


@distributed(world_size=4)
def test_every_feature_on_four_ranks(tmp_path: Path) -> None:
    assert_right(every_feature_once("TP x SP"), tmp_path, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("axis", ["TP", "SP"])
@distributed(world_size=2, timeout=400)
def test_matrix_on_two_ranks(axis: str, stage: int, tmp_path: Path) -> None:
    assert_right(cells(axis, stage), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=4, timeout=400)
def test_matrix_on_four_ranks(stage: int, tmp_path: Path) -> None:
    assert_right(cells("TP x SP", stage), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["TP", "SP"])
@distributed(world_size=2, timeout=400)
def test_pairs_of_features_on_two_ranks(axis: str, tmp_path: Path) -> None:
    assert_right(pairs_of_features(axis), tmp_path)


@pytest.mark.slow
@distributed(world_size=4, timeout=400)
def test_pairs_of_features_on_four_ranks(tmp_path: Path) -> None:
    assert_right(pairs_of_features("TP x SP"), tmp_path)


def test_the_published_table_is_this_one() -> None:
    total = [cell for axis in AXES for stage in STAGES for cell in cells(axis, stage)]
    assert len([cell for cell in total if cell not in REFUSED]) >= 0.95 * len(total)
    assert table() in PAGE.read_text()
