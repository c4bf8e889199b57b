"""Effects of the arguments of saving and loading, and their error messages."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.base.logging import logger
from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError, CheckpointTagError
from deepspeed.checkpoint.files import archive_writer
from deepspeed.checkpoint.names import SCRIPTS
from deepspeed.pipe import LayerSpec, PipelineModule
from tests.checkpoint.models import (
    Zoo,
    assert_equal,
    assert_restored,
    config,
    full_state,
    make_engine,
    train,
    weights,
)
from tests.pool import distributed


class Lines:
    """Capture the messages of the package's logger."""

    def __enter__(self) -> Lines:
        self.said: list[str] = []
        self.filter = lambda record: self.said.append(record.getMessage()) or True
        logger.addFilter(self.filter)
        return self

    def __exit__(self, *exc: object) -> None:
        logger.removeFilter(self.filter)


def trained_engine(folder: Path, stage: int = 1, steps: int = 2, **options):
    engine = make_engine(config(stage))
    train(engine, 0, steps)
    engine.save_checkpoint(folder, **options)
    return engine


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_documented_files_and_keys(tmp_path, stage):
    engine = trained_engine(tmp_path, stage, client_state={"epoch": 1})
    model = "zero_pp_rank_0_mp_rank_00" if stage == 3 else "mp_rank_00"
    names = {p.name for p in (tmp_path / "global_step2").iterdir()}
    expected = {f"{model}_model_states.pt"}
    if stage == 3:
        expected.add("zero_pp_rank_1_mp_rank_00_model_states.pt")
    if stage:
        expected |= {f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(2)}
    assert names == expected
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert (tmp_path / "zero_to_fp32.py").stat().st_mode & 0o777 == 0o744
    states = torch.load(tmp_path / f"global_step2/{model}_model_states.pt")  # weights_only is torch's default
    documented = "module buffer_names optimizer param_shapes frozen_param_shapes shared_params lr_scheduler"
    documented += " frozen_param_fragments data_sampler random_ltd sparse_tensor_module_names skipped_steps"
    documented += " global_steps global_samples dp_world_size mp_world_size ds_config ds_version epoch"
    assert set(documented.split()) <= set(states)
    assert states["global_steps"] == 2 and states["global_samples"] == 16 and states["dp_world_size"] == 2
    assert states["ds_config"] == engine.config and states["ds_version"] == deepspeed.__version__
    assert states["buffer_names"] == ["calls"] and states["shared_params"] == {"head.weight": "emb.weight"}
    if stage:
        path = tmp_path / "global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt"
        optim = torch.load(path)["optimizer_state_dict"]
        assert optim["zero_stage"] == stage and type(optim["zero_stage"]) is int
        assert optim["partition_count"] == 2
        assert list(states["param_shapes"][0]) == ["emb.weight", "l1.weight", "l2.weight", "unused.weight"]


@distributed(world_size=1)
def test_bf16_files_have_their_prefix(tmp_path):
    engine = make_engine(config(1, "bf16"))
    engine.save_checkpoint(str(tmp_path), "mine")
    assert (tmp_path / "mine/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").exists()


@distributed(world_size=2)
def test_nothing_to_load(tmp_path):
    engine = make_engine(config(1))
    with Lines() as log:
        assert engine.load_checkpoint(tmp_path) == (None, None)
    assert len(log.said) == (1 if engine.global_rank == 0 else 0)
    assert all("'latest'" in line for line in log.said)
    with Lines() as log:
        assert engine.load_checkpoint(tmp_path / "mistaken") == (None, None)
    assert all(f"folder {tmp_path / 'mistaken'} does not exist" in line for line in log.said)
    assert len(log.said) == (1 if engine.global_rank == 0 else 0)


@distributed(world_size=2)
def test_another_global_batch_is_said(tmp_path):
    trained_engine(tmp_path)
    for changed, warned in (({}, False), ({"gradient_accumulation_steps": 3}, True)):
        engine = make_engine({**config(1), **changed})
        with Lines() as log:
            engine.load_checkpoint(tmp_path)
            engine.load_checkpoint(tmp_path, load_module_only=True)
        found = [line for line in log.said if "samples per update, and goes on with" in line]
        assert len(found) == (warned and engine.global_rank == 0), log.said


@distributed(world_size=2)
def test_a_named_tag_must_be_there(tmp_path):
    engine = trained_engine(tmp_path, tag="best", save_latest=False)
    assert engine.load_checkpoint(tmp_path, tag="best")[0] == str(tmp_path / "best")
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint 'wurst'.*it holds: best"):
        engine.load_checkpoint(tmp_path, tag="wurst")
    if engine.global_rank == 0:
        (tmp_path / "latest").write_text("gone\n")
    torch.distributed.barrier()
    with pytest.raises(FileNotFoundError, match="no checkpoint 'gone'"):
        engine.load_checkpoint(tmp_path)


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_weights_alone(tmp_path, stage):
    """``load_module_only`` needs no optimizer file and leaves counters and schedule alone."""
    engine = trained_engine(tmp_path, stage)
    expected = full_state(engine)
    if engine.global_rank == 0 and stage != 3:  # there the masters are the weights
        for path in tmp_path.glob("*/*optim_states.pt"):
            path.unlink()
    torch.distributed.barrier()
    fresh = make_engine(config(stage), seed=9)
    path, _ = fresh.load_checkpoint(tmp_path, load_module_only=True)
    assert path is not None and fresh.global_steps == 0
    found = full_state(fresh)
    assert_equal(
        {k: v for k, v in found.items() if k.endswith("fp32")},
        {k: v for k, v in expected.items() if k.endswith("fp32")},
    )
    assert fresh.lr_scheduler.state_dict() == make_engine(config(stage)).lr_scheduler.state_dict()


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_without_optimizer_states_masters_still_come_from_fp32(tmp_path, stage):
    engine = make_engine(config(stage, "bf16"))
    train(engine, 0, 3)
    engine.save_checkpoint(tmp_path)
    fresh = make_engine(config(stage, "bf16"), seed=9)
    fresh.load_checkpoint(tmp_path, load_optimizer_states=False)
    expected, found = full_state(engine), full_state(fresh)
    assert_equal(found, {k: v for k, v in expected.items() if k.endswith("fp32")})
    assert fresh.global_steps == 3
    if stage == 1:
        ds_config = config(stage, "bf16")
        ds_config["zero_optimization"]["load_from_fp32_weights"] = False
        rounded = make_engine(ds_config, seed=9)
        rounded.load_checkpoint(tmp_path, load_optimizer_states=False)
        values = full_state(rounded)["l1.weight/fp32"]
        assert torch.equal(values, expected["l1.weight/fp32"].bfloat16().float())
        assert not torch.equal(values, expected["l1.weight/fp32"])


@distributed(world_size=1)
def test_the_schedule_can_stay_behind(tmp_path):
    engine = trained_engine(tmp_path, steps=3)
    fresh = make_engine(config(1), seed=9)
    before = fresh.lr_scheduler.state_dict()
    fresh.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert fresh.lr_scheduler.state_dict() == before
    fresh.load_checkpoint(tmp_path)
    assert fresh.lr_scheduler.state_dict() == engine.lr_scheduler.state_dict()
    assert fresh.get_lr() == engine.get_lr()


class Wider(Zoo):
    """One module more, which an older checkpoint does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(6, 6)


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_strict_and_lenient(tmp_path, stage):
    engine = trained_engine(tmp_path, stage)
    expected = full_state(engine)
    wider = make_engine(config(stage), model=Wider())
    with pytest.raises(
        CheckpointError, match=r"2 not in the checkpoint: extra\.weight, extra\.bias.*strict=Fal"
    ):
        wider.load_checkpoint(tmp_path)
    before = {k: v for k, v in full_state(wider).items() if k.startswith("extra") and k.endswith("fp32")}
    wider.load_checkpoint(tmp_path, load_module_strict=False)
    found = full_state(wider)
    assert_restored({k: v for k, v in found.items() if not k.startswith("extra")}, expected)
    assert_equal({k: found[k] for k in before}, before)
    narrower = make_engine(config(stage), seed=9)
    wider.save_checkpoint(tmp_path / "wider")
    with pytest.raises(CheckpointError, match=r"2 not in the model: extra\.bias, extra\.weight"):
        narrower.load_checkpoint(tmp_path / "wider")
    narrower.load_checkpoint(tmp_path / "wider", load_module_strict=False)
    assert_restored(full_state(narrower), expected)


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=2)
def test_another_shape_is_named(tmp_path, stage):
    class Other(Zoo):
        def __init__(self) -> None:
            super().__init__()
            self.l1 = nn.Linear(5, 8)
            self.norm = nn.LayerNorm(8)
            self.l2 = nn.Linear(8, 6)

    trained_engine(tmp_path, stage)
    other = make_engine(config(stage), model=Other())
    for options in ({}, {"load_module_only": True}, {"load_module_strict": False}):
        with pytest.raises(CheckpointError, match=r"(l1|norm|l2)\.(weight|bias): .*shape") as error:
            other.load_checkpoint(tmp_path, **options)
        text = str(error.value)
        assert text.count(" shape ") > (stage == 0)  # sharded: those of this rank's shard
        assert all(text.count(name) <= 1 for name in ("l1.weight", "norm.bias", "l2.weight")), text


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=2)
def test_frozen_parameters_can_be_left_out(tmp_path, stage):
    engine = trained_engine(tmp_path, stage, exclude_frozen_parameters=True)
    name = "zero_pp_rank_0_mp_rank_00" if stage == 3 else "mp_rank_00"
    states = torch.load(tmp_path / f"global_step2/{name}_model_states.pt")
    assert not any("frozen" in key for key in states["module"])
    fresh = make_engine(config(stage), seed=9)
    with pytest.raises(CheckpointError, match="exclude_frozen_parameters=True"):
        fresh.load_checkpoint(tmp_path)
    own = make_engine(config(stage), seed=9)
    fresh.load_checkpoint(tmp_path, load_module_strict=False)
    assert_restored(full_state(fresh), full_state(engine))
    with deepspeed.zero.GatheredParameters([fresh.module.frozen.weight, own.module.frozen.weight]):
        assert torch.equal(fresh.module.frozen.weight, own.module.frozen.weight)


@distributed(world_size=2)
def test_thawed_parameters_need_a_word(tmp_path):
    """Trained now, frozen then: there is no optimizer state, which must not pass silently."""
    trained_engine(tmp_path)
    model = Zoo()
    model.frozen.requires_grad_(True)
    thawed = make_engine(config(1), model=model)
    before = full_state(thawed)
    with pytest.raises(CheckpointError, match=r"frozen\.(weight|bias) is trainable now, but was frozen"):
        thawed.load_checkpoint(tmp_path)
    assert_equal(before, full_state(thawed))  # nothing was written, so the engine may train or load without
    thawed.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert train(thawed, 2, 4)
    thawed.load_checkpoint(tmp_path, load_module_strict=False)
    assert "frozen.weight/exp_avg" not in full_state(thawed)  # the optimizer makes it
    assert train(thawed, 2, 4)


@distributed(world_size=2)
def test_another_optimizer_is_not_taken_for_this_one(tmp_path):
    trained_engine(tmp_path)
    sgd = make_engine(
        config(1, optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, scheduler=None)
    )
    for trained in (False, True):  # before there is any state, and after
        before = full_state(sgd)
        with pytest.raises(CheckpointError, match=r"keeps momentum_buffer.*holds exp_avg, exp_avg_sq, step"):
            sgd.load_checkpoint(tmp_path)
        assert_equal(before, full_state(sgd))  # nothing was written, so the engine may train
        assert trained or train(sgd, 2, 4)
    sgd.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert train(sgd, 2, 4)


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_custom_load_function(tmp_path, stage):
    engine = trained_engine(tmp_path, stage)
    fresh = make_engine(config(stage), seed=9)

    def halve(src, dst):
        dst.load_state_dict({k: v / 2 if v.is_floating_point() else v for k, v in src.items()})

    fresh.load_checkpoint(tmp_path, custom_load_fn=halve, load_optimizer_states=False)
    expected, found = full_state(engine), full_state(fresh)
    masters = [k for k in found if k.endswith("fp32")]
    assert masters and all(torch.equal(found[k], expected[k] / 2) for k in masters)


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=2)
def test_module_state_dict_and_back(tmp_path, stage):
    engine = make_engine(config(stage, "bf16"))
    names = set(engine.module_state_dict())
    assert names - set(engine.module_state_dict(exclude_frozen_parameters=True)) == {
        "frozen.weight",
        "frozen.bias",
    }
    source = {k: torch.full_like(v, 0.5) for k, v in Zoo().state_dict().items()}
    engine.load_module_state_dict({"module": source})
    assert all((v == 0.5).all() for k, v in full_state(engine).items() if k.endswith("fp32"))
    del source["l1.bias"]
    with pytest.raises(RuntimeError, match=r"l1\.bias"):
        engine.load_module_state_dict({"module": source})


@distributed(world_size=2)
def test_client_state(tmp_path):
    engine = make_engine(config(1))
    with pytest.raises(KeyError, match="'global_steps', 'module'"):
        engine.save_checkpoint(tmp_path, client_state={"module": 1, "global_steps": 2, "mine": 3})
    state = {"epoch": 2, "best": torch.tensor(0.5), "path": Path("/a"), "nested": {"list": [1, {"x": None}]}}
    engine.save_checkpoint(tmp_path, client_state=state)
    loaded = engine.load_checkpoint(tmp_path)[1]
    assert loaded == state and loaded is not None
    shutil.rmtree(tmp_path, ignore_errors=True)
    assert loaded["best"] == 0.5, "it does not depend on the file"
    with pytest.raises(CheckpointError, match=r"models\.Zoo.* under 'model'"):
        engine.save_checkpoint(tmp_path, client_state={"model": Zoo()})


@distributed(world_size=2)
def test_tags_that_lead_elsewhere(tmp_path):
    engine = trained_engine(tmp_path / "in", tag="epoch1/step5")
    assert engine.load_checkpoint(tmp_path / "in")[0] == str(tmp_path / "in/epoch1/step5")
    for tag in ("../up", "", " ", str(tmp_path / "up")):
        for use in (engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises(CheckpointTagError, match="a tag is the name of a folder inside save_dir"):
                use(tmp_path / "in", tag=tag)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@distributed(world_size=2)
def test_empty_save_dir(tmp_path):
    with pytest.raises(ValueError, match="save_dir is empty"):
        make_engine(config(1)).save_checkpoint("")


@pytest.mark.parametrize("mode", ["Ignore", "Warn", "Fail"])
@distributed(world_size=2)
def test_ranks_that_give_different_tags(tmp_path, mode):
    engine = make_engine(config(1, checkpoint={"tag_validation": mode}))
    tag = f"tag{engine.global_rank}"
    if mode == "Fail":
        with pytest.raises(AssertionError, match="rank 0 gave 'tag0', rank 1 gave 'tag1'") as caught:
            engine.save_checkpoint(tmp_path, tag)
        assert isinstance(caught.value, CheckpointError)
        assert not list(tmp_path.iterdir())
        return
    with Lines() as log:
        engine.save_checkpoint(tmp_path, tag)
    assert any("different tags" in line for line in log.said) == (mode == "Warn")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "tag0", *SCRIPTS]
    engine.load_checkpoint(tmp_path)


@distributed(world_size=2)
def test_one_rank_that_cannot_write_fails_all_and_nothing_is_lost(tmp_path):
    engine = trained_engine(tmp_path, tag="same")
    expected = full_state(engine)
    train(engine, 2, 4)
    original = archive_writer._write_tensor

    def full_disk(*args):
        raise OSError(28, "No space left on device")

    if engine.global_rank == 1:
        archive_writer._write_tensor = full_disk
    try:
        with pytest.raises(CheckpointError, match=r"zero_pp_rank_1.*No space left on device") as caught:
            engine.save_checkpoint(tmp_path, tag="same")
    finally:
        archive_writer._write_tensor = original
    assert ("failed on rank 1" in str(caught.value)) == (engine.global_rank == 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "same", *SCRIPTS]
    engine.load_checkpoint(tmp_path)
    assert_restored(full_state(engine), expected)


def _flip(path: Path, where: float) -> None:
    """Change one byte at the given share of a file, inside its tensors."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 0x10
    path.write_bytes(data)


@distributed(world_size=2)
def test_missing_and_foreign_files(tmp_path):
    engine = trained_engine(tmp_path)
    folder = tmp_path / "global_step2"
    optim = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    model = folder / "mp_rank_00_model_states.pt"
    kept = {path: path.read_bytes() for path in (optim, model)}
    torch.distributed.barrier()

    def broken(path, content, message):
        if engine.global_rank == 0:
            path.unlink() if content is None else path.write_bytes(content)
        torch.distributed.barrier()
        with pytest.raises(CheckpointError, match=message):
            engine.load_checkpoint(tmp_path)
        torch.distributed.barrier()
        if engine.global_rank == 0:
            path.write_bytes(kept[path])
        torch.distributed.barrier()

    broken(optim, None, r"zero_pp_rank_1_mp_rank_00_optim_states\.pt is missing \(1 of 2 ")
    broken(optim, kept[optim][:300], r"zero_pp_rank_1.* truncated or not a checkpoint file")
    broken(optim, b"", r"zero_pp_rank_1.*0 bytes")
    broken(model, None, r"holds no \*_model_states\.pt")
    broken(model, kept[model][: len(kept[model]) // 2], r"mp_rank_00_model_states\.pt.*truncated")
    engine.load_checkpoint(tmp_path)
    if engine.global_rank == 0:
        torch.save({"weights": torch.ones(3)}, model)
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match="was not written by this package: it has no 'module'"):
        engine.load_checkpoint(tmp_path)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_flipped_bits_are_found(tmp_path, stage, world):
    """Whole fragments on the rank that reads them; parts of one by adding up over ranks."""
    from tests.pool import run

    run(_save_linear, 2 if world == 1 else 3, folder=tmp_path, stage=stage)
    files = [p for p in tmp_path.glob("*/*states.pt") if stage == 0 or "optim" in p.name]
    for path in files:
        content = path.read_bytes()
        _flip(path, 0.5)
        run(_load_flipped, world, folder=tmp_path, stage=stage, name=path.name)
        path.write_bytes(content)


def _linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(60, 61), nn.Linear(61, 62))


def _save_linear(folder: Path, stage: int) -> None:
    engine = make_engine(config(stage), model=_linear())
    engine.backward(engine(torch.randn(2, 60)).square().mean())
    engine.step()
    engine.save_checkpoint(folder)


def _load_flipped(folder: Path, stage: int, name: str) -> None:
    engine = make_engine(config(stage), model=_linear())
    with pytest.raises(CheckpointError, match=f"damaged.*{name}|{name}.*damaged"):
        engine.load_checkpoint(folder)


@distributed(world_size=2)
def test_old_files_of_more_ranks_are_gone(tmp_path):
    folder = tmp_path / "same"
    folder.mkdir(exist_ok=True)
    (folder / "zero_pp_rank_7_mp_rank_00_optim_states.pt").write_bytes(b"old")
    torch.distributed.barrier()
    trained_engine(tmp_path, tag="same")
    assert not (folder / "zero_pp_rank_7_mp_rank_00_optim_states.pt").exists()


@distributed(world_size=2)
def test_an_engine_without_optimizer(tmp_path):
    trained_engine(tmp_path)
    engine, _, _, _ = deepspeed.initialize(model=Zoo(), config=config(0, optimizer=None, scheduler=None))
    before = weights(engine)
    engine.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert not torch.equal(weights(engine)["l1.weight"], before["l1.weight"])
    engine.save_checkpoint(tmp_path / "own")
    again, _, _, _ = deepspeed.initialize(model=Zoo(), config=config(0, optimizer=None, scheduler=None))
    again.load_checkpoint(tmp_path / "own")
    assert_equal(weights(again), weights(engine))
    trains = make_engine(config(1), seed=9)
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        trains.load_checkpoint(tmp_path / "own")


def lines_of_loading(engine, folder: Path, **options: Any) -> list[str]:
    level = logger.level
    logger.setLevel("INFO")
    try:
        with Lines() as log:
            engine.load_checkpoint(folder, **options)
    finally:
        logger.setLevel(level)
    return [line for line in log.said if str(folder) in line]


@distributed(world_size=2)
def test_loads_report_what_they_restored(tmp_path):
    trained_engine(tmp_path, steps=3)
    engine = make_engine(config(2), model=Zoo())
    said = lines_of_loading(engine, tmp_path)
    if engine.global_rank == 0:
        assert any("restored 13/13 parameters, 16/16 optimizer states, step 3" in line for line in said), said


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_lenient_loads_say_how_many_of_how_many(tmp_path, stage):
    trained_engine(tmp_path, stage)
    engine = make_engine(config(stage), model=Wider())
    for options in ({}, {"load_module_only": True}):
        said = lines_of_loading(engine, tmp_path, load_module_strict=False, **options)
        if engine.global_rank == 0:
            line = next(line for line in said if "restored 13/15 parameters" in line)
            assert "2 not in the checkpoint: extra.weight, extra.bias" in line


@distributed(world_size=2)
def test_each_stage_says_how_many_of_how_many(tmp_path):
    """Rank 0 knows its own stage: here the other one has something new."""

    def engine_of(*layers: Any) -> Any:
        model = PipelineModule([LayerSpec(*each) for each in layers], num_stages=2, loss_fn=nn.MSELoss())
        settings = {**config(1), "train_batch_size": 4}
        made = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]
        return made

    engine_of((nn.Linear, 3, 3), (nn.Linear, 3, 3)).save_checkpoint(tmp_path)
    engine = engine_of((nn.Linear, 3, 3), (nn.Sequential, nn.Linear(3, 3)))
    said = lines_of_loading(engine, tmp_path, load_module_strict=False)
    count = ("2/2", "0/2")[engine.global_rank]
    assert any(f"restored {count} parameters" in line for line in said), said
    engine = engine_of((nn.Sequential, nn.Linear(3, 3)), (nn.Sequential, nn.Linear(3, 3)))
    with pytest.raises(CheckpointError, match="0 of the 2 parameters of the model"):
        engine.load_checkpoint(tmp_path, load_module_strict=False)
    assert engine.global_steps == 0
