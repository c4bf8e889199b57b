"""Making the linear layers of an unchanged model optimized ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.linear.config import LoRAConfig, QuantizationConfig
from deepspeed.linear.optimized_linear import LoRAOptimizedLinear, OptimizedLinear


class Init:
    """``with Init(lora_config, quant_config): model = Model(...)`` makes `OptimizedLinear` layers where the model asks
    for ``torch.nn.Linear``. Load weights, then call `init_lora`, which makes adapters and quantizes the layers among
    ``target_mods``.

    Args:
        lora_config: None: no adapters.
        quant_config: None: not quantized. Without adapters all layers are quantized when they are made.
    """

    def __init__(
        self, lora_config: LoRAConfig | None = None, quant_config: QuantizationConfig | None = None
    ) -> None:
        self._lora_config = lora_config
        self._quant_config = quant_config
        self._before: list[type[nn.Module]] = []

    def __enter__(self) -> Init:
        self._before.append(nn.Linear)
        torch.nn.Linear = _in_place_of(  # type: ignore[misc]
            nn.Linear, self._lora_config, self._quant_config
        )
        return self

    def __exit__(self, *args: Any, **kwargs: Any) -> None:
        torch.nn.Linear = self._before.pop()  # type: ignore[misc]


def init_lora(model: nn.Module) -> None:
    """Freeze ``model``, and make the adapters of its `LoRAOptimizedLinear` layers whose name is among their
    ``target_mods``; the others stay plain layers. In a model that has no layer of such a name, all get adapters."""
    model.requires_grad_(False)
    layers = {
        path: module for path, module in model.named_modules() if isinstance(module, LoRAOptimizedLinear)
    }
    meant = {path for path, module in layers.items() if not path or _is_target(path, module)}
    seen = 0
    for path, module in layers.items():
        if meant and path not in meant:
            module.disable()
        else:  # of every so many layers, one
            config, seen = module.lora_config, seen + 1
            share = config.offload_ratio
            module.offloads = config.offload or int(seen * share) > int((seen - 1) * share)
        module.init_lora()


def _is_target(path: str, module: LoRAOptimizedLinear) -> bool:
    return any(part in module.lora_config.target_mods for part in path.split("."))


def _in_place_of(
    original: type[nn.Module], lora: LoRAConfig | None, quantization: QuantizationConfig | None
) -> type[nn.Module]:
    class Linear(original):  # type: ignore[misc, valid-type]
        """What ``torch.nn.Linear`` is meanwhile; its instances are of other classes."""

        def __new__(
            cls, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
        ) -> Any:
            delayed = None if lora is None else LoRAConfig(**{**vars(lora), "delay_lora_init": True})
            made = OptimizedLinear(
                in_features,
                out_features,
                bias,
                delayed,
                quantization,
                device,
                dtype or torch.get_default_dtype(),
                original,
            )
            return made

    return Linear
