"""Builders of the documented ops, one class each, generated from one table."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.ops.op_builder.table import OPS

ALL_OPS: dict[str, type[OpBuilder]] = {
    op.name: type(
        op.builder,
        (OpBuilder,),
        {"OP": op, "NAME": op.name, "BUILD_VAR": op.build_var, "__module__": __name__},
    )
    for op in OPS
}
"""Op name -> builder class."""


class FPQuantizerBuilder(ALL_OPS["fp_quantizer"]):
    """Builder with the properties of the op's formats."""

    @staticmethod
    def get_default_quant_dtype() -> torch.dtype:
        """Return the default dtype of quantized tensors."""
        return torch.uint8

    @staticmethod
    def get_quant_range(q_bits: int) -> float:
        """Return the largest number that ``q_bits`` bits represent. ValueError: there is no such format."""
        from deepspeed.ops.formats.small_floats import FORMATS

        if q_bits not in FORMATS:
            raise ValueError(f"q_bits={q_bits}: must be one of {', '.join(map(str, FORMATS))}")
        return FORMATS[q_bits].largest


ALL_OPS["fp_quantizer"] = FPQuantizerBuilder
globals().update({builder.__name__: builder for builder in ALL_OPS.values()})

__all__ = ["ALL_OPS", "OpBuilder"]
__all__ += [builder.__name__ for builder in ALL_OPS.values()]


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no op builder {name!r}; it has {', '.join(__all__)}")
