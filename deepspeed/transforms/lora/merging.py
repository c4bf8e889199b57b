"""A model with adapters as the plain model that computes the same."""

from __future__ import annotations

from torch import Tensor, nn

from deepspeed.transforms.lora.optimized_linear import LoRAOptimizedLinear
from deepspeed.transforms.lora.quantization import QuantizedParameter
from deepspeed.zero.gathering.gathered import GatheredParameters


def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict, on the host, of ``model`` without optimized layers: weights in floating point, with what the
    adapters add. It loads into the model as its class makes it, to generate or to be saved.

    At ZeRO stage 3 collective: one module after another is gathered, and every rank gets all of them.
    """
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
