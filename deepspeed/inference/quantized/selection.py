"""Selection of the linear layers that get integer weights, by the keys ``dtype`` and ``quant`` of `init_inference`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from deepspeed.config.sections.compression import WeightQuantConfig
from deepspeed.inference.config import DeepSpeedInferenceConfig, QuantTypeEnum
from deepspeed.inference.kernels import IntegerLinear, quantize_linears
from deepspeed.ops.small_product import RUNS, QuantizedMatrix, padded_columns
from deepspeed.parallel.tensor.layers import LinearAllreduce, LinearLayer
from deepspeed.transforms.lora.config import QuantizationConfig
from deepspeed.transforms.lora.quantization import FrozenLinear, make_quantized
from deepspeed.transforms.weight_quantization.quantization import quantize_layers


class QuantizedPart(IntegerLinear):
    """The integer weight of a tensor-parallel layer, in place of its weight parameter."""

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.matrix.shape)


def settings_of_integers(config: DeepSpeedInferenceConfig) -> list[str]:
    """Return the given keys of ``quant`` that only take effect with ``dtype="int8"``."""
    quant = config.quant
    given = sorted(quant.weight.model_fields_set & {"num_bits", "q_groups", "q_type"})
    activation = ["quant.activation"] if "activation" in quant.model_fields_set else []
    return [f"quant.weight.{key}" for key in given] + activation if quant.enabled else []


def quantize_as_configured(
    module: nn.Module, config: DeepSpeedInferenceConfig, dtype: torch.dtype
) -> Iterator[str]:
    """Quantize layers in place; yield a log line per change. ``dtype``: dtype of activations.

    ValueError: settings are invalid, or fit no layer.
    """
    weight = config.quant.weight
    post, initial = weight.post_init_quant, weight.quantized_initialization
    if config.quant.enabled and weight.enabled and (post or initial):
        yield from _quantize_layers(module, post_init_quant=post, quantized_initialization=initial)
    if config.dtype is not torch.int8:
        return
    if QuantTypeEnum(weight.q_type) is QuantTypeEnum.asym:
        bits, groups = weight.num_bits, weight.q_groups
        yield from _quantize_layers(module, num_bits=bits, q_groups=groups, q_type="asymmetric")
        return
    yield quantize_linears(module, weight.num_bits, weight.q_groups, dtype)
    parts = quantize_parts(module, weight.num_bits, weight.q_groups, dtype)
    if parts:
        yield f"{parts} tensor-parallel layers have weights of {weight.num_bits} bits"
    activation = config.quant.activation
    if config.quant.enabled and activation.enabled and "activation" in config.quant.model_fields_set:
        if activation.num_bits != 8 or QuantTypeEnum(activation.q_type) is not QuantTypeEnum.sym:
            raise ValueError(
                f"quant.activation: num_bits={activation.num_bits}, q_type={activation.q_type}: activations "
                "can only be quantized to 8 bits, symmetric; set these, or 'enabled': false"
            )
        layers = [layer for layer in module.modules() if isinstance(layer, IntegerLinear)]
        for layer in layers:
            layer.rounds_inputs = True
        yield f"{len(layers)} layers quantize their inputs to 8 bits"


def _quantize_layers(module: nn.Module, **settings: Any) -> Iterator[str]:
    line = quantize_layers(module, WeightQuantConfig(**settings))
    if line is not None:
        yield line


def quantize_parts(module: nn.Module, bits: int, groups: int, dtype: torch.dtype) -> int:
    """Quantize tensor-parallel layers as ``quantize_linears`` does whole ones; return how many were changed."""
    owners = Counter(id(param) for layer in module.modules() for param in layer._parameters.values())
    count = 0
    for layer in list(module.modules()):
        if not isinstance(layer, (LinearLayer, LinearAllreduce)):
            continue
        weight: Any = layer.weight
        if not isinstance(weight, nn.Parameter) or owners[id(weight)] > 1 or layer.cut.shared():
            continue
        matrix = weight.detach().T if layer.transposed else weight.detach()
        run = RUNS[bits]
        columns = padded_columns(matrix.shape[1], bits)
        group = columns // groups if columns % groups == 0 and columns // groups % run == 0 else None
        made = QuantizedMatrix.of(matrix, bits, group)
        del layer.weight
        layer.weight = QuantizedPart(made, None, dtype)  # type: ignore[assignment]
        count += 1
    return count


def quantize_to_fp6(module: nn.Module) -> str:
    """Store the weights of linear layers as 6-bit floating-point numbers (W6A16), except weights shared with other
    layers. Return a log line."""
    owners = Counter(id(param) for layer in module.modules() for param in layer._parameters.values())
    config = QuantizationConfig(q_bits=6, mantissa_bits=2)
    count = before = after = 0
    for layer in module.modules():
        weight: Any = layer._parameters.get("weight")
        parallel = isinstance(layer, (LinearLayer, LinearAllreduce))
        if not (parallel or type(layer) is nn.Linear) or weight is None or owners[id(weight)] > 1:
            continue
        stored = make_quantized(weight.detach(), config)
        if parallel:
            if layer.transposed or layer.cut.shared():  # type: ignore[union-attr, operator]
                continue
            holder = FrozenLinear(1, 1, bias=False, device="meta")
            holder.weight = stored
            holder.shape = weight.shape  # type: ignore[assignment]
            del layer.weight
            layer.weight = holder  # type: ignore[assignment]
        else:
            layer.weight = stored
            layer.__class__ = FrozenLinear
        count, before, after = count + 1, before + weight.nbytes, after + stored.nbytes
    return f"{count} linear layers have weights of 6 bits: {before / 1e6:.1f} MB became {after / 1e6:.1f} MB"
