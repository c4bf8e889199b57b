"""TRL's trainers, unchanged, at every stage: what they log, step by step, is what they log under torch's DDP."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="the clients extra is not installed")
pytest.importorskip("datasets", reason="the clients extra is not installed")

from tests.clients.kit import clean_clients, llama, llama_config
from tests.clients.test_trl import WORDS, options, tokenizer
from tests.pool import distributed

Log = list[dict[str, float]]
NOT_COMPARED = ("time", "per_second", "runtime", "flos")


def rows(kind: str, folder: Path) -> Any:
    """Data sets on disk: a trainer caches results computed in advance next to them, where all ranks find them."""
    from datasets import Dataset, load_from_disk

    prompts = [" ".join(WORDS[i : i + 3]) for i in range(16)]
    right = [" " + " ".join(WORDS[i + 3 : i + 3 + 1 + i % 4]) for i in range(16)]
    wrong = [" " + " ".join(WORDS[: 2 + i % 3]) for i in range(16)]
    columns: dict[str, list[Any]] = {"prompt": prompts}
    if kind in ("dpo", "reward"):
        columns |= {"chosen": right, "rejected": wrong}
    if kind == "kto":
        columns = {
            "prompt": prompts * 2,
            "completion": right + wrong,
            "label": [True] * 16 + [False] * 16,
        }
    if torch.distributed.get_rank() == 0:
        Dataset.from_dict(columns).save_to_disk(folder)
    torch.distributed.barrier()
    return load_from_disk(folder)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()) & set(WORDS[:8]))) for text in completions]


def scored(seed: int = 3) -> Any:
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(seed)
    return LlamaForSequenceClassification(llama_config(num_labels=1))


def base(folder: Path) -> str:
    """A policy on disk: an online trainer loads its reference from where the policy is from."""
    if torch.distributed.get_rank() == 0:
        llama().save_pretrained(folder / "base")
    torch.distributed.barrier()
    return str(folder / "base")


def adapters(task: str = "CAUSAL_LM") -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type=task)


def trainer(kind: str, folder: Path, settings: dict[str, Any]) -> Any:
    """``settings`` are those of the trainer's config; of them these are its own arguments."""
    import trl

    own = {
        name: settings.pop(name)
        for name in ("peft_config", "reward_model", "rollout_func")
        if name in settings
    }
    names = {
        "dpo": "DPO",
        "kto": "KTO",
        "reward": "Reward",
        "grpo": "GRPO",
        "rloo": "RLOO",
        "distillation": "Distillation",
    }
    if kind in ("grpo", "rloo"):
        settings = {"num_generations": 4, "max_completion_length": 6, "beta": 0.05} | settings
        judge = own.pop("reward_model", None)
        own |= {"model": base(folder), "reward_funcs": reward if judge is None else judge()}
        if judge is not None:
            own["reward_processing_classes"] = tokenizer()
    elif kind == "distillation":
        settings = {"max_completion_length": 6} | settings
        own |= {"model": base(folder), "teacher_model": llama(seed=1)}
    elif kind == "reward":
        own["model"] = scored()
    else:
        own["model"] = llama()
        if "peft_config" not in own and not settings.get("precompute_ref_log_probs"):
            own["ref_model"] = llama()
    config = getattr(trl, f"{names[kind]}Config")(**settings)
    made = getattr(trl, f"{names[kind]}Trainer")
    data = rows(kind, Path(config.output_dir) / "rows")
    if config.eval_strategy != "no":
        own["eval_dataset"] = data.select(range(8))
    return made(args=config, train_dataset=data, processing_class=tokenizer(), **own)


def trained(kind: str, folder: Path, stage: int | None, **changes: Any) -> Log:
    """Return the logs of each step; ``stage`` None: under torch's DDP."""
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    given: dict[str, Any] = {
        "max_steps": 3,
        "learning_rate": 5e-3,
        "warmup_steps": 0,
        "per_device_train_batch_size": 4,
        "deepspeed": config,
    }
    if stage is None:
        given |= {"deepspeed": None, "use_cpu": True, "accelerator_config": None}
    if changes.pop("hybrid_engine", False):
        config["hybrid_engine"] = {"enabled": True}
    with clean_clients(deepspeed_state=stage is not None):
        run = trainer(kind, folder, options(folder / str(stage), 0, **given) | changes)
        run.train()
        if stage is not None:
            assert run.model_wrapped.zero_optimization_stage() == stage
        return [entry for entry in run.state.log_history if "loss" in entry or "eval_loss" in entry]


def assert_same_logs(found: Log, expected: Log) -> None:
    assert len(found) == len(expected) >= 3
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys()
        for name, value in other.items():
            if not isinstance(value, (int, float)) or any(word in name for word in NOT_COMPARED):
                continue
            same = math.isnan(value) and math.isnan(one[name])
            assert same or one[name] == pytest.approx(value, rel=1e-3, abs=2e-5), (step, name)


CASES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "dpo": ("dpo", dict),
    "kto": ("kto", dict),
    "reward": ("reward", dict),
    "grpo": ("grpo", dict),
    "rloo": ("rloo", dict),
    "distillation": ("distillation", dict),
}
VARIANTS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "dpo: adapter": ("dpo", lambda: {"peft_config": adapters(), "gradient_checkpointing": True}),
    "dpo: reference asked beforehand": ("dpo", lambda: {"precompute_ref_log_probs": True}),
    "dpo: reference follows": ("dpo", lambda: {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    "dpo: recomputed": ("dpo", lambda: {"gradient_checkpointing": True}),
    "dpo: accumulated": ("dpo", lambda: {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    "dpo: evaluated": ("dpo", lambda: {"eval_strategy": "steps", "eval_steps": 2}),
    "grpo: evaluated": ("grpo", lambda: {"eval_strategy": "steps", "eval_steps": 2}),
    "kto: adapter": ("kto", lambda: {"peft_config": adapters()}),
    "reward: adapter": ("reward", lambda: {"peft_config": adapters("SEQ_CLS")}),
    "grpo: adapter": ("grpo", lambda: {"peft_config": adapters(), "gradient_checkpointing": True}),
    "grpo: reward model": ("grpo", lambda: {"reward_model": scored}),
    "grpo: reference follows": ("grpo", lambda: {"sync_ref_model": True, "ref_model_sync_steps": 1}),
    "grpo: several updates": ("grpo", lambda: {"num_iterations": 2, "gradient_accumulation_steps": 2}),
    "grpo: gathered by layer": ("grpo", lambda: {"ds3_gather_for_generation": False}),
    "grpo: hybrid engine": (
        "grpo",
        lambda: {"hybrid_engine": True, "ds3_gather_for_generation": False, "reward_model": scored},
    ),
    "grpo: head in fp32": ("grpo", lambda: {"cast_lm_head_to_fp32": True}),
    "rloo: adapter": ("rloo", lambda: {"peft_config": adapters()}),
    "distillation: adapter": ("distillation", lambda: {"peft_config": adapters()}),
}
ALL = CASES | VARIANTS


@pytest.mark.parametrize("case", list(CASES))
@distributed(world_size=2, timeout=120)
def test_trains_at_stage_3_as_under_ddp(tmp_path: Path, case: str) -> None:
    kind, changes = ALL[case]
    expected = trained(kind, tmp_path, None, **changes())
    assert_same_logs(trained(kind, tmp_path, 3, **changes()), expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(ALL))
@distributed(world_size=2, timeout=240)
def test_trains_at_every_stage_as_under_ddp(tmp_path: Path, case: str) -> None:
    kind, changes = ALL[case]
    expected = trained(kind, tmp_path, None, **changes())
    for stage in range(4):
        assert_same_logs(trained(kind, tmp_path, stage, **changes()), expected)


@pytest.mark.parametrize("adapter", [False, True])
@distributed(world_size=2)
def test_rollouts_by_the_serving_engine(tmp_path: Path, adapter: bool) -> None:
    """Through TRL's ``rollout_func``: the same answers, and the same learning from them, at every stage."""
    from deepspeed.engine.rollout.for_trl import rollouts_for_trl

    def at(stage: int) -> Log:
        changes: dict[str, Any] = {"peft_config": adapters()} if adapter else {}
        return trained("grpo", tmp_path, stage, rollout_func=rollouts_for_trl(max_sequences=3), **changes)

    expected = at(2)
    assert expected[0]["completions/mean_length"] > 1
    assert_same_logs(at(3), expected)
