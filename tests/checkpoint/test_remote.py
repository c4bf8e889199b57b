"""Checkpoints at URLs: what is complete loads, at every instant and after every fault."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import deepspeed
from deepspeed import comm as dist
from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from deepspeed.checkpoint.remote import store as stores
from deepspeed.checkpoint.remote.mirror import Mirror, local_copy
from deepspeed.checkpoint.remote.store import Store
from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.pool import distributed


class Faulty(MemoryFileSystem):
    """Objects in memory; ``fails`` says how often the next puts whose names contain a text fail."""

    protocol = "faulty"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    fails: dict[str, int] = {}
    puts: list[str] = []

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        self._maybe_fail(rpath)
        super().put_file(lpath, rpath, **kwargs)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        self._maybe_fail(path)
        super().pipe_file(path, value, **kwargs)

    def _maybe_fail(self, path: str) -> None:
        for part, left in self.fails.items():
            if part in path and left:
                self.fails[part] = left - 1
                raise OSError("503 Slow Down")
        self.puts.append(path.rpartition("/")[2])


fsspec.register_implementation("faulty", Faulty, clobber=True)
URL = "faulty://bucket/run"


@pytest.fixture(autouse=True)
def empty_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for kept in (Faulty.store, Faulty.fails, Faulty.puts):
        kept.clear()
    monkeypatch.setattr(stores, "FIRST_WAIT_S", 0.001)
    yield


class One:
    """A machine's first rank, with what the gather of all ranks gives."""

    keeps_folder = True

    def __init__(self, rank: int = 0, reports: list[Any] | None = None) -> None:
        self.rank, self.reports = rank, reports

    def gather(self, value: Any) -> list[Any]:
        return self.reports or [value]


def mirror(staging: Path, **options: Any) -> Mirror:
    found = Mirror(URL, str(staging))
    found.store = Store(URL, attempts=3, first_wait_s=0.001)
    return found


def save(at: Mirror, tag: str, files: dict[str, str], ranks: Any = None, **options: Any) -> None:
    folder = at.local / tag
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    at.committed(folder, tag, ranks or One(), **options)


def fetched(tmp_path: Path, tag: str | None = None) -> dict[str, str]:
    """Download the checkpoint as another machine would."""
    other = mirror(tmp_path / "another")
    tag = other.fetch(tag)
    assert tag is not None
    assert (other.local / "latest").read_text() == tag
    return {path.name: path.read_text() for path in (other.local / tag).iterdir() if path.name[0] != "."}


def test_what_is_saved_comes_back_and_older_tags_go(tmp_path: Path) -> None:
    at = mirror(tmp_path)
    for step in range(3):
        save(at, f"step{step}", {"a.pt": f"a{step}", "b.pt": "b"}, keep_last=2)
        at.wait()
    assert list(at.complete()) == ["step1", "step2"]
    assert fetched(tmp_path) == {"a.pt": "a2", "b.pt": "b"}
    assert fetched(tmp_path, "step1/") == {"a.pt": "a1", "b.pt": "b"}
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint 'step0'; complete there: step1, step2"):
        fetched(tmp_path, "step0")
    assert [path.name for path in at.local.glob("step*")] == ["step2"], "copies of older saves are removed"


def test_a_service_that_fails_for_a_moment_is_asked_again(tmp_path: Path) -> None:
    at = mirror(tmp_path)
    Faulty.fails["a.pt"] = 2
    save(at, "step1", {"a.pt": "a"})
    at.wait()
    assert fetched(tmp_path) == {"a.pt": "a"}


def test_an_upload_that_fails_leaves_the_last_good_tag_and_goes_on_later(tmp_path: Path) -> None:
    at = mirror(tmp_path)
    save(at, "step1", {"a.pt": "a1", "b.pt": "b1"})
    at.wait()
    Faulty.fails["step2/b.pt"] = 100
    save(at, "step2", {"a.pt": "a2", "b.pt": "b2"})
    with pytest.raises(
        CheckpointError, match="'step2' is not in faulty://bucket/run yet: .*503 Slow Down.*next save"
    ):
        at.wait()
    assert fetched(tmp_path) == {"a.pt": "a1", "b.pt": "b1"}
    with pytest.raises(
        CheckpointError, match="step2: its upload is incomplete; complete checkpoints there: step1"
    ):
        fetched(tmp_path, "step2")

    Faulty.fails.clear()
    Faulty.puts.clear()
    restarted = mirror(tmp_path)  # the next process on that machine
    assert restarted.has_checkpoint()
    restarted.finish_uploads()
    assert fetched(tmp_path) == {"a.pt": "a2", "b.pt": "b2"}
    assert "b.pt" in Faulty.puts and "a.pt" not in Faulty.puts, "what was there already is not sent again"


def test_a_note_that_another_process_removes_is_passed_over(tmp_path: Path) -> None:
    at = mirror(tmp_path)
    notes = at.local / ".pending"
    notes.mkdir(parents=True)
    (notes / "gone.json").symlink_to("removed")  # listed, and then not there
    save(at, "step1", {"a.pt": "a1"})
    at.wait()
    assert fetched(tmp_path) == {"a.pt": "a1"}


def test_a_tag_that_is_replaced_half_is_not_mixed_with_the_former(tmp_path: Path) -> None:
    """Files of the same name and size: only the id of the save tells them apart."""
    at = mirror(tmp_path)
    save(at, "first", {"a.pt": "a0"})
    at.wait()
    save(at, "best", {"a.pt": "a1", "b.pt": "b1"})
    at.wait()
    Faulty.fails["best/b.pt"] = 3
    save(at, "best", {"a.pt": "a2", "b.pt": "b2"})
    with pytest.raises(CheckpointError):
        at.wait()
    with pytest.raises(CheckpointError, match="best: its upload is incomplete"):
        fetched(tmp_path, "best")
    assert fetched(tmp_path) == {"a.pt": "a0"}, "the newest complete one"
    with pytest.raises(CheckpointError, match="is a newer save of 'first'"):
        save(at, "first", {"a.pt": "a9"})
        Faulty.fails["first"] = 100
        at.finish_uploads()
        at.fetch("first")
    Faulty.fails.clear()
    at.finish_uploads()
    assert fetched(tmp_path, "best") == {"a.pt": "a2", "b.pt": "b2"}


def test_a_tag_that_one_machine_has_replaced_is_not_mixed_with_the_former_of_another(tmp_path: Path) -> None:
    """Every receipt and file of the tag is there: only the ids of the saves tell that they do not belong together."""
    machines = [mirror(tmp_path / "0"), mirror(tmp_path / "1")]

    def save_part(rank: int, number: int, content: str) -> None:
        reports = [(number, ["r0.pt"]), (number, ["r1.pt"])]
        save(machines[rank], "best", {f"r{rank}.pt": content}, One(rank, reports))
        machines[rank].wait()

    for rank in (0, 1):
        save_part(rank, 7, "old")
    assert fetched(tmp_path) == {"r0.pt": "old", "r1.pt": "old"}
    save_part(0, 8, "new")
    assert machines[0].complete() == {}
    with pytest.raises(CheckpointError, match="best: its upload is incomplete"):
        fetched(tmp_path, "best")
    save_part(1, 8, "new")
    assert fetched(tmp_path) == {"r0.pt": "new", "r1.pt": "new"}


def test_a_save_that_replaces_one_on_its_way_is_what_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = mirror(tmp_path)
    upload = Store.upload

    def replaced_meanwhile(self: Store, source: Path, name: str) -> None:
        monkeypatch.setattr(Store, "upload", upload)
        (at.local / "best" / ".save").unlink()  # as an exchange of the folder does
        save(at, "best", {"a.pt": "a2", "b.pt": "b2"})
        upload(self, source, name)

    monkeypatch.setattr(Store, "upload", replaced_meanwhile)
    save(at, "best", {"a.pt": "a1", "b.pt": "b1"})
    at.wait()
    assert fetched(tmp_path) == {"a.pt": "a2", "b.pt": "b2"}


def test_machines_upload_their_parts_and_the_last_one_publishes(tmp_path: Path) -> None:
    reports = [(7, ["model.pt", "r0.pt"]), (8, []), (9, ["model.pt", "r2.pt"]), (10, [])]
    first, second = mirror(tmp_path / "0"), mirror(tmp_path / "1")
    save(second, "step1", {"model.pt": "m of 1", "r2.pt": "2"}, One(2, reports))
    second.wait()
    assert first.complete() == {}
    assert not second.has_checkpoint()
    save(first, "step1", {"model.pt": "m of 0", "r0.pt": "0"}, One(0, reports))
    first.wait()
    assert fetched(tmp_path) == {"model.pt": "m of 0", "r0.pt": "0", "r2.pt": "2"}


def test_folders_copied_there_by_hand_load_and_unknown_schemes_are_named(tmp_path: Path) -> None:
    there = Store(URL)
    there.write("best/a.pt", b"a")
    there.write("latest", b"best\n")
    assert fetched(tmp_path) == {"a.pt": "a"}
    with pytest.raises(CheckpointError, match="unheard://bucket: no file system for 'unheard'"):
        Store("unheard://bucket")
    with pytest.raises(CheckpointError, match="'../a' has '..' as a path component"):
        mirror(tmp_path).fetch("../a")
    assert mirror(tmp_path / "empty").fetch() == "best"
    there.remove("latest")
    assert mirror(tmp_path / "empty").fetch() is None


NO_RECEIPTS = [
    "",
    "[]",
    "no JSON",
    '{"save": 1}',
    '{"save": 1, "parts": 3, "files": {}, "time": 0}',
    '{"save": 1, "parts": [0], "files": [1], "time": 0}',
    '{"save": [], "parts": [0], "files": {}, "time": 0}',
]


@pytest.mark.parametrize("receipt", NO_RECEIPTS)
def test_what_others_put_into_the_bucket_is_no_receipt(tmp_path: Path, receipt: str) -> None:
    at = mirror(tmp_path)
    at.store.write("odd/.uploaded.0", receipt.encode())
    assert at.complete() == {}
    with pytest.raises(CheckpointError, match="odd: its upload is incomplete"):
        at.fetch("odd")


def test_files_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    at = mirror(tmp_path)
    there = Store(URL)
    for name in ("../../../escaped", "a\\b"):
        at.store._files.pipe_file(f"{there._root}/bad/{name}", b"x")
        receipt = {"save": 1, "parts": [0], "time": 0, "files": {name: 1}}
        there.write("bad/.uploaded.0", json.dumps(receipt).encode())
        with pytest.raises(CheckpointError, match="is not a file in a checkpoint folder"):
            at.fetch("bad")
    assert not list(tmp_path.rglob("escaped"))


def config(staging: str, **checkpoint: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3},
        "checkpoint": {"staging_folder": staging, **checkpoint},
    }


def engine_of(settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    return deepspeed.initialize(model=model, config=settings)[0]


def train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(torch.full((2, 4), 0.1 * (step + 1 + dist.get_rank()))).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("decoupled", [False, True])
@distributed(2)
def test_training_goes_on_from_a_url(tmp_path: Path, decoupled: bool) -> None:
    url, writer = f"file://{tmp_path}/bucket/run", {"writer": {"decoupled": decoupled}}
    engine = engine_of(config(f"{tmp_path}/here", keep_last=1, **writer))
    train(engine, range(2))
    assert engine.save_checkpoint(url, client_state={"epoch": 1})
    train(engine, range(2, 3))
    engine.save_checkpoint(url, tag="newer", client_state={"epoch": 2})
    expected = train(engine, range(3, 6))
    engine.destroy()  # waits for the upload
    dist.barrier()
    assert sorted(os.listdir(tmp_path / "bucket" / "run")) == [
        "latest",
        "newer",
        "zero_to_fp32.py",
        "zero_to_torch.py",
    ]

    resumed = engine_of(config(f"{tmp_path}/elsewhere", folder=url, resume=True))
    assert resumed.global_steps == 3
    assert train(resumed, range(3, 6)) == expected
    path, state = resumed.load_checkpoint(url, "newer")
    assert path is not None and state == {"epoch": 2}
    with pytest.raises(CheckpointError, match="has no checkpoint 'global_step2'"):
        resumed.load_checkpoint(url, "global_step2")
    assert resumed.load_checkpoint(f"file://{tmp_path}/nothing") == (None, None)
    resumed.destroy()
    if dist.get_rank() == 0:
        weights = get_fp32_state_dict_from_zero_checkpoint(url)
        assert [tuple(each.shape) for each in weights.values()] == [(8, 4), (8,), (1, 8), (1,)]
        assert Path(local_copy(url, staging=f"{tmp_path}/third"), "newer").is_dir()
