"""Folders with files of two saves are refused, and an engine that a failed load has half filled does not train."""

from __future__ import annotations

import itertools
import re
import shutil
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.files.safe_types import allowed_types
from deepspeed.checkpoint.foreign.universal_export import convert
from deepspeed.checkpoint.foreign.upstream_export import export_checkpoint
from deepspeed.checkpoint.names import CHECKSUMS, INDEX, SAVE, SAVED_BY
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.tools import hf_to_universal
from tests.checkpoint.models import Zoo, assert_equal, config, full_state, make_engine, train
from tests.pool import distributed


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_a_file_of_another_save_is_refused(tmp_path, stage):
    engine = make_engine(config(stage))
    for tag in ("old", "new"):
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path, tag=tag)
    saved = full_state(engine)
    names = sorted(path.name for path in (tmp_path / "new").iterdir())
    for name in names:
        if engine.global_rank == 0:
            shutil.copytree(tmp_path / "new", tmp_path / "mixed", dirs_exist_ok=True)
            shutil.copy(tmp_path / "old" / name, tmp_path / "mixed" / name)
        torch.distributed.barrier()
        mixed = re.escape(str(tmp_path / "mixed"))
        with pytest.raises(
            CheckpointError,
            match=rf"belongs to the save \w{{16}} \(global_steps .*, but {mixed}/\S+\.pt to the save \w{{16}} \(global",
        ):
            engine.load_checkpoint(tmp_path, tag="mixed")
        torch.distributed.barrier()
    engine.load_checkpoint(tmp_path, tag="new")
    assert_equal(full_state(engine), saved)


@pytest.mark.parametrize(("layout", "stage"), [("universal", 2), ("universal", 3), ("of release 0.19", 2)])
@distributed(world_size=1)
def test_a_file_of_another_export_is_refused(tmp_path, layout, stage):
    """The layouts of release 0.19 have no index: an entry of their files, or a note in those that hold a tensor or a
    number alone, says which save they were made of."""
    engine = make_engine(config(stage))
    made = []
    for tag in ("old", "new"):
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path, tag=tag)
        if layout == "universal":
            # Of a parameter without gradients, stage 3 of release 0.19 reads state as well.
            made.append(convert(tmp_path / tag, tmp_path / "made" / tag, inject_missing_state=stage == 3))
        else:
            made.append(export_checkpoint(tmp_path, tmp_path / "made", tag=tag))
    saved = full_state(engine)
    old, new = made
    other = make_engine(config(stage, checkpoint={"load_universal": layout == "universal"}), seed=9)
    files = [
        path for path in sorted(new.rglob("*.pt")) if path.parent.name != "empty"
    ]  # of which nothing is read
    for path in files if stage == 2 else files[:: len(files) // 8]:
        torch.load(path, mmap=True, weights_only=False)  # torch ignores a note outside the content
        shutil.copytree(new, tmp_path / "made/mixed", dirs_exist_ok=True)
        shutil.copy(old / path.relative_to(new), tmp_path / "made/mixed" / path.relative_to(new))
        (tmp_path / "made/latest_universal").write_text("mixed")
        mixed = re.escape(str(tmp_path / "made/mixed"))
        with pytest.raises(
            CheckpointError,
            match=rf"belongs to the save \w{{16}} \(global_steps .*, but {mixed}/\S+\.pt to the save \w{{16}} \(global",
        ):
            other.load_checkpoint(tmp_path / "made", tag=None if layout == "universal" else "mixed")
    (tmp_path / "made/latest_universal").write_text("new")
    universal = layout == "universal"
    _, client_state = other.load_checkpoint(
        tmp_path / "made", tag=None if universal else "new", load_module_only=not universal
    )
    assert client_state == {}
    if universal:
        found = full_state(other)
        assert_equal({name: found[name] for name in saved}, saved)


@pytest.mark.parametrize("stage", [0, 3])
@distributed(world_size=1)
def test_a_mixture_of_two_conversions_of_weights_is_refused(tmp_path, stage):
    """Folders that ``hf_to_universal`` made have no model file: parameters' files are compared with each other."""
    engine = make_engine(config(0))
    for tag in ("old", "new"):
        train(engine, 0, 1)
        engine.save_16bit_model(tmp_path / tag, "pytorch_model.bin")
        hf_to_universal.convert(tmp_path / tag, tmp_path / "made" / tag)
    saved = full_state(engine)
    old, new = tmp_path / "made/old", tmp_path / "made/new"
    other = make_engine(config(stage, checkpoint={"load_universal": True}), seed=9)
    before = full_state(other)
    files = [path.relative_to(new) for path in sorted(new.rglob("*.pt"))]
    assert len(files) > 2
    for path in files:
        mixed = shutil.copytree(new, tmp_path / "made/mixed", dirs_exist_ok=True)
        shutil.copy(old / path, mixed / path)
        (tmp_path / "made/latest_universal").write_text("mixed")
        at_fault = files[1] if path == files[0] else path  # the first file in order says what the others are
        words = rf"{re.escape(str(mixed / at_fault))} belongs to .*, but {re.escape(str(mixed / files[0]))} to the save"
        with pytest.raises(CheckpointError, match=words):
            other.load_checkpoint(tmp_path / "made")
    assert_equal(full_state(other), before)
    (tmp_path / "made/latest_universal").write_text("new")
    other.load_checkpoint(tmp_path / "made")
    masters = [name for name in saved if name.endswith("/fp32")]
    found = full_state(other)
    assert_equal({name: found[name] for name in masters}, {name: saved[name] for name in masters})


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=1)
def test_universal_files_without_ids_load(tmp_path, stage):
    """As release 0.19, and ours before there were notes, wrote them."""
    engine = make_engine(config(stage))
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="t")
    made = convert(tmp_path / "t", tmp_path / "made/u", inject_missing_state=stage == 3)
    for path in made.rglob("zero/*/*.pt"):
        content = torch.load(path, weights_only=False)
        if isinstance(content, dict):
            content.pop(SAVED_BY)
        torch.save(content, path)
    other = make_engine(config(stage, checkpoint={"load_universal": True}), seed=9)
    other.load_checkpoint(tmp_path / "made")
    found, saved = full_state(other), full_state(engine)
    assert_equal({name: found[name] for name in saved}, saved)


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=1)
def test_files_without_ids_load(tmp_path, stage):
    engine = make_engine(config(stage))
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path, tag="t")
    saved = full_state(engine)
    for path in (tmp_path / "t").glob("*.pt"):
        with allowed_types():
            content = torch.load(path)
        del content[INDEX][SAVE], content[CHECKSUMS]
        torch.save(content, path)
    train(engine, 2, 3)
    engine.load_checkpoint(tmp_path, tag="t")
    assert_equal(full_state(engine), saved)


def damage_moments(path):
    """Flip a bit in the last of the optimizer's tensors."""
    data = bytearray(path.read_bytes())
    moments = torch.load(path, mmap=True)["optimizer_state_dict"]["tensors"][-1]["data"]
    data[bytes(data).index(moments.numpy().tobytes())] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=2)
def test_a_half_loaded_engine_refuses(tmp_path, stage):
    engine = make_engine(config(stage))
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path, tag="good")
    engine.save_checkpoint(tmp_path, tag="bad")
    saved = full_state(engine)
    if engine.global_rank == 0:
        damage_moments(tmp_path / "bad/zero_pp_rank_1_mp_rank_00_optim_states.pt")
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=r"nothing was loaded|do.* not hold|missing|no checkpoint"):
        engine.load_checkpoint(tmp_path, tag="nowhere")
    train(engine, 2, 3)  # nothing was written
    with pytest.raises(CheckpointError, match="damaged"):
        engine.load_checkpoint(tmp_path, tag="bad")
    for refused in (
        lambda: engine(torch.zeros(4, 5, dtype=torch.int64)),
        lambda: engine.step(),
        lambda: engine.save_checkpoint(tmp_path, tag="half"),
        lambda: engine.save_16bit_model(tmp_path),
    ):
        with pytest.raises(
            CheckpointError, match=r"partially loaded: loading .*bad .*damaged.* its optimizer states"
        ):
            refused()
    engine.load_checkpoint(tmp_path, tag="good", load_optimizer_states=False)
    with pytest.raises(
        CheckpointError, match="partially loaded"
    ):  # the moments are still those of the failed load
        engine.step()
    engine.load_checkpoint(tmp_path, tag="good")
    assert_equal(full_state(engine), saved)
    train(engine, 2, 3)


@distributed(world_size=1)
def test_a_half_loaded_pipeline_refuses(tmp_path):
    model = PipelineModule([LayerSpec(nn.Linear, 4, 4)], num_stages=1, loss_fn=nn.functional.mse_loss)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config={**config(1), "train_batch_size": 4}
    )
    batches = itertools.repeat((torch.ones(4, 4), torch.zeros(4, 4)))
    engine.train_batch(batches)
    engine.save_checkpoint(tmp_path, tag="bad")
    damage_moments(next((tmp_path / "bad").glob("*optim_states.pt")))
    with pytest.raises(CheckpointError, match="damaged"):
        engine.load_checkpoint(tmp_path, tag="bad")
    for refused in (engine.train_batch, engine.eval_batch):
        with pytest.raises(CheckpointError, match="partially loaded"):
            refused(batches)


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=2)
def test_nothing_in_common(tmp_path, stage):
    engine = make_engine(config(stage))
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="t")

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Zoo()

    other = make_engine(config(stage), model=Other())
    before = full_state(other)
    for options in ({}, {"load_module_only": True}, {"load_optimizer_states": False}):
        with pytest.raises(CheckpointError, match=r"0 of the \d+ parameters of the model"):
            other.load_checkpoint(tmp_path, tag="t", load_module_strict=False, **options)
    assert_equal(full_state(other), before)
    assert other.global_steps == 0


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=2)
def test_weights_alone_are_as_precise_as_the_file(tmp_path, stage):
    engine = make_engine(config(stage, "bf16"))
    train(engine, 0, 3)  # the first two have a learning rate of 0
    engine.save_checkpoint(tmp_path, tag="t")
    expected = {k: v for k, v in full_state(engine).items() if k.endswith("fp32")}
    rounded = {k: v.bfloat16().float() for k, v in expected.items()}
    assert not torch.equal(expected["l1.weight/fp32"], rounded["l1.weight/fp32"])
    fresh = make_engine(config(stage, "bf16"), seed=9)
    fresh.load_checkpoint(tmp_path, tag="t", load_module_only=True)
    assert_equal({k: v for k, v in full_state(fresh).items() if k.endswith("fp32")}, expected)
    assert fresh.global_steps == 0
    if stage != 1:
        return
    torch.distributed.barrier()
    if engine.global_rank == 0:
        next((tmp_path / "t").glob("*_1_*optim_states.pt")).unlink()
    torch.distributed.barrier()
    fresh.load_checkpoint(tmp_path, tag="t", load_module_only=True)  # the weights of the model file
    found = full_state(fresh)
    assert_equal({k: found[k] for k in expected}, rounded)


@pytest.mark.parametrize("background", [False, True])
@distributed(world_size=2)
def test_a_layer_file_of_another_save_is_refused(tmp_path, background):
    """A strict load refuses an extra entry in a state dict, so the id of the save is stored outside the entries."""
    options = {"checkpoint": {"writer": {"type": "FAST", "decoupled": True}}} if background else {}
    model = PipelineModule([LayerSpec(nn.Linear, 3, 3)] * 2, num_stages=2, loss_fn=nn.MSELoss())
    engine: Any = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={**config(1, **options), "train_batch_size": 4},
    )[0]
    for tag in ("old", "new"):
        engine.save_checkpoint(tmp_path, tag=tag)
    if background:
        engine.background_writer.wait()
    torch.distributed.barrier()
    folder = tmp_path / "new"
    saved = {number: torch.load(path) for number, path in enumerate(sorted(folder.glob("layer_*")))}
    assert len(saved) == 2
    for state in saved.values():
        nn.Linear(3, 3).load_state_dict(state, strict=True)
    engine.module.load_state_dir(folder, engine.checkpoint_engine)
    other = shutil.copytree(folder, tmp_path / f"mixed_{engine.global_rank}")
    own = f"layer_{engine.global_rank:02d}-model_states.pt"
    shutil.copy(tmp_path / "old" / own, other / own)
    beside = rf"{re.escape(str(other))}/\w+_model_states\.pt"
    with pytest.raises(
        CheckpointError, match=rf"{own} belongs to the save \w{{16}} .*, but {beside} to the save"
    ):
        engine.module.load_state_dir(other, engine.checkpoint_engine)
    torch.save(dict(saved[engine.global_rank]), other / own)  # of a release that did not say
    engine.module.load_state_dir(other, engine.checkpoint_engine)
    engine.destroy()
