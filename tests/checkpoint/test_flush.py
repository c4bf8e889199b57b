"""Flushing: the order on disk, who waits, and the messages of a disk that fails."""

from __future__ import annotations

import errno
import os
import shutil
import textwrap
import threading
from pathlib import Path

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.files import writers
from deepspeed.checkpoint.files.flush import flush_later, wait_for_flushes
from deepspeed.checkpoint.files.writers import StagedFolder, write_latest
from tests import forked
from tests.pool import distributed

ROOT = Path(__file__).resolve().parents[2]
FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")


class Disk:
    """Stands in for fsync: notes what is stored, and may be slow or broken."""

    def __init__(self) -> None:
        self.stored: list[str] = []
        self.error: OSError | None = None
        self.goes_on = threading.Event()
        self.goes_on.set()

    def fsync(self, handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        assert self.goes_on.wait(20)
        if self.error is not None:
            raise self.error
        self.stored.append(path)


@pytest.fixture
def disk(monkeypatch):
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc")
    disk = Disk()
    monkeypatch.setattr(os, "fsync", disk.fsync)
    yield disk
    disk.error = None
    disk.goes_on.set()
    wait_for_flushes()


def save(folder: Path, tag: str) -> None:
    staged = StagedFolder(folder, tag)
    staged.prepare()
    for name in FILES:
        (staged.staging / name).write_text(tag)
    staged.commit()
    write_latest(folder, tag)


def test_a_new_tag_is_in_place_before_the_disk_has_it(tmp_path, disk):
    disk.goes_on.clear()
    save(tmp_path, "a")
    assert {p.name for p in (tmp_path / "a").iterdir()} == set(FILES)
    assert (tmp_path / "latest").read_text() == "a" and disk.stored == []
    disk.goes_on.set()
    wait_for_flushes()
    files = [str(tmp_path / "a" / name) for name in FILES]
    assert set(disk.stored[:2]) == set(files)
    assert disk.stored[2:] == [str(tmp_path / "a"), str(tmp_path), str(tmp_path / "latest"), str(tmp_path)]


def test_an_older_checkpoint_is_removed_when_the_disk_has_the_newer_one(tmp_path, disk, monkeypatch):
    save(tmp_path, "a")
    wait_for_flushes()
    disk.stored.clear()
    known: list[list[str]] = []
    exchange = writers._exchange

    def spy(one: Path, other: Path) -> bool:
        known.append(list(disk.stored))
        return exchange(one, other)

    monkeypatch.setattr(writers, "_exchange", spy)
    save(tmp_path, "a")
    (stored,) = known
    assert {os.path.basename(path) for path in stored} == {*FILES, ".a.tmp"}


@pytest.mark.parametrize("keep", [1, 2])
@distributed(world_size=2)
def test_the_last_older_checkpoint_goes_when_the_disk_has_the_newer_one(tmp_path, keep):
    stored: list[str] = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        fsync(handle)
        stored.append(os.readlink(f"/proc/self/fd/{handle}"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", noted)
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 1},
            "checkpoint": {"keep_last": keep},
        }
        engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=settings)
        engine.save_checkpoint(tmp_path, tag="a")
        engine.save_checkpoint(tmp_path, tag="b")
        names = {Path(path).name for path in list(stored) if "/.b.tmp/" in path or "/b/" in path}
        left = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
        engine.destroy()
    rank = dist.get_rank()
    own = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    assert left == (["b"] if keep == 1 else ["a", "b"])
    assert keep == 2 or own in names


def test_what_the_disk_refuses_is_logged_and_raised_by_the_next_who_waits(
    tmp_path, disk, caplog, monkeypatch
):
    monkeypatch.setattr(writers.logger, "propagate", True)
    disk.error = OSError(errno.EIO, os.strerror(errno.EIO))
    save(tmp_path, "a")
    with pytest.raises(
        CheckpointError, match=r"/a was written, but flushing it to disk failed \(Input/output"
    ):
        wait_for_flushes()
    assert "flushing it to disk failed" in caplog.text
    with pytest.raises(CheckpointError, match="/latest"):
        wait_for_flushes()
    wait_for_flushes()  # reported only once
    disk.error = None
    save(tmp_path, "b")
    wait_for_flushes()
    assert str(tmp_path / "b" / FILES[0]) in disk.stored


def test_what_is_removed_meanwhile_is_skipped(tmp_path, disk):
    disk.goes_on.clear()
    for tag in ("a", "b", "c"):
        save(tmp_path, tag)
    shutil.rmtree(tmp_path / "b")
    flush_later([tmp_path / "never" / "there"])
    disk.goes_on.set()
    wait_for_flushes()
    assert str(tmp_path / "c" / FILES[0]) in disk.stored
    assert str(tmp_path / "b" / FILES[0]) not in disk.stored


def test_a_forked_process_has_nothing_to_wait_for(tmp_path, disk):
    disk.goes_on.clear()
    save(tmp_path, "a")
    child = os.fork()
    if child == 0:
        disk.goes_on.set()
        save(tmp_path, "b")
        wait_for_flushes()
        os._exit(0 if str(tmp_path / "b" / FILES[0]) in disk.stored else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_another_thread_may_wait_for_what_is_just_queued(tmp_path, disk, monkeypatch):
    (tmp_path / "a").touch()
    start = threading.Thread.start

    def waits_first(thread: threading.Thread) -> None:
        wait_for_flushes()  # as another thread does, when this one is interrupted here
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", waits_first)
    flush_later([tmp_path / "a"])
    wait_for_flushes()
    assert str(tmp_path / "a") in disk.stored


@distributed(world_size=2, timeout=60)
def test_what_one_disk_refuses_is_raised_on_all_ranks(tmp_path):
    settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=settings)
    (tmp_path / f"left_by_{dist.get_rank()}").touch()
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk()
        disk.error = OSError(errno.EIO, os.strerror(errno.EIO)) if dist.get_rank() == 1 else None
        patch.setattr(os, "fsync", disk.fsync)
        flush_later([tmp_path / f"left_by_{dist.get_rank()}"])
        with pytest.raises(CheckpointError, match="left_by_1 was written, but flushing it to disk failed"):
            engine.save_checkpoint(tmp_path, tag="a")
    engine.save_checkpoint(tmp_path, tag="b")
    assert (tmp_path / "b").is_dir() and not (tmp_path / "a").exists()
    engine.destroy()


@pytest.mark.parametrize("ending", ["", "engine.destroy(); print('destroyed', flush=True)"])
def test_destroy_and_the_end_of_the_process_wait_for_the_disk(tmp_path, ending):
    program = f"""
    import os, threading, time, torch, deepspeed
    real, returned = os.fsync, threading.Event()
    def slow(handle):
        returned.wait(60)
        time.sleep(0.3)
        real(handle)
        os.write(1, b"stored\\n")
    config = {{"train_batch_size": 1, "optimizer": {{"type": "AdamW", "params": {{"lr": 0.1}}}}}}
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)
    os.fsync = slow
    engine.save_checkpoint({str(tmp_path)!r}, tag="a")
    print("saved", flush=True)
    returned.set()
    {ending}
    """
    output = forked.run(
        ["-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "DEEPSPEED_PROGRESS": "0"},
    )
    assert output.returncode == 0, output.stderr
    lines = output.stdout.split()
    assert lines[0] == "saved" and lines.count("stored") >= 3
    if ending:
        assert lines[-1] == "destroyed"
