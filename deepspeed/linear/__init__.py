"""Linear layers with frozen, quantized weights and low-rank adapters."""

from __future__ import annotations

from deepspeed.linear.config import LoRAConfig, QuantizationConfig
from deepspeed.linear.context_manager import Init, init_lora
from deepspeed.linear.merging import merged_state_dict
from deepspeed.linear.optimized_linear import OptimizedLinear

__all__ = ["Init", "LoRAConfig", "OptimizedLinear", "QuantizationConfig", "init_lora", "merged_state_dict"]
