"""Accelerate, unmodified: plugins, prepare and backward, several engines, saved states."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.kit import Tokens, assert_same_weights, clean_clients, llama, whole_weights
from tests.pool import distributed

pytest.importorskip("transformers", reason="the clients extra is not installed")
pytest.importorskip("accelerate", reason="the clients extra is not installed")


def accelerator(plugin: Any, **options: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(deepspeed_plugin=plugin, **options)


def plugin(stage: int, **options: Any) -> Any:
    from accelerate import DeepSpeedPlugin

    return DeepSpeedPlugin(zero_stage=stage, **({"gradient_clipping": 1.0} | options))


def loader(size: int = 16) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(Tokens(size), batch_size=2)


def prepared(launched: Any, seed: int = 0) -> tuple[Any, Any, Any]:
    model = llama(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return launched.prepare(model, optimizer, loader())


def train(launched: Any, model: Any, optimizer: Any, data: Any) -> list[float]:
    losses = []
    for batch in data:
        with launched.accumulate(model):
            loss = model(**batch).loss
            launched.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_prepare_and_train(stage: int, precision: str) -> None:
    import deepspeed

    with clean_clients():
        launched = accelerator(plugin(stage), mixed_precision=precision)
        model, optimizer, data = prepared(launched)
        assert type(model) is deepspeed.runtime.engine.DeepSpeedEngine
        losses = train(launched, model, optimizer, data) + train(launched, model, optimizer, data)
        assert sum(losses[-4:]) < sum(losses[:4])
        assert optimizer.step_was_skipped in (True, False)
        assert isinstance(launched.unwrap_model(model), type(llama()))
        launched.free_memory()


@distributed(world_size=2)
def test_accumulation_is_driven_by_accelerate() -> None:
    """Two micro-batches per update; the loss is divided once, by Accelerate's plugin or ours, not by both."""

    def weights(gas: int, batch: int) -> dict[str, torch.Tensor]:
        with clean_clients():
            launched = accelerator(
                plugin(2, gradient_accumulation_steps=gas), gradient_accumulation_steps=gas
            )
            model = llama()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            data = torch.utils.data.DataLoader(Tokens(8), batch_size=batch)
            model, optimizer, data = launched.prepare(model, optimizer, data)
            losses = train(launched, model, optimizer, data)
            assert model.global_steps == len(losses) // gas
            return whole_weights(model)

    once, twice = weights(1, 2), weights(2, 1)
    for name in once:
        # ranks see the rows in another order, and the mean over a step is the same only for the first update
        assert torch.allclose(once[name], twice[name], atol=2e-2)


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_save_state_and_load_state(tmp_path: Path, stage: int) -> None:
    with clean_clients():
        launched = accelerator(plugin(stage))
        model, optimizer, data = prepared(launched)
        train(launched, model, optimizer, data)
        launched.save_state(str(tmp_path / "state"))
        first = train(launched, model, optimizer, data)
        weights = whole_weights(model)
        launched.load_state(str(tmp_path / "state"))
        assert train(launched, model, optimizer, data) == first
        assert_same_weights(whole_weights(model), weights)


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_save_model_and_state_dict(tmp_path: Path, stage: int) -> None:
    from transformers import LlamaForCausalLM

    with clean_clients():
        launched = accelerator(plugin(stage, zero3_save_16bit_model=True), mixed_precision="bf16")
        model, optimizer, data = prepared(launched)
        train(launched, model, optimizer, data)
        state = launched.get_state_dict(model)
        launched.unwrap_model(model).save_pretrained(
            tmp_path / "saved",
            is_main_process=launched.is_main_process,
            save_function=launched.save,
            state_dict=state,
        )
        launched.save_model(model, str(tmp_path / "flat"))
        ours = whole_weights(model)
        launched.wait_for_everyone()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert_same_weights({n: p.detach() for n, p in loaded.named_parameters()}, ours)
    assert (tmp_path / "flat" / "model.safetensors").is_file()


@distributed(world_size=2)
def test_several_plugins_and_engines() -> None:
    """A student at stage 2 and a frozen teacher at stage 3, each with its own plugin, as Accelerate documents."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import get_active_deepspeed_plugin
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    base = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    with clean_clients():
        plugins = {
            "student": DeepSpeedPlugin(hf_ds_config=base | {"zero_optimization": {"stage": 2}}),
            "teacher": DeepSpeedPlugin(hf_ds_config=base | {"zero_optimization": {"stage": 3}}),
        }
        first = Accelerator(deepspeed_plugins=plugins)
        second = Accelerator()
        assert get_active_deepspeed_plugin(first.state) is plugins["student"]
        student = llama()
        optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
        student, optimizer, data = first.prepare(student, optimizer, loader())
        second.state.select_deepspeed_plugin("teacher")
        assert is_deepspeed_zero3_enabled()
        teacher = llama(seed=1)
        teacher = second.prepare(teacher)
        teacher.eval()
        assert (student.zero_optimization_stage(), teacher.zero_optimization_stage()) == (2, 3)
        losses = []
        for batch in [*data, *data]:
            with torch.no_grad():
                target = teacher(**batch).logits
            loss = (student(**batch).logits - target).square().mean()
            first.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]


@distributed(world_size=2)
def test_two_trained_engines() -> None:
    """Two accelerators, one engine each, stepping in turn."""
    from accelerate import Accelerator, DeepSpeedPlugin

    base = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    with clean_clients():
        plugins = {
            "a": DeepSpeedPlugin(hf_ds_config=base | {"zero_optimization": {"stage": 3}}),
            "b": DeepSpeedPlugin(hf_ds_config=base | {"zero_optimization": {"stage": 3}}),
        }
        one, two = Accelerator(deepspeed_plugins=plugins), Accelerator()
        left = prepared(one, 0)
        two.state.select_deepspeed_plugin("b")
        right = prepared(two, 1)
        for batch in left[2]:
            for launched, (model, optimizer, _) in ((one, left), (two, right)):
                launched.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        assert left[0].global_steps == right[0].global_steps == 4


@distributed(world_size=1)
def test_config_by_environment_and_auto() -> None:
    """The settings that `accelerate launch` passes in environment variables are read by the plugin; "auto" gets its
    values."""
    with clean_clients():
        os.environ |= {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
            "ACCELERATE_GRADIENT_CLIPPING": "0.5",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
        }
        from accelerate import Accelerator

        launched = Accelerator()
        assert launched.state.deepspeed_plugin.zero_stage == 3
        model, optimizer, data = prepared(launched)
        assert model.gradient_accumulation_steps() == 2 and model.gradient_clipping() == 0.5
        assert model.config["steps_per_print"] == float("inf")
        train(launched, model, optimizer, data)
        assert model.global_steps == len(data) // 2


@pytest.mark.parametrize("kind", ["DummyOptim", "torch"])
@distributed(world_size=1)
def test_optimizer_and_scheduler_of_the_config(kind: str) -> None:
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }
    if kind == "DummyOptim":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
        config["scheduler"] = {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": "auto",
                "warmup_max_lr": "auto",
                "warmup_num_steps": "auto",
                "total_num_steps": "auto",
            },
        }
    with clean_clients():
        launched = accelerator(DeepSpeedPlugin(hf_ds_config=config, gradient_clipping=1.0))
        model = llama()
        if kind == "DummyOptim":
            optimizer: Any = DummyOptim(params=model.parameters(), lr=1e-2, weight_decay=0.0)
            scheduler: Any = DummyScheduler(optimizer, total_num_steps=16, warmup_num_steps=2)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
        model, optimizer, data, scheduler = launched.prepare(model, optimizer, loader(), scheduler)
        rates = []
        for batch in data:
            launched.backward(model(**batch).loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
        assert len(set(rates)) > 3 and model.gradient_clipping() == 1.0
        assert scheduler.get_last_lr()[0] == rates[-1]


@distributed(world_size=2)
def test_norm_gather_and_metrics() -> None:
    with clean_clients():
        launched = accelerator(plugin(3))
        model, optimizer, data = prepared(launched)
        batch = next(iter(data))
        launched.backward(model(**batch).loss)
        norm = launched.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        norm = model.get_global_grad_norm()
        assert norm is not None and norm > 0
        assert launched.gather_for_metrics(torch.tensor([launched.process_index])).tolist() == [0, 1]
        assert launched.reduce(torch.tensor(1.0), reduction="sum") == 2


@distributed(world_size=1)
def test_monitors_of_a_config_file(tmp_path: Path) -> None:
    """A JSON with a monitor through `DeepSpeedPlugin(hf_ds_config=)`; nothing is printed by the engine."""
    import contextlib
    import csv
    import io

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2},
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "curves"},
    }
    from accelerate import DeepSpeedPlugin

    printed = io.StringIO()
    with clean_clients(), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        launched = accelerator(DeepSpeedPlugin(hf_ds_config=config))
        losses = train(launched, *prepared(launched))
    with open(tmp_path / "curves" / "Train_Samples_train_loss.csv", newline="") as file:
        _, *rows = csv.reader(file)
    means = [(first + second) / 2 for first, second in zip(losses[::2], losses[1::2], strict=True)]
    assert [int(samples) for samples, _ in rows] == [4 * step for step in range(1, len(means) + 1)]
    assert [float(loss) for _, loss in rows] == pytest.approx(means, rel=1e-4)
    assert "step=" not in printed.getvalue() and "DeepSpeed info" not in printed.getvalue()
