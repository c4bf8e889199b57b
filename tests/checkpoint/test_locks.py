"""Two saves of one folder, and what a killed one leaves: real processes, one of which is killed with SIGKILL."""

from __future__ import annotations

import errno
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.files import locks
from deepspeed.checkpoint.files.background import remove_older
from deepspeed.checkpoint.files.writers import StagedFolder
from tests import forked

NAME = "mp_rank_00_model_states.pt"
JOB = """
import os, sys, time
from pathlib import Path
from deepspeed.checkpoint.files.writers import StagedFolder
staged = StagedFolder(Path(sys.argv[1]), sys.argv[2], exclusive="shared" not in sys.argv[3])
staged.prepare()
(staged.staging / "mp_rank_00_model_states.pt").write_text("half")
if "displaced" in sys.argv[3]:
    os.rename(staged.final, staged.displaced)
Path(sys.argv[1], "ready").touch()
time.sleep(600)
"""


@contextmanager
def another_job(folder: Path, tag: str, how: str = "exclusive") -> Iterator[forked.Process]:
    """A process in the middle of a save, which is killed at the end."""
    job = forked.start(["-c", JOB, str(folder), tag, how], env=dict(os.environ))
    ready, deadline = folder / "ready", time.monotonic() + 60
    try:
        while not ready.exists():
            assert time.monotonic() < deadline, "the job does not start"
            time.sleep(0.005)
        ready.unlink()
        yield job
    finally:
        job.kill()
        job.communicate(timeout=60)


def save(folder: Path, tag: str) -> None:
    staged = StagedFolder(folder, tag)
    staged.prepare()
    (staged.staging / NAME).write_text(tag)
    staged.commit()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(locks, "_PATIENCE", 0.1)


def test_two_jobs_under_one_tag(tmp_path):
    with another_job(tmp_path, "a") as job:
        staged = StagedFolder(tmp_path, "a")
        with pytest.raises(
            CheckpointError,
            match=rf"{re.escape(str(tmp_path / 'a'))} is being written by process {job.pid} on "
            rf"{re.escape(socket.gethostname())}, since \d{{4}}-.*its own save_dir or tags",
        ):
            staged.prepare()
        staged.discard()  # as `save` does after an error
        assert (tmp_path / ".a.tmp" / NAME).read_text() == "half"
        save(tmp_path, "b")  # another tag is independent
        assert (tmp_path / ".a.tmp" / NAME).read_text() == "half"
    save(tmp_path, "a")
    assert names(tmp_path) == ["a", "b"] and names(tmp_path / "a") == [NAME]


@pytest.mark.parametrize("how", ["exclusive", "shared"])
@pytest.mark.parametrize(("tag", "next_tag"), [("a", "b"), ("...", "v1.0"), ("epoch1/a", "epoch2/b")])
def test_what_a_killed_save_left_goes_at_the_next_one(tmp_path, how, tag, next_tag):
    with another_job(tmp_path, tag, how):
        pass
    where = (tmp_path / tag).parent
    assert [path for path in where.iterdir() if path.name.endswith(".tmp")]
    save(tmp_path, next_tag)
    assert not [path for path in where.iterdir() if path.name.startswith(".") and path.name != tag]
    assert (tmp_path / next_tag / NAME).read_text() == next_tag


@pytest.mark.parametrize("how", ["as it writes", "after it wrote"])
def test_killed_while_it_takes_over_what_a_killed_save_left(tmp_path, monkeypatch, how):
    """At every instant the lock file says who held it."""
    with another_job(tmp_path, "a"):
        pass
    write = os.pwrite

    def killed(*arguments: object) -> None:
        if how == "after it wrote":
            write(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "pwrite", killed)
        StagedFolder(tmp_path, "a").prepare()
    save(tmp_path, "b")
    assert names(tmp_path) == ["b"]


@pytest.mark.parametrize("how", ["displaced", "displaced, shared"])
def test_a_checkpoint_that_was_moved_away_gets_its_name_back(tmp_path, how):
    """Where two folders cannot be exchanged, a kill between the renames leaves ``.a.old`` only."""
    save(tmp_path, "a")
    with another_job(tmp_path, "a", how):
        pass
    assert ".a.old" in names(tmp_path) and "a" not in names(tmp_path)
    save(tmp_path, "b")
    assert names(tmp_path) == ["a", "b"]
    assert (tmp_path / "a" / NAME).read_text() == "a"


def test_saves_of_one_process_know_each_other(tmp_path):
    """Each close of a lock's file would end it: no other save of the process may open it."""
    running = StagedFolder(tmp_path, "a")
    thread = threading.Thread(target=running.prepare)  # as a background save does
    thread.start()
    thread.join()
    with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on .* \(this process\)"):
        StagedFolder(tmp_path, "a").prepare()
    save(tmp_path, "b")
    other = forked.run(["-c", JOB, str(tmp_path), "a", "exclusive"], env=dict(os.environ))
    assert f"being written by process {os.getpid()}" in other.stderr
    running.commit()
    assert names(tmp_path) == ["a", "b"]
    save(tmp_path, "a")
    assert names(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_locks(tmp_path, monkeypatch, code):
    fcntl = pytest.importorskip("fcntl")
    with another_job(tmp_path, "a"):
        pass

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    said: list[str] = []
    monkeypatch.setattr(locks, "warning_once", said.append)
    save(tmp_path, "b")
    assert said and os.strerror(code) in said[0] and "another job" in said[0]
    assert names(tmp_path) == [".a.lock", ".a.tmp", "b"]  # that save may still be running
    save(tmp_path, "a")
    assert names(tmp_path) == ["a", "b"]


def test_files_of_others_stay(tmp_path):
    (tmp_path / ".x.tmp").mkdir()
    (tmp_path / ".y.tmp").mkdir()
    for content, name in (("", ".y.lock"), ("12345", ".z.lock"), ('{"owner": "me"}', ".w.lock")):
        (tmp_path / name).write_text(content)
    before = names(tmp_path)
    save(tmp_path, "a")
    assert names(tmp_path) == [*before, "a"]


def test_small_files_and_removed_folders_of_killed_saves(tmp_path):
    old, new = tmp_path / ".latest.7-0123456789ab.tmp", tmp_path / ".latest.8-0123456789ab.tmp"
    for path in (old, new):
        path.write_text("a")
    os.utime(old, (time.time() - 4000,) * 2)
    (tmp_path / ".global_step1.removed").mkdir()
    save(tmp_path, "a")
    remove_older(tmp_path, 3, lambda folder: 1)
    assert names(tmp_path) == [new.name, "a"]
