"""Rollouts by continuous batching: each forward has one token of every unfinished answer, without padding."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.engine.rollout.base import (
    RolloutBatch,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
    special_tokens,
)
from deepspeed.inference.adapters import FusedAdapters
from deepspeed.inference.generation.generator import Generator
from deepspeed.inference.model.runner import ModelRunner
from deepspeed.inference.scheduling.requests import Request, SamplingParams
from deepspeed.zero.gathering.gathered_parameters import unwrap_model_for_generation

_SEEDS = 2**62


@dataclass
class ServingRolloutConfig:
    """
    Attributes:
        token_budget: tokens per forward.
        max_sequences: maximum answers generated concurrently; others wait.
        block_size: tokens per block of the KV cache.
    """

    token_budget: int = 2048
    max_sequences: int = 256
    block_size: int = 16


class ServingRollout(RolloutEngine):
    """Generates by the scheduler and the paged KV cache of the serving engine, with the trained weights themselves: no
    second copy under ZeRO 0 to 2; at stage 3 they are gathered once per rollout. Adapters are merged for the rollout,
    and the cache is freed after it.

    Args:
        engine: of ``deepspeed.initialize``, with a causal language model of Transformers.
        tokenizer: provides the end and padding tokens; None: the model's generation config does.
        cfg: see ``ServingRolloutConfig``.

    Raises:
        ValueError: ranks share layers.
        LayoutError: in ``generate``, the model cannot be run over a paged cache.
    """

    name = "serving"

    def __init__(self, engine: Any, tokenizer: Any, cfg: ServingRolloutConfig | None = None) -> None:
        _check_ranks(engine)
        self.engine = engine
        self._server = _RolloutServer(tokenizer, cfg or ServingRolloutConfig())

    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Generate answers. At stage 3 a collective on entry and exit; prompts and lengths may differ between ranks."""
        seeds = _seeds(request, sampling)
        with _whole(self.engine) as module:
            return self._server.answers(module, request, sampling, seeds)

    def sync_weights(self, step: int) -> None:
        """Do nothing: generation uses the trained weights themselves."""


class ServingRolloutAhead(RolloutEngine):
    """Generates while the engine trains, with a copy of the weights of the last ``sync_weights``: updates may happen
    between ``begin`` and ``finish``. The answers are then stale, which ``importance_weights`` corrects.

    They depend only on the weights, the prompts and the seeds, not on the timing of training.

    The constructor and ``sync_weights`` are collectives at stage 3, and nothing else is. Arguments and errors as in
    ``ServingRollout``.
    """

    name = "serving_ahead"

    def __init__(self, engine: Any, tokenizer: Any, cfg: ServingRolloutConfig | None = None) -> None:
        _check_ranks(engine)
        self.engine = engine
        self.step = 0
        """Training step of the weights in use."""
        self._server = _RolloutServer(tokenizer, cfg or ServingRolloutConfig())
        self._worker = ThreadPoolExecutor(1, "rollout")
        self._running: Future[RolloutBatch] | None = None
        with _whole(engine) as module:
            self._copy = _copy_of(module)

    @property
    def weight_bytes(self) -> int:
        """Size of the copy of the weights in bytes."""
        return sum(param.nbytes for param in self._copy.parameters())

    @property
    def in_progress(self) -> bool:
        """Return whether ``begin`` was called and its answers have not been taken."""
        return self._running is not None

    def sync_weights(self, step: int) -> None:
        """Take the weights after training step ``step``. Waits for a rollout in progress, and keeps its answers."""
        if self._running is not None:
            self._running.exception()
        with _whole(self.engine) as module:
            for held, source in zip(self._copy.parameters(), module.parameters(), strict=True):
                held.copy_(source.detach())
            for kept, buffer in zip(self._copy.buffers(), module.buffers(), strict=True):
                kept.copy_(buffer)
        self.step = step

    def begin(self, request: RolloutRequest, sampling: SamplingConfig) -> None:
        """Generate in the background. RuntimeError: the answers of the previous ``begin`` have not been taken."""
        if self._running is not None:
            raise RuntimeError("a rollout is in progress: collect its answers with finish() first")
        seeds = _seeds(request, sampling)
        self._running = self._worker.submit(self._server.answers, self._copy, request, sampling, seeds)

    def finish(self) -> RolloutBatch:
        """Wait for the answers of ``begin`` and return them. RuntimeError: ``begin`` was not called."""
        if self._running is None:
            raise RuntimeError("no rollout is in progress: call begin() first")
        running, self._running = self._running, None
        return running.result()

    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Call ``begin`` and ``finish``."""
        self.begin(request, sampling)
        return self.finish()

    def shutdown(self) -> None:
        """Wait for the rollout in progress, and free the copy of the weights."""
        self._worker.shutdown()
        self._running = None
        self._copy = nn.Module()


class _RolloutServer:
    """Generates answers with a module. Facts about the module are kept between rollouts; the cache is not."""

    def __init__(self, tokenizer: Any, cfg: ServingRolloutConfig) -> None:
        self._tokenizer = tokenizer
        self._cfg = cfg
        self._runner: ModelRunner | None = None

    def answers(
        self, module: nn.Module, request: RolloutRequest, sampling: SamplingConfig, seeds: list[int]
    ) -> RolloutBatch:
        """Generate. ``module``: in evaluation mode, with whole weights; ``seeds``: one per answer."""
        ends, padding = special_tokens(self._tokenizer, module)
        prompts = [
            tokens[kept.bool()].tolist()
            for tokens, kept in zip(request.prompt_ids, request.prompt_attention_mask, strict=True)
        ]
        several = [prompt for prompt in prompts for _ in range(sampling.n_samples_per_prompt)]
        params = [_params(sampling, ends, seed) for seed in seeds]
        generator = self._generator(module, len(several), max(map(len, prompts)) + sampling.max_new_tokens)
        try:
            made = generator.generate(several, params)
        finally:
            generator.runner.release()
        return _batch(request, sampling, made, padding)

    def _generator(self, module: nn.Module, rows: int, length: int) -> Generator:
        cfg = self._cfg
        if self._runner is None or self._runner.module is not module:
            self._runner = ModelRunner(module, cfg.block_size)
        sequences = min(rows, cfg.max_sequences)
        return Generator(
            self._runner,
            token_budget=max(cfg.token_budget, sequences),
            max_sequences=sequences,
            max_length=length,
            num_blocks=sequences * -(-length // cfg.block_size),
        )


def _params(sampling: SamplingConfig, ends: list[int], seed: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_k=max(0, sampling.top_k),
        top_p=sampling.top_p,
        stop_token_ids=tuple(ends),
        seed=seed,
        logprobs=sampling.log_probs,
    )


def _batch(
    request: RolloutRequest, sampling: SamplingConfig, made: list[Request], padding: int
) -> RolloutBatch:
    """Stack the finished requests, padded to the longest answer."""
    prompts, count = request.prompt_ids, sampling.n_samples_per_prompt
    rows, width = len(made), prompts.shape[1]
    longest = max(len(each.generated) for each in made)
    answers = torch.full((rows, longest), padding, dtype=prompts.dtype)
    mask = torch.zeros(rows, longest, dtype=request.prompt_attention_mask.dtype)
    log_probs = torch.zeros(rows, longest) if sampling.log_probs else None
    for row, each in enumerate(made):
        length = len(each.generated)
        answers[row, :length] = torch.tensor(each.generated)
        mask[row, :length] = 1
        if log_probs is not None:
            log_probs[row, :length] = torch.tensor([token.value for token in each.logprobs])
    device = prompts.device
    return RolloutBatch(
        torch.cat([prompts.repeat_interleave(count, 0), answers.to(device)], 1),
        torch.cat([request.prompt_attention_mask.repeat_interleave(count, 0), mask.to(device)], 1),
        torch.full((rows,), width, device=device),
        None if log_probs is None else log_probs.to(device),
    )


def _seeds(request: RolloutRequest, sampling: SamplingConfig) -> list[int]:
    """Return one seed per answer. ValueError: the request has another number of them."""
    rows = request.prompt_ids.shape[0] * sampling.n_samples_per_prompt
    if request.seeds is None:
        return torch.randint(_SEEDS, (rows,)).tolist()
    if len(request.seeds) != rows:
        raise ValueError(
            f"seeds: {len(request.seeds)} of them for {rows} answers ({request.prompt_ids.shape[0]} "
            f"prompts, n_samples_per_prompt={sampling.n_samples_per_prompt}): pass one per answer"
        )
    return [int(each) % _SEEDS for each in request.seeds]


def _check_ranks(engine: Any) -> None:
    shared = max(engine.mp_world_size, engine._config.hybrid_engine.inference_tp_size)
    if shared > 1:
        raise ValueError(
            f"the serving engine does not support rollouts with {shared} ranks sharing each layer: use "
            "RolloutConfig(engine='hybrid_engine')"
        )


@contextlib.contextmanager
def _whole(engine: Any) -> Iterator[nn.Module]:
    """Yield the engine's causal model in evaluation mode, with whole weights and merged adapters."""
    adapters = getattr(engine, "adapters", None)
    trained = engine.training
    engine.eval()
    try:
        with unwrap_model_for_generation(engine) as module, torch.no_grad():
            fused = adapters if adapters is not None else FusedAdapters(module)
            with fused.during():
                inner: Any = module
                yield inner.get_base_model() if hasattr(inner, "get_base_model") else module
    finally:
        engine.train(trained)


def _copy_of(module: nn.Module) -> nn.Module:
    """Return a copy with its own weights, unknown to any engine. ``copy.deepcopy`` alone would also copy what an engine
    has attached to the parameters."""
    copies: dict[int, Tensor] = {
        id(param): nn.Parameter(param.detach().clone(), requires_grad=False) for param in module.parameters()
    }
    copies |= {id(buffer): buffer.detach().clone() for buffer in module.buffers()}
    return copy.deepcopy(module, {**copies}).eval()
