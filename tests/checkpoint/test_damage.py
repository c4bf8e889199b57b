"""Files that are not as they were written: each is refused by name, or what was damaged did not matter."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from deepspeed.checkpoint.consolidate import consolidate
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.files.archive_reader import read_archive
from deepspeed.checkpoint.reader import open_checkpoint
from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.checkpoint.make_upstream_checkpoints import FIXTURES
from tests.checkpoint.models import config, make_engine, train
from tests.pool import run


def save(folder: str, stage: int) -> None:
    engine = make_engine(config(stage))
    train(engine, 0, 2)
    engine.save_checkpoint(folder, tag="t")


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def flip(data: bytes, rng: random.Random) -> bytes:
    """One bit; every second time near the beginning, where the structure is."""
    at = rng.randrange(len(data) if rng.random() < 0.5 else min(9000, len(data)))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def blank(data: bytes, rng: random.Random) -> bytes:
    """A hole, as a crash of the machine may leave it."""
    at = rng.randrange(len(data))
    return (data[:at] + bytes(64) + data[at + 64 :])[: len(data)]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_no_damage_goes_unnoticed(tmp_path: Path, stage: int) -> None:
    run(save, 2, folder=str(tmp_path), stage=stage)
    folder, rng = tmp_path / "t", random.Random(stage)
    good = consolidate(folder).materialized()
    refused = 0
    for path in sorted(folder.glob("*.pt")):
        data = path.read_bytes()
        for damage in [cut, flip, blank] * 15:
            path.write_bytes(damage(data, rng))
            try:
                found = consolidate(folder).materialized()
            except CheckpointError:
                refused += 1
                continue
            assert found.keys() == good.keys() and all(torch.equal(found[name], good[name]) for name in good)
        path.write_bytes(data)
    assert refused > 20


@pytest.mark.parametrize("name", ["stage1_fp32", "stage2_bf16", "stage3_fp16"])
def test_a_checkpoint_of_another_layout_says_so(tmp_path: Path, name: str) -> None:
    """As that release's other optimizers and later releases may write it."""
    for source in (FIXTURES / name / "global_step3").iterdir():
        content = read_archive(source)
        if "optim" in source.name:
            state = content["optimizer_state_dict"]
            plain = {k: v for k, v in state.items() if k not in ("loss_scaler", "param_slice_mappings")}
            content["optimizer_state_dict"] = {
                f"other_{k}" if "fp32" in k else k: v for k, v in plain.items()
            }
        torch.save(content, tmp_path / source.name)
    with pytest.raises(CheckpointError, match=r"release 0\.19\.8, has an unexpected layout.*fp32"):
        open_checkpoint(tmp_path)


def test_folders_that_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("t")
    (tmp_path / "t").mkdir()
    with pytest.raises(CheckpointError, match=r"holds no \*_model_states\.pt"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    (tmp_path / "t/mp_rank_00_model_states.pt").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(
        CheckpointError, match=r"mp_rank_00_model_states\.pt \(43 bytes\) is truncated or not"
    ):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    torch.save([1, 2], tmp_path / "t/mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="holds a list, not the states"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)
