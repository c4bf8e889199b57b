"""Dtypes by short name, so that a config can be read and checked without the seconds of importing torch."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_LONG_NAMES = {"fp16": "float16", "fp32": "float32", "bf16": "bfloat16", "int8": "int8", "fp64": "float64"}
_SHORT_NAMES = {
    **{long: short for short, long in _LONG_NAMES.items()},
    "half": "fp16",
    "bfloat": "bf16",
    "bfp16": "bf16",  # the only spelling in early releases
    "float": "fp32",
    "double": "fp64",
}


class Dtype(str, Enum):
    """A dtype, equal to its short name: `Dtype.bf16 == "bf16"`.

    The constructor takes every spelling, in any case, and torch's dtypes: `Dtype("torch.half") is Dtype.fp16`.
    ValueError: anything else.
    """

    fp16 = "fp16"
    fp32 = "fp32"
    bf16 = "bf16"
    int8 = "int8"
    fp64 = "fp64"

    @classmethod
    def _missing_(cls, value: Any) -> Dtype | None:
        word = str(value).lower().removeprefix("torch.")
        return cls.__members__.get(_SHORT_NAMES.get(word, word))

    def __str__(self) -> str:
        return self.value

    @property
    def long_name(self) -> str:
        """Return the name in torch, such as `bfloat16`."""
        return _LONG_NAMES[self.value]

    @property
    def torch(self) -> torch.dtype:
        import torch  # callers that make tensors have loaded torch already

        return getattr(torch, self.long_name)


def torch_dtype(dtype: Dtype | None) -> torch.dtype | None:
    """Return torch's dtype of an optional setting."""
    return None if dtype is None else dtype.torch
