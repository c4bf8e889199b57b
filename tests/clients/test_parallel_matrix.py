"""Tensor and sequence parallelism in combination with everything: each cell trains as one rank does."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.clients.kit import clean_clients
from tests.clients.parallel_cells import (
    AXES,
    CLIP,
    DECAY,
    EPS,
    RATE,
    REFUSED,
    STAGES,
    Cell,
    batches,
    cells,
    config,
    every_feature_once,
    model,
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
    assert_right(every_feature_once(axis), tmp_path)


@distributed(world_size=4, timeout=240)
def test_every_feature_on_four_ranks(tmp_path: Path) -> None:
    assert_right(every_feature_once("TP x SP"), tmp_path)


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


@pytest.mark.parametrize(("axis", "stage"), [("TP", 3), ("SP", 2)])
@distributed(world_size=4, timeout=240)
def test_layers_or_sequences_and_data_over_four_ranks(axis: str, stage: int, tmp_path: Path) -> None:
    assert_two_groups_train_as_one_rank(axis, stage, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@distributed(world_size=8, timeout=400)
def test_layers_sequences_and_data_over_eight_ranks(stage: int, tmp_path: Path) -> None:
    assert_two_groups_train_as_one_rank("TP x SP", stage, tmp_path)


def assert_two_groups_train_as_one_rank(axis: str, stage: int, folder: Path) -> None:
    """Two groups of ranks that share layers, sequences or both have different batches."""
    import deepspeed

    cell = Cell(axis, stage, ())
    with clean_clients():
        plain = model(adapted=False)
        engine = deepspeed.initialize(model=model(adapted=False), config=config(cell, folder))[0]
        assert [engine.mesh.size(name) for name in ("tp", "sp")] == [
            2 if "TP" in axis else 1,
            2 if "SP" in axis else 1,
        ]
        assert engine.mesh.size("dp") == 2
        optimizer = torch.optim.AdamW(plain.parameters(), lr=RATE, eps=EPS, weight_decay=DECAY)
        for batch in batches():
            rows = [{key: value[row : row + 1] for key, value in batch.items()} for row in range(2)]
            losses = [plain(**row).loss for row in rows]
            (sum(losses) / 2).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            own = engine.mesh.rank("dp")
            loss = engine(**rows[own]).loss
            assert loss.item() == pytest.approx(losses[own].item(), rel=1e-5)
            engine.backward(loss)
            engine.step()
        for name, param in engine.module.named_parameters():
            wanted = plain.get_parameter(name)
            difference = (engine.whole_tensor(param) - wanted).abs().max()
            assert difference <= 2e-5 * max(1.0, wanted.abs().max()), name
        engine.destroy()


def test_the_published_table_is_this_one() -> None:
    total = [cell for axis in AXES for stage in STAGES for cell in cells(axis, stage)]
    assert len([cell for cell in total if cell not in REFUSED]) >= 0.95 * len(total)
    assert table() in PAGE.read_text()
