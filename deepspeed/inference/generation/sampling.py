"""Choosing the next tokens from logits, by Transformers' rules in Transformers' order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed.inference.scheduling.requests import Request, SamplingParams
from deepspeed.ops import gpu
from deepspeed.ops.host_graph import largest_of

__all__ = ["Sampler", "log_probabilities", "processed"]


class Sampler:
    """Draws for requests, each with random numbers of its own: what else is in a batch, and when a request was
    preempted, makes no difference. All ranks with the same ``seed`` and the same logits choose the same tokens. On a
    GPU a Triton kernel draws, with other random numbers than the host.

    Args:
        seed: for requests without one.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._random: dict[int, torch.Generator] = {}

    def choose(self, logits: Tensor, requests: Sequence[Request]) -> dict[int, int]:
        """The next token of each request, by its id. ``logits`` [requests, vocabulary]. ``logprobs`` of the requests
        that ask for it grow by one.

        ValueError: logits are not finite.
        """
        if all(request.params.is_plain for request in requests):
            chosen = largest_of(logits)
        elif self._takes(logits):
            chosen = self._drawn_on_gpu(logits, requests)
        elif all(request.params.draws_from_all for request in requests):
            temperatures = torch.tensor([[request.params.temperature] for request in requests])
            chosen = self._drawn(logits.float() / temperatures.to(logits.device), requests)
        else:
            chosen = [self._one(row, request) for row, request in zip(logits, requests, strict=True)]
        told = [row for row, request in enumerate(requests) if request.params.logprobs]
        if told:
            tokens = torch.tensor([[chosen[row]] for row in told], device=logits.device)
            found = log_probabilities(logits if len(told) == len(requests) else logits[told])
            for row, value in zip(told, found.gather(1, tokens)[:, 0].tolist(), strict=True):
                requests[row].logprobs.append(value)
        return {request.id: token for request, token in zip(requests, chosen, strict=True)}

    def forget(self, request: Request) -> None:
        """It needs no further random numbers."""
        self._random.pop(request.id, None)

    def _one(self, logits: Tensor, request: Request) -> int:
        params = request.params
        scores = processed(logits, params, request.tokens, len(request.tokens) - len(request.prompt))
        if params.temperature == 0:
            return int(scores.argmax())
        return self._drawn(scores[None], [request])[0]

    def _drawn(self, scores: Tensor, requests: Sequence[Request]) -> list[int]:
        """A token of each row of ``scores`` [requests, vocabulary], whose softmax are the probabilities."""
        probabilities = scores.softmax(-1).cpu()
        if not bool(probabilities.isfinite().all()):
            wrong = probabilities.isfinite().all(-1).tolist().index(False)
            raise ValueError(f"the logits of request {requests[wrong].id} are not finite")
        # the exponential race: the first of clocks with these rates, a draw with these probabilities
        clocks = torch.empty_like(probabilities)
        for row, request in zip(clocks, requests, strict=True):
            row.exponential_(generator=self._random_of(request))
        return (probabilities / clocks).argmax(-1).tolist()

    @staticmethod
    def _takes(logits: Tensor) -> bool:
        if not gpu.usable(logits):
            return False
        from deepspeed.ops.gpu import sampling as kernels  # imports Triton

        return kernels.takes(logits)

    def _drawn_on_gpu(self, logits: Tensor, requests: Sequence[Request]) -> list[int]:
        from deepspeed.ops.gpu import sampling as kernels  # imports Triton

        params = [request.params for request in requests]
        new = [len(request.tokens) - len(request.prompt) for request in requests]
        rows = [
            penalised(*each) for each in zip(logits, params, (r.tokens for r in requests), new, strict=True)
        ]
        chosen = kernels.draw(
            torch.stack(rows),
            temperatures=[each.temperature for each in params],
            top_k=[min(each.top_k, logits.shape[-1]) for each in params],
            top_p=[each.top_p for each in params],
            min_p=[each.min_p for each in params],
            seeds=[self._seed_of(request) for request in requests],
            drawn=new,
        )
        if -1 in chosen:
            raise ValueError(f"the logits of request {requests[chosen.index(-1)].id} are not finite")
        return chosen

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


def log_probabilities(logits: Tensor) -> Tensor:
    """[.., vocabulary], in fp32."""
    return logits.float().log_softmax(-1)


def processed(logits: Tensor, params: SamplingParams, tokens: Sequence[int], generated: int) -> Tensor:
    """The logits [vocabulary] from which the token after ``tokens`` is drawn, ``generated`` of which are new."""
    scores = penalised(logits, params, tokens, generated)
    if params.temperature == 0:
        return scores
    scores = scores / params.temperature
    if 0 < params.top_k < scores.numel():
        scores = scores.masked_fill(scores < scores.topk(params.top_k).values[-1], -torch.inf)
    if params.top_p < 1:
        ascending, order = scores.sort()
        unlikely = ascending.softmax(-1).cumsum(-1) <= 1 - params.top_p
        unlikely[-1] = False  # one always remains
        scores = scores.index_fill(0, order[unlikely], -torch.inf)
    if params.min_p > 0:
        probabilities = scores.softmax(-1)
        scores = scores.masked_fill(probabilities < params.min_p * probabilities.max(), -torch.inf)
    return scores


def penalised(logits: Tensor, params: SamplingParams, tokens: Sequence[int], generated: int) -> Tensor:
    """The logits [vocabulary] in fp32 with what depends on the tokens before."""
    scores = logits.float()
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(tokens)), device=scores.device)
        old = scores[seen]
        penalty = params.repetition_penalty
        scores = scores.index_put((seen,), torch.where(old < 0, old * penalty, old / penalty))
    if generated < params.min_new_tokens and params.stop_token_ids:
        scores = scores.index_fill(0, torch.tensor(params.stop_token_ids, device=scores.device), -torch.inf)
    return scores
