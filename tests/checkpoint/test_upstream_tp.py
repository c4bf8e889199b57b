"""Checkpoints of tensor-parallel ranks that DeepSpeed 0.19.8 wrote (``make_universal_checkpoints.py``)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.foreign.splits import WantedParts, split_placements
from deepspeed.checkpoint.foreign.universal_export import convert
from deepspeed.checkpoint.placement import Placement
from deepspeed.checkpoint.shards import regions
from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.checkpoint.make_universal_checkpoints import (
    SPLIT,
    SPLIT_CASES,
    TP,
    Unit,
    split_config,
    split_model,
)
from tests.pool import run


def whole(held: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The two ranks' tensors joined by hand, by ``name/kind``; [0] where both have a copy."""
    joined: dict[str, torch.Tensor] = {}
    for key, (one, other) in held.items():
        name = key.split("/")[0]
        if name.startswith("norm") or name == "down.bias" or not one.dim():
            joined[key] = one
        elif name.startswith("up"):
            blocks = zip(one.chunk(2), other.chunk(2), strict=True)
            joined[key] = torch.cat([part for pair in blocks for part in pair])
        else:
            joined[key] = torch.cat([one, other], 1 if name == "down.weight" else 0)
    return joined


def saved(case: str) -> dict[str, torch.Tensor]:
    """Masters and optimizer state of whole tensors, joined from that release's files by hand."""
    stage, precision, dp = SPLIT_CASES[case]
    folder = SPLIT / case / "global_step3"
    held: dict[str, list[torch.Tensor]] = {}
    for rank in range(TP):
        name = f"mp_rank_{rank:02d}_model_states.pt"
        content = torch.load(folder / (f"zero_pp_rank_0_{name}" if stage == 3 else name))
        if stage == 0:
            states = stage0(content)
        else:
            prefix = "bf16_" if precision == "bf16" else ""
            files = [f"{prefix}zero_pp_rank_{n}_mp_rank_{rank:02d}_optim_states.pt" for n in range(dp)]
            of_stage = even_parts if stage == 3 else partitions
            states = of_stage([folder / file for file in files], content["param_shapes"][0])
        for key, value in states.items():
            held.setdefault(key, []).append(value)
    return whole(held)


def stage0(content: dict[str, Any]) -> dict[str, torch.Tensor]:
    optimizer, module = content["optimizer"], content["module"]
    inner = optimizer.get("optimizer_state_dict", optimizer)
    masters = optimizer.get("fp32_groups", [list(module.values())])[0]
    found: dict[str, torch.Tensor] = {}
    for number, name in enumerate(module):
        found[f"{name}/fp32"] = masters[number]
        found |= {f"{name}/{kind}": value for kind, value in inner["state"][number].items()}
    return found


def partitions(files: list[Path], shapes: dict[str, Any]) -> dict[str, torch.Tensor]:
    from deepspeed.checkpoint.files.archive_reader import read_archive

    sections = [read_archive(file)["optimizer_state_dict"] for file in files]
    inner = [section["base_optimizer_state"]["state"][0] for section in sections]
    flat = {
        "fp32": torch.cat([section["single_partition_of_fp32_groups"][0] for section in sections]),
        "exp_avg": torch.cat([state["exp_avg"] for state in inner]),
        "exp_avg_sq": torch.cat([state["exp_avg_sq"] for state in inner]),
    }
    found: dict[str, torch.Tensor] = {}
    position = 0
    for name, shape in shapes.items():
        for kind, values in flat.items():
            found[f"{name}/{kind}"] = values[position : position + shape.numel()].view(shape)
        found[f"{name}/step"] = inner[0]["step"]
        position += shape.numel()
    return found


def even_parts(files: list[Path], shapes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Stage 3: each rank has an even part of every parameter, padded, end to end."""
    from deepspeed.checkpoint.files.archive_reader import read_archive

    sections = [read_archive(file)["optimizer_state_dict"] for file in files]
    inner = [section["optimizer_state_dict"]["state"][0] for section in sections]
    flat = {
        "fp32": [section["fp32_flat_groups"][0] for section in sections],
        "exp_avg": [state["exp_avg"] for state in inner],
        "exp_avg_sq": [state["exp_avg_sq"] for state in inner],
    }
    found: dict[str, torch.Tensor] = {}
    position = 0
    for name, shape in shapes.items():
        part = -(-shape.numel() // len(files))
        for kind, ranks in flat.items():
            joined = torch.cat([values[position : position + part] for values in ranks])
            found[f"{name}/{kind}"] = joined[: shape.numel()].view(shape)
        found[f"{name}/step"] = inner[0]["step"]
        position += part
    return found


def load_into(
    folder: str, tp: int, stages: list[int], precision: str, universal: bool = False
) -> list[dict[str, Any]]:
    """Return the state of engines at these stages after loading, whole, from all ranks."""
    import deepspeed

    found: list[dict[str, Any]] = []
    for stage in stages:
        unit = Unit() if tp > 1 else None
        settings = {**split_config(stage, precision), "checkpoint": {"load_universal": universal}}
        net = split_model(unit)
        with torch.no_grad():
            for param in net.parameters():
                param.zero_()
        engine, _, _, _ = deepspeed.initialize(model=net, config=settings, mpu=unit)
        path, client = engine.load_checkpoint(folder)
        assert path is not None
        with deepspeed.zero.GatheredParameters(list(net.parameters())):
            weights = {name: value.clone() for name, value in net.state_dict().items()}
        found.append(
            {
                "state": whole_state(engine),
                "weights": weights,
                "epoch": client["epoch"],
                "steps": engine.global_steps,
            }
        )
    return found


def whole_state(engine: Any) -> dict[str, torch.Tensor]:
    own = [(index, {k: t.clone() for k, t in held.items()}) for index, held in engine.state_access.shards()]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    made: dict[str, torch.Tensor] = {}
    for index, held in (entry for entries in gathered for entry in entries):
        for kind, value in held.items():
            key = f"{index.name}/{kind}"
            if value.dim() != 1 or value.numel() != index.numel:
                made[key] = value
                continue
            into = made.setdefault(key, torch.full(index.global_shape, float("nan")))
            for region in regions(index):
                shape = tuple(high - low for low, high in region.box)
                place = tuple(slice(low, high) for low, high in region.box)
                into[place] = value.as_strided(shape, region.strides, region.offset)
    return made


def check(loaded: list[dict[str, Any]], reference: dict[str, torch.Tensor], precision: str) -> None:
    for found in loaded:
        assert (found["epoch"], found["steps"]) == (3, 3)
        assert found["state"].keys() == reference.keys()
        for key, value in reference.items():
            assert torch.equal(found["state"][key].view(-1), value.view(-1).float()), key
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        for name, value in found["weights"].items():
            expected = reference[f"{name}/fp32"].to(dtype)
            if value.shape == expected.shape:
                assert torch.equal(value, expected), name


@pytest.mark.parametrize("case", SPLIT_CASES)
@pytest.mark.parametrize(("world", "tp"), [(2, 2), (1, 1)])
def test_parts_of_that_release_resume_over_as_many_ranks_and_over_one(case: str, world: int, tp: int) -> None:
    precision = SPLIT_CASES[case][1]
    folder = str(SPLIT / case)
    stages = [0, 2] if case.startswith("stage0") else [1, 3]
    loaded = run(load_into, world, folder=folder, tp=tp, stages=stages, precision=precision)[0]
    check(loaded, saved(case), precision)


@pytest.mark.parametrize("case", ["stage1_bf16", "stage2_fp32", "stage3_bf16"])
@pytest.mark.parametrize(("world", "tp"), [(2, 2), (2, 1)])
def test_their_conversion_resumes_over_as_many_ranks_and_over_one(case: str, world: int, tp: int) -> None:
    """That release drops the padding of the vocabulary, row 11, of which the model that loads has zeros."""
    precision = SPLIT_CASES[case][1]
    reference = saved(case)
    for key, value in reference.items():
        if key.startswith("words") and value.dim():
            value[11:] = 0
    options = {"folder": str(SPLIT / case), "tp": tp, "stages": [0, 3], "precision": precision}
    check(run(load_into, world, **options, universal=True)[0], reference, precision)


@pytest.mark.parametrize("case", ["stage1_bf16", "stage3_bf16"])
def test_our_conversion_says_the_same_as_theirs(case: str, tmp_path: Path) -> None:
    """Also along which dim that release's tensor-parallel ranks divide each weight; it divides the rest by shape."""
    convert(SPLIT / case / "global_step3", tmp_path / "universal")
    theirs = SPLIT / case / "universal/zero"
    for file in sorted(theirs.glob("*/*.pt")):
        reference, made = (
            torch.load(folder / file.relative_to(theirs)) for folder in (theirs, tmp_path / "universal/zero")
        )
        if file.stem == "step":
            assert made == reference
            continue
        padded = made["param"][: reference["param"].shape[0]]  # our vocabulary keeps its padding
        assert torch.equal(padded.float(), reference["param"].float())
        split = {key: reference.get(key) for key in ("cat_dim", "param_n_sub_params")}
        assert split["cat_dim"] is None or split == {key: made.get(key) for key in split}


@pytest.mark.parametrize("case", ["stage1_bf16", "stage3_bf16"])
def test_weights_join_without_a_model_where_the_file_says_how(case: str) -> None:
    joined = get_fp32_state_dict_from_zero_checkpoint(SPLIT / case)
    reference = saved(case)
    assert all(torch.equal(value, reference[f"{name}/fp32"]) for name, value in joined.items())


def test_parts_that_nothing_describes_are_refused_without_a_model() -> None:
    with pytest.raises(CheckpointError, match="2 parts of words.weight, but not how to join them"):
        get_fp32_state_dict_from_zero_checkpoint(SPLIT / "stage0_fp32")


def test_rules_that_name_no_parameter_mean_the_first_dim() -> None:
    """As a model writes them whose layers are all split by their outputs. A model that loads knows better."""
    rules: dict[str, Any] = {
        "universal_checkpoint_version": 0.4,
        "parameter_with_row_parallelism_patterns": [],
        "parameter_with_sub_params": [],
    }
    shapes = [(3, 4), (2, 4)]
    parts = split_placements("fc.weight", shapes, rules, None)
    assert [part and part.global_shape for part in parts] == [(5, 4), (5, 4)]
    assert [part and part.boxes for part in parts] == [(((0, 3), (0, 4)),), (((3, 5), (0, 4)),)]
    loads = WantedParts(placements={"fc.weight": Placement(global_shape=(3, 8))}, ranks=2)
    parts = split_placements("fc.weight", [(3, 4), (3, 4)], rules, loads)
    assert [part and part.global_shape for part in parts] == [(3, 8), (3, 8)]
    with pytest.raises(CheckpointError, match="not how to join them"):
        split_placements("fc.weight", shapes, {"universal_checkpoint_version": 0.4}, None)


def test_a_lost_part_is_named(tmp_path: Path) -> None:
    shutil.copytree(SPLIT / "stage2_fp32", tmp_path / "c")
    file = tmp_path / "c/global_step3/mp_rank_01_model_states.pt"
    file.unlink()
    with pytest.raises(CheckpointError, match="lacks the model file of tensor-parallel rank 1"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "c", tag="global_step3")
