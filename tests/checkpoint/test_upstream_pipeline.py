"""Checkpoints of pipelines that DeepSpeed 0.19.8 wrote (``make_pipeline_checkpoints.py``)."""

from __future__ import annotations

import shutil
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.files.archive_reader import read_archive
from deepspeed.checkpoint.foreign.universal_export import convert
from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.checkpoint.make_pipeline_checkpoints import (
    CASES,
    PIPELINES,
    VOCAB,
    WIDTH,
    batches,
    config,
    make_pipeline,
)
from tests.checkpoint.test_upstream_tp import whole_state
from tests.pool import run

PARTITIONED = [case for case, (stage, precision, _) in CASES.items() if stage or precision == "bf16"]
STAGE_SHAPES = (
    {"tied_modules.words.weight": (VOCAB, WIDTH), "1.weight": (WIDTH, WIDTH), "1.bias": (WIDTH,)},
    {
        "tied_modules.words.weight": (VOCAB, WIDTH),
        "3.weight": (WIDTH,),
        "3.bias": (WIDTH,),
        "4.weight": (WIDTH, WIDTH),
    },
)
"""Parameters of the two stages, in the order of their optimizers."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def saved(case: str) -> dict[str, torch.Tensor]:
    """Masters and moments by name, joined from that release's files by hand."""
    _, precision, dp = CASES[case]
    folder = PIPELINES / case / "global_step3"
    prefix = "bf16_" if precision == "bf16" else ""
    found: dict[str, torch.Tensor] = {}
    for stage in range(2):
        shapes = STAGE_SHAPES[stage]
        files = [folder / f"{prefix}zero_pp_rank_{n}_mp_rank_{stage:02d}_optim_states.pt" for n in range(dp)]
        sections = [read_archive(file)["optimizer_state_dict"] for file in files]
        flat = {"fp32": torch.cat([section["single_partition_of_fp32_groups"][0] for section in sections])}
        for kind in MOMENTS:
            flat[kind] = torch.cat([s["base_optimizer_state"]["state"][0][kind] for s in sections])
        position = 0
        for name, shape in shapes.items():
            for kind, values in flat.items():
                found.setdefault(f"{name}/{kind}", values[position : position + prod(shape)].view(shape))
            position += prod(shape)
    return found


def load_into(folder: str, stages: int, zero: int, precision: str) -> dict[str, Any]:
    import deepspeed

    module = make_pipeline(stages)
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    engine, _, _, _ = deepspeed.initialize(model=module, config=config(zero, precision))
    _, client = engine.load_checkpoint(folder)
    made = {
        "state": whole_state(engine),
        "epoch": client["epoch"],
        "steps": engine.global_steps,
        "lr": engine.get_lr(),
    }
    data = batches(1, engine.grid.get_data_parallel_rank())
    made["loss"] = engine.train_batch(data).item()
    return made


@pytest.mark.parametrize("case", PARTITIONED)
@pytest.mark.parametrize(("world", "stages", "zero"), [(2, 2, 1), (2, 1, 2), (1, 1, 0)])
def test_they_resume_over_as_many_stages_and_over_one(case: str, world: int, stages: int, zero: int) -> None:
    precision = CASES[case][1]
    folder = str(PIPELINES / case)
    loaded = run(load_into, world, folder=folder, stages=stages, zero=zero, precision=precision)
    reference = saved(case)
    for found in loaded:
        assert (found["epoch"], found["steps"]) == (3, 3) and found["lr"] == [
            pytest.approx(0.006826061944859854)
        ]
        for key, value in reference.items():
            assert torch.equal(found["state"][key].view(-1), value.reshape(-1).float()), key
        expected = sum(loss_of(reference, replica) for replica in range(world // stages)) / (world // stages)
        assert found["loss"] == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 2e-2)


@pytest.mark.parametrize("case", [case for case in PARTITIONED if CASES[case][0]])
def test_their_conversion_has_the_parameters_of_all_stages(case: str, tmp_path: Path) -> None:
    """It keeps a model file of each stage, which names only its own."""
    convert(PIPELINES / case / "global_step3", tmp_path / "universal")
    (tmp_path / "latest").write_text("universal")
    found = run(load_into, 1, folder=str(tmp_path), stages=1, zero=1, precision=CASES[case][1])[0]
    assert (found["epoch"], found["steps"]) == (3, 3)
    for key, value in saved(case).items():
        assert torch.equal(found["state"][key].view(-1), value.reshape(-1).float()), key


def loss_of(saved: dict[str, torch.Tensor], replica: int) -> float:
    """Return the loss of the layers, computed by hand over the micro-batches of a step."""
    words = saved["tied_modules.words.weight/fp32"]
    losses: list[float] = []
    for tokens, labels in batches(1, replica):
        hidden = torch.tanh(functional.linear(words[tokens], saved["1.weight/fp32"], saved["1.bias/fp32"]))
        hidden = functional.layer_norm(hidden, (WIDTH,), saved["3.weight/fp32"], saved["3.bias/fp32"])
        logits = functional.linear(hidden, saved["4.weight/fp32"]) @ words.t()
        losses.append(functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize("case", ["stage1_fp32", "stage1_bf16"])
def test_weights_join_without_a_model(case: str) -> None:
    joined = get_fp32_state_dict_from_zero_checkpoint(PIPELINES / case)
    reference = {
        name.removesuffix("/fp32"): value for name, value in saved(case).items() if name.endswith("/fp32")
    }
    assert joined.keys() == reference.keys()
    assert all(torch.equal(value, reference[name]) for name, value in joined.items())


def test_a_shape_that_no_file_has_is_refused_without_a_model() -> None:
    with pytest.raises(
        CheckpointError, match="shape of tied_modules.words.weight: load the checkpoint into an engine"
    ):
        get_fp32_state_dict_from_zero_checkpoint(PIPELINES / "stage0_bf16")


def load_weights(folder: str, strict: bool) -> tuple[str, dict[str, torch.Tensor]]:
    import deepspeed

    engine, _, _, _ = deepspeed.initialize(model=make_pipeline(1), config=config(0, "fp32"))
    try:
        engine.load_checkpoint(folder)
        told = ""
    except CheckpointError as error:
        told = str(error)
    engine.load_checkpoint(folder, load_module_only=True, load_module_strict=strict)
    return told, dict(engine.module.state_dict())


def test_an_optimizer_by_number_is_refused_and_its_weights_load() -> None:
    """ZeRO stage 0 in fp32, whose files do not say which parameters a stage had."""
    told, weights = run(load_weights, 1, folder=str(PIPELINES / "stage0_fp32"), strict=False)[0]
    assert "by index only" in told and "load_module_only=True" in told
    for layer in (1, 3, 4):
        file = PIPELINES / "stage0_fp32/global_step3" / f"layer_{layer:02d}-model_states.pt"
        for name, value in torch.load(file).items():
            assert torch.equal(weights[f"{layer}.{name}"], value)


def test_a_lost_stage_is_named(tmp_path: Path) -> None:
    shutil.copytree(PIPELINES / "stage1_bf16", tmp_path / "c")
    (tmp_path / "c/global_step3/mp_rank_01_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="the model file of pipeline stage 1 of 2"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "c", tag="global_step3")
