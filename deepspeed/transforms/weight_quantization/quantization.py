"""Choice of the layers of a model that get weights of few bits: by the section ``weight_quantization``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from deepspeed.base.sharded import full_shape
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.sections.compression import WeightQuantConfig
from deepspeed.transforms.weight_quantization.layers import GroupwiseEmbedding, GroupwiseLinear
from deepspeed.transforms.weight_quantization.utils import Grouping, recursive_setattr
from deepspeed.zero.gathering.gathered import GatheredParameters

if TYPE_CHECKING:
    from deepspeed.transforms.module_transforms import TransformContext

SECTION = "weight_quantization"
_KINDS = (GroupwiseLinear, GroupwiseEmbedding)


class WeightQuantization:
    """Gives the layers that the section chooses weights of few bits; they are frozen.

    ``post_init_quant`` has settings by a part of the layers' names, the longest that fits counts;
    ``quantized_initialization`` those of all linear layers and embeddings; without either, ``num_bits``, ``q_groups``
    (of a row) and ``q_type`` hold for all linear layers.
    """

    name = "weight_quantization"
    after: tuple[str, ...] = ("tensor_parallel", "expert_parallel")
    before: tuple[str, ...] = ()

    def __init__(self, config: WeightQuantConfig) -> None:
        self.config = config

    def apply(self, module: nn.Module, context: TransformContext) -> None:
        """DeepSpeedConfigError: settings are wrong, or fit no layer of the model."""
        told = quantize_layers(module, self.config, context)
        if told is None and any(isinstance(each, _KINDS) for each in module.modules()):
            told = "the model's weights are quantized already"
        if told is None:
            raise DeepSpeedConfigError(f"{SECTION}: no layer of {type(module).__name__} has a name that fits")
        dtype = context.plan.precision.param
        for layer in module.modules():
            if isinstance(layer, _KINDS) and dtype is not None:
                layer.like = layer.like.to(dtype)
        context.say(told)


def quantize_layers(
    module: nn.Module, config: WeightQuantConfig, context: TransformContext | None = None
) -> str | None:
    """A line that says what was done in place; None: nothing. DeepSpeedConfigError: settings are wrong."""
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
            context.became(weight, made.weight)
        count += 1
    if not count:
        return None
    others = f"; {len(left)} whose size is no multiple of the group stay, such as {left[0]}" if left else ""
    return f"{count} layers store their weights in few bits: {before / 1e6:.1f} MB became {after / 1e6:.1f} MB{others}"


def _chosen(path: str, layer: nn.Module, config: WeightQuantConfig) -> dict[str, Any] | None:
    """The settings of a layer, None if it stays as it is."""
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
    """``model`` with the layers that ``weight_quantization.post_init_quant`` names changed in place."""
    quantize_layers(model, WeightQuantConfig.model_validate(ds_config.get(SECTION, {})))
    return model
