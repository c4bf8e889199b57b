"""Changes of logits before a token is chosen: penalties, biases, masks, filters. Every step is done for all requests
of a batch at once.

The order is that of Transformers where it has the step (repetition penalty, masks, temperature, top-k, top-p, min-p);
presence and frequency penalties follow OpenAI's formula, biases come before masks so that none lifts a mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from deepspeed.inference.scheduling.requests import Constraint, Request, SamplingParams

_LIKELIEST = 256
"""Tokens that mostly hold the mass of a top-p: only where they do not, a whole vocabulary is sorted."""


class Matcher(Protocol):
    """Progress of one request through its constraint."""

    def allowed(self) -> Tensor:
        """Return which tokens may follow: bool [vocabulary], True for at least one."""
        ...

    def advance(self, token: int) -> None:
        """Take the token that was chosen."""
        ...


class MatcherFactory(Protocol):
    """Makes matchers, over a vocabulary of ``size`` tokens."""

    def check(self, constraint: Constraint, size: int) -> None:
        """ValueError: no answer can follow ``constraint``."""
        ...

    def __call__(self, constraint: Constraint, size: int) -> Matcher:
        """Return a matcher at the beginning of ``constraint``."""
        ...


class _History:
    """Tokens of one request, counted as they come.

    ``seen`` bool [vocabulary]: of prompt and answer; ``counts`` fp32 [vocabulary]: of the answer.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.seen = torch.zeros(size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(size, device=device)
        self._length = 0

    def follow(self, request: Request) -> _History:
        """Count the tokens since the last call."""
        start, prompt = self._length, len(request.prompt)
        if start < len(request.tokens):
            new = torch.tensor(request.tokens[start:], device=self.seen.device)
            answered = new[max(0, prompt - start) :]
            self.seen[new] = True
            self.counts.index_add_(0, answered, torch.ones_like(answered, dtype=self.counts.dtype))
            self._length = len(request.tokens)
        return self


class _Match:
    """A matcher that follows its request."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._taken = 0

    def allowed(self, request: Request) -> Tensor:
        answer = request.generated
        for token in answer[self._taken :]:
            self._matcher.advance(token)
        self._taken = len(answer)
        return self._matcher.allowed()


class LogitsProcessor:
    """Applies what depends on a request's tokens and constraints. Keeps a state for each request that needs one, until
    ``forget``; a preempted request continues where it was.

    Args:
        matcher_of: makes the matcher of a constraint; None: constraints are refused when a request is made.
    """

    def __init__(self, matcher_of: MatcherFactory | None = None) -> None:
        self._matcher_of = matcher_of
        self._histories: dict[int, _History] = {}
        self._matches: dict[int, _Match] = {}

    def forget(self, request: Request) -> None:
        """Drop the state of a request that has ended."""
        self._histories.pop(request.id, None)
        self._matches.pop(request.id, None)

    def __call__(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        """Return scores [requests, vocabulary] in fp32, unwarped; ``logits`` of the same shape stay as they are."""
        scores = logits.float()
        if scores is logits and any(request.params.changes_logits for request in requests):
            scores = logits.clone()
        self._penalise(scores, requests)
        _add(scores, ((row, each.params.logit_bias) for row, each in enumerate(requests)))
        _exclude(scores, ((row, _forbidden(each)) for row, each in enumerate(requests)))
        for row, request in enumerate(requests):
            allowed = self._allowed(request, scores)
            if allowed is None:
                continue
            scores[row].masked_fill_(~allowed, -torch.inf)
            if not bool(
                (scores[row] > -torch.inf).any()
            ):  # what is excluded is all that may follow: it follows
                scores[row] = logits[row].float().masked_fill(~allowed, -torch.inf)
        return scores

    def _penalise(self, scores: Tensor, requests: Sequence[Request]) -> None:
        rows = [row for row, each in enumerate(requests) if each.params.has_penalties]
        if not rows:
            return
        params = [requests[row].params for row in rows]
        histories = [self._history(requests[row], scores) for row in rows]
        at = torch.tensor(rows, device=scores.device)
        of = scores[at]
        repeated = _column([each.repetition_penalty for each in params], scores)
        seen = torch.stack([each.seen for each in histories])
        of = torch.where(seen, torch.where(of < 0, of * repeated, of / repeated), of)
        counts = torch.stack([each.counts for each in histories])
        of -= counts * _column([each.frequency_penalty for each in params], scores)
        of -= (counts > 0) * _column([each.presence_penalty for each in params], scores)
        scores[at] = of

    def _history(self, request: Request, scores: Tensor) -> _History:
        known = self._histories.get(request.id)
        if known is None:
            known = self._histories[request.id] = _History(scores.shape[-1], scores.device)
        return known.follow(request)

    def _allowed(self, request: Request, scores: Tensor) -> Tensor | None:
        """Return bool [vocabulary], or None if the request excludes nothing."""
        params, size, allowed = request.params, scores.shape[-1], None
        if params.allowed_token_ids is not None:
            allowed = torch.zeros(size, dtype=torch.bool, device=scores.device)
            allowed[list(params.allowed_token_ids)] = True
        if params.constraint is not None:
            match = self._matches.get(request.id)
            if match is None:
                assert self._matcher_of is not None, "Generator.check refuses constraints without matchers"
                match = self._matches[request.id] = _Match(self._matcher_of(params.constraint, size))
            of_constraint = match.allowed(request).to(scores.device)
            both = of_constraint if allowed is None else allowed & of_constraint
            allowed = both if bool(both.any()) else of_constraint
        return allowed


def _forbidden(request: Request) -> list[int]:
    """Return the tokens that may not come next: ends before ``min_new_tokens``, and ends of bad words."""
    params, answer = request.params, request.generated
    found = list(params.stop_token_ids) if len(answer) < params.min_new_tokens else []
    for word in params.bad_words:
        before = len(word) - 1
        if len(answer) >= before and tuple(answer[len(answer) - before :]) == word[:-1]:
            found.append(word[-1])
    return found


def _exclude(scores: Tensor, excluded: Iterable[tuple[int, Sequence[int]]]) -> None:
    pairs = [(row, token) for row, tokens in excluded for token in tokens]
    if pairs:
        at = torch.tensor(pairs, device=scores.device)
        scores[at[:, 0], at[:, 1]] = -torch.inf


def _add(scores: Tensor, biases: Iterable[tuple[int, Sequence[tuple[int, float]]]]) -> None:
    entries = [(row, token, value) for row, bias in biases for token, value in bias]
    if entries:
        at = torch.tensor([entry[:2] for entry in entries], device=scores.device)
        values = torch.tensor([entry[2] for entry in entries], device=scores.device)
        scores.index_put_((at[:, 0], at[:, 1]), values, accumulate=True)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]


# ------------------------------------------------------------------------------------------------------- filters


def filtered(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply temperature, top-k, top-p and min-p to ``scores`` fp32 [rows, vocabulary], one of ``params`` for each row;
    excluded tokens get -inf. Rows with temperature 0 keep their scores.

    Top-k: R. Fan, M. Lewis, Y. Dauphin 2018; top-p: A. Holtzman et al. 2020; min-p: N. N. Minh et al. 2024.
    """
    drawn = [each.temperature > 0 for each in params]
    scores = scores / _column([each.temperature or 1.0 for each in params], scores)
    size = scores.shape[-1]
    top_k = [
        each.top_k if draws and 0 < each.top_k < size else 0
        for each, draws in zip(params, drawn, strict=True)
    ]
    if any(top_k):
        scores = _keep_top_k(scores, top_k)
    for value, neutral, keep in (("top_p", 1.0, _keep_top_p), ("min_p", 0.0, _keep_min_p)):
        rows = [row for row, each in enumerate(params) if drawn[row] and getattr(each, value) != neutral]
        if rows:
            at = torch.tensor(rows, device=scores.device)
            wanted = _column([getattr(params[row], value) for row in rows], scores)
            scores = scores.index_copy(0, at, keep(scores[at], wanted))
    return scores


def _keep_top_k(scores: Tensor, top_k: Sequence[int]) -> Tensor:
    best = scores.topk(max(top_k)).values
    at = torch.tensor(top_k, device=scores.device)[:, None]
    least = best.gather(1, (at - 1).clamp_(min=0)).masked_fill_(at == 0, -torch.inf)
    return scores.masked_fill(scores < least, -torch.inf)


def _keep_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """Keep the likeliest tokens of each row, up to the one with which their mass reaches ``top_p`` [rows, 1]."""
    probabilities = scores.softmax(-1)
    best = probabilities.topk(min(_LIKELIEST, scores.shape[-1])).values
    if not bool((best.sum(-1, keepdim=True) >= top_p).all()):
        best = probabilities.sort(descending=True).values
    before = best.cumsum(-1) - best
    beyond = before >= top_p
    beyond[:, 0] = False  # one always remains
    least = best.masked_fill(beyond, torch.inf).amin(-1, keepdim=True)
    return scores.masked_fill(probabilities < least, -torch.inf)


def _keep_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    probabilities = scores.softmax(-1)
    least = min_p * probabilities.amax(-1, keepdim=True)
    return scores.masked_fill(probabilities < least, -torch.inf)
