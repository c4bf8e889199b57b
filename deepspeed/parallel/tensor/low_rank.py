"""Column- and row-parallel forms of layers with frozen weights and low-rank adapters.

The plan splits the adapters, which are linear layers, themselves: beside a column-parallel weight the second one,
beside a row-parallel weight the first one. The other stays whole (E. Hu et al.: LoRA, 2021).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from deepspeed.parallel.tensor.layers import LinearAllreduce, LinearLayer, TensorParallelLayer
from deepspeed.transforms.lora.optimized_linear import LoRAOptimizedLinear
from deepspeed.transforms.lora.quantization import QuantizedParameter, frozen_linear

QUANTIZED = (
    "a quantized weight of LoRAOptimizedLinear cannot be split by tensor parallelism, as its blocks share scales: "
    "leave out its quantization_config, or use ZeRO stage 3, which shards it as stored"
)


class _Adapted(TensorParallelLayer):
    """Adds the adapters of ``module`` to the product of the split weight."""

    has_adapters: bool
    lora_scaling_factor: float
    lora_weight_1: nn.Module
    lora_weight_2: nn.Module

    def __init__(self, module: LoRAOptimizedLinear, *args: Any, **options: Any) -> None:
        if isinstance(module.weight, QuantizedParameter):
            raise ValueError(QUANTIZED)
        if not (module.has_adapters or module.disabled):
            raise ValueError(
                "LoRAOptimizedLinear with delay_lora_init is split by tensor parallelism only after init_lora(): call "
                "it, for example by deepspeed.linear.init_lora(model), before deepspeed.initialize"
            )
        split_weight: Any = super().__init__  # of the linear layer that follows among the bases
        split_weight(module, *args, **options)
        for name, adapter in module.named_children():
            self.add_module(name, adapter)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = super().forward(input)
        if not self.has_adapters:
            return output
        return output + self.lora_scaling_factor * self.lora_weight_2(self.lora_weight_1(input))

    def _product(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return frozen_linear(inputs, weight, bias)


class LoRAColumns(_Adapted, LinearLayer):
    """A column-parallel linear layer with adapters."""


class LoRARows(_Adapted, LinearAllreduce):
    """A row-parallel linear layer with adapters."""


LoRAOptimizedLinear.tp_classes = {"column": LoRAColumns, "row": LoRARows}
