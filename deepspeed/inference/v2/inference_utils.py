"""Dtypes of the ragged engine."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch


class DtypeEnum(Enum):
    """The value is the torch dtype; `DtypeEnum("bf16")` and the other usual words find the member."""

    fp16 = torch.float16
    fp32 = torch.float32
    bf16 = torch.bfloat16
    int8 = torch.int8

    @classmethod
    def _missing_(cls, value: Any) -> DtypeEnum | None:
        words = {
            "half": "fp16",
            "float16": "fp16",
            "float": "fp32",
            "float32": "fp32",
            "bfloat16": "bf16",
            "bfloat": "bf16",
        }
        word = str(value).removeprefix("torch.")
        return cls.__members__.get(words.get(word, word))
