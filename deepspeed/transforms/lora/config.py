"""Configuration of an `OptimizedLinear`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass
class LoRAConfig:
    """Low-rank adapters beside frozen weights. E. J. Hu et al.: LoRA: Low-rank adaptation of large language models,
    2021.

    Args:
        lora_r: rank of the adapters.
        lora_alpha: their output is multiplied with ``lora_alpha / lora_r``.
        base_weight_sharding: 1 or the number of ranks, and the same with both: ZeRO stage 3 shards frozen weights, at
            the other stages each rank has them whole (with a warning where sharding is asked for).
        offload, offload_ratio: keep (that share of) the frozen weights in host memory and fetch them for use. A layer
            that stands alone is offloaded from a share of 0.5 on.
        delay_lora_init: make the adapters in `init_lora`, when the frozen weights have been loaded.
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
    """Frozen weights as small floating-point numbers (`deepspeed.ops.fp_quantizer.FP_Quantize`).

    Args:
        q_bits: 4, 6, 8 or 12.
        mantissa_bits: of the format; follows from ``q_bits``.
        group_size: values that share a scale.
        q_dtype: of the quantized tensor: ``torch.uint8``.
    """

    q_bits: int = 8
    mantissa_bits: int = 3
    group_size: int = 512
    q_dtype: torch.dtype = torch.uint8
