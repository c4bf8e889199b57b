"""The main job of `examples/pretrain_gpt`: its data, its model, every config, resuming elsewhere, and the
short demo."""

from __future__ import annotations

import csv
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tests import pool
from tests.tools.launcher.programs import REPOSITORY, environment

pytest.importorskip("tokenizers")

EXAMPLE = REPOSITORY / "examples" / "pretrain_gpt"
CONFIGS = sorted(path.name for path in (EXAMPLE / "configs").iterdir())
SMALL = ["--layers", "2", "--heads", "2", "--width", "32", "--context", "32", "--evaluate_every", "2"]


def example(name: str) -> ModuleType:
    """A module of the example, imported as its scripts import it: by its own name, from its own folder."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Tokens of a small part of the library."""
    data, folder = example("data"), tmp_path_factory.mktemp("text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "TEXT_LIMIT_BYTES", 2_000_000)
        data.make(folder)
    return folder


def run_training(arguments: list[str], metrics: Path) -> list[dict[str, str]]:
    """Runs train.py in this rank; the measurements that rank 0 wrote."""
    example("train").main([*arguments, *SMALL, "--metrics", str(metrics)])
    torch.distributed.barrier()
    with open(metrics, newline="") as file:
        return list(csv.DictReader(file))


def losses(rows: list[dict[str, str]]) -> list[float]:
    return [float(row["train_loss"]) for row in rows if row["train_loss"]]


# ---------------------------------------------------------------------------------------------- data and mode


def test_text_is_split_by_file_and_decodes_to_itself(text):
    data = example("data")
    loaded = data.load(text)
    names = list(data.read_sources())
    held_out = [name for name in names if data.is_validation(name)]
    assert 0 < len(held_out) < len(names) / 5
    assert len(loaded.validation) < len(loaded.train)
    assert max(loaded.train.max(), loaded.validation.max()) < data.VOCABULARY
    source = "def größe(x):\n\treturn x ** 2  # ÷\n"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode(source).ids) == source


def test_unigram_entropy():
    data = example("data")
    even = data.Text(np.zeros(1, np.uint16), np.arange(8, dtype=np.uint16), None)
    assert even.unigram_entropy() == pytest.approx(math.log(8))


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_sees_the_same_windows_at_each_step(ranks):
    data = example("data")
    tokens = np.arange(1000, dtype=np.uint16)

    def seen(of: int, step: int) -> set[int]:
        firsts = set()
        for rank in range(of):
            batches = data.Batches(tokens, 8, global_batch=16, micro_batch=2, rank=rank, ranks=of).from_step(
                step
            )
            for _ in range(16 // 2 // of):
                ids, targets = next(batches)
                assert torch.equal(ids[:, 1:], targets[:, :-1])
                firsts |= set(ids[:, 0].tolist())
        assert len(firsts) == 16  # no window twice
        return firsts

    for step in (0, 3, 6, 7, 20):  # 7 steps an epoch: the last ones lie in the second and third
        assert seen(1, step) == seen(ranks, step)
    one = data.Batches(tokens, 8, global_batch=16, micro_batch=16, rank=0, ranks=1).from_step(0)
    for step in range(9):
        assert set(next(one)[0][:, 0].tolist()) == seen(1, step)


def test_model_is_causal_and_knows_positions():
    model = example("model")
    torch.manual_seed(0)
    gpt = model.GPT(model.GPTConfig(vocabulary=50, context=16, layers=2, heads=2, width=32)).double()
    ids = torch.randint(50, (1, 16))
    changed = ids.clone()
    changed[0, 10] = (ids[0, 10] + 1) % 50
    before, after = gpt(ids), gpt(changed)
    assert torch.equal(before[:, :10], after[:, :10]) and not torch.equal(before[:, 10:], after[:, 10:])
    swapped = ids[:, [1, 0, *range(2, 16)]]
    assert not torch.allclose(gpt(swapped)[:, -1], before[:, -1])  # attention alone would not tell them apart


def test_size_of_the_model():
    model = example("model")
    assert 9.5e6 < sum(p.numel() for p in model.GPT(model.GPTConfig()).parameters()) < 10.5e6


# ---------------------------------------------------------------------------------------------- training


def test_configs_differ_in_stage_and_precision_only():
    configs = {name: json.loads((EXAMPLE / "configs" / name).read_text()) for name in CONFIGS}
    assert len(configs) == 12
    for name, config in configs.items():
        stage, precision = name.removesuffix(".json").removeprefix("zero").split("_")
        to_export = {"stage3_gather_16bit_weights_on_model_save": True} if stage == "3" else {}
        assert config.pop("zero_optimization") == {"stage": int(stage), **to_export}
        section = config.pop(precision, None)
        assert (section or {}).get("enabled", False) == (precision != "fp32")
    assert all(config == configs["zero0_fp32.json"] for config in configs.values())


def train_all_configs(text: str, tmp_path: Path) -> dict[str, list[float]]:
    return {
        name: losses(
            run_training(
                ["--deepspeed_config", str(EXAMPLE / "configs" / name), "--steps", "3", "--text", text],
                tmp_path / f"{name}.csv",
            )
        )
        for name in CONFIGS
    }


def test_every_stage_and_precision_trains_by_json_alone(text, tmp_path):
    by_name = pool.run(train_all_configs, 2, timeout=180, text=str(text), tmp_path=tmp_path)[0]
    exact = by_name["zero0_fp32.json"]
    assert len(exact) == 3 and all(math.isfinite(loss) for loss in exact)
    for name, seen in by_name.items():
        assert seen == pytest.approx(exact, rel=1e-6 if "fp32" in name else 2e-3), name


def train_and_save(text: str, tmp_path: Path, name: str, steps: int, save: str, load: str) -> list[float]:
    config = str(EXAMPLE / "configs" / f"{name}.json")
    options = ["--save", save] if save else []
    options += ["--load", load] if load else []
    metrics = tmp_path / f"{name}{steps}{bool(load)}.csv"
    return losses(
        run_training(["--deepspeed_config", config, "--steps", str(steps), "--text", text, *options], metrics)
    )


@pytest.mark.parametrize(
    "before, after, rel",
    [
        ("zero2_fp32", "zero1_fp32", 1e-5),
        ("zero3_fp32", "zero0_fp32", 1e-5),
        ("zero2_bf16", "zero3_bf16", 2e-3),
    ],
)
def test_resumed_on_one_rank_at_another_stage_it_goes_on_with_the_same_losses(
    text, tmp_path, before, after, rel
):
    common = {"text": str(text), "tmp_path": tmp_path, "timeout": 120}
    checkpoint = str(tmp_path / "checkpoint")
    whole = pool.run(train_and_save, 2, name=before, steps=6, save="", load="", **common)[0]
    first = pool.run(train_and_save, 2, name=before, steps=3, save=checkpoint, load="", **common)[0]
    second = pool.run(train_and_save, 1, name=after, steps=6, save="", load=checkpoint, **common)[0]
    assert first == whole[:3]
    assert second == pytest.approx(whole[3:], rel=rel)


def train_for(text: str, tmp_path: Path, seconds: str) -> list[dict[str, str]]:
    config = str(EXAMPLE / "configs" / "zero2_fp32.json")
    limits = ["--steps", "7", "--seconds", seconds, "--at_least", "3"]
    return run_training(["--deepspeed_config", config, "--text", text, *limits], tmp_path / f"{seconds}.csv")


@pytest.mark.parametrize("seconds, steps", [("0", 3), ("1000", 7)])
def test_training_ends_by_time_as_well_as_by_steps(text, tmp_path, seconds, steps):
    rows = pool.run(train_for, 2, timeout=180, text=str(text), tmp_path=tmp_path, seconds=seconds)[0]
    assert len(losses(rows)) == steps
    assert rows[-1]["step"] == str(steps) and rows[-1]["validation_loss"]  # looked at before it is saved


@pytest.mark.parametrize("seconds, layers, steps", [(0.01, 7, 600), (1.0, 4, 400), (60.0, 2, 100)])
def test_the_demo_chooses_a_model_that_it_has_time_for(monkeypatch, seconds, layers, steps):
    """``seconds``: what a micro-batch of the large model takes; the others take a quarter and a tenth of that."""
    demo = example("demo")
    assert demo.GPTConfig().layers == 7
    share = {7: 1.0, 4: 0.25, 2: 0.1}
    monkeypatch.setattr(demo, "seconds_per_micro_batch", lambda config, *_: seconds * share[config.layers])
    plan = demo.make_plan(False, demo.Clock(4.0))
    assert plan.model.layers == layers and abs(plan.all_steps - steps) <= 20
    late = demo.plan_the_rest(
        plan, [{"step": 40.0, "train_loss": 5.0, "seconds": 300.0}], 10, demo.Clock(0.0)
    )
    assert late.first_steps == 40 and 40 < late.all_steps <= 50


def train_and_write(text: str, tmp_path: Path, config: str) -> None:
    arguments = ["--deepspeed_config", config, "--steps", "2", "--text", text, "--sample", "5"]
    run_training([*arguments, "--export", str(tmp_path / "model")], tmp_path / "metrics.csv")


def test_a_divided_model_exports_and_writes_text(text, tmp_path):
    """Stage 3 on two ranks: neither holds the model, and both take part in what needs all of it."""
    from safetensors.torch import load_file

    config = str(EXAMPLE / "configs" / "zero3_bf16.json")
    pool.run(train_and_write, 2, timeout=120, text=str(text), tmp_path=tmp_path, config=config)
    model = example("model")
    whole = model.GPT(model.GPTConfig(layers=2, heads=2, width=32, context=32)).state_dict()
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in exported.items()}.items() <= {
        name: tensor.shape for name, tensor in whole.items()
    }.items()
    assert (
        set(whole) - set(exported) <= {"head.weight", "embedding.weight"} and len(exported) >= len(whole) - 1
    )


def test_short_demo(tmp_path):
    """The whole job in a subprocess, and the exported weights against the validation loss that it
    reported."""
    pytest.importorskip("matplotlib")
    from safetensors.torch import load_file

    command = [sys.executable, str(EXAMPLE / "demo.py"), "--short", "--minutes", "4", "--out", str(tmp_path)]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "----- sampled -----\ndef " in result.stdout
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["ranks"], row["zero_stage"]) for row in rows} == {("2", "2"), ("1", "1")}
    assert [int(row["step"]) for row in rows if row["train_loss"]] == list(
        range(1, int(rows[-1]["step"]) + 1)
    )

    train, model, data = example("train"), example("model"), example("data")
    gpt = model.GPT(model.GPTConfig(layers=2, heads=4, width=128, context=128))
    gpt.load_state_dict(load_file(tmp_path / "model" / "model.safetensors"), strict=False)
    held_out = data.Batches(
        data.load(tmp_path / "text").validation, 128, global_batch=4, micro_batch=4, rank=0, ranks=1
    ).from_step(0)
    with torch.no_grad():
        found = [gpt(*next(held_out)).item() for _ in range(train.VALIDATION_WINDOWS // 4)]
    assert np.mean(found) == pytest.approx(float(rows[-1]["validation_loss"]), abs=1e-4)
