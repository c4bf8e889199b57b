"""Numbers of few bits in words of 32, one after another."""

from __future__ import annotations

import torch
from torch import Tensor


def bits_of(numbers: Tensor, bits: int) -> Tensor:
    """int32 [n * bits / 32, m] of [n, m]: each column is one number of many bits, the first ones lowest."""
    words = torch.zeros(-(-numbers.shape[0] * bits // 32), numbers.shape[1], dtype=torch.int32)
    for column, values in enumerate(numbers.T.tolist()):
        whole = sum(value << (bits * place) for place, value in enumerate(values))
        for word in range(words.shape[0]):
            found = (whole >> (32 * word)) & 0xFFFFFFFF
            words[word, column] = found - 2**32 if found >= 2**31 else found
    return words
