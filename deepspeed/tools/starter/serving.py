"""Output of `ds init` for serving: the command, with the fewest tensor-parallel ranks that hold the model."""

from __future__ import annotations

import argparse

import torch

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.planning.report import size
from deepspeed.tools.plan import build_model

SHARE = 0.7
"""Share of a device's memory that weights may take, besides the KV cache."""


def files(args: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Return the files and the reasons; sets ``args.gpus`` to the ranks that share the model. DeepSpeedConfigError: the
    model fits on no allowed number of ranks."""
    module = build_model(args.model, torch.bfloat16)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    config = getattr(module, "config", None)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 1)
    ways = [ranks for ranks in range(1, args.gpus + 1) if heads % ranks == 0]
    memory = args.host_memory if args.device == "cpu" else args.device_memory
    fitting = [ranks for ranks in ways if memory is None or weights / ranks <= SHARE * memory]
    if not fitting:
        raise DeepSpeedConfigError(
            f"{size(weights)} of weights in bf16 take more than {SHARE:.0%} of {size(memory or 0)} on each of "
            f"{ways[-1]} ranks: give more --gpus or more memory"
        )
    args.gpus = fitting[0]
    of = "unknown memory: give --device-memory to check it" if memory is None else f"{size(memory)} each"
    reasons = [
        f"Weights in bf16 take {size(weights)}: {args.gpus} of {ways[-1]} possible ranks hold them ({of}), "
        "the rest is for the key-value cache."
    ]
    return {"CHOICES.md": f"# Serving {args.model}\n\n- {reasons[0]}\n"}, reasons
