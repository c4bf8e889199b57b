"""Dtypes by their short names. A config is read and checked with these, without the seconds of importing torch."""

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
    "bfp16": "bf16",  # the only word for it of early releases
    "float": "fp32",
    "double": "fp64",
}


class Dtype(str, Enum):
    """A dtype, equal to its short name: `Dtype.bf16 == "bf16"`.

    The constructor takes every spelling, in any case, and torch's dtype itself: `Dtype("torch.half") is Dtype.fp16`.
    ValueError for anything else.
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
        """Its name in torch, such as `bfloat16`."""
        return _LONG_NAMES[self.value]

    @property
    def torch(self) -> torch.dtype:
        import torch  # where a tensor is made of it, torch is loaded already

        return getattr(torch, self.long_name)


def torch_dtype(dtype: Dtype | None) -> torch.dtype | None:
    """The dtype of torch, of a setting that may be absent."""
    return None if dtype is None else dtype.torch
