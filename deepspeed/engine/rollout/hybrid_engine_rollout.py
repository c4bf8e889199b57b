"""Rollouts by the training engine's own ``generate``."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.config.section import note
from deepspeed.engine.rollout.base import (
    RolloutBatch,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
    special_tokens,
    until_the_end,
)


@dataclass
class HybridEngineRolloutConfig:
    """``use_graph_capture`` has no effect: decoding is not captured as a graph. The other options concern batching and
    do not change answers; they have no effect either: ``RolloutConfig("serving")`` shares prompts and memory on its
    own.

    ``enable_profiling``: ``get_last_profile`` returns the times of the last ``generate``; synchronizes with the device.
    """

    use_graph_capture: bool = False
    use_shared_prefill: bool = False
    align_decode_fronts: bool = False
    enable_cache_trimming: bool = False
    continuous_cache_capacity: int | None = None
    enable_profiling: bool = False


_UNUSED = "use_shared_prefill align_decode_fronts enable_cache_trimming continuous_cache_capacity".split()


class HybridEngineRollout(RolloutEngine):
    """Generates by ``engine.generate`` in evaluation mode, and restores the engine's mode afterwards.

    Args:
        engine: of ``deepspeed.initialize`` with ``hybrid_engine``, or any engine whose module has ``generate``.
        tokenizer: provides the end and padding tokens; None: the model's generation config does.
        cfg: see ``HybridEngineRolloutConfig``.
    """

    name = "hybrid_engine"

    def __init__(self, engine: Any, tokenizer: Any, cfg: HybridEngineRolloutConfig | None = None) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.use_graph_capture = cfg is not None and cfg.use_graph_capture
        self._profiled = cfg is not None and cfg.enable_profiling
        self._marks: list[float] = []
        self._last_profile: dict[str, Any] | None = None
        if self.use_graph_capture:
            note("rollout: use_graph_capture has no effect: decoding is not captured as a graph")
        for name in _UNUSED:
            if getattr(cfg, name, None):
                note(f"rollout: {name} has no effect on the hybrid engine: use RolloutConfig('serving')")

    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Generate answers. Collective if the engine's ``generate`` is.

        ValueError: ``log_probs``, with ranks that share layers only in generation; ``seeds``.
        """
        if request.seeds is not None:
            raise ValueError(
                "seeds of a RolloutRequest: generate() uses a single random stream for all rows; use "
                "RolloutConfig(engine='serving')"
            )
        self._marks = []
        self._mark()
        ends, padding = special_tokens(self.tokenizer, self.engine.module)
        trained = self.engine.training
        self.engine.eval()
        each = sampling.n_samples_per_prompt  # Transformers refuses num_return_sequences without sampling
        prompts = request.prompt_attention_mask.repeat_interleave(each, 0)
        self._mark()
        try:
            made = self.engine.generate(
                input_ids=request.prompt_ids.repeat_interleave(each, 0),
                attention_mask=prompts,
                **_settings(sampling),
                eos_token_id=ends or None,
                pad_token_id=padding,
            )
        finally:
            self.engine.train(trained)
        self._mark()
        tokens = made.sequences if sampling.log_probs else made
        width = request.prompt_ids.shape[1]
        answers = until_the_end(tokens[:, width:], ends)
        batch = RolloutBatch(
            tokens,
            torch.cat([prompts, answers.to(prompts.dtype)], 1),
            torch.full((tokens.shape[0],), width, device=tokens.device),
            _log_probs(made.logits, tokens[:, width:]) * answers if sampling.log_probs else None,
        )
        self._mark()
        if self._profiled:
            self._last_profile = _profile(self._marks, *answers.shape)
        return batch

    def get_last_profile(self) -> dict[str, Any] | None:
        """Return milliseconds of each part of the last ``generate``, the padded length of the answers, and tokens per
        second. None: before the first one, or without ``enable_profiling``."""
        return None if self._last_profile is None else dict(self._last_profile)

    def _mark(self) -> None:
        if self._profiled:
            get_accelerator().synchronize()
            self._marks.append(time.perf_counter())

    def sync_weights(self, step: int) -> None:
        """Do nothing: generation uses the trained weights themselves."""


def _profile(marks: list[float], rows: int, length: int) -> dict[str, Any]:
    """Return the profile. ``marks``: times of the start, and of the ends of preparing, generating and
    postprocessing."""
    before, generating, after = ((end - start) * 1e3 for start, end in itertools.pairwise(marks))
    return {
        "prompt_expansion_ms": before,
        "generation_ms": generating,
        "post_processing_ms": after,
        "total_ms": (marks[-1] - marks[0]) * 1e3,
        "tokens_per_second": rows * length / (marks[-1] - marks[0]),
        "response_length": length,
    }


def _settings(sampling: SamplingConfig) -> dict[str, Any]:
    """Return the arguments of ``generate``."""
    settings: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "do_sample": sampling.temperature > 0,
    }
    if sampling.temperature > 0:
        settings |= {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": max(0, sampling.top_k),
        }
    if sampling.log_probs:
        settings |= {"return_dict_in_generate": True, "output_logits": True}
    return settings


def _log_probs(logits: tuple[Tensor, ...], answers: Tensor) -> Tensor:
    """Return the log-probabilities [rows, length], float32, of the sampled tokens, from the logits [rows, vocabulary]
    of each position."""
    each = [step.float().log_softmax(-1).gather(1, answers[:, at, None]) for at, step in enumerate(logits)]
    return torch.cat(each, 1)
