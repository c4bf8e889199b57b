"""Context manager that builds a model with optimized linear layers."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from deepspeed.transforms.lora.config import LoRAConfig, QuantizationConfig
from deepspeed.transforms.lora.optimized_linear import LoRAOptimizedLinear, OptimizedLinear

_MAKERS = ("from_pretrained", "from_config", "_from_config")


class Init:
    """``with Init(lora_config, quant_config): model = Model(...)`` creates `OptimizedLinear` layers instead of
    ``torch.nn.Linear``. Load weights, then call `init_lora`, which creates the adapters of the layers in
    ``target_mods`` and quantizes these layers.

    Transformers models created in the context by ``from_pretrained`` or ``from_config`` (of ``AutoModelForCausalLM`` or
    their own class) are complete when that returns: weights are quantized one by one during loading, adapters created,
    and everything else frozen.

    Args:
        lora_config: None: no adapters.
        quant_config: None: no quantization. Without adapters all layers are quantized on creation.
    """

    def __init__(
        self, lora_config: LoRAConfig | None = None, quant_config: QuantizationConfig | None = None
    ) -> None:
        self._lora_config = lora_config
        self._quant_config = quant_config
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Init:
        before = nn.Linear
        torch.nn.Linear = _replacement(before, self._lora_config, self._quant_config)  # type: ignore[misc]
        self._undo.append(lambda: setattr(torch.nn, "Linear", before))
        if self._lora_config is not None:
            self._undo.append(register_module_module_registration_hook(_mark_target).remove)
            self._patch_transformers()
        return self

    def __exit__(self, *args: Any, **kwargs: Any) -> None:
        while self._undo:
            self._undo.pop()()

    def _patch_transformers(self) -> None:
        if importlib.util.find_spec("transformers") is None:
            return
        from transformers import AutoModelForCausalLM, PreTrainedModel

        calls: list[str] = []  # active calls: models create submodels by the same functions
        for cls in (AutoModelForCausalLM, PreTrainedModel):
            for name in _MAKERS:
                if hasattr(cls, name):
                    self._undo.append(_init_after(cls, name, calls))


def _init_after(cls: type, name: str, calls: list[str]) -> Callable[[], None]:
    """Call `init_lora` after every outermost ``cls.name``; returns a function that undoes the patch."""
    own = cls.__dict__.get(name)
    made_by: Any = getattr(cls, name).__func__

    @functools.wraps(made_by)
    def complete(for_class: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        try:
            made = made_by(for_class, *args, **kwargs)
        finally:
            calls.pop()
        if not calls:
            init_lora(made[0] if isinstance(made, tuple) else made)  # a tuple: with output_loading_info
        return made

    setattr(cls, name, classmethod(complete))
    return (lambda: delattr(cls, name)) if own is None else (lambda: setattr(cls, name, own))


def init_lora(model: nn.Module) -> None:
    """Freeze ``model``, and create adapters in its `LoRAOptimizedLinear` layers named in their ``target_mods``; the
    others become plain layers. If no layer has such a name, all get adapters. Existing adapters are kept and
    trained."""
    model.requires_grad_(False)
    layers = {
        path: module for path, module in model.named_modules() if isinstance(module, LoRAOptimizedLinear)
    }
    meant = {path for path, module in layers.items() if not path or _is_target(path, module)}
    seen = 0
    for path, module in layers.items():
        if meant and path not in meant:
            module.disable()
        else:  # offloaded layers are spread evenly
            config, seen = module.lora_config, seen + 1
            share = config.offload_ratio
            module.offloads = config.offload or int(seen * share) > int((seen - 1) * share)
        module.init_lora()


def _is_target(path: str, module: LoRAOptimizedLinear) -> bool:
    return any(part in module.lora_config.target_mods for part in path.split("."))


def _mark_target(parent: nn.Module, name: str, layer: nn.Module | None) -> None:
    """Let a layer registered under a target's name quantize its weight on loading."""
    if isinstance(layer, LoRAOptimizedLinear) and _is_target(name, layer):
        layer.quantizes_loaded = layer.quantization_config is not None


def _replacement(
    original: type[nn.Module], lora: LoRAConfig | None, quantization: QuantizationConfig | None
) -> type[nn.Module]:
    class LinearMeta(type(original)):
        def __instancecheck__(cls, instance: Any) -> bool:
            """Accept optimized layers too: models use ``isinstance`` to initialize their linear layers."""
            return isinstance(instance, (original, LoRAOptimizedLinear))

    class Linear(original, metaclass=LinearMeta):  # type: ignore[misc, valid-type]
        """Temporary replacement of ``torch.nn.Linear``, which creates instances of other classes."""

        def __new__(
            cls, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None
        ) -> Any:
            delayed = None if lora is None else LoRAConfig(**{**vars(lora), "delay_lora_init": True})
            return OptimizedLinear(
                in_features,
                out_features,
                bias,
                delayed,
                quantization,
                device,
                dtype or torch.get_default_dtype(),
                original,
            )

    return Linear
