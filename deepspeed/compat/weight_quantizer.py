"""Weights of a whole checkpoint or model as 8-bit integers with scales per group, as Megatron's inference took them."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.accelerator import get_accelerator

__all__ = ["WeightQuantization"]

_MEGATRON = {
    "mlp.dense_4h_to_h.weight": "mlp4hh_scales",
    "mlp.dense_h_to_4h.weight": "mlph4h_scales",
    "attention.query_key_value.weight": "qkv_scales",
    "attention.dense.weight": "dense_scales",
}


class WeightQuantization:
    """Collects the scales of the layers that it has seen, by kind of weight.

    Args:
        mlp_extra_grouping: weights of feed-forward parts have twice as many groups.
        mp_size: ranks that share the weights, of which each is a part.
    """

    def __init__(self, mlp_extra_grouping: bool = True, mp_size: int = 1) -> None:
        self.dense_scales: list[Tensor] = []
        self.qkv_scales: list[Tensor] = []
        self.mlp4hh_scales: list[Tensor] = []
        self.mlph4h_scales: list[Tensor] = []
        self.mlp_extra_grouping = mlp_extra_grouping
        self.mp_size = mp_size

    def quantize_data(
        self, data: Tensor, quantize_bits: int, groups: int, key: str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Integers (int8) of the shape of ``data``, and by what each group was multiplied, [groups, 1]. ``groups`` are
        equal runs of elements. ValueError: they are not."""
        if data.numel() % groups:
            raise ValueError(
                f"{key or 'a weight'} of {data.numel()} elements cannot be {groups} equal groups"
            )
        half = 1 << (quantize_bits - 1)
        flat = data.detach().float().reshape(groups, -1)
        factors = (2 * half) / (2 * flat.abs().amax(1, keepdim=True) + 1e-5)
        codes = (flat * factors).round_().clamp_(-half, half - 1)
        return codes.to(torch.int8).reshape(data.shape), factors

    def is_mlp(self, data: Tensor, merge_count: int = 1) -> bool:
        """Whether one extent of the whole matrix is four times the other."""
        return self._is_times(4, data, merge_count)

    def is_qkv(self, data: Tensor) -> bool:
        """Whether one extent of the whole matrix is three times the other."""
        return self._is_times(3, data, 1)

    def _is_times(self, factor: int, data: Tensor, parts: int) -> bool:
        rows, columns = data.shape
        count = self.mp_size * parts
        return count * rows == factor * columns or count * columns == factor * rows

    def Quantize(
        self, value_list: list[Tensor], quantize_bits: int, groups: int, key: str, merge_dim: int = 0
    ) -> list[Tensor]:
        """The integers of each part of the weight called ``key``; what they are multiplied with is remembered."""
        if self.mlp_extra_grouping and self.is_mlp(value_list[0], len(value_list)):
            groups *= 2
        made = [self.quantize_data(value, quantize_bits, groups, key) for value in value_list]
        factors = torch.cat([each for _, each in made], merge_dim)
        scale = (1 / factors).view(1, -1).to(get_accelerator().current_device_name())
        kind = next((kind for name, kind in _MEGATRON.items() if name in key), "dense_scales")
        getattr(self, kind).append(scale)
        value_list[:] = [codes for codes, _ in made]
        return value_list

    def merge_layer_scales(self, layer_scales: list[Tensor]) -> Tensor:
        """[1, weights, longest]: the scales of one layer, with zeros behind the shorter ones."""
        longest = max(scale.shape[-1] for scale in layer_scales)
        padded = [nn.functional.pad(scale, (0, longest - scale.shape[-1])) for scale in layer_scales]
        return torch.cat(padded).unsqueeze(0)

    def merge_scales(self) -> Tensor:
        """[layers, 4, longest]: fused projection, projection behind the attention, going in, coming out."""
        return torch.cat([self.merge_layer_scales(list(layer)) for layer in self._layers()])

    def merge_scales_split(self, split_count: int) -> list[list[Tensor]]:
        """The same for each of ``split_count`` ranks: a list of layers [1, 4, longest]."""
        ranks: list[list[Tensor]] = [[] for _ in range(split_count)]
        for layer in self._layers():
            parts = [scale.chunk(split_count, -1) for scale in layer]
            for rank, own in enumerate(ranks):
                own.append(self.merge_layer_scales([part[rank] for part in parts]))
        return ranks

    def _layers(self) -> Any:
        return zip(self.qkv_scales, self.dense_scales, self.mlph4h_scales, self.mlp4hh_scales, strict=True)

    def sd_quantize_megatron(
        self, sd: MutableMapping[str, Tensor], quantize_bits: int, groups: int
    ) -> tuple[MutableMapping[str, Tensor], Tensor]:
        """``sd`` with integers in the place of the weights of Megatron's layers, and ``merge_scales``."""
        for key in sd:
            if any(name in key for name in _MEGATRON):
                sd[key] = self.Quantize([sd[key]], quantize_bits, groups, key)[0]
        return sd, self.merge_scales()

    def model_quantize(
        self, model: nn.Module, quantize_policy: Mapping[type, Any], quantize_bits: int, groups: int
    ) -> tuple[nn.Module, Tensor]:
        """The values of the layers' weights become integers, in their own dtype; ``model`` itself, and the scales
        [layers, 4, longest].

        ``quantize_policy``: the class of layers -> the policy that says where their weights are. ValueError: the model
        has no such layer, or its projection is not one weight of the layer.
        """
        every: list[Tensor] = []
        for layer in [each for each in model.modules() if type(each) in quantize_policy]:
            policy = quantize_policy[type(layer)](layer)
            own = {id(param) for param in layer.parameters()}
            scales = []
            for weight in (policy.attention()[0], policy.attention()[2], policy.mlp()[0], policy.mlp()[2]):
                if id(weight) not in own:
                    raise ValueError(
                        f"{type(layer).__name__} has no fused weight: quantize it with init_inference(dtype=torch.int8)"
                    )
                more = 2 if self.mlp_extra_grouping and self.is_mlp(weight) else 1
                codes, factors = self.quantize_data(weight, quantize_bits, groups * more)
                with torch.no_grad():
                    weight.copy_(codes)
                scales.append((1 / factors).view(1, -1))
            every.append(self.merge_layer_scales(scales))
        if not every:
            raise ValueError(f"{type(model).__name__} has none of the layers that quantize_policy names")
        return model, torch.cat(every)
