"""Folders exchanged whole: what a crash, a full disk or a second save leave behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError, CheckpointTagError
from deepspeed.checkpoint.files import writers
from deepspeed.checkpoint.files.flush import wait_for_flushes
from deepspeed.checkpoint.files.tags import read_latest
from deepspeed.checkpoint.files.writers import StagedFolder, find_folder, replace_file, write_latest
from tests import forked

CRASHES = Path(__file__).with_name("crash_while_saving.py")


def save(folder: Path, tag: str, text: str, name: str = "mp_rank_00_model_states.pt") -> None:
    staged = StagedFolder(folder, tag)
    staged.prepare()
    (staged.staging / name).write_text(text)
    staged.commit()


def content(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(params=["exchange", "no exchange"])
def exchanging(request, monkeypatch):
    """Both on systems that can swap two folders and on those that cannot."""
    if request.param == "no exchange":
        monkeypatch.setattr(writers, "_exchange", lambda one, other: False)


@pytest.mark.usefixtures("exchanging")
def test_the_same_tag_again_replaces_all_of_it(tmp_path):
    save(tmp_path, "a", "one", "zero_pp_rank_3_mp_rank_00_optim_states.pt")
    save(tmp_path, "a", "two")
    assert content(tmp_path) == {"a/mp_rank_00_model_states.pt": "two"}


@pytest.mark.usefixtures("exchanging")
def test_files_of_the_client_stay(tmp_path):
    save(tmp_path, "a", "one")
    (tmp_path / "a/tokenizer.json").write_text("mine")
    (tmp_path / "a/notes").mkdir()
    (tmp_path / "a/notes/x.txt").write_text("too")
    save(tmp_path, "a", "two")
    assert content(tmp_path) == {
        "a/mp_rank_00_model_states.pt": "two",
        "a/notes/x.txt": "too",
        "a/tokenizer.json": "mine",
    }


def test_a_crash_between_the_two_renames_is_known_to_the_loader_and_to_the_next_save(tmp_path):
    save(tmp_path, "a", "one")
    os.rename(tmp_path / "a", tmp_path / ".a.old")
    assert find_folder(tmp_path, "a") == tmp_path / ".a.old"
    save(tmp_path, "b", "other")
    staged = StagedFolder(tmp_path, "a")
    staged.prepare()
    assert (tmp_path / "a/mp_rank_00_model_states.pt").read_text() == "one"
    staged.discard()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_what_a_crash_left_in_staging_is_cleared_away(tmp_path):
    staged = StagedFolder(tmp_path, "a")
    staged.prepare()
    (staged.staging / "half").write_text("x")
    del staged  # and so its lock, as with the process (test_locks.py has real ones)
    save(tmp_path, "a", "one")
    assert content(tmp_path) == {"a/mp_rank_00_model_states.pt": "one"}


def test_unfinished_folders_are_not_matched_by_clients_patterns(tmp_path):
    staged = StagedFolder(tmp_path, "global_step5")
    staged.prepare()
    assert not list(tmp_path.glob("global_step*"))


NO_TAGS = {
    "": "is empty",
    " ": "starts or ends with a space",
    "x ": "starts or ends with a space",
    "\tx": "control character",
    "a\n": "control character",
    "a\0b": "control character",
    "\udc80": "unpaired surrogate",
    ".": "has '.' as a path component",
    "..": "has '..' as a path component",
    "../up": "has '..' as a path component",
    "a/../../up": "has '..' as a path component",
    "a/./b": "has '.' as a path component",
    "a//b": "has '' as a path component",
    "a/": "has '' as a path component",
    "a/ b": "starts or ends with a space",
    "/tmp/x": "is an absolute path",
    "latest": "is the name of a file",
    "zero_to_fp32.py": "is the name of a file",
    "zero_to_torch.py": "is the name of a file",
    ".a.tmp": "unfinished save",
}


@pytest.mark.parametrize("tag", NO_TAGS)
def test_tags_that_name_no_folder_inside(tmp_path, tag):
    folder = tmp_path / "checkpoints"
    save(folder, "a", "one")
    for use in (StagedFolder, find_folder):
        with pytest.raises(CheckpointTagError, match=NO_TAGS[tag]) as caught:
            use(folder, tag)
        assert repr(tag) in str(caught.value) and "'global_step100'" in str(caught.value)
        assert isinstance(caught.value, (ValueError, AssertionError))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints"] and len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    "tag", ["epoch1/step5", "a b", "v1.0", ".hidden", "...", "\u00e9poque", "latest/1", "a\\b", "~"]
)
def test_tags_as_release_0_19_takes_them(tmp_path, tag):
    for text in ("one", "two"):
        save(tmp_path, tag, text)
        if not tag.startswith("latest"):
            write_latest(tmp_path, tag)
        found = find_folder(tmp_path, tag)
        assert found == tmp_path / tag and (found / "mp_rank_00_model_states.pt").read_text() == text
    if not tag.startswith("latest"):
        assert read_latest(tmp_path) == tag


@pytest.mark.usefixtures("exchanging")
def test_a_folder_that_is_a_symbolic_link_stays_one(tmp_path):
    """The real folder is on another disk, say; what is exchanged is that folder."""
    real, folder = tmp_path / "real/of_a", tmp_path / "checkpoints"
    real.mkdir(parents=True), folder.mkdir()
    (real / "notes.txt").write_text("mine")
    (folder / "a").symlink_to(real, target_is_directory=True)
    (folder / "later").symlink_to(tmp_path / "real/not_yet")
    for text in ("one", "two", "three"):
        for tag, place in (("a", real), ("later", tmp_path / "real/not_yet")):
            save(folder, tag, text)
            assert (folder / tag).is_symlink() and not place.is_symlink()
            assert (place / "mp_rank_00_model_states.pt").read_text() == text
            assert find_folder(folder, tag) == folder / tag
    assert (real / "notes.txt").read_text() == "mine"
    assert sorted(p.name for p in folder.iterdir()) == ["a", "later"]
    assert sorted(p.name for p in (tmp_path / "real").iterdir()) == ["not_yet", "of_a"]
    os.rename(real, real.parent / ".of_a.old")  # a crash between two renames
    assert find_folder(folder, "a") == real.parent / ".of_a.old"


def test_links_and_files_in_the_way(tmp_path):
    (tmp_path / "round").symlink_to(tmp_path / "round")
    with pytest.raises(CheckpointError, match=r"round.*(link|levels)"):
        save(tmp_path, "round", "x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file is a file"):
        save(tmp_path, "file", "x")
    (tmp_path / ".a.tmp").symlink_to(tmp_path)  # as former releases left it behind
    save(tmp_path, "a", "one")
    assert content(tmp_path / "a") == {"mp_rank_00_model_states.pt": "one"}


def test_a_latest_that_names_no_checkpoint(tmp_path):
    latest = tmp_path / "latest"
    for written, message in (
        (b"", "latest is empty"),
        (b" \n", "latest is empty"),
        (b"\xff\xfeg\x00", r"latest does not hold a tag: .*not text"),
        (b"../up\n", r"latest names '\.\./up' has '\.\.'"),
    ):
        latest.write_bytes(written)
        with pytest.raises(CheckpointError, match=message):
            read_latest(tmp_path)
    latest.write_bytes(b"gone\n")
    with pytest.raises(
        CheckpointNotFoundError, match=r"no checkpoint 'gone', which .*latest names, in .*no folders"
    ):
        find_folder(tmp_path, "gone")
    latest.unlink()
    (tmp_path / "global_step5").mkdir()
    latest.symlink_to(tmp_path / "global_step5")
    with pytest.raises(CheckpointError, match="latest is a folder.*Pass tag="):
        read_latest(tmp_path)


def test_latest_and_small_files_are_replaced_in_one_step(tmp_path):
    assert read_latest(tmp_path) is None
    write_latest(tmp_path, "one")
    write_latest(tmp_path, "two")
    assert (tmp_path / "latest").read_bytes() == b"two"
    assert read_latest(tmp_path) == "two"
    replace_file(tmp_path / "script.py", b"#!/bin/sh\n", mode=0o744)
    assert (tmp_path / "script.py").stat().st_mode & 0o777 == 0o744
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "script.py"]


def test_missing_folders_say_what_there_is(tmp_path):
    save(tmp_path, "global_step1", "x")
    with pytest.raises(
        CheckpointNotFoundError, match=r"no checkpoint 'global_step2'.*it holds: global_step1"
    ):
        find_folder(tmp_path, "global_step2")
    with pytest.raises(CheckpointNotFoundError, match="nowhere does not exist"):
        find_folder(tmp_path / "nowhere", "x")
    assert issubclass(CheckpointNotFoundError, FileNotFoundError) and issubclass(CheckpointError, ValueError)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_errors_of_the_file_system_leave_the_previous_checkpoint(tmp_path, monkeypatch, code):
    save(tmp_path, "a", "one")
    wait_for_flushes()  # what it left to the background must not meet the failing disk

    def fail(*_args: object, **_options: object) -> None:
        raise OSError(code, os.strerror(code))

    staged = StagedFolder(tmp_path, "a")
    staged.prepare()
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match=rf"cannot write .*{os.strerror(code)}.*MiB free"):
        staged.commit()
    monkeypatch.undo()
    staged.discard()
    assert content(tmp_path) == {"a/mp_rank_00_model_states.pt": "one"}


def test_a_vanished_folder(tmp_path):
    staged = StagedFolder(tmp_path / "run", "a")
    staged.prepare()
    import shutil

    shutil.rmtree(tmp_path / "run")
    with pytest.raises(CheckpointError, match="cannot write .*No such file"):
        staged.commit()


def test_a_file_where_a_folder_should_be(tmp_path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(CheckpointError, match="cannot write"):
        StagedFolder(tmp_path / "run", "a").prepare()
    with pytest.raises(CheckpointNotFoundError, match="is a file"):
        read_latest(tmp_path / "run")


def crash(folder: Path, *arguments: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run([str(CRASHES), str(folder), *arguments], env=env, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("tags", ["same", "new"])
@pytest.mark.parametrize("exchange", ["yes", "no"])
def test_killed_at_random_instants(tmp_path, tags, exchange):
    """A child saves again and again and is killed with SIGKILL; what is left must load each time."""
    assert "15 kills" in crash(tmp_path, tags, exchange, "15")


@pytest.mark.slow
@pytest.mark.parametrize("tags", ["same", "new"])
@pytest.mark.parametrize("exchange", ["yes", "no"])
@pytest.mark.parametrize("where", ["one process", "two ranks"])
def test_killed_at_fifty_random_instants(tmp_path, tags, exchange, where):
    """On two ranks one dies first and the other a moment later; their files must be of one save."""
    assert "50 kills" in crash(tmp_path, tags, exchange, "50", *(["ranks"] if where == "two ranks" else []))


@pytest.mark.parametrize("tags", ["same", "new"])
def test_one_of_two_ranks_is_killed(tmp_path, tags):
    assert "6 kills" in crash(tmp_path, tags, "yes", "6", "ranks")


def test_shares_without_permissions(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "no permissions here")

    monkeypatch.setattr(os, "chmod", refuse)
    said: list[str] = []
    monkeypatch.setattr(writers.logger, "info", said.append)
    replace_file(tmp_path / "script.py", b"1", mode=0o744)
    assert (tmp_path / "script.py").read_bytes() == b"1" and [
        "no permissions here" in line for line in said
    ] == [True]
