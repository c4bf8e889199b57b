"""Selection of the next tokens from logits, by Transformers' rules in Transformers' order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed.inference.generation.grammars import Grammars
from deepspeed.inference.generation.logits import LogitsProcessor, filtered
from deepspeed.inference.scheduling.requests import Request, TokenLogprob
from deepspeed.ops import gpu
from deepspeed.ops.host_graph import largest_of

_ROWS = 64
"""Number of rows of logits whose log-probabilities are computed at once."""


class Sampler:
    """Samples for requests, each with its own random numbers: results depend neither on the rest of the batch nor on
    preemption. All ranks with the same ``seed`` and logits choose the same tokens. On a GPU a Triton kernel samples,
    with other random numbers than the host.

    Args:
        seed: for requests without a seed.
        matcher_of: creates the matchers of constrained requests (`logits.py`).
    """

    def __init__(self, seed: int = 0, matcher_of: Grammars | None = None) -> None:
        self.seed = seed
        self._process = LogitsProcessor(matcher_of)
        self._random: dict[int, torch.Generator] = {}

    def choose(self, logits: Tensor, requests: Sequence[Request]) -> dict[int, int]:
        """Choose the next token of each request, by request id. ``logits`` [requests, vocabulary]. Appends an entry to
        ``logprobs`` of the requests that ask for it. Those that are ``cut`` get no token: their grammar is whole, or
        their logits are not finite.
        """
        scores = logits
        if all(request.params.is_plain for request in requests):
            chosen = largest_of(logits)
        else:
            scores = self._process(logits, requests)
            chosen = (
                self._on_gpu(scores, requests) if self._takes(scores) else self._on_host(scores, requests)
            )
        for row in _not_finite(scores, chosen):
            requests[row].cut = requests[row].cut or "failed"
        wanted = [row for row, each in enumerate(requests) if each.params.logprobs and each.cut is None]
        if wanted:
            found = logprobs_of(
                logits if len(wanted) == len(requests) else logits[wanted],
                [chosen[row] for row in wanted],
                [requests[row].params.top_logprobs for row in wanted],
            )
            for row, entry in zip(wanted, found, strict=True):
                requests[row].logprobs.append(entry)
        return {each.id: token for each, token in zip(requests, chosen, strict=True) if each.cut is None}

    def forget(self, request: Request) -> None:
        """Drop the random numbers and other state of a request that has ended."""
        self._random.pop(request.id, None)
        self._process.forget(request)

    def _on_host(self, scores: Tensor, requests: Sequence[Request]) -> list[int]:
        scores = filtered(scores, [request.params for request in requests])
        chosen = largest_of(scores)
        drawn = [row for row, request in enumerate(requests) if request.params.temperature > 0]
        if drawn:
            tokens = self._drawn(scores[drawn], [requests[row] for row in drawn])
            for row, token in zip(drawn, tokens, strict=True):
                chosen[row] = token
        return chosen

    def _drawn(self, scores: Tensor, requests: Sequence[Request]) -> list[int]:
        """Sample a token from each row of ``scores`` [requests, vocabulary], by its softmax; -1: it has none."""
        probabilities = scores.softmax(-1).cpu()
        # an exponential race: the first of clocks with these rates is a sample with these probabilities
        clocks = torch.empty_like(probabilities)
        for row, request in zip(clocks, requests, strict=True):
            row.exponential_(generator=self._random_of(request))
        tokens = (probabilities / clocks).argmax(-1)
        return tokens.where(probabilities[:, 0].isfinite(), -1).tolist()

    @staticmethod
    def _takes(scores: Tensor) -> bool:
        if not gpu.usable(scores):
            return False
        from deepspeed.ops.gpu import sampling as kernels  # imports Triton

        return kernels.supports(scores)

    def _on_gpu(self, scores: Tensor, requests: Sequence[Request]) -> list[int]:
        from deepspeed.ops.gpu import sampling as kernels  # imports Triton

        params = [request.params for request in requests]
        return kernels.draw(
            scores,
            temperatures=[each.temperature for each in params],
            top_k=[min(each.top_k, scores.shape[-1]) for each in params],
            top_p=[each.top_p for each in params],
            min_p=[each.min_p for each in params],
            seeds=[self._seed_of(request) for request in requests],
            drawn=[len(request.tokens) - len(request.prompt) for request in requests],
        )

    def _seed_of(self, request: Request) -> int:
        """Reduce the seed of a client, any integer, to 63 bits."""
        seed = request.params.seed
        return (seed if seed is not None else self.seed * 1_000_003 + request.id) % 2**63

    def _random_of(self, request: Request) -> torch.Generator:
        random = self._random.get(request.id)
        if random is None:
            random = self._random[request.id] = torch.Generator()
            random.manual_seed(self._seed_of(request))
        return random


def _not_finite(scores: Tensor, chosen: Sequence[int]) -> list[int]:
    """Return the rows of ``scores`` [requests, vocabulary] whose ``chosen`` token is -1 or has no finite score."""
    known = torch.tensor([[max(token, 0)] for token in chosen], device=scores.device)
    values = scores.gather(1, known)[:, 0].tolist()
    return [row for row, value in enumerate(values) if chosen[row] < 0 or not math.isfinite(value)]


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: Sequence[int]) -> list[TokenLogprob]:
    """Return the log-probability of one token per row of ``logits`` [rows, vocabulary], with the ``top`` most probable
    tokens of the row."""
    made: list[TokenLogprob] = []
    for start in range(0, len(tokens), _ROWS):
        rows = slice(start, start + _ROWS)
        found = logits[rows].float().log_softmax(-1)
        at = torch.tensor(tokens[rows], device=found.device)[:, None]
        values = found.gather(1, at)[:, 0].tolist()
        wanted = [min(each, found.shape[-1]) for each in top[rows]]
        best = found.topk(max(wanted)) if any(wanted) else None
        for row, (token, value) in enumerate(zip(tokens[rows], values, strict=True)):
            likeliest = ()
            if best is not None:
                some = slice(wanted[row])
                likeliest = zip(
                    best.indices[row, some].tolist(), best.values[row, some].tolist(), strict=True
                )
            made.append(TokenLogprob(token, value, tuple(likeliest)))
    return made
