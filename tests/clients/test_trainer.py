"""Transformers' Trainer, unmodified: training, evaluation, saving, resuming, at every stage and precision."""

from __future__ import annotations

import contextlib
import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.kit import (
    Tokens,
    assert_same_weights,
    auto_config,
    bf16_without_gpu,
    clean_clients,
    llama,
    llama_config,
    whole_weights,
)
from tests.pool import distributed
from tests.pool import run as run_on

pytest.importorskip("transformers", reason="the clients extra is not installed")
pytest.importorskip("accelerate", reason="the clients extra is not installed")

FP32, BF16, FP16 = "fp32", "bf16", "fp16"


def arguments(folder: Path, config: Any, **changes: Any) -> Any:
    from transformers import TrainingArguments

    options: dict[str, Any] = {
        "output_dir": str(folder),
        "deepspeed": config,
        "accelerator_config": {"use_configured_state": True},
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 7,
    }
    return TrainingArguments(**(options | changes))


def trainer(args: Any, model: Any = None, **options: Any) -> Any:
    from transformers import Trainer

    return Trainer(
        model=model if model is not None or "model_init" in options else llama(),
        args=args,
        train_dataset=Tokens(),
        eval_dataset=Tokens(size=8, seed=1),
        **options,
    )


def losses(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.parametrize("precision", [FP32, BF16, FP16])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_trains_evaluates_and_predicts(tmp_path: Path, stage: int, precision: str) -> None:
    with clean_clients(), bf16_without_gpu():
        args = arguments(
            tmp_path,
            auto_config(stage),
            bf16=precision == BF16,
            fp16=precision == FP16,
            gradient_accumulation_steps=2,
        )
        run = trainer(args)
        run.train()
        steps = losses(run)
        assert len(steps) == 4 and all(loss == loss for loss in steps) and steps[-1] < steps[0]
        assert type(run.model_wrapped).__name__ == "DeepSpeedEngine"
        assert run.model_wrapped.zero_optimization_stage() == stage
        assert 0 < run.evaluate()["eval_loss"] < 10
        predicted = run.predict(Tokens(size=8, seed=1))
        assert predicted.predictions.shape == (8, 12, 64)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_equals_a_plain_loop(tmp_path: Path, stage: int) -> None:
    """Losses are those of torch's AdamW and clipping over the whole batch in one process."""
    seen: list[torch.Tensor] = []
    config = auto_config(stage)
    del config["scheduler"]
    with clean_clients():
        args = arguments(tmp_path, config, max_steps=3, warmup_steps=0, lr_scheduler_type="constant")
        model = llama()
        model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["input_ids"].clone()), with_kwargs=True
        )
        run = trainer(args, model)
        run.train()
        ours = losses(run)
    plain = llama()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    expected = []
    for mine in seen:
        parts = [torch.empty_like(mine) for _ in range(2)]
        torch.distributed.all_gather(parts, mine)
        batch = torch.cat(parts)
        loss = plain(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert ours == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("stage", "precision"), [(1, BF16), (2, FP32), (2, FP16), (3, FP32), (3, BF16), (3, FP16)]
)
@distributed(world_size=2)
def test_resumes_bit_identically(tmp_path: Path, stage: int, precision: str) -> None:
    """Weights, log history and sharded masters after a resume equal those of the run that went through."""

    def run_to(folder: str, resume: str | None) -> tuple[Any, dict[str, Any]]:
        with clean_clients(), bf16_without_gpu():
            args = arguments(
                tmp_path / folder,
                auto_config(stage),
                bf16=precision == BF16,
                fp16=precision == FP16,
                save_strategy="steps",
                save_steps=2,
            )
            run = trainer(args)
            run.train(resume_from_checkpoint=resume)
            optimizer = run.model_wrapped.optimizer
            flat = getattr(optimizer, "single_partition_of_fp32_groups", None)
            if flat is None:
                flat = optimizer.fp32_partitioned_groups_flat
            kept = whole_weights(run.model) | {f"master {i}": part.clone() for i, part in enumerate(flat)}
            return losses(run), kept

    straight, weights = run_to("straight", None)
    again, resumed = run_to("resumed", str(tmp_path / "straight" / "checkpoint-2"))
    assert again == straight
    assert_same_weights(weights, resumed)


@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=2)
def test_save_model_and_best_model(tmp_path: Path, stage: int) -> None:
    """`load_best_model_at_end` reloads into the trained engine; `save_model` writes the whole model."""
    from transformers import LlamaForCausalLM

    with clean_clients():
        args = arguments(
            tmp_path,
            auto_config(stage),
            save_strategy="steps",
            eval_strategy="steps",
            save_steps=1,
            eval_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            greater_is_better=True,  # the first, so that something has to change
        )
        run = trainer(args)
        run.train()
        best = run.state.best_model_checkpoint
        assert best is not None and best.endswith("checkpoint-1")
        assert run.evaluate()["eval_loss"] == pytest.approx(run.state.best_metric, rel=1e-6)
        run.save_model(str(tmp_path / "saved"))
        ours = whole_weights(run.model)
        engine = run.model_wrapped  # continues after the reload, from the loaded weights
        batch = {key: value.unsqueeze(0) for key, value in Tokens()[0].items()}
        before = engine(**batch).loss.item()
        for _ in range(2):  # the first one still has the warm-up's rate of 0
            engine.backward(engine(**batch).loss)
            engine.step()
        assert engine(**batch).loss.item() < before
    torch.distributed.barrier()
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same_weights({n: p.detach() for n, p in loaded.named_parameters()}, ours)


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_without_gathering_the_full_checkpoint_is_saved(tmp_path: Path, stage: int) -> None:
    config = auto_config(stage)
    if stage == 3:
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = False
    with clean_clients():
        run = trainer(arguments(tmp_path, config, max_steps=1))
        run.train()
        run.save_model(str(tmp_path / "saved"))
    torch.distributed.barrier()
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert ("zero_to_fp32.py" in names) == (stage == 3)
    assert ("model.safetensors" in names) == (stage == 2)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_gradient_checkpointing_changes_no_bit(tmp_path: Path, stage: int, reentrant: bool) -> None:
    def weights(checkpointing: bool) -> dict[str, torch.Tensor]:
        with clean_clients():
            args = arguments(
                tmp_path,
                auto_config(stage),
                gradient_checkpointing=checkpointing,
                gradient_checkpointing_kwargs={"use_reentrant": reentrant} if checkpointing else None,
            )
            run = trainer(args)
            run.train()
            return whole_weights(run.model)

    assert_same_weights(weights(True), weights(False))


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=2)
def test_clients_optimizer_and_scheduler(tmp_path: Path, stage: int) -> None:
    """Without those sections in the JSON, Trainer makes them; its scheduler starts after the first step."""
    config = auto_config(stage)
    del config["optimizer"], config["scheduler"]
    with clean_clients():
        run = trainer(arguments(tmp_path, config, lr_scheduler_type="linear"))
        run.train()
        rates = [entry["learning_rate"] for entry in run.state.log_history if "learning_rate" in entry]
        assert rates == pytest.approx([0.0, 0.005, 0.01, 0.005]) and losses(run)[-1] < losses(run)[0]


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=1)
def test_hyperparameter_search_makes_many_engines(tmp_path: Path, stage: int) -> None:
    pytest.importorskip("optuna", reason="the clients extra is not installed")
    with clean_clients(deepspeed_state=False):
        args = arguments(
            tmp_path,
            auto_config(stage),
            max_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            accelerator_config=None,
        )
        run = trainer(args, model_init=lambda trial=None: llama())
        best = run.hyperparameter_search(
            hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-2)},
            n_trials=3,
            backend="optuna",
        )
        assert best.objective > 0 and set(best.hyperparameters) == {"learning_rate"}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("level", ["passive", "info"])
@distributed(world_size=2)
def test_nothing_printed_beyond_the_start(tmp_path: Path, level: str, stage: int, offload: bool) -> None:
    """By default not a line; with `log_level="info"` only what an engine says when it starts, and files it wrote.

    `clean_clients` and the pool turn a FutureWarning of ours into an error."""
    from deepspeed.utils import logger

    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    logger.addHandler(handler)
    printed = io.StringIO()
    try:
        with clean_clients(), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            config = auto_config(stage)
            if offload:
                config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
            options = {
                "save_strategy": "steps",
                "save_steps": 4,
                "log_level": level,
                "log_level_replica": level,
            }
            trainer(arguments(tmp_path, config, **options)).train()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.WARNING)
    said = lines.getvalue()
    assert not logger.propagate
    if level == "passive":
        assert said == "" and "deepspeed" not in printed.getvalue().lower()
    elif torch.distributed.get_rank() == 0:
        assert said.count("DeepSpeed info") == 1
        rest = said[said.index("optimizer state") :].splitlines()[1:]
        assert all(str(tmp_path) in line for line in rest), rest


@distributed(world_size=1)
def test_from_config_under_zero_init(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with clean_clients():
        args = arguments(tmp_path, auto_config(3), max_steps=2)
        model = AutoModelForCausalLM.from_config(llama_config())
        assert all(hasattr(p, "ds_id") and p.numel() == 0 for p in model.parameters())
        run = trainer(args, model)
        run.train()
        assert losses(run)[-1] < losses(run)[0] + 1


@pytest.mark.parametrize("stage", [2, 3])
@distributed(world_size=1)
def test_gradients_are_seen_before_the_step_only(tmp_path: Path, stage: int) -> None:
    """Accelerate's `backward` takes the step as well: what runs after it, as the Trainer's callbacks, sees none."""
    from transformers import TrainerCallback

    from deepspeed.utils import safe_get_full_grad

    class Look(TrainerCallback):
        before: list[Any] = []
        after: list[Any] = []

        def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
            engine = run.model_wrapped
            step = engine.step

            def looked_at(*args: Any, **options: Any) -> None:
                self.before += [safe_get_full_grad(param) for param in model.parameters()]
                step(*args, **options)

            engine.step = looked_at

        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            self.after += [safe_get_full_grad(param) for param in model.parameters()]

    with clean_clients():
        run = trainer(arguments(tmp_path, auto_config(stage), max_steps=1), callbacks=[look := Look()])
        run.train()
    assert look.before and all(grad is not None and grad.abs().sum() > 0 for grad in look.before)
    assert look.after and all(grad is None for grad in look.after)


@distributed(world_size=2)
def test_monitors_of_the_config(tmp_path: Path) -> None:
    """The sections reach the engine through the Trainer; the loss is the one that the Trainer logs, on rank 0."""
    import csv

    with clean_clients():
        section = {"enabled": True, "output_path": str(tmp_path), "job_name": "curves"}
        config = auto_config(2, csv_monitor=section)
        args = arguments(tmp_path, config, gradient_accumulation_steps=2, log_level="warning")
        run = trainer(args)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            run.train()
        assert "step=" not in printed.getvalue() and "DeepSpeed info" not in printed.getvalue()
        if torch.distributed.get_rank() == 0:
            with open(tmp_path / "curves" / "Train_Samples_train_loss.csv", newline="") as file:
                header, *rows = csv.reader(file)
            assert header == ["step", "train_loss"]
            assert [int(samples) for samples, _ in rows] == [8, 16, 24, 32]  # 2 ranks x 2 x 2 micro-batches
            assert all(
                float(loss) == pytest.approx(seen, rel=0.1)
                for (_, loss), seen in zip(rows, losses(run), strict=True)
            )


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_that_share_layers_learn_from_the_same_batches(tmp_path: Path, stage: int) -> None:
    """The Trainer counts all ranks in `train_batch_size`; here two of them read what one alone would."""
    alone = run_on(_losses_with_shared_layers, 1, folder=tmp_path / "one", stage=stage, ranks=1)
    shared = run_on(_losses_with_shared_layers, 2, folder=tmp_path / "two", stage=stage, ranks=2)
    assert len(alone[0]) == 4
    for seen in shared:
        assert seen == pytest.approx(alone[0], rel=1e-4)


def _losses_with_shared_layers(folder: Path, stage: int, ranks: int) -> list[float]:
    config = auto_config(stage, tensor_parallel={"autotp_size": ranks})
    with clean_clients():
        training = trainer(arguments(folder, config, gradient_accumulation_steps=2))
        training.train()
        assert training.model_wrapped.train_batch_size() == 4
    return losses(training)
