"""Continuous batching: many concurrent requests, and as many tokens per forward as the budget allows.

A step is ``schedule -> run -> choose -> complete``; each part is an object.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch
from torch import Tensor, nn

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.logging import log_dist
from deepspeed.comm.collectives import Communicator
from deepspeed.inference.cache.blocks import BlockManager, BlockPool
from deepspeed.inference.cache.pages import PagePiece
from deepspeed.inference.generation.grammars import Grammars
from deepspeed.inference.generation.sampling import Sampler, logprobs_of
from deepspeed.inference.model.info import DEFAULT_LENGTH
from deepspeed.inference.model.runner import ModelRunner
from deepspeed.inference.scheduling.requests import Chunk, NotFiniteError, Request, SamplingParams
from deepspeed.inference.scheduling.scheduler import Scheduler, SchedulerCounts
from deepspeed.inference.scheduling.speculation import Proposer

_PART_OF_MEMORY = 0.4
_MOST_WITH_DRAFTS = 64
"""Most tokens of a forward of one program with drafts: each of more costs about as much as a wanted one."""


class Generator:
    """Generates from an unchanged causal model of Transformers.

    Each tensor-parallel rank has a generator with the same requests in the same order; all of them make the same
    decisions without communicating.

    Args:
        module: the model, in evaluation mode, already split if tensor-parallel; or the runner of an earlier generator,
            whose layout is reused without a new trial, with a new cache.
        token_budget: tokens per forward.
        max_sequences: maximum number of requests served concurrently.
        max_length: maximum tokens of a request with its result; None: what the model was made for, at most 2,048. A
            cache that holds fewer shortens it.
        block_size: tokens per block of the cache.
        cache_bytes: size of the cache; None: enough for ``max_sequences`` requests of maximum length, at most 0.4 of
            the free memory.
        num_blocks: size of the cache in blocks, instead of ``cache_bytes``.
        short_share: fraction of the prompt tokens of a forward with which short prompts may overtake long ones; 0:
            strict order of arrival.
        policy: "fcfs": requests are served by arrival; "priority": by `SamplingParams.priority`, then by arrival.
        speculation: proposes next tokens, so that a forward may yield several per request; None: one each. Not shared
            with other generators.
        prefix_sharing: requests that begin with the same tokens share their keys and values.
        seed: for requests without a seed.
        group: the tensor-parallel ranks.
        matcher_of: creates the matchers of requests with a constraint; None: these are refused.

    Raises:
        LayoutError: the model cannot be run over a paged cache.
        ValueError: the cache does not hold one block, or ``speculation`` does not fit this model.
    """

    def __init__(
        self,
        module: nn.Module | ModelRunner,
        *,
        token_budget: int = 512,
        max_sequences: int = 64,
        max_length: int | None = None,
        block_size: int = 16,
        cache_bytes: int | None = None,
        num_blocks: int | None = None,
        short_share: float = 0.5,
        policy: str = "fcfs",
        speculation: Proposer | None = None,
        prefix_sharing: bool = True,
        seed: int = 0,
        group: Communicator | None = None,
        matcher_of: Grammars | None = None,
    ) -> None:
        self.runner = module if isinstance(module, ModelRunner) else ModelRunner(module, block_size)
        block_size = self.runner.block_size
        length = longest_request(self.runner, max_length)
        kept = self.runner.block_bytes + block_size * (0 if speculation is None else speculation.token_bytes)
        most = max_sequences * -(-length // block_size)
        blocks = num_blocks or self._affordable(kept, most, cache_bytes, group)
        self.runner.allocate(blocks)
        if speculation is not None:
            speculation.start(self.runner.info.vocab_size, blocks * block_size)
        manager = BlockManager(
            BlockPool(blocks), block_size, sharing=prefix_sharing, span=self.runner.rotations.span
        )
        if max_length is not None and manager.capacity < max_length:
            text = f"max_length={max_length} is shortened to {manager.capacity}, which is all that the cache holds"
            log_dist(f"inference: {text}", ranks=[0], level=logging.WARNING)
        self.scheduler = Scheduler(
            manager,
            token_budget=token_budget,
            max_sequences=max_sequences,
            max_length=length,
            short_share=short_share,
            policy=policy,
            speculation=speculation,
        )
        self.matcher_of = matcher_of
        self.sampler = Sampler(seed, matcher_of)
        self._next_id = 0

    @property
    def counts(self) -> SchedulerCounts:
        """Return the counts of all forwards so far."""
        return self.scheduler.counts

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, prompt: Sequence[int], params: SamplingParams | None = None) -> Request:
        """Add a request; its ``tokens`` grow with each ``step``. ValueError: it is empty or too long, has a token
        outside the vocabulary, or would grow beyond a length at which its rotations change
        (`inference/model/rotations.py`)."""
        request = self._known(Request(self._next_id, prompt, params or SamplingParams()))
        self.scheduler.add(request)
        self._next_id += 1
        return request

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Check a request without adding it. ValueError: it would be refused."""
        self.scheduler.check(self._known(Request(self._next_id, prompt, params)))

    def state(self) -> dict[str, float]:
        """Return current values by name."""
        scheduler = self.scheduler
        pool = scheduler.blocks.pool
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "free_blocks": pool.num_free,
            "blocks": pool.num_blocks,
            **{name: float(value) for name, value in asdict(self.counts).items()},
        }

    def cancel(self, request: Request) -> None:
        """Stop generating for a request, and free its blocks."""
        self.scheduler.cancel(request)
        self.sampler.forget(request)

    def step(self, unchanged: bool = False) -> list[Request]:
        """Run one forward, if there is work. Returns the requests that got tokens. ``unchanged``: the module has not
        been modified since the last step."""
        # With more tokens than are fused, drafts would run other kernels, with other rounding.
        fused = self.runner.max_fused_tokens
        most = None if fused is None else min(fused, _MOST_WITH_DRAFTS)
        scheduled = self.scheduler.schedule(most)
        pooled = [chunk for chunk in scheduled if chunk.request.params.pooling is not None]
        chunks = [chunk for chunk in scheduled if chunk.request.params.pooling is None]
        if pooled:
            self._pool(pooled, unchanged)
        requests, chosen = self._choose(chunks, unchanged) if chunks else ([], {})
        for request in self.scheduler.complete(scheduled, chosen):
            self.sampler.forget(request)
        return requests

    def _choose(self, chunks: Sequence[Chunk], unchanged: bool) -> tuple[list[Request], dict[int, int]]:
        """Compute ``chunks``. Returns the requests that got tokens, and the last token of each by request id."""
        pieces = [_piece(chunk) for chunk in chunks]
        logits = self.runner.forward(pieces, unchanged)
        last, end = [], 0
        for chunk, piece in zip(chunks, pieces, strict=True):
            if chunk.request.computes_prompt:
                _note_prompt(chunk, logits[end : end + piece.wanted])
            end += piece.wanted
            if chunk.is_last and chunk.request.params.max_new_tokens:
                last.append((end - 1 - len(chunk.proposed), chunk))
        requests, chosen = [chunk.request for _, chunk in last], {}
        while last:
            rows, going = [row for row, _ in last], [chunk.request for _, chunk in last]
            found = self.sampler.choose(logits if len(rows) == len(logits) else logits[rows], going)
            chosen |= found
            for request in going:
                if request.cut is not None:  # the token before was the last one, be it a draft's
                    chosen.pop(request.id, None)
            last = [
                (row + 1, chunk)
                for row, chunk in last
                if chunk.request.id in found and chunk.accept(found[chunk.request.id])
            ]
        return requests, chosen

    def _pool(self, chunks: Sequence[Chunk], unchanged: bool) -> None:
        """Compute ``chunks``, and add their hidden states to the pooled vectors of their requests."""
        pieces = [_piece(chunk) for chunk in chunks]
        states = self.runner.hidden(pieces, unchanged).float().split([piece.wanted for piece in pieces])
        for chunk, rows in zip(chunks, states, strict=True):
            request, pooling = chunk.request, chunk.request.params.pooling
            if pooling == "mean":
                # A preempted request starts over.
                request.pooled = rows.sum(0) + (request.pooled if chunk.start else 0.0)
                if chunk.is_last:
                    request.pooled = request.pooled / len(request.prompt)
            elif pooling == "last" or chunk.start == 0:
                request.pooled = rows[0 if pooling == "cls" else -1].clone()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Request]:
        """Generate for all prompts. Returns the finished requests in the order of the prompts. ``params``: one for all,
        or one for each.

        An error cancels all of them. NotFiniteError: the logits of one are NaN or infinite."""
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else params
        requests: list[Request] = []
        try:
            for prompt, one in zip(prompts, each, strict=True):
                requests.append(self.submit(prompt, one))
            self.step()
            while self.has_work:
                self.step(unchanged=True)
            for request in requests:
                _check_finite(request)
        except BaseException:
            for request in requests:
                self.cancel(request)
            raise
        return requests

    def stream(self, prompt: Sequence[int], params: SamplingParams | None = None) -> Iterator[int]:
        """Yield the new tokens of one request as they are generated. Closing the iterator cancels the request.
        NotFiniteError: its logits are NaN or infinite."""
        request = self.submit(prompt, params)
        given = 0
        try:
            while request.reason is None or given < len(request.generated):
                if given == len(request.generated):
                    self.step()
                while given < len(request.generated):
                    given += 1
                    yield request.generated[given - 1]
            _check_finite(request)
        finally:
            self.cancel(request)

    def _known(self, request: Request) -> Request:
        size, named = self.runner.info.vocab_size, list(request.params.tokens)
        for of, tokens in (("the prompt", request.tokens), ("its parameters", named)):
            wrong = [
                token for token in (min(tokens, default=0), max(tokens, default=0)) if not 0 <= token < size
            ]
            if wrong:
                raise ValueError(
                    f"request {request.id}: token {wrong[0]} of {of} is outside the vocabulary, 0 to {size - 1}"
                )
        constraint = request.params.constraint
        if constraint is not None and self.matcher_of is None:
            raise ValueError(f"request {request.id}: a constraint needs a generator created with matcher_of")
        if constraint is not None:
            self.matcher_of.check(constraint, size)  # type: ignore[union-attr]
        if request.params.pooling is not None and self.runner.hidden_states_error is not None:
            raise ValueError(
                f"request {request.id}: {self.runner.info.name} has no hidden states to pool: "
                f"{self.runner.hidden_states_error}"
            )
        self.runner.rotations.check_growth(len(request.prompt), request.limit - 1)
        return request

    def _affordable(
        self, block_bytes: int, most: int, cache_bytes: int | None, group: Communicator | None
    ) -> int:
        """Blocks, at most ``most``; the same on all ranks."""
        size = self.runner.block_size
        if cache_bytes is None:
            cache_bytes = default_cache_bytes()
        blocks = min(most, cache_bytes // block_bytes)
        if group is not None and group.size > 1:
            least = torch.tensor([-float(blocks)], dtype=torch.float64, device=self.runner.info.device)
            group.all_reduce_max(least).wait()
            blocks = int(-least.item())
        if blocks < 1:
            raise ValueError(
                f"cache_bytes={cache_bytes} cannot hold a block of {size} tokens ({block_bytes} bytes)"
            )
        return blocks


def default_cache_bytes() -> int:
    """Return the default size of a cache in bytes, from the memory that is free now."""
    return int(_PART_OF_MEMORY * get_accelerator().available_memory())


def divide(total: int, wanted: Sequence[int], shares: Sequence[float]) -> list[int]:
    """Divide ``total`` bytes of cache among models in proportion to ``shares``, at most ``wanted`` for each; what a
    model cannot use is divided among the others, again in proportion. Returns bytes by model."""
    parts, left, shares_left = [0] * len(wanted), total, sum(shares)
    # Ascending by how much of its share a model can use, so that its unused part is known before the others' turn.
    for at in sorted(range(len(wanted)), key=lambda at: wanted[at] / shares[at]):
        parts[at] = min(wanted[at], int(left * shares[at] / shares_left))
        left, shares_left = left - parts[at], shares_left - shares[at]
    return parts


def longest_request(runner: ModelRunner, max_length: int | None) -> int:
    """Return the maximum tokens of a request with its result. ValueError: more than the model supports."""
    made_for = runner.info.max_length
    length = max_length or min(made_for or DEFAULT_LENGTH, DEFAULT_LENGTH)
    if made_for is not None and length > made_for:
        raise ValueError(f"max_length={length}: the model supports {made_for} tokens")
    return length


def _piece(chunk: Chunk) -> PagePiece:
    request = chunk.request
    return PagePiece(
        [*request.tokens[chunk.start : chunk.start + chunk.count], *chunk.proposed],
        chunk.start,
        request.table.blocks,
        request.table.span,
        chunk.count if request.computes_prompt else 1 + len(chunk.proposed),
        request.params.adapter,
    )


def _check_finite(request: Request) -> None:
    if request.reason == "failed":
        raise NotFiniteError(f"the logits of request {request.id} are not finite")


def _note_prompt(chunk: Chunk, logits: Tensor) -> None:
    """Add the log-probabilities of the prompt's tokens that ``logits`` [tokens of the chunk, vocabulary] predict."""
    request, params = chunk.request, chunk.request.params
    predicted = request.tokens[chunk.start + 1 : min(chunk.start + chunk.count + 1, len(request.prompt))]
    known = len(request.prompt_logprobs) - chunk.start  # of a preempted request that starts over
    found = logprobs_of(
        logits[known : len(predicted)], predicted[known:], [params.top_logprobs] * len(predicted)
    )
    request.prompt_logprobs += found
