"""Logits processing before a token is chosen: penalties, biases, masks, filters. Each step runs for all requests of a
batch at once.

Steps that Transformers has keep its order (repetition penalty, masks, temperature, top-k, top-p, min-p). Presence and
frequency penalties follow OpenAI's formula; biases come before masks so that none can lift a mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from deepspeed.inference.generation.grammars import GrammarMatcher, Grammars
from deepspeed.inference.scheduling.requests import Request, SamplingParams

_LIKELIEST = 256
"""Tokens that usually hold the top-p mass; otherwise the whole vocabulary is sorted."""


class _Progress:
    """Token history of one request. Tensors are [vocabulary]:

    ``seen`` bool: tokens in prompt or answer; ``counts`` fp32: occurrences in the answer; both updated by ``count``.
    ``named`` bool: `SamplingParams.allowed_token_ids`; None if all tokens are allowed.
    """

    def __init__(self, request: Request, scores: Tensor, matcher: GrammarMatcher | None) -> None:
        size, device, ids = scores.shape[-1], scores.device, request.params.allowed_token_ids
        self._request = request
        self._matcher = matcher
        self._matched = self._counted = 0
        self.seen = torch.zeros(size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(size, device=device)
        self.named: Tensor | None = None
        if ids is not None:
            self.named = torch.zeros(size, dtype=torch.bool, device=device)
            self.named[list(ids)] = True

    def count(self) -> None:
        """Account for the tokens since the last call."""
        request, start = self._request, self._counted
        new = torch.tensor(request.tokens[start:], dtype=torch.long, device=self.seen.device)
        answered = new[max(0, len(request.prompt) - start) :]
        self.seen[new] = True
        self.counts.index_add_(0, answered, torch.ones_like(answered, dtype=self.counts.dtype))
        self._counted = len(request.tokens)

    def allowed(self) -> Tensor | None:
        """Return the allowed tokens, bool [vocabulary], True for at least one; None: all are."""
        if self._matcher is None:
            return self.named
        answer = self._request.generated
        for token in answer[self._matched :]:
            self._matcher.advance(token)
        self._matched = len(answer)
        by_grammar = self._matcher.allowed().to(self.seen.device)
        # Without a stop token that the grammar could allow at its end, nothing else ends the answer.
        self._request.cut = "stop" if self._matcher.is_complete else None
        both = by_grammar if self.named is None else by_grammar & self.named
        return both if bool(both.any()) else by_grammar


class LogitsProcessor:
    """Applies penalties, biases and constraints. Keeps the progress of each request that needs it until ``forget``, so
    a preempted request resumes where it was.

    Args:
        matcher_of: makes the matcher of a constraint; None: requests with constraints are refused when created.
    """

    def __init__(self, matcher_of: Grammars | None = None) -> None:
        self._matcher_of = matcher_of
        self._progress: dict[int, _Progress] = {}

    def forget(self, request: Request) -> None:
        """Drop the progress of a finished request."""
        self._progress.pop(request.id, None)

    def __call__(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        """Return scores [requests, vocabulary] in fp32, unwarped; ``logits`` of the same shape stay as they are."""
        scores = logits.float()
        if scores is logits and any(request.params.changes_logits for request in requests):
            scores = logits.clone()
        self._penalise(scores, requests)
        _add(scores, ((row, each.params.logit_bias) for row, each in enumerate(requests)))
        _exclude(scores, ((row, _forbidden(each)) for row, each in enumerate(requests)))
        for row, request in enumerate(requests):
            allowed = self._of(request, scores).allowed() if request.params.has_masks else None
            if allowed is None:
                continue
            scores[row].masked_fill_(~allowed, -torch.inf)
            if not bool((scores[row] > -torch.inf).any()):  # all allowed ones excluded: constraint wins
                scores[row] = logits[row].float().masked_fill(~allowed, -torch.inf)
        return scores

    def _of(self, request: Request, scores: Tensor) -> _Progress:
        known = self._progress.get(request.id)
        if known is None:
            matcher, constraint = None, request.params.constraint
            if constraint is not None:
                assert self._matcher_of is not None, "Generator.check rejects constraints without matchers"
                matcher = self._matcher_of(constraint, scores.shape[-1])
            known = self._progress[request.id] = _Progress(request, scores, matcher)
        return known

    def _penalise(self, scores: Tensor, requests: Sequence[Request]) -> None:
        rows = [row for row, each in enumerate(requests) if each.params.has_penalties]
        if not rows:
            return
        params = [requests[row].params for row in rows]
        histories = [self._of(requests[row], scores) for row in rows]
        for each in histories:
            each.count()
        at = torch.tensor(rows, device=scores.device)
        of = scores[at]
        repeated = _column([each.repetition_penalty for each in params], scores)
        seen = torch.stack([each.seen for each in histories])
        of = torch.where(seen, torch.where(of < 0, of * repeated, of / repeated), of)
        counts = torch.stack([each.counts for each in histories])
        of -= counts * _column([each.frequency_penalty for each in params], scores)
        of -= (counts > 0) * _column([each.presence_penalty for each in params], scores)
        scores[at] = of


def _forbidden(request: Request) -> list[int]:
    """Return the tokens that may not come next: stop tokens before ``min_new_tokens``, last tokens of bad words."""
    params, answer = request.params, request.generated
    found = list(params.stop_token_ids) if len(answer) < params.min_new_tokens else []
    for word in params.bad_words:
        before = len(word) - 1
        if len(answer) >= before and tuple(answer[len(answer) - before :]) == word[:-1]:
            found.append(word[-1])
    return found


def _exclude(scores: Tensor, excluded: Iterable[tuple[int, Sequence[int]]]) -> None:
    # Models and clients may name stop tokens outside the vocabulary, which never come.
    known = range(scores.shape[-1])
    pairs = [(row, token) for row, tokens in excluded for token in tokens if token in known]
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
    """Apply temperature, top-k, top-p and min-p to ``scores`` fp32 [rows, vocabulary], with one ``params`` entry per
    row; excluded tokens get -inf. Rows with temperature 0 keep their scores.

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
    """Keep the smallest set of most likely tokens per row whose mass reaches ``top_p`` [rows, 1]."""
    probabilities = scores.softmax(-1)
    best = probabilities.topk(min(_LIKELIEST, scores.shape[-1])).values
    if not bool((best.sum(-1, keepdim=True) >= top_p).all()):
        best = probabilities.sort(descending=True).values
    before = best.cumsum(-1) - best
    beyond = before >= top_p
    beyond[:, 0] = False  # keep at least one
    least = best.masked_fill(beyond, torch.inf).amin(-1, keepdim=True)
    return scores.masked_fill(probabilities < least, -torch.inf)


def _keep_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    probabilities = scores.softmax(-1)
    least = min_p * probabilities.amax(-1, keepdim=True)
    return scores.masked_fill(probabilities < least, -torch.inf)
