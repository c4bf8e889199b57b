"""The example of CIFAR-10 in a short form: dense and with experts, with its monitors, and from the original files."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.examples.scripts import script
from tests.pool import distributed

MOE = "--moe --num-experts 2 --ep-world-size 2 --mlp-type residual --noisy-gate-policy RSample".split()


@distributed(world_size=2)
@pytest.mark.parametrize("model", [[], MOE], ids=["dense", "experts"])
def test_it_learns(tmp_path: Path, model: list[str]) -> None:
    arguments = ["--pictures", "1024", "--batch", "16", "--epochs", "1", "--output", str(tmp_path)]
    before, after = script("cifar").main([*arguments, *model])
    assert before < 0.2 and after > before + 0.15
    (curve,) = tmp_path.glob("cifar/*train_loss.csv")
    assert len(curve.read_text().splitlines()) == 1 + 32
    assert (tmp_path / "checkpoints/latest").read_text() == "global_step32"


def test_original_files(tmp_path: Path) -> None:
    cifar = script("cifar")
    data = np.arange(2 * 3072, dtype=np.int64).reshape(2, 3072) % 256
    (tmp_path / "test_batch").write_bytes(pickle.dumps({b"data": data.astype(np.uint8), b"labels": [3, 7]}))
    pictures, classes = cifar.read(tmp_path, ["test_batch"]).tensors
    assert pictures.shape == (2, 3, 32, 32) and classes.tolist() == [3, 7]
    assert pictures[0, 1, 2, 3].item() == pytest.approx(((1024 + 2 * 32 + 3) % 256) / 127.5 - 1)


@distributed(world_size=1)
def test_it_trains_on_a_folder_of_them(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
        data = random.integers(256, size=(8, 3072), dtype=np.uint8)
        (tmp_path / name).write_bytes(pickle.dumps({b"data": data, b"labels": [1] * 8}))
    arguments = ["--data", str(tmp_path), "--epochs", "10", "--batch", "20"]
    _, after = script("cifar").main([*arguments, "--output", str(tmp_path / "out")])
    assert after == 1.0  # there is one class
