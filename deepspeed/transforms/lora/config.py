"""Configuration of an `OptimizedLinear`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass
class LoRAConfig:
    """Low-rank adapters for frozen weights. E. J. Hu et al.: LoRA: Low-rank adaptation of large language models,
    2021.

    Args:
        lora_r: rank of the adapters.
        lora_alpha: adapter outputs are scaled by ``lora_alpha / lora_r``.
        base_weight_sharding: 1 or the world size, with the same effect: ZeRO stage 3 shards frozen weights, at other
            stages they are replicated (with a warning if sharding was requested).
        offload, offload_ratio: keep (that share of) the frozen weights in host memory and fetch them for use. A single
            layer is offloaded if the share is at least 0.5.
        delay_lora_init: create the adapters in `init_lora`, after the frozen weights have been loaded.
        target_mods: names of layers that get adapters (`Init`).
    """

    lora_r: int = 64
    lora_alpha: float = 16.0
    base_weight_sharding: int = 1
    offload: bool = False
    offload_ratio: float = 0.0
    delay_lora_init: bool = False
    target_mods: list[str] = field(default_factory=lambda: list(_TARGETS))


@dataclass
class QuantizationConfig:
    """Format of quantized frozen weights (`deepspeed.ops.fp_quantizer.FP_Quantize`).

    Args:
        q_bits: 4, 6, 8 or 12.
        mantissa_bits: mantissa bits of the format; follows from ``q_bits``.
        group_size: number of values that share a scale.
        q_dtype: dtype of the quantized tensor: ``torch.uint8``.
    """

    q_bits: int = 8
    mantissa_bits: int = 3
    group_size: int = 512
    q_dtype: torch.dtype = torch.uint8
