"""The example of DeepNVMe in a short form: tensors come back, settings are compared, a model learns from files."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.examples.scripts import script
from tests.pool import distributed


@distributed(world_size=1)
def test_tensors_and_files(tmp_path: Path) -> None:
    files = script("deepnvme", "files")
    first, last = files.main(["--folder", str(tmp_path), "--mebibytes", "1", "--shards", "8"])
    assert last < 0.05 * first
    assert not any(tmp_path.iterdir())


def test_the_loader_gives_every_row_once(tmp_path: Path) -> None:
    files = script("deepnvme", "files")
    weights = files.write_shards(tmp_path, 3)
    batches = list(files.read_ahead([tmp_path / f"shard{each}.bin" for each in (2, 0, 1)], 100))
    assert sum(len(inputs) for inputs, _ in batches) == 3 * files.ROWS
    inputs = torch.cat([each for each, _ in batches])
    targets = torch.cat([each for _, each in batches])
    torch.testing.assert_close(inputs @ weights, targets, atol=1e-4, rtol=1e-4)
    assert len(inputs[:, 0].unique()) > 3 * files.ROWS - 5  # no shard twice
