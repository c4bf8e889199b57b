"""Saves that do not wait: what is written is the state at the call, and a failure leaves the former checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.checkpoint import save as saving
from deepspeed.checkpoint.errors import CheckpointError, CheckpointTagError
from deepspeed.checkpoint.files.archive_writer import LazyTensor
from deepspeed.checkpoint.files.background import remove_older
from deepspeed.checkpoint.files.round_trip import difference
from deepspeed.checkpoint.files.snapshot import Snapshot
from deepspeed.checkpoint.files.tags import read_latest
from deepspeed.checkpoint.storage import CheckpointCommitInfo, TorchCheckpointEngine
from deepspeed.checkpoint.storage.decoupled_checkpoint_engine import (
    DataStatesCheckpointEngine,
    DecoupledCheckpointEngine,
)
from deepspeed.checkpoint.storage.torch_checkpoint_engine import FastCheckpointEngine
from deepspeed.checkpoint.storage.utils import create_checkpoint_engine
from tests.checkpoint.models import (
    assert_equal,
    assert_restored,
    config,
    full_state,
    make_engine,
    train,
    weights,
)
from tests.pool import distributed

DECOUPLED = {"checkpoint": {"writer": {"type": "FAST", "decoupled": True}}}


def slow_down(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Writing takes this much longer."""
    plain = saving.write_archive

    def slowly(*args, **kwargs):
        time.sleep(seconds)
        return plain(*args, **kwargs)

    monkeypatch.setattr(saving, "write_archive", slowly)


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_the_state_at_the_call_is_saved(tmp_path, stage):
    ds_config = config(stage, "bf16", accumulation=2, **DECOUPLED)
    engine = make_engine(ds_config)
    with pytest.MonkeyPatch.context() as patch:
        slow_down(patch, 0.3)
        train(engine, 0, 3)  # one micro-batch of the next step has been accumulated
        client_state = {"epoch": 3, "list": [1]}
        assert engine.save_checkpoint(tmp_path, client_state=client_state) is True
        assert not (tmp_path / "latest").exists()  # it is not complete yet
        saved = full_state(engine)
        client_state["list"].append(2)
        expected = train(engine, 3, 8)
        resumed = make_engine(ds_config, seed=9)
        engine.background_writer.wait()
    _, loaded = resumed.load_checkpoint(tmp_path)
    assert loaded == {"epoch": 3, "list": [1]}
    assert_restored(full_state(resumed), saved)
    assert train(resumed, 3, 8) == expected
    assert_equal(weights(resumed), weights(engine))
    engine.destroy()
    resumed.destroy()


@distributed(world_size=2)
def test_destroy_waits_for_a_save(tmp_path):
    """The thread reads the shapes of sharded parameters, which destroy removes."""
    ds_config = config(3, **DECOUPLED)
    engine = make_engine(ds_config)
    train(engine, 0, 2)
    saved = full_state(engine)
    with pytest.MonkeyPatch.context() as patch:
        plain = saving._agree
        patch.setattr(saving, "_agree", lambda *given: (time.sleep(0.5), plain(*given))[1])
        engine.save_checkpoint(tmp_path)
        engine.destroy()
    assert (tmp_path / "latest").exists()
    resumed = make_engine(ds_config, seed=9)
    resumed.load_checkpoint(tmp_path)
    assert_restored(full_state(resumed), saved)
    resumed.destroy()


@distributed(world_size=2)
def test_files_are_those_of_a_save_that_waits(tmp_path):
    engine = make_engine(config(2, **DECOUPLED))
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path / "later")
    engine.background_writer.wait()
    writer, engine.background_writer = engine.background_writer, None
    engine.save_checkpoint(tmp_path / "now")
    engine.background_writer = writer
    torch.distributed.barrier()
    later, now = ({p.name for p in (tmp_path / d / "global_step2").iterdir()} for d in ("later", "now"))
    assert later == now
    mine = [name for name in now if f"_rank_{engine.global_rank}_" in name]
    for name in mine:
        one, other = (
            torch.load(tmp_path / d / "global_step2" / name, weights_only=True) for d in ("later", "now")
        )
        assert difference(one["optimizer_state_dict"], other["optimizer_state_dict"], LazyTensor) is None
    assert read_latest(tmp_path / "later") == "global_step2"
    engine.destroy()


@distributed(world_size=2)
def test_a_rank_that_cannot_write_leaves_the_former_checkpoint(tmp_path):
    engine = make_engine(config(1, **DECOUPLED))
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path)
    engine.background_writer.wait()
    with pytest.MonkeyPatch.context() as patch:
        if engine.global_rank == 1:

            def full(*args, **kwargs):
                raise OSError(28, "No space left on device")

            patch.setattr(saving, "write_archive", full)
        train(engine, 1, 2)
        engine.save_checkpoint(tmp_path)
        with pytest.raises(CheckpointError, match="No space left|could not write"):
            engine.save_checkpoint(tmp_path)  # the next one tells, on every rank
    assert read_latest(tmp_path) == "global_step1"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["global_step1"]
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    torch.distributed.barrier()
    assert read_latest(tmp_path) == "global_step2"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_a_save_communicates_nothing_and_copies_the_state_into_kept_memory(tmp_path, stage):
    quiet = {"comm": {"hang_report_seconds": 0}}  # the watch for hangs adds keys to the store at any time
    engine = make_engine(config(stage, "bf16", **DECOUPLED, **quiet))
    keys = []
    for step in range(3):
        train(engine, step, step + 1)
        assert engine.background_writer.snapshot.allocations == 1  # before the first save
        with (
            mock.patch.multiple(dist, all_reduce=forbidden, all_gather_object=forbidden, broadcast=forbidden),
            mock.patch.object(torch.distributed, "gather_object", forbidden),
        ):
            engine.save_checkpoint(tmp_path)
            engine.background_writer.wait()
        torch.distributed.barrier()
        keys.append(torch.distributed.distributed_c10d._get_default_store().num_keys())
        torch.distributed.barrier()
    snapshot = engine.background_writer.snapshot
    assert snapshot.allocations == 1
    state = sum(t.nbytes for _, tensors in engine.state_access.distinct_shards() for t in tensors.values())
    weights_too = (
        sum(p.nbytes for p in engine.module.state_dict().values())
        if stage == 3 or engine.global_rank == 0
        else 0
    )
    if stage == 0 and engine.global_rank:
        state = 0  # the first rank writes it
    assert state + weights_too <= snapshot.copied < state + weights_too + (16 << 10)  # random states
    assert keys[1] == keys[2]
    engine.destroy()
    assert snapshot.nbytes == 0


def forbidden(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a collective")


@distributed(world_size=2)
def test_ranks_that_save_different_steps_do_not_make_a_checkpoint(tmp_path):
    """Nothing of a save waits for the other ranks: one that was left out must not be taken for the next."""
    engine = make_engine(config(2, **DECOUPLED))
    train(engine, 0, 1)
    if engine.global_rank == 0:
        engine.save_checkpoint(tmp_path, tag="same")
    train(engine, 1, 2)
    if engine.global_rank == 1:
        engine.save_checkpoint(tmp_path, tag="same")
    with pytest.raises(CheckpointError, match=r"rank 0: \(1, 1\), rank 1: \(2, 2\)"):
        engine.save_checkpoint(tmp_path, tag="same")
    assert list(tmp_path.iterdir()) == []
    engine.save_checkpoint(tmp_path, tag="same")
    engine.destroy()
    assert read_latest(tmp_path) == "same"


@distributed(world_size=2)
def test_what_ranks_do_not_agree_on_is_told_at_the_next_save(tmp_path):
    engine = make_engine(config(1, checkpoint={**DECOUPLED["checkpoint"], "tag_validation": "Fail"}))
    engine.save_checkpoint(tmp_path, tag=f"of_rank_{engine.global_rank}")
    with pytest.raises(CheckpointTagError, match="rank 1 gave 'of_rank_1'"):
        engine.save_checkpoint(tmp_path, tag="t")
    with pytest.MonkeyPatch.context() as patch:
        if engine.global_rank == 1:
            patch.setattr(engine.background_writer.snapshot, "take", out_of_memory)
        engine.save_checkpoint(tmp_path, tag="t")
        with pytest.raises(CheckpointError, match="no more"):
            engine.load_checkpoint(tmp_path)
    with pytest.raises(CheckpointTagError, match="empty"):
        engine.save_checkpoint(tmp_path, tag="")
    assert list(tmp_path.iterdir()) == []
    engine.save_checkpoint(tmp_path, tag="t")
    engine.background_writer.wait()
    assert read_latest(tmp_path) == "t"
    engine.destroy()


def out_of_memory(*args: Any) -> None:
    raise MemoryError("no more")


@distributed(world_size=1)
def test_old_checkpoints_are_removed(tmp_path):
    engine = make_engine(config(0, checkpoint={"keep_last": 2}))
    (tmp_path / "notes").mkdir()
    for step in range(4):
        train(engine, step, step + 1)
        engine.save_checkpoint(tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert left == ["global_step3", "global_step4", "notes"]
    assert remove_older(tmp_path, 1, lambda folder: None) == []


@distributed(world_size=1)
def test_what_was_just_saved_stays_whatever_is_put_into_older_ones(tmp_path):
    engine = make_engine(config(0, checkpoint={"keep_last": 1}))
    engine.save_checkpoint(tmp_path, tag="a")
    future = time.time() + 100
    for path in ((tmp_path / "a"), *(tmp_path / "a").iterdir()):
        os.utime(path, (future, future))
    (tmp_path / "a" / "evaluation.json").write_text("{}")
    engine.save_checkpoint(tmp_path, tag="b")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["b"]
    assert engine.load_checkpoint(tmp_path)[0] is not None
    engine.destroy()


@distributed(world_size=1)
def test_a_mock_writes_nothing(tmp_path):
    engine = make_engine(config(0, checkpoint={"writer": {"type": "mock", "show_statistics": True}}))
    assert engine.save_checkpoint(tmp_path) is True
    assert list(tmp_path.iterdir()) == []


TRAINING = """\
import os, sys, time, torch, deepspeed
from deepspeed.checkpoint import save as saving
plain = saving.write_archive
def slowly(path, *args, **kwargs):
    if os.path.exists("second"):
        open("writing", "w").close()
        time.sleep(60)
    return plain(path, *args, **kwargs)
saving.write_archive = slowly
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config={
    "train_batch_size": 1, "optimizer": {"type": "Adam"}, "checkpoint": {"writer": {"decoupled": True}}})
engine.save_checkpoint("c", tag="first")
engine.background_writer.wait()
open("second", "w").close()
engine.save_checkpoint("c", tag="second")
time.sleep(60)
"""


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_a_kill_in_the_middle_leaves_the_former_checkpoint(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    repository = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": repository, "DS_ACCELERATOR": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "train.py"], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL
    )
    limit = time.monotonic() + 60
    while not (tmp_path / "writing").exists():
        assert time.monotonic() < limit and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert read_latest(tmp_path / "c") == "first"
    assert not (tmp_path / "c" / "second").exists()


# ------------------------------------------------------------------------------------------------- parts


def test_a_snapshot_keeps_structure_sharing_and_values():
    shared = torch.arange(6.0)
    lazy = LazyTensor((4,), torch.float32, lambda: iter([torch.ones(1), torch.full((3,), 2.0)]))
    content = {
        "a": shared, "b": [shared, {"t": shared.view(2, 3).t()}], "lazy": lazy, "n": (1, "x", None),
        "empty": torch.empty(0), "parameter": torch.nn.Parameter(torch.ones(2)), "mutable": {"s": {1, 2}},
    }  # fmt: skip
    snapshot = Snapshot()
    taken = snapshot.take({"file": content})["file"]
    shared.zero_()
    content["mutable"]["s"].add(3)
    assert taken["a"] is taken["b"][0]
    torch.testing.assert_close(taken["a"], torch.arange(6.0))
    torch.testing.assert_close(taken["b"][1]["t"], torch.arange(6.0).view(2, 3).t())
    assert taken["lazy"].tolist() == [1, 2, 2, 2]
    assert taken["n"] == (1, "x", None) and taken["mutable"] == {"s": {1, 2}} and taken["empty"].shape == (0,)
    assert type(taken["parameter"]) is torch.nn.Parameter
    size, where = snapshot.nbytes, taken["a"].data_ptr()
    again = snapshot.take({"file": content})["file"]
    assert (snapshot.nbytes, again["a"].data_ptr()) == (size, where)  # the memory is used again


@pytest.mark.parametrize(
    "make",
    [
        lambda: FastCheckpointEngine(None, None, False),
        lambda: DecoupledCheckpointEngine(None, None, False),
        lambda: DataStatesCheckpointEngine(None, 0),
    ],
)
def test_engines_by_name(tmp_path, make):
    engine = make()
    info = CheckpointCommitInfo(tag="t", save_dir=str(tmp_path), save_latest=True)
    weight = torch.ones(3)
    engine.create(info)
    engine.save({"w": weight}, str(tmp_path / "a.pt"))
    if engine.is_decoupled():
        weight.zero_()
    assert engine.commit(info) is True
    assert engine.load(str(tmp_path / "a.pt"))["w"].tolist() == [1, 1, 1]
    engine.save({"w": weight}, str(tmp_path / "missing" / "a.pt")) if engine.is_decoupled() else None
    if engine.is_decoupled():
        with pytest.raises(CheckpointError, match="missing"):
            engine.commit(info)
    if engine.is_decoupled():  # the memory of the copies is used again
        assert [each.allocations for each in engine._snapshots] == [1]
        engine.save({"w": weight}, str(tmp_path / "missing" / "a.pt"))
        with pytest.raises(CheckpointError, match="missing"):  # not lost without a commit
            engine.cleanup()
        assert not engine._snapshots
    engine.cleanup()


@distributed(world_size=1)
def test_the_config_chooses_the_engine():
    for changes, kind in (
        ({}, TorchCheckpointEngine),
        ({"checkpoint": {"writer": {"type": "python"}}}, FastCheckpointEngine),
        (DECOUPLED, DecoupledCheckpointEngine),
        ({"datastates_ckpt": {}}, DataStatesCheckpointEngine),
    ):
        engine = make_engine(config(0, **changes))
        assert type(engine.checkpoint_engine) is kind
        assert (engine.background_writer is not None) == engine.checkpoint_engine.is_decoupled()
    assert type(create_checkpoint_engine(None, None, 0, False, False)) is TorchCheckpointEngine
