"""Plain weights of a whole model load into any engine: split over ranks, sharded, or both."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.export import save_weights
from deepspeed.checkpoint.foreign.plain_weights import find_plain, tensors_of
from deepspeed.tools import hf_to_universal
from tests.pool import distributed
from tests.zero.test_placements import WIDTH, Block, alone, assert_weights, config, start, train


def trained() -> dict[str, torch.Tensor]:
    """The whole weights after two steps."""
    _, _, model = alone(0, 2, 1, 0.0)
    return {name: value.clone() for name, value in model.state_dict().items()}


def write(weights: dict[str, torch.Tensor], folder: Path, kind: str) -> Path:
    if dist.get_rank() == 0:
        if kind == "one file":
            save_file(weights, folder / "model.safetensors")
        else:
            save_weights(weights, folder, max_shard_size=200, safetensors=kind == "shards")
    dist.barrier()
    return folder


@pytest.mark.parametrize(
    ("stage", "split", "kind"),
    [
        (0, True, "one file"),
        (1, True, "shards"),
        (2, True, "bin"),
        (3, True, "one file"),
        (3, False, "shards"),
        (1, False, "bin"),
    ],
)
@distributed(world_size=2)
def test_plain_weights_load(stage: int, split: bool, kind: str, tmp_path: Path) -> None:
    weights = trained()
    engine = start(config(stage, 0.0), split=split)
    folder, client_state = engine.load_checkpoint(write(weights, tmp_path, kind))
    assert folder == str(tmp_path) and client_state == {}
    model = Block()
    model.load_state_dict(weights)
    assert_weights(engine, model, rtol=0, atol=0)
    losses, _ = train(engine, 0, 1)  # the optimizer is as new
    assert losses[0] == pytest.approx(model(batch_of(engine)).item(), rel=1e-5)
    assert engine.global_steps == 1
    engine.destroy()


def batch_of(engine: object) -> torch.Tensor:
    from tests.zero.test_placements import batch

    return batch(0, engine.mesh.rank("dp"))  # type: ignore[attr-defined]


@distributed(world_size=2)
def test_one_file_is_enough(tmp_path: Path) -> None:
    weights = trained()
    write(weights, tmp_path, "one file")
    engine = start(config(1))
    engine.load_checkpoint(tmp_path / "model.safetensors")
    model = Block()
    model.load_state_dict(weights)
    assert_weights(engine, model, rtol=0, atol=0)
    engine.destroy()


@pytest.mark.parametrize(("name", "key"), [("w.pt", None), ("w.pth", "model"), ("w.pt", "state_dict")])
@distributed(world_size=2)
def test_a_state_dict_of_torch_save(tmp_path: Path, name: str, key: str | None) -> None:
    weights = trained()
    if dist.get_rank() == 0:
        torch.save(weights if key is None else {key: weights, "epoch": 3}, tmp_path / name)
    dist.barrier()
    engine = start(config(1))
    engine.load_checkpoint(tmp_path / name)
    model = Block()
    model.load_state_dict(weights)
    assert_weights(engine, model, rtol=0, atol=0)
    engine.destroy()


def test_a_file_of_a_checkpoint_is_no_plain_weights(tmp_path: Path) -> None:
    """It may hold a part of the weights, and its optimizer states are in other files."""
    for name, found in (("w.pt", True), ("mp_rank_00_model_states.pt", False)):
        torch.save({"module": trained()}, tmp_path / name)
        assert (find_plain(tmp_path / name) is not None) == found


@distributed(world_size=2)
def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    engine = start(config(1))
    weights = trained()
    folder = write({**weights, "bias": torch.zeros(WIDTH + 1)}, tmp_path, "one file")
    with pytest.raises(CheckpointError, match="bias"):
        engine.load_checkpoint(folder)
    weights.pop("scale")
    with pytest.raises(CheckpointError, match="1 not in the checkpoint: scale"):
        engine.load_checkpoint(write(weights, tmp_path, "one file"))
    dist.barrier()
    if dist.get_rank() == 0:
        (tmp_path / "model.safetensors").write_bytes(b"nothing")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        engine.load_checkpoint(tmp_path)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(tmp_path)
    engine.destroy()


@pytest.mark.parametrize(("stage", "kind"), [(1, "bin"), (3, "shards")])
@distributed(world_size=2)
def test_weights_as_a_universal_checkpoint(stage: int, kind: str, tmp_path: Path) -> None:
    weights = trained()
    (tmp_path / "hf").mkdir(exist_ok=True)
    write({name: value.bfloat16() for name, value in weights.items()}, tmp_path / "hf", kind)
    target = tmp_path / "converted" / "start"
    if dist.get_rank() == 0:
        hf_to_universal.main(["--hf_checkpoint_dir", str(tmp_path / "hf"), "--save_dir", str(target)])
        assert all(value.dtype == torch.float32 for _, value in tensors_of(target / "zero"))
    dist.barrier()
    model = Block()
    model.load_state_dict({name: value.bfloat16().float() for name, value in weights.items()})
    universal = {**config(stage, 0.0), "checkpoint": {"load_universal": True}}
    for folder, tag in ((target, None), (target.parent, "start"), (target.parent, None)):
        engine = start(universal, split=stage == 3)
        assert engine.load_checkpoint(str(folder), tag=tag) == (str(target), {})
        assert_weights(engine, model, rtol=0, atol=0)
        engine.destroy()


@distributed(world_size=1)
def test_a_universal_checkpoint_without_its_model_files_is_refused(tmp_path: Path) -> None:
    save_weights(trained(), tmp_path, safetensors=True)
    hf_to_universal.convert(tmp_path, tmp_path / "universal")
    (tmp_path / "universal" / "zero" / "optimizer_state.pt").touch()
    engine = start(config(1, 0.0), split=False)
    with pytest.raises(CheckpointError, match="holds no .*model_states"):
        engine.load_checkpoint(str(tmp_path), tag="universal")
    engine.destroy()


def test_conversion_of_no_weights(tmp_path: Path) -> None:
    save_weights({"w": torch.zeros(1)}, tmp_path, safetensors=False)
    with pytest.raises(CheckpointError, match="holds no .safetensors files"):
        hf_to_universal.convert(tmp_path, tmp_path / "out", safe_serialization=True)
    with pytest.raises(CheckpointError, match="holds no weights"):
        hf_to_universal.convert(tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()
