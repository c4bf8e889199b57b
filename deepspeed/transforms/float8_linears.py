"""The section ``fp8`` for an unmodified model: its linear layers use FP8 products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from deepspeed.base.accelerator import get_accelerator
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.sections.precision import Float8Config
from deepspeed.ops.float8 import ALIGNMENT, Rounded, float8_linear, has_float8_products

if TYPE_CHECKING:
    from deepspeed.transforms.module_transforms import TransformContext


class Float8Linears:
    """Replaces the forward of plain linear layers. Parameters, names, classes and checkpoints stay the same."""

    name, after, before = "fp8", (), ()

    def __init__(self, section: Float8Config) -> None:
        self.section = section

    def apply(self, module: nn.Module, context: TransformContext) -> None:
        """Replace the forwards. DeepSpeedConfigError: the device has no FP8 products, or the model no suitable layers.
        Collective."""
        device = torch.device(get_accelerator().current_device_name())
        is_meta = any(param.is_meta for param in module.parameters())  # planning, perhaps for another machine
        has_products = is_meta or has_float8_products(device)
        if not has_products and not self.section.emulate:
            raise DeepSpeedConfigError(
                f"fp8.enabled: {_named(device)} does not support 8-bit floating-point matrix products "
                "(NVIDIA GPUs do from compute capability 8.9). Remove the section, or set fp8.emulate: true "
                "for the same numerics without the speed-up"
            )
        linears = {path: each for path, each in module.named_modules() if _is_plain(each)}
        chosen = {path: each for path, each in linears.items() if self._takes(path, each)}
        found = torch.tensor([len(chosen)], device="cpu" if is_meta else device)
        if not is_meta:  # a pipeline's stage may have none of them
            context.mesh.communicator("pp").all_reduce_max(found).wait()
        if not found:
            raise DeepSpeedConfigError(
                f"fp8.enabled: none of the model's {len(linears)} linear layers can use it: their sizes "
                f"must be multiples of {ALIGNMENT} and their names not in fp8.exclude={self.section.exclude}"
            )
        rounded = Rounded()
        for layer in chosen.values():
            vars(layer)["forward"] = Float8Forward(layer, rounded, emulate=is_meta or not has_products)
        context.report(
            f"{len(chosen)} of {len(linears)} linear layers, products {'' if has_products else 'emulated '}in 8 bits"
        )

    def _takes(self, path: str, layer: nn.Linear) -> bool:
        fits = layer.in_features % ALIGNMENT == 0 and layer.out_features % ALIGNMENT == 0
        return fits and not set(path.split(".")) & set(self.section.exclude)


class Float8Forward:
    """Replacement of a linear layer's ``forward``."""

    def __init__(self, layer: nn.Linear, rounded: Rounded, *, emulate: bool) -> None:
        self.layer = layer
        self.rounded = rounded
        self.emulate = emulate

    def __call__(self, input: Tensor) -> Tensor:
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))
        weight, bias = self.layer.weight, self.layer.bias
        return float8_linear(input, weight, bias, emulate=self.emulate, rounded=self.rounded)


def _is_plain(module: Any) -> TypeGuard[nn.Linear]:
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "forward" not in vars(module)
    )


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"a {device.type.upper()}"
