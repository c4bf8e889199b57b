"""Linear layers with frozen, quantized weights and low-rank adapters."""

from deepspeed.transforms.lora.config import LoRAConfig, QuantizationConfig
from deepspeed.transforms.lora.context import Init, init_lora
from deepspeed.transforms.lora.optimized_linear import OptimizedLinear, merged_state_dict

__all__ = ["Init", "LoRAConfig", "OptimizedLinear", "QuantizationConfig", "init_lora", "merged_state_dict"]
