"""Configs of the engines: each model has its own stage, and only the actor generates."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from torch import nn

import deepspeed


def trained(
    model: nn.Module, options: Namespace, *, stage: int, lr: float, rows: int, hybrid: bool = False
) -> Any:
    """An engine that trains.

    Args:
        rows: of one forward.
        hybrid: it generates too.
    """
    config = _shared(options, stage, rows)
    config["optimizer"] = {
        "type": "AdamW",
        "params": {"lr": lr, "betas": [0.9, 0.95], "weight_decay": options.weight_decay},
    }
    config["gradient_clipping"] = 1.0
    if options.offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if options.gradient_checkpointing:
        inner = getattr(model, "base", model)
        inner.gradient_checkpointing_enable({"use_reentrant": False})
        if getattr(options, "lora_dim", 0):
            inner.enable_input_require_grads()
    if hybrid:
        config["hybrid_engine"] = {
            "enabled": options.enable_hybrid_engine,
            "max_out_tokens": options.max_prompt_seq_len + options.max_answer_seq_len,
            "inference_tp_size": options.inference_tp_size,
            "release_inference_cache": options.release_inference_cache,
            "pin_parameters": not options.unpin_actor_parameters,
            "tp_gather_partition_size": options.tp_gather_partition_size,
        }
        if options.monitor is not None:
            config["csv_monitor"] = {
                "enabled": True,
                "output_path": str(options.monitor),
                "job_name": "rlhf",
            }
    params = [param for param in model.parameters() if param.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=params, config=config)[0]


def frozen(model: nn.Module, options: Namespace, *, stage: int, offload: bool = False) -> Any:
    """An engine that only runs: a reference, a reward model, an average. Its weights are partitioned at stage 3."""
    config = _shared(options, 3 if stage == 3 else 0, 1)
    if offload and stage == 3:
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    return deepspeed.initialize(model=model, config=config)[0].eval()


def _shared(options: Namespace, stage: int, rows: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows,
        "steps_per_print": None,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 1000},
    }
    if options.dtype != "fp32":
        config[options.dtype] = {"enabled": True}
    return config


def follow(average: Any, engine: Any, beta: float) -> None:
    """Move the weights of ``average`` by ``1 - beta`` of the way to those of ``engine``. Collective at stage 3."""
    pairs = list(zip(average.module.parameters(), engine.module.parameters(), strict=True))
    everything = [each for pair in pairs for each in pair]
    with deepspeed.zero.GatheredParameters(everything, modifier_rank=0):
        for kept, param in pairs:
            kept.data.lerp_(param.data.to(kept.dtype), 1 - beta)
