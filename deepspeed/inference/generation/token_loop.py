"""The loop that chooses tokens, as Transformers' ``generate`` has it for greedy search and samples, over a forward that
computes only what goes on.

Processors, criteria and random numbers are those of the call, asked for and drawn in the same order, so that the tokens
are the same. Left out is what goes around a forward of any model: inputs that are prepared, masks that grow, and rows
that have ended, which Transformers computes on until the last one has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.host_graph import largest_of

Forward = Callable[[Tensor, Sequence[int]], Tensor]
"""(tokens [rows, new], the numbers of the rows that go on) -> their logits [rows that go on, vocabulary]."""

_USUAL = ("_sample", "_prefill", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")


def is_usual(kind: type[Any]) -> bool:
    """Return whether models of this class use the token loop of Transformers."""
    from transformers import GenerationMixin

    return all(getattr(kind, name, None) is getattr(GenerationMixin, name, None) for name in _USUAL)


@dataclass(slots=True)
class Chosen:
    """``tokens`` [rows, length]: the prompts and what comes behind them, with padding behind a row's end. ``scores``,
    ``logits`` [rows, vocabulary] of each new token, with and without processors, where they are wanted."""

    tokens: Tensor
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


def takes(config: Any, criteria: Any, others: Sequence[Any]) -> bool:
    """Return whether this loop supports all that is asked for. ``others``: further arguments of the loop."""
    padded = isinstance(getattr(config, "_pad_token_tensor", None), Tensor)
    return not any(others) and (padded or not _has_ends(criteria))


def choose_tokens(forward: Forward, prompts: Tensor, processors: Any, criteria: Any, config: Any) -> Chosen:
    """``prompts``: [rows, length] on the host."""
    made, new, told = Chosen(prompts), prompts, config.return_dict_in_generate
    ends, rows = _has_ends(criteria), len(prompts)
    going, unfinished = list(range(rows)), torch.ones(rows, dtype=torch.bool)
    logits = torch.empty(0)
    while True:
        found = forward(new, going).float()
        # A row that has ended keeps its last logits: it draws what it would have drawn, and gets padding.
        logits = found if len(going) == rows else logits.index_copy(0, torch.tensor(going), found)
        scores = processors(made.tokens, logits.clone()) if processors else logits
        if told and config.output_scores:
            made.scores.append(scores)
        if told and config.output_logits:
            made.logits.append(logits)
        chosen = _choose(scores, config.do_sample)
        if ends:
            chosen = torch.where(unfinished, chosen, config._pad_token_tensor)
        new = chosen[:, None]
        made.tokens = torch.cat([made.tokens, new], dim=1)
        unfinished &= ~criteria(made.tokens, tuple(made.scores) or None)
        if not unfinished.any():
            return made
        if ends and not told:  # logits of what comes behind an end, and the cache, are part of what is told
            going = unfinished.nonzero()[:, 0].tolist()


def _choose(scores: Tensor, samples: bool | None) -> Tensor:
    if samples:
        return torch.multinomial(scores.softmax(-1), num_samples=1)[:, 0]
    return torch.tensor(largest_of(scores))


def _has_ends(criteria: Any) -> bool:
    """Return whether one of them is a token that ends a row."""
    return any(hasattr(each, "eos_token_id") for each in criteria)
