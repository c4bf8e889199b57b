"""Weight-only quantization of linear layers and embeddings, by the section ``weight_quantization``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed.base.sharded import full_shape
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.sections.compression import WeightQuantConfig
from deepspeed.ops.formats.linear import frozen_linear
from deepspeed.transforms.weight_quantization.utils import (
    Grouping,
    GroupwiseDequantizer,
    GroupwiseQuantizer,
    concat_to_compat_param,
    parts_of_param,
    recursive_setattr,
)
from deepspeed.zero.gathering.gathered_parameters import GatheredParameters

if TYPE_CHECKING:
    from deepspeed.transforms.module_transforms import TransformContext


# A weight is one frozen uint8 parameter (``concat_to_compat_param``), so that ZeRO partitions and offloads it like any
# other: the integers travel between ranks, host memory and files.


_REPLACEMENT = "_ds_quantized"
"""Attribute of a weight: the parameter that replaces it in all layers that share it."""


class _QuantizedBase(nn.Module):
    """Base class of both layers: the quantized weight, and its values."""

    weight: nn.Parameter
    like: Tensor

    def _store(self, config: dict[str, Any], layer: nn.Module) -> None:
        weight: Any = layer.weight
        self.config = dict(config)
        self.full_shape = torch.Size(weight.shape)
        self.scale_dtype = torch.float16 if weight.dtype is torch.float16 else torch.float32
        # Holds the dtype of dequantized values, which follows casts of the module.
        self.register_buffer(
            "like", torch.empty(0, dtype=weight.dtype, device=weight.device), persistent=False
        )
        if not hasattr(weight, _REPLACEMENT):
            setattr(
                weight, _REPLACEMENT, concat_to_compat_param(*GroupwiseQuantizer(config).quantize(weight))
            )
        self._parameters["weight"] = getattr(weight, _REPLACEMENT)

    def values(self, dtype: torch.dtype | None = None) -> Tensor:
        """Dequantize the weight to its original shape. ``dtype``: default: that of the module."""
        parts = parts_of_param(self.weight.detach(), self.config, self.full_shape, self.scale_dtype)
        return GroupwiseDequantizer(self.config, dtype or self.like.dtype).dequantize(*parts)


class GroupwiseLinear(_QuantizedBase, nn.Linear):
    """Replaces ``pre_quant_layer``, and keeps its bias. ValueError: groups do not divide the weight."""

    def __init__(self, config: dict[str, Any], pre_quant_layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = pre_quant_layer.in_features, pre_quant_layer.out_features
        self._store(config, pre_quant_layer)
        self.register_parameter("bias", pre_quant_layer.bias)
        self.train(pre_quant_layer.training)

    def forward(self, input: Tensor) -> Tensor:
        return frozen_linear(input, lambda like: self.values(like.dtype), self.bias)


class GroupwiseEmbedding(_QuantizedBase, nn.Embedding):
    """Replaces ``pre_quant_layer``. ValueError: groups do not divide the weight."""

    def __init__(self, config: dict[str, Any], pre_quant_layer: nn.Embedding) -> None:
        nn.Module.__init__(self)
        for name in ("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "norm_type", "sparse"):
            setattr(self, name, getattr(pre_quant_layer, name))
        self.scale_grad_by_freq = False
        self._store(config, pre_quant_layer)
        self.train(pre_quant_layer.training)

    def forward(self, input: Tensor) -> Tensor:
        rows = self._rows(input.reshape(-1))
        if self.max_norm is not None:  # torch would clip the table itself
            rows = torch.renorm(rows, self.norm_type, 0, self.max_norm)
        return rows.view(*input.shape, self.embedding_dim)

    def _rows(self, tokens: Tensor) -> Tensor:
        """Return the rows of ``tokens``. Only they are dequantized, unless groups span several rows."""
        words, scale, least = parts_of_param(
            self.weight.detach(), self.config, self.full_shape, self.scale_dtype
        )
        maker = GroupwiseDequantizer(self.config, self.like.dtype)
        if maker.grouping.group_dim % 2 == 0:
            return maker.dequantize(words, scale, least)[tokens]
        return maker.dequantize(words[tokens], scale[tokens], least[tokens])


QuantizedLinear, QuantizedEmbedding = GroupwiseLinear, GroupwiseEmbedding
"""The documented names. (`deepspeed.transforms.lora` has another documented ``QuantizedLinear``, constructed from
sizes, with a weight in few-bit floating point. Both compute with ``ops/formats/linear.py``.)"""


SECTION = "weight_quantization"
_KINDS = (GroupwiseLinear, GroupwiseEmbedding)


class WeightQuantization:
    """Transform that quantizes and freezes the weights of the layers that the section selects.

    ``post_init_quant`` maps substrings of layer names to settings, and the longest match applies;
    ``quantized_initialization`` applies to all linear layers and embeddings; without either, ``num_bits``, ``q_groups``
    (per row) and ``q_type`` apply to all linear layers.
    """

    name = "weight_quantization"
    after: tuple[str, ...] = ("tensor_parallel", "expert_parallel")
    before: tuple[str, ...] = ()

    def __init__(self, config: WeightQuantConfig) -> None:
        self.config = config

    def apply(self, module: nn.Module, context: TransformContext) -> None:
        """Quantize ``module``. DeepSpeedConfigError: settings are invalid, or match no layer of the model."""
        summary = quantize_layers(module, self.config, context)
        if summary is None and any(isinstance(each, _KINDS) for each in module.modules()):
            summary = "the model's weights are already quantized"
        if summary is None:
            raise DeepSpeedConfigError(f"{SECTION}: no layer of {type(module).__name__} has a matching name")
        dtype = context.plan.precision.param
        for layer in module.modules():
            if isinstance(layer, _KINDS) and dtype is not None:
                layer.like = layer.like.to(dtype)
        context.report(summary)


def quantize_layers(
    module: nn.Module, config: WeightQuantConfig, context: TransformContext | None = None
) -> str | None:
    """Quantize the selected layers in place. Returns a summary line; None: no layer was quantized.
    DeepSpeedConfigError: settings are invalid."""
    count = before = after = 0
    left: list[str] = []
    for path, layer in list(module.named_modules()):
        chosen = _chosen(path, layer, config)
        if chosen is None:
            continue
        weight: Any = layer.weight
        try:
            fits = Grouping.of(chosen).fits(tuple(full_shape(weight)))
        except ValueError as error:
            raise DeepSpeedConfigError(f"{SECTION}: {error}") from error
        if not fits:
            left.append(path)
            continue
        kind: Any = GroupwiseLinear if isinstance(layer, nn.Linear) else GroupwiseEmbedding
        with GatheredParameters([weight]) if context is None else context.whole(weight):
            made = kind(chosen, layer)
            before += weight.nbytes
        after += made.weight.nbytes
        recursive_setattr(module, path, made)
        if context is not None:
            context.replace_param(weight, made.weight)
        count += 1
    if not count:
        return None
    others = (
        f"; {len(left)} unquantized (size not a multiple of the group), such as {left[0]}" if left else ""
    )
    return f"{count} layers quantized: {before / 1e6:.1f} MB became {after / 1e6:.1f} MB{others}"


def _chosen(path: str, layer: nn.Module, config: WeightQuantConfig) -> dict[str, Any] | None:
    """Return the settings of a layer; None if it is not quantized."""
    linear = type(layer) is nn.Linear
    if not linear and type(layer) is not nn.Embedding:
        return None
    if config.post_init_quant:
        keys = [key for key in config.post_init_quant if key in path]
        return config.post_init_quant[max(keys, key=len)] if keys else None
    if config.quantized_initialization:
        return config.quantized_initialization
    weight: Any = layer.weight
    columns = full_shape(weight)[1]
    if not linear or columns % config.q_groups:
        return None
    return {
        "num_bits": config.num_bits,
        "group_size": columns // config.q_groups,
        "group_dim": 1,
        "symmetric": config.q_type == "symmetric",
    }


def _init_group_wise_weight_quantization(model: nn.Module, ds_config: dict[str, Any]) -> nn.Module:
    """Quantize the layers that ``weight_quantization.post_init_quant`` names in place, and return ``model``."""
    quantize_layers(model, WeightQuantConfig.model_validate(ds_config.get(SECTION, {})))
    return model
