"""Ends of answers, and the padding behind them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def special_tokens(tokenizer: Any, module: Any) -> tuple[list[int], int]:
    """Tokens that end an answer, and the one behind the end: of ``tokenizer``, else of the generation config of
    ``module``."""
    source = tokenizer if tokenizer is not None else module.generation_config
    found = source.eos_token_id
    ends = [] if found is None else [found] if isinstance(found, int) else list(found)
    padding = source.pad_token_id
    return ends, padding if padding is not None else ends[0] if ends else 0


def until_the_end(answers: Tensor, ends: list[int]) -> Tensor:
    """[rows, length]: 1 up to and with the first of ``ends``, 0 behind."""
    ended = torch.isin(answers, torch.tensor(ends, dtype=answers.dtype, device=answers.device)).int()
    return (ended.cumsum(1) - ended == 0).int()
