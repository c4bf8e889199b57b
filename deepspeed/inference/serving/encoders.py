"""Encoders: embedding models, as in sentence-transformers, and cross-encoders (``BertForSequenceClassification`` with
one label), which read two texts together and score how well they match, as its ``CrossEncoder`` does."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.inference.scheduling.requests import Request, SamplingParams, State
from deepspeed.inference.serving.bodies import RequestError

_ACTIVATION_KEYS = ("activation_fn", "sbert_ce_default_activation_function")


class TextEncoder:
    """Embeds texts for a ``Service``, in order of arrival, several in one forward.

    Args:
        module: in evaluation mode.
        tokenizer: of Transformers, not shared with other users.
        token_budget: tokens per forward, with padding; a longer text gets its own forward.
    """

    use, unit, remedy = "the model only computes embeddings: use /v1/embeddings", "text", ""

    def __init__(self, module: nn.Module, tokenizer: Any, *, token_budget: int = 512) -> None:
        self.module: Any = module
        self.token_budget = token_budget
        self.max_length = min(tokenizer.model_max_length, _positions(module))
        self._tokenizer, self._segment = tokenizer, max(len(tokenizer), self.module.config.vocab_size)
        self._known = self.module.config.vocab_size
        self._waiting: list[Request] = []
        self._last_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """ValueError: it is empty or too long, or has unknown tokens."""
        if not 0 < len(prompt) <= self.max_length:
            raise ValueError(
                f"the {self.unit} has {len(prompt)} tokens, but the model supports {self.max_length}{self.remedy}"
            )
        if not 0 <= min(prompt) <= max(prompt) < self._known:
            raise ValueError(f"token outside the vocabulary, 0 to {self._known - 1}")

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
        """Compute the oldest waiting requests, and return them."""
        batch = self._waiting[:1]
        longest = len(batch[0].prompt)
        for request in self._waiting[1:]:
            longest = max(longest, len(request.prompt))
            if longest * (len(batch) + 1) > self.token_budget:
                break
            batch.append(request)
        for request, value in zip(batch, self._computed(batch), strict=True):
            request.pooled, request.state, request.reason = value, State.FINISHED, "stop"
        del self._waiting[: len(batch)]
        return batch

    @torch.inference_mode()
    def _computed(self, batch: Sequence[Request]) -> Sequence[Tensor]:
        """Return one fp32 vector per request."""
        states = self._outputs([request.prompt for request in batch]).last_hidden_state.float().cpu()
        return [
            _pooled(rows[: len(request.prompt)], request.params.pooling)
            for rows, request in zip(states, batch, strict=True)
        ]

    def _outputs(self, prompts: Sequence[Sequence[int]]) -> Any:
        """Run the module over ``prompts``, padded. Tokens of segment 1 are offset by the vocabulary size."""
        width, fill = max(map(len, prompts)), self._tokenizer.pad_token_id or 0
        padded = torch.tensor([[*each, *[fill] * (width - len(each))] for each in prompts])
        mask = torch.arange(width) < torch.tensor([[len(each)] for each in prompts])
        given = {"input_ids": padded % self._segment, "attention_mask": mask.long()}
        if "token_type_ids" in self._tokenizer.model_input_names:
            given["token_type_ids"] = padded // self._segment
        device = self.module.device
        return self.module(**{name: each.to(device) for name, each in given.items()})


class CrossEncoder(TextEncoder):
    """Scores pairs of texts. A prompt is a pair as encoded by ``encode_pair``, and its pooled value is the score.

    ValueError: the model has several labels, or an unknown activation.
    """

    use = "the model scores pairs of texts and does not generate text: use /v1/score or /v1/rerank"
    unit, remedy = "pair", ": set truncate_prompt_tokens"

    def __init__(self, module: nn.Module, tokenizer: Any, *, token_budget: int = 512) -> None:
        super().__init__(module, tokenizer, token_budget=token_budget)
        self._known = 2 * self._segment
        config: Any = module.config
        if config.num_labels != 1:
            raise ValueError(f"the model has {config.num_labels} labels, but a cross-encoder has one")
        self._encoding, self._least = threading.Lock(), tokenizer.num_special_tokens_to_add(pair=True)
        self._activate = _activation(config)

    def encode_pair(self, left: str, right: str, most: int | None = None) -> list[int]:
        """Return the tokens of a pair, at most ``most`` (the longer text is truncated first); those of segment 1 are
        offset by the vocabulary size. Thread-safe. RequestError: ``most`` is less than the number of special tokens, in
        which case a tokenizer would not truncate at all."""
        if most is not None and most < self._least:
            raise RequestError(
                f"truncate_prompt_tokens={most}: expected at least {self._least}, the special tokens of a pair",
                "truncate_prompt_tokens",
            )
        with self._encoding:  # truncation is set on the tokenizer
            found = self._tokenizer(
                left, right, truncation="longest_first" if most else False, max_length=most, verbose=False
            )
        segments = found.get("token_type_ids") or [0] * len(found["input_ids"])
        return [
            token + segment * self._segment
            for token, segment in zip(found["input_ids"], segments, strict=True)
        ]

    @torch.inference_mode()
    def _computed(self, batch: Sequence[Request]) -> Sequence[Tensor]:
        """Return the scores, fp32 [pairs]."""
        logits = self._outputs([request.prompt for request in batch]).logits
        return self._activate(logits[:, 0].float()).cpu()


def _pooled(rows: Tensor, pooling: str | None) -> Tensor:
    return rows.mean(0) if pooling == "mean" else rows[0 if pooling == "cls" else -1]


def _positions(module: nn.Module) -> int:
    """Return the number of positions for tokens: RoBERTa's begin after that of padding."""
    for name, part in module.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding):
            return part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1)
    return getattr(module.config, "max_position_embeddings", 512)  # type: ignore[union-attr]


def _activation(config: Any) -> nn.Module:
    """Return the activation that a folder of sentence-transformers names; default: the logistic function."""
    settings = {**vars(config), **(getattr(config, "sentence_transformers", None) or {})}
    named = next((str(settings[key]) for key in _ACTIVATION_KEYS if settings.get(key)), "Sigmoid").rpartition(
        "."
    )[2]
    if named not in ("Sigmoid", "Identity"):
        raise ValueError(f"the activation {named} of the model's config is not Sigmoid or Identity")
    return getattr(nn, named)()
