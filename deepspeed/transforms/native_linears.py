"""The section ``native_products`` for an unmodified model: linear layers use the native library's fp32 products."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from deepspeed.ops.transformer.products import NativeLinear, is_faster

if TYPE_CHECKING:
    from deepspeed.transforms.module_transforms import TransformContext


class NativeLinears:
    """Turns plain linear layers into native ones. Parameters, names and checkpoints stay the same."""

    name, after, before = "native_products", (), ()

    def apply(self, module: nn.Module, context: TransformContext) -> None:
        if not is_faster():
            context.report("no native kernels for this processor; using torch")
            return
        plain = [each for each in module.modules() if type(each) is nn.Linear and "forward" not in vars(each)]
        for layer in plain:
            layer.__class__ = NativeLinear
        context.report(f"{len(plain)} linear layers use native fp32 kernels")
