"""Configs of the engines: each model has its own stage, and only the actor generates."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from torch import nn

import deepspeed


def trained(
    model: nn.Module,
    options: Namespace,
    *,
    stage: int,
    lr: float,
    rows: int,
    role: str = "",
    micro_batches: int = 0,
) -> Any:
    """An engine that trains.

    Args:
        rows: of one forward.
        role: ``actor`` (which generates too) or ``critic``, in the third step.
        micro_batches: of the third step.
    """
    config = _shared(options, stage, rows)
    decay = getattr(options, f"{role}_weight_decay") if role else options.weight_decay
    config["optimizer"] = {
        "type": "AdamW",
        "params": {"lr": lr, "betas": [0.9, 0.95], "weight_decay": decay},
    }
    config["gradient_clipping"] = 1.0
    config["gradient_accumulation_steps"] = options.gradient_accumulation_steps
    if options.wide_sums:
        config |= {"communication_data_type": "fp64", "data_types": {"grad_accum_dtype": "fp64"}}
    if role:
        config |= _schedule(options, lr, micro_batches // options.gradient_accumulation_steps)
    if options.offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if getattr(options, f"{role}_gradient_checkpointing") if role else options.gradient_checkpointing:
        inner: Any = getattr(model, "base", model)
        inner.gradient_checkpointing_enable({"use_reentrant": False})
        if options.critic_lora_dim if role == "critic" else options.lora_dim:
            inner.enable_input_require_grads()
    if role == "actor":
        config |= _generation(options) | _monitors(options)
    params = [param for param in model.parameters() if param.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=params, config=config)[0]


def _schedule(options: Namespace, lr: float, updates: int) -> dict[str, Any]:
    """Of the learning rate, over the updates of the third step."""
    warmup, kind = options.num_warmup_steps, options.lr_scheduler_type
    if kind == "constant" and not warmup:
        return {}
    if kind == "cosine":
        params = {"total_num_steps": updates, "warmup_num_steps": warmup}
        return {"scheduler": {"type": "WarmupCosineLR", "params": params}}
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": lr, "warmup_num_steps": warmup, "warmup_type": "linear"}
    if kind == "linear":
        return {"scheduler": {"type": "WarmupDecayLR", "params": params | {"total_num_steps": updates}}}
    return {"scheduler": {"type": "WarmupLR", "params": params}}


def _generation(options: Namespace) -> dict[str, Any]:
    return {
        "hybrid_engine": {
            "enabled": options.enable_hybrid_engine,
            "max_out_tokens": options.max_prompt_seq_len + options.max_answer_seq_len,
            "inference_tp_size": options.inference_tp_size,
            "release_inference_cache": options.release_inference_cache,
            "pin_parameters": not options.unpin_actor_parameters,
            "tp_gather_partition_size": options.tp_gather_partition_size,
        }
    }


def _monitors(options: Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, wanted, folder in (
        ("csv_monitor", options.monitor is not None, options.monitor),
        ("tensorboard", options.enable_tensorboard, options.tensorboard_path),
    ):
        if wanted:
            found[name] = {"enabled": True, "output_path": str(folder), "job_name": "rlhf"}
    return found


def frozen(model: nn.Module, options: Namespace, *, stage: int, offload: bool = False) -> Any:
    """An engine that only runs: a reference, a reward model, an average. Its weights are partitioned at stage 3."""
    config = _shared(options, 3 if stage == 3 else 0, 1)
    if offload and stage == 3:
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.eval()
    return engine


def _shared(options: Namespace, stage: int, rows: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows,
        "steps_per_print": None,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 1000},
    }
    if options.native_products:
        config["native_products"] = {"enabled": True}
    if options.dtype in ("bf16", "fp16"):
        config[options.dtype] = {"enabled": True}
    return config


def follow(average: Any, engine: Any, beta: float) -> None:
    """Move the weights of ``average`` by ``1 - beta`` of the way to those of ``engine``. Collective at stage 3."""
    pairs = list(zip(average.module.parameters(), engine.module.parameters(), strict=True))
    everything = [each for pair in pairs for each in pair]
    with deepspeed.zero.GatheredParameters(everything, modifier_rank=0):
        for kept, param in pairs:
            kept.data.lerp_(param.data.to(kept.dtype), 1 - beta)
