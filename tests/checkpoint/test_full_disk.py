"""A disk that is full, or a file that may not grow: a clear error, on all ranks, and nothing that was there is lost."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.tools.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
from tests.checkpoint.models import assert_restored, config, full_state, make_engine
from tests.pool import run

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB; only root can make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if not sys.platform.startswith("linux") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("cannot mount a small file system here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def engine_and_step(stage: int):
    """2.4 MB of weights and state."""
    torch.manual_seed(0)
    ds_config = config(stage)
    ds_config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    engine = make_engine(ds_config, model=nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 128)))
    step(engine)
    return engine


def step(engine) -> None:
    engine.backward(engine(torch.ones(2, 256)).square().mean())
    engine.step()


def _save_until_full(folder: str, stage: int, tag: str | None) -> None:
    engine = engine_and_step(stage)
    engine.save_checkpoint(folder, tag=tag)
    saved = full_state(engine)
    step(engine)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            engine.save_checkpoint(folder, tag=tag)
        assert "MiB free" in str(caught.value) or "failed on rank" in str(caught.value)
        dist.barrier()
        assert not [path for path in Path(folder).iterdir() if path.name.startswith(".")]
    engine.load_checkpoint(folder)
    assert_restored(full_state(engine), saved)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("tag", ["same", None])
def test_full_disk(small_disk: Path, stage: int, tag: str | None) -> None:
    """There is room for one checkpoint only, be the second one's tag another or the same."""
    run(_save_until_full, 2, folder=str(small_disk), stage=stage, tag=tag)
    with pytest.raises(CheckpointError, match=r"cannot write .*No space left on device"):
        for number in range(9):
            convert_zero_checkpoint_to_fp32_state_dict(small_disk, small_disk / f"out{number}")
    assert {path.name for path in small_disk.glob("out*/*")} <= {"pytorch_model.bin"}, (
        "nothing unfinished is left"
    )


def _save_with_a_limit(folder: str, stage: int) -> None:
    engine = engine_and_step(stage)
    engine.save_checkpoint(folder, tag="same")
    saved = full_state(engine)
    step(engine)
    with largest_file(MIB // 4):
        with pytest.raises(CheckpointError, match="File too large"):
            engine.save_checkpoint(folder, tag="same")
        with pytest.raises(CheckpointError, match="File too large|failed on rank 0"):
            engine.save_16bit_model(folder + "/out", "model.safetensors")
    engine.load_checkpoint(folder)
    assert_restored(full_state(engine), saved)
    step(engine)
    engine.save_checkpoint(folder, tag="same")  # it works again as soon as there is space


@pytest.mark.skipif(sys.platform == "win32", reason="no such limits")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_file_that_may_not_grow(tmp_path: Path, stage: int) -> None:
    run(_save_with_a_limit, 2, folder=str(tmp_path), stage=stage)
