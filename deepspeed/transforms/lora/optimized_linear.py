"""Linear layers with frozen weights, quantized or not, and low-rank adapters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

import deepspeed.comm as dist
from deepspeed.base.logging import warning_once
from deepspeed.checkpoint.placement import placement_of
from deepspeed.transforms.lora.config import LoRAConfig, QuantizationConfig
from deepspeed.transforms.lora.quantization import (
    QuantizedLinear,
    QuantizedParameter,
    frozen_linear,
    quantize_assigned,
    quantize_gathered,
    quantize_state_dict,
)
from deepspeed.zero.gathering.gathered_parameters import GatheredParameters


class OptimizedLinear(nn.Module):
    """Factory of linear layers by config: ``linear_cls`` without any, a `QuantizedLinear` with a
    ``quantization_config`` alone, else a `LoRAOptimizedLinear`.

    Args:
        input_dim, output_dim: sizes.
        bias: whether the layer has a bias.
        lora_config, quantization_config: select the kind of layer.
        device, dtype: of the weights.
        linear_cls: class of plain layers.
    """

    def __new__(
        cls,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: type[nn.Module] = nn.Linear,
    ) -> Any:
        for name, given, kind in (
            ("lora_config", lora_config, LoRAConfig),
            ("quantization_config", quantization_config, QuantizationConfig),
        ):
            if given is not None and not isinstance(given, kind):
                raise TypeError(f"{name} must be a {kind.__name__}, got {type(given).__name__}")
        if lora_config is not None:
            return LoRAOptimizedLinear(
                input_dim, output_dim, bias, lora_config, quantization_config, device, dtype, linear_cls
            )
        if quantization_config is not None:
            layer = QuantizedLinear(input_dim, output_dim, bias, quantization_config, dtype)
            return layer if device is None else layer.to(device)
        return linear_cls(input_dim, output_dim, bias=bias, device=device, dtype=dtype)


class LoRAOptimizedLinear(nn.Module):
    """Computes ``x @ weight.T + lora_alpha / lora_r * B(A(x))``: ``weight`` is frozen, and quantized if there is a
    ``quantization_config``; ``lora_weight_1`` (A, random) and ``lora_weight_2`` (B, zero) are trained.

    With ``delay_lora_init`` the weight stays unquantized, to be loaded, until `init_lora`; if ``quantizes_loaded`` is
    set, a parameter that a loader assigns to it (as Transformers does) is quantized immediately. The state dict has
    ``weight`` as stored; loading also accepts floating-point values.

    Args:
        input_dim, output_dim, bias, device, dtype, linear_cls: as for `OptimizedLinear`; the bias is frozen.
        lora_config: the adapters.
        quantization_config: storage format of ``weight``; None: unquantized.

    Raises:
        ValueError: no ``lora_config``, or an invalid one (`LoRAConfig`).
    """

    tp_classes: ClassVar[Mapping[str, type[nn.Module]]] = {}
    """The split forms, which `parallel/tensor/low_rank.py` declares."""

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        lora_config: LoRAConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
        device: Any = None,
        dtype: torch.dtype = torch.bfloat16,
        linear_cls: type[nn.Module] = nn.Linear,
    ) -> None:
        super().__init__()
        if lora_config is None:
            raise ValueError(
                "LoRAOptimizedLinear needs a lora_config; use OptimizedLinear for layers without one"
            )
        _check(lora_config)
        self.input_dim, self.output_dim = input_dim, output_dim
        self.lora_config, self.quantization_config = lora_config, quantization_config
        self.device, self.dtype = device, dtype
        self.linear_cls = linear_cls
        self.disabled = False
        self.offloads = lora_config.offload or lora_config.offload_ratio >= 0.5
        self.has_adapters = False
        plain: Any = linear_cls(input_dim, output_dim, bias=bias, device=device, dtype=dtype)
        self.quantizes_loaded = False
        self.weight = plain.weight.requires_grad_(False)  # not a copy: it may already be partitioned
        self.bias = plain.bias.requires_grad_(False) if bias else None
        self.register_load_state_dict_pre_hook(quantize_state_dict)
        if not lora_config.delay_lora_init:
            self.init_lora()

    def disable(self) -> None:
        """Make this a plain linear layer, without adapters or quantization. Call it before `init_lora`."""
        self.disabled = True

    def init_lora(self) -> None:
        """Create the adapters and quantize the weight, if not done yet. The adapters are then trained."""
        if self.disabled:
            return
        if self.has_adapters:
            for adapter in (self.lora_weight_1, self.lora_weight_2):
                adapter.requires_grad_(True)
            return
        self.has_adapters = True
        config, like = self.lora_config, {"device": self.weight.device, "dtype": self.dtype}
        self.lora_scaling_factor = config.lora_alpha / config.lora_r
        make: Any = self.linear_cls  # not nn.Linear, which `Init` replaces
        self.lora_weight_1 = make(self.input_dim, config.lora_r, bias=False, **like)
        self.lora_weight_2 = make(config.lora_r, self.output_dim, bias=False, **like)
        nn.init.kaiming_uniform_(self.lora_weight_1.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_weight_2.weight)
        if self.quantization_config is not None and not isinstance(self.weight, QuantizedParameter):
            self.weight = quantize_gathered(self.weight, self.quantization_config)
        self.weight.requires_grad_(False)
        if self.offloads:
            self.weight.data = self.weight.data.to("cpu")

    def full_weight(self) -> Tensor:
        """Return the frozen weight [outputs, inputs] in floating point."""
        return _values(self.weight)

    def merged_weight(self) -> Tensor:
        """Return the weight [outputs, inputs] of an equivalent plain layer, with the adapters merged."""
        weight = self.full_weight().detach()
        if not self.has_adapters:
            return weight
        added = self.lora_weight_2.weight.detach() @ self.lora_weight_1.weight.detach()
        return weight + (self.lora_scaling_factor * added).to(weight.device, weight.dtype)

    def linear_without_F_linear(self, input: Tensor, weight: Tensor) -> Tensor:
        """Compute ``input @ weight.T`` as one matrix product."""
        rows = input.reshape(-1, input.shape[-1])
        return torch.matmul(rows, weight.t()).view(*input.shape[:-1], weight.shape[0])

    def forward(self, input_tensor: Tensor) -> Tensor:
        if not self.has_adapters:
            return functional.linear(input_tensor, self.weight, self.bias)
        base = frozen_linear(input_tensor, self.weight, self.bias)
        return base + self.lora_scaling_factor * self.lora_weight_2(self.lora_weight_1(input_tensor))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and self.__dict__.get("quantizes_loaded"):
            value = quantize_assigned(value, self.quantization_config)
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        stored = self.quantization_config
        kind = f"{stored.q_bits} bits" if stored is not None and self.has_adapters else str(self.dtype)
        return f"input_dim={self.input_dim}, output_dim={self.output_dim}, r={self.lora_config.lora_r}, weight={kind}"


def _check(config: LoRAConfig) -> None:
    if config.base_weight_sharding != 1:
        text = (
            f"base_weight_sharding={config.base_weight_sharding}: frozen weights are not sharded by the "
            "layer itself; use ZeRO stage 3, which shards them over all ranks, still quantized"
        )
        if config.base_weight_sharding != (dist.get_world_size() if dist.is_initialized() else 1):
            raise ValueError(f"{text}. It must be 1 or the number of ranks")
        warning_once(f"{text}; at stages 0 to 2 every rank keeps full copies")
    if config.lora_r < 1:
        raise ValueError(f"lora_r={config.lora_r} must be at least 1")
    if not 0.0 <= config.offload_ratio <= 1.0:
        raise ValueError(f"offload_ratio={config.offload_ratio}: must be in [0, 1]")


# Export of a model with adapters as the equivalent plain model.


def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict, on the host, of the plain model equivalent to ``model``: weights in floating point, with
    adapters merged. It loads into the unmodified model class, for generation or saving.

    Collective at ZeRO stage 3: modules are gathered one after another, and every rank gets all weights. ValueError:
    tensor parallelism has split some.
    """
    cut = [name for name, param in model.named_parameters() if "tp" in placement_of(param).split]
    if cut:
        raise ValueError(
            f"merged_state_dict: {len(cut)} weights such as {cut[0]} are split over ranks: save a checkpoint and load "
            "it into an engine without tensor parallelism first"
        )
    state: dict[str, Tensor] = {}
    _collect(model, "", state)
    return state


def _collect(module: nn.Module, prefix: str, state: dict[str, Tensor]) -> None:
    optimized = isinstance(module, LoRAOptimizedLinear)
    with GatheredParameters(module.parameters(recurse=optimized)):
        for name, parameter in module.named_parameters(recurse=False):
            state[f"{prefix}{name}"] = _on_host(_values(parameter))
        if optimized:
            state[f"{prefix}weight"] = _on_host(module.merged_weight())
            return
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            state[f"{prefix}{name}"] = _on_host(buffer)
    for name, child in module._modules.items():
        if child is not None:
            _collect(child, f"{prefix}{name}.", state)


def _values(parameter: nn.Parameter) -> Tensor:
    return parameter.dequantized() if isinstance(parameter, QuantizedParameter) else parameter


def _on_host(values: Tensor) -> Tensor:
    return values.detach().to("cpu", copy=True)
