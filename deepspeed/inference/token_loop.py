"""The loop that chooses tokens, as Transformers' ``generate`` has it for greedy search and samples, over a forward that
computes only what goes on.

Processors, criteria and random numbers are those of the call, asked for and drawn in the same order, so that the tokens
are the same. Left out is what goes around a forward of any model: inputs that are prepared, masks that grow, and rows
that have ended, which Transformers computes on until the last one has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.host_program import largest_of

Forward = Callable[[Tensor, Sequence[int]], Tensor]
"""(tokens [rows, new], the numbers of the rows that go on) -> their logits [rows that go on, vocabulary]."""

_USUAL = ("_sample", "_prefill", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


def is_usual(kind: type[Any]) -> bool:
    """Whether the loop of models of this class is that of Transformers."""
    from transformers import GenerationMixin

    return all(getattr(kind, name, None) is getattr(GenerationMixin, name, None) for name in _USUAL)


def takes(config: Any, criteria: Any, others: Sequence[Any]) -> bool:
    """Whether tokens are all that a call wants. ``others``: what the loop is given that has no place here."""
    ends = _has_ends(criteria)
    return (
        not config.return_dict_in_generate
        and not any(others)
        and (not ends or isinstance(getattr(config, "_pad_token_tensor", None), Tensor))
    )


def choose_tokens(forward: Forward, prompts: Tensor, processors: Any, criteria: Any, config: Any) -> Tensor:
    """``prompts`` [rows, length] on the host with the tokens behind them; padded behind a row's end."""
    tokens, new = prompts, prompts
    ends, rows = _has_ends(criteria), range(len(prompts))
    going, unfinished = list(rows), torch.ones(len(prompts), dtype=torch.bool)
    logits = torch.empty(0)
    while True:
        found = forward(new, going).float()
        # A row that has ended keeps its last logits: it draws what it would have drawn, and gets padding.
        logits = found if len(going) == len(rows) else logits.index_copy(0, torch.tensor(going), found)
        chosen = _choose(processors(tokens, logits.clone()) if processors else logits, config.do_sample)
        if ends:
            chosen = torch.where(unfinished, chosen, config._pad_token_tensor)
        new = chosen[:, None]
        tokens = torch.cat([tokens, new], dim=1)
        unfinished &= ~criteria(tokens, None)
        if not unfinished.any():
            return tokens
        if ends:
            going = unfinished.nonzero()[:, 0].tolist()


def _choose(scores: Tensor, samples: bool | None) -> Tensor:
    if samples:
        return torch.multinomial(scores.softmax(-1), num_samples=1)[:, 0]
    return torch.tensor(largest_of(scores))


def _has_ends(criteria: Any) -> bool:
    """Whether one of them is a token that ends a row."""
    return any(hasattr(each, "eos_token_id") for each in criteria)
