"""Weights for use elsewhere: ``save_16bit_model``, consolidation, and ``zero_to_fp32`` in all its forms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, load_model

import deepspeed
from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from deepspeed.checkpoint.export import parse_size
from deepspeed.checkpoint.foreign.upstream_export import export_checkpoint
from deepspeed.compat.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.tools.zero_to_fp32 import (
    convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict,
    get_checkpoint_files,
    get_fp32_state_dict_from_zero_checkpoint,
    get_model_state_file,
    get_optim_files,
    load_state_dict_from_zero_checkpoint,
    to_torch_tensor,
)
from tests.checkpoint.models import Zoo, assert_equal, config, full_state, make_engine, train, weights
from tests.pool import distributed, run

ROOT = Path(__file__).resolve().parents[2]


def engine_of(stage: int, precision: str = "bf16", **zero: Any) -> Any:
    ds_config = config(stage, precision)
    ds_config["zero_optimization"] |= {"stage3_gather_16bit_weights_on_model_save": True, **zero}
    engine = make_engine(ds_config)
    train(engine, 0, 2)
    return engine


def whole_weights(engine: Any) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return weights(engine)


@pytest.mark.parametrize("stage", [0, 2, 3])
@distributed(world_size=2)
def test_save_16bit_model(tmp_path, stage):
    engine = engine_of(stage)
    expected = whole_weights(engine)
    assert engine.save_16bit_model(tmp_path) is True
    assert engine.save_16bit_model(tmp_path, "model.safetensors") is True
    assert engine.save_16bit_model(tmp_path / "own", "own.bin", exclude_frozen_parameters=True) is True
    dist.barrier()
    loaded = torch.load(tmp_path / "pytorch_model.bin")
    assert_equal(loaded, expected)
    assert {value.dtype for value in loaded.values()} == {torch.bfloat16, torch.int64}
    assert loaded["head.weight"].data_ptr() == loaded["emb.weight"].data_ptr()
    tensors = load_file(tmp_path / "model.safetensors")
    assert_equal(tensors, {name: value for name, value in expected.items() if name != "head.weight"})
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "emb.weight"}
    model = Zoo().bfloat16()
    load_model(model, tmp_path / "model.safetensors")
    assert_equal(model.state_dict(), expected)
    own = torch.load(tmp_path / "own/own.bin")
    assert expected.keys() - own.keys() == {"frozen.weight", "frozen.bias"}
    assert train(engine, 2, 3), "training goes on"


@distributed(world_size=2)
def test_consolidated_16bit_state_dict(tmp_path):
    engine = engine_of(3)
    expected = whole_weights(engine)
    state = engine._zero3_consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        assert_equal(state, expected)
        assert state["head.weight"] is state["emb.weight"]
    else:
        assert state is None
    without = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    assert dist.get_rank() or expected.keys() - without.keys() == {"frozen.weight", "frozen.bias"}
    train(engine, 2, 3)
    assert dist.get_rank() or state["l1.weight"].eq(expected["l1.weight"]).all(), "it is a copy"


@distributed(world_size=2)
def test_a_model_is_not_saved_whole_unless_asked_for_but_its_weights_may_be_had(tmp_path):
    engine = engine_of(3, stage3_gather_16bit_weights_on_model_save=False)
    assert engine.save_16bit_model(tmp_path) is False
    assert not list(tmp_path.iterdir())
    expected = whole_weights(engine)
    state = engine._zero3_consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        assert_equal(state, expected)
    with pytest.raises(ValueError, match="not partitioned"):
        engine_of(1)._zero3_consolidated_16bit_state_dict()


@distributed(world_size=2)
def test_a_rank_that_cannot_write_fails_all_and_training_goes_on(tmp_path):
    engine = engine_of(3)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write .*file|failed on rank 0"):
        engine.save_16bit_model(tmp_path / "file" / "folder")
    assert train(engine, 2, 3)
    assert engine.save_16bit_model(tmp_path / "folder")


def _save(folder: str, stage: int, precision: str) -> dict[str, torch.Tensor]:
    engine = engine_of(stage, precision)
    engine.save_checkpoint(folder)
    whole = {name: value.float() for name, value in whole_weights(engine).items()}
    masters = {
        name.removesuffix("/fp32"): v for name, v in full_state(engine).items() if name.endswith("/fp32")
    }
    return whole | {name: value.view(whole[name].shape) for name, value in masters.items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_state_dict(tmp_path, stage, precision):
    expected = run(_save, 2, folder=str(tmp_path), stage=stage, precision=precision)[0]
    expected["head.weight"] = expected["emb.weight"]
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert {name: value.shape for name, value in found.items()} == {
        name: v.shape for name, v in expected.items()
    }
    for name, value in found.items():
        assert torch.equal(value.float(), expected[name]), name
        assert value.dtype == torch.float32 or name.startswith(("frozen", "calls", "empty")), name
    assert found["head.weight"] is found["emb.weight"]
    lazy = get_fp32_state_dict_from_zero_checkpoint(tmp_path, lazy_mode=True)
    assert not any(isinstance(value, torch.Tensor) for value in lazy.values())
    assert {name: v.shape for name, v in to_torch_tensor(lazy, return_empty_tensor=True).items()} == {
        name: v.shape for name, v in found.items()
    }
    assert_equal(to_torch_tensor(lazy), found)
    without = get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)
    assert found.keys() - without.keys() == {"frozen.weight", "frozen.bias"}
    model = load_state_dict_from_zero_checkpoint(Zoo(), tmp_path)
    assert torch.equal(model.l1.weight, expected["l1.weight"]) and model.head.weight is model.emb.weight


@pytest.mark.parametrize("safe", [False, True])
def test_files_in_shards(tmp_path, safe):
    run(_save, 2, folder=str(tmp_path), stage=3, precision="bf16")
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    out, name = tmp_path / "out", "model.safetensors" if safe else "pytorch_model.bin"
    convert_zero_checkpoint_to_fp32_state_dict(tmp_path, out, max_shard_size=200, safe_serialization=safe)
    index = json.loads((out / f"{name}.index.json").read_text())
    shards = sorted(path for path in out.iterdir() if not path.name.endswith(".json"))
    stem, _, suffix = name.rpartition(".")
    assert [path.name for path in shards] == [
        f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}" for number in range(1, len(shards) + 1)
    ]
    loaded: dict[str, torch.Tensor] = {}
    for path in shards:
        content = load_file(path) if safe else torch.load(path)
        assert dict.fromkeys(content, path.name).items() <= index["weight_map"].items()
        own = [value.nbytes for key, value in content.items() if key != "head.weight"]
        assert len(own) == 1 or sum(own) <= 200
        loaded |= content
    assert loaded.keys() == index["weight_map"].keys()
    assert_equal(loaded, {key: value for key, value in found.items() if key in loaded})
    assert found.keys() - loaded.keys() == ({"head.weight"} if safe else set())
    unique = {value.data_ptr(): value.nbytes for value in found.values() if value.numel()}
    assert index["metadata"]["total_size"] == sum(unique.values())


def test_the_script_beside_a_checkpoint(tmp_path):
    """A shell runs it in the folder of checkpoints; errors are one line."""
    run(_save, 2, folder=str(tmp_path), stage=2, precision="bf16")
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }

    def script(*arguments: str, name: str = "zero_to_fp32") -> subprocess.CompletedProcess[str]:
        command = [f"./{name}.py", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)

    done = script(".", "out", "--safe_serialization", "--exclude_frozen_parameters")
    assert done.returncode == 0, done.stderr
    assert "l1.weight" in load_file(tmp_path / "out/model.safetensors")
    failed = script(".", "out", "-t", "global_step9")
    assert failed.returncode == 1 and "no checkpoint 'global_step9'" in failed.stderr
    assert "Traceback" not in failed.stderr and "Traceback" in script(".", "out", "-t", "x", "--debug").stderr
    done = script(".", "half", "--dtype", "bf16", name="zero_to_torch")
    assert done.returncode == 0, done.stderr
    assert torch.load(tmp_path / "half/pytorch_model.bin")["l1.weight"].dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", ["bf16", "torch.float16", torch.bfloat16, torch.float32])
def test_exports_of_16_bits(tmp_path, dtype):
    run(_save, 2, folder=str(tmp_path), stage=3, precision="fp32")
    whole = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    convert_zero_checkpoint_to_state_dict(tmp_path, tmp_path / "out", dtype)
    found = torch.load(tmp_path / "out/pytorch_model.bin")
    wanted = dtype if isinstance(dtype, torch.dtype) else {"b": torch.bfloat16, "t": torch.float16}[dtype[0]]
    cast = {k: v.to(wanted) if v.is_floating_point() else v for k, v in whole.items()}
    assert_equal(found, whole if wanted is torch.float32 else cast)
    shared = [{k for k in tied if tied[k] is v} for tied in (whole, found) for v in tied.values()]
    assert shared[: len(whole)] == shared[len(whole) :]
    lazy = get_fp32_state_dict_from_zero_checkpoint(tmp_path, lazy_mode=True)
    assert_equal(to_torch_tensor(lazy, dtype=dtype), cast)
    empty = to_torch_tensor(lazy, return_empty_tensor=True, dtype=dtype)
    assert {k: v.dtype for k, v in empty.items()} == {k: v.dtype for k, v in cast.items()}
    for wrong in ("int8", torch.int8):
        with pytest.raises(ValueError, match="Unsupported output dtype .*int8.*: use one of float32"):
            convert_zero_checkpoint_to_state_dict(tmp_path, tmp_path / "no", wrong)


def test_names_of_files(tmp_path):
    run(_save, 2, folder=str(tmp_path), stage=2, precision="fp32")
    folder = str(tmp_path / "global_step2")
    assert [Path(file).name for file in get_optim_files(folder)] == [
        f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)
    ]
    assert Path(get_model_state_file(folder, 2)).name == "mp_rank_00_model_states.pt"
    with pytest.raises(FileNotFoundError, match="zero_pp_rank_0_mp_rank_00_model_states"):
        get_model_state_file(folder, 3)
    with pytest.raises(FileNotFoundError, match=r"no \*\.json"):
        get_checkpoint_files(folder, "*.json")
    for number in (10, 9):
        (tmp_path / f"rank_{number}").touch()
    assert [Path(file).name for file in get_checkpoint_files(str(tmp_path), "rank_*")] == [
        "rank_9",
        "rank_10",
    ]
    (tmp_path / "latest").unlink()
    with pytest.raises(CheckpointNotFoundError, match="'latest'.*pass tag="):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("size", "nbytes"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("200", 200), (7, 7), ("2kb", 2000)]
)
def test_sizes(size, nbytes):
    assert parse_size(size) == nbytes


def test_a_size_that_is_none():
    with pytest.raises(ValueError, match="max_shard_size='much': expected a size such as 5GB"):
        parse_size("much")


def test_cloned_tensors_have_storages_of_their_own_size():
    flat = torch.arange(1000.0)
    state = {"a": flat[10:20], "nested": [(flat[:2], "text"), {"b": flat[5:6]}]}
    cloned = clone_tensors_for_torch_save(state)
    assert cloned["a"].untyped_storage().nbytes() == 40 and torch.equal(cloned["a"], state["a"])
    assert type(cloned["nested"][0]) is tuple and cloned["nested"][0][1] == "text"
    assert cloned["nested"][1]["b"].untyped_storage().nbytes() == 4


def _save_on_two_ranks(folder: str) -> None:
    engine = make_engine(config(2))
    train(engine, 0, 1)
    engine.save_checkpoint(folder)


def _convert(folder: str, output: str, safetensors: bool, shard: str | None) -> None:
    dist.barrier()
    for _ in range(3):
        convert_zero_checkpoint_to_fp32_state_dict(folder, output, shard, safetensors)


@pytest.mark.parametrize(("safetensors", "shard"), [(False, None), (True, "300B")])
def test_several_processes_convert_at_once(tmp_path, safetensors, shard):
    """Scripts that are started once per rank call it on every rank."""
    run(_save_on_two_ranks, 2, folder=str(tmp_path))
    expected = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    output = tmp_path / "out"
    run(_convert, 3, folder=str(tmp_path), output=str(output), safetensors=safetensors, shard=shard)
    found: dict[str, torch.Tensor] = {}
    for path in output.iterdir():
        assert not path.name.startswith(".")
        if path.suffix in (".bin", ".safetensors"):
            found.update(load_file(path) if safetensors else torch.load(path))
    assert all(torch.equal(found[name], expected[name]) for name in found) and len(found) >= len(expected) - 1
    if shard:
        index = json.loads((output / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {p.name for p in output.glob("*.safetensors")}


def _export(folder: str, output: str) -> None:
    dist.barrier()
    for _ in range(3):
        export_checkpoint(folder, output, zero_stage=1, world_size=2)


def test_several_processes_export_at_once(tmp_path):
    run(_save_on_two_ranks, 2, folder=str(tmp_path))
    run(_export, 3, folder=str(tmp_path), output=str(tmp_path / "out"))
    expected = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    found = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "out")
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)
    assert not [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]
