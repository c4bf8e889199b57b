"""Cross-encoders: models of the kind ``BertForSequenceClassification`` with one label, which read two texts together
and tell how well they match, as ``CrossEncoder`` of sentence-transformers does."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.inference.scheduling.requests import Request, SamplingParams, State
from deepspeed.inference.serving.bodies import RequestError

_ACTIVATION_KEYS = ("activation_fn", "sbert_ce_default_activation_function")


class CrossEncoder:
    """Scores pairs of texts for a ``Service``. A prompt is a pair as ``encode_pair`` makes it, and the score its pooled
    value. Pairs are computed in the order of their arrival, several in one forward.

    Args:
        module: in evaluation mode.
        tokenizer: of Transformers, which nobody else uses.
        token_budget: tokens of a forward, padding included; a longer pair has one of its own.

    ValueError: the model has more labels than one, or an activation that is not known here.
    """

    def __init__(self, module: nn.Module, tokenizer: Any, *, token_budget: int = 512) -> None:
        config: Any = module.config
        if config.num_labels != 1:
            raise ValueError(f"the model has {config.num_labels} labels: a cross-encoder has one, the score")
        self.module: Any = module
        self.token_budget = token_budget
        self.max_length = min(tokenizer.model_max_length, _positions(module))
        self._tokenizer, self._encoding = tokenizer, threading.Lock()
        self._segment, self._least = len(tokenizer), tokenizer.num_special_tokens_to_add(pair=True)
        self._activate = _activation(config)
        self._waiting: list[Request] = []
        self._last_id = 0

    def encode_pair(self, left: str, right: str, most: int | None = None) -> list[int]:
        """Return the tokens of a pair, at most ``most`` (the longer text is cut first); to those of segment 1, the size
        of the vocabulary is added. May be called from any thread. RequestError: ``most`` is less than the tokens that
        belong to no text, with which a tokenizer would cut nothing."""
        if most is not None and most < self._least:
            raise RequestError(
                f"truncate_prompt_tokens={most}: at least {self._least} is expected, the special tokens of a pair",
                "truncate_prompt_tokens",
            )
        with self._encoding:  # truncation is a state of the tokenizer
            found = self._tokenizer(
                left, right, truncation="longest_first" if most else False, max_length=most, verbose=False
            )
        segments = found.get("token_type_ids") or [0] * len(found["input_ids"])
        return [
            token + segment * self._segment
            for token, segment in zip(found["input_ids"], segments, strict=True)
        ]

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """ValueError: it is no pair of texts, or too long a one."""
        if params.pooling is None:
            raise ValueError(
                "the model scores pairs of texts and generates none: use /v1/score or /v1/rerank"
            )
        if len(prompt) > self.max_length:
            raise ValueError(
                f"the pair has {len(prompt)} tokens, the model takes {self.max_length}: give truncate_prompt_tokens"
            )

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        self._last_id += 1
        self._waiting.append(Request(self._last_id, prompt, params))
        return self._waiting[-1]

    def cancel(self, request: Request) -> None:
        if request.state is not State.FINISHED:
            self._waiting.remove(request)
            request.state, request.reason = State.FINISHED, "cancelled"

    def state(self) -> dict[str, float]:
        return {"waiting": len(self._waiting)}

    def step(self) -> list[Request]:
        """Score the pairs that have waited longest; return them."""
        batch = self._waiting[:1]
        longest = len(batch[0].prompt)
        for request in self._waiting[1:]:
            longest = max(longest, len(request.prompt))
            if longest * (len(batch) + 1) > self.token_budget:
                break
            batch.append(request)
        scores = self._scores([request.tokens for request in batch])
        for request, score in zip(batch, scores, strict=True):
            request.pooled, request.state, request.reason = score, State.FINISHED, "stop"
        del self._waiting[: len(batch)]
        return batch

    @torch.inference_mode()
    def _scores(self, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return fp32 [pairs]."""
        width, fill = max(map(len, pairs)), self._tokenizer.pad_token_id or 0
        padded = torch.tensor([[*pair, *[fill] * (width - len(pair))] for pair in pairs])
        mask = torch.arange(width) < torch.tensor([[len(pair)] for pair in pairs])
        given = {"input_ids": padded % self._segment, "attention_mask": mask.long()}
        if "token_type_ids" in self._tokenizer.model_input_names:
            given["token_type_ids"] = padded // self._segment
        device = self.module.device
        logits = self.module(**{name: each.to(device) for name, each in given.items()}).logits
        return self._activate(logits[:, 0].float()).cpu()


def _positions(module: nn.Module) -> int:
    """Return the tokens that the model has positions for: RoBERTa's begin behind that of padding."""
    for name, part in module.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding):
            return part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1)
    return getattr(module.config, "max_position_embeddings", 512)  # type: ignore[union-attr]


def _activation(config: Any) -> nn.Module:
    """Return what a folder of sentence-transformers names; the logistic function where it names nothing."""
    told = {**vars(config), **(getattr(config, "sentence_transformers", None) or {})}
    named = next((str(told[key]) for key in _ACTIVATION_KEYS if told.get(key)), "Sigmoid").rpartition(".")[2]
    if named not in ("Sigmoid", "Identity"):
        raise ValueError(f"the activation {named} of the model's config is not Sigmoid or Identity")
    return getattr(nn, named)()
