"""Models of a server, and the names by which requests select them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from safetensors import SafetensorError

from deepspeed.inference.serving.bodies import RequestError
from deepspeed.inference.serving.service import Service, Services
from deepspeed.inference.serving.tokenizers import HuggingFaceTokenizer
from deepspeed.inference.serving.tool_requests import Formats

_MAX_TOLD = 8

_MAX_ADAPTERS = 64
"""Maximum number of adapters: each keeps memory until it is removed."""


class ModelError(RequestError):
    """A request names an unknown model."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "model", "model_not_found")


@dataclass(eq=False, kw_only=True)
class ServedModel:
    """``name``: in requests and answers; ``path``: of its folder, a name in requests, too. ``max_length``: tokens of a
    prompt and its answer. ``default_tokens``: of an answer if the client does not say. ``formats``: of calls and
    reasoning; ``trust_templates``: a request may bring its own template. ``pooling``: of embeddings; ``dimensions``:
    to which they may be cut: those of the list, any for an empty one, none for None. ``no_text``: why it generates
    none; empty: it does. ``encode_pair``: (left, right, most tokens) -> the prompt of a pair of texts, for a
    cross-encoder; None: it is none. ``load_adapter``: makes an adapter of a folder; None: there are none."""

    name: str
    service: Service
    tokenizer: HuggingFaceTokenizer
    max_length: int
    path: str = ""
    stop_token_ids: tuple[int, ...] = ()
    default_tokens: int = 1024
    formats: Formats = Formats()
    trust_templates: bool = False
    pooling: str = "last"
    dimensions: tuple[int, ...] | None = None
    no_text: str = ""
    encode_pair: Callable[[str, str, int | None], list[int]] | None = None
    load_adapter: Callable[[str], Any] | None = None

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Return the tokens that decoding omits, by their texts."""
        return {text: token for token, text in self.tokenizer.specials.items()}

    @property
    def type(self) -> str:
        """Return the type of the model in the terms of Together's API: a "rerank" model scores pairs of texts, a
        "language" model has no chat template."""
        if self.no_text:
            return "embedding" if self.encode_pair is None else "rerank"
        return "chat" if self.tokenizer.template else "language"


class Models:
    """The models of a server. Thread-safe. ``models``: with different names; the first serves requests without a model.
    ValueError: a name is empty or occurs twice."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = {model.name: model for model in models}
        if len(self._models) < len(models) or "" in self._models:
            names = [model.name for model in models]
            raise ValueError(f"the models of a server need different names: {', '.join(map(repr, names))}")
        self._by_path = {model.path: model for model in reversed(models)}
        self.default = models[0]
        self.services = Services({model.name: model.service for model in models})
        self._began = int(time.time())
        # name -> (folder, adapter, its model)
        self._adapters: dict[str, tuple[str, Any, ServedModel]] = {}
        self._loading: set[str] = set()
        self._lock = threading.Lock()  # of both

    def add(self, name: str, folder: str, base: str = "", *, anew: bool = False) -> None:
        """Load an adapter of the model ``base``. ``anew``: replace one of this name; running requests keep the old one.
        ModelError: no such model. ValueError: the name is taken, there are too many adapters, or the folder has none
        for this model."""
        model = self._base(base)
        if model.load_adapter is None:
            raise ValueError(
                f"{model.name!r} does not support adapters: they need a generative model on one rank"
            )
        with self._lock:
            self._reserve(name, anew)
        try:
            self._adapters[name] = folder, model.load_adapter(folder), model
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{folder}: {error}") from error
        finally:
            with self._lock:
                self._loading.discard(name)

    def _reserve(self, name: str, anew: bool) -> None:
        taken = name in self._models or name in self._loading or (name in self._adapters and not anew)
        if not name or taken:
            raise ValueError(f"the name {name!r} is {'taken' if name else 'empty'}")
        known = self._loading | self._adapters.keys()
        if name not in known and len(known) >= _MAX_ADAPTERS:
            raise ValueError(f"there are {len(known)} adapters loaded, the maximum: unload one first")
        self._loading.add(name)

    def remove(self, name: str) -> None:
        """Remove an adapter. Running requests finish with it. ModelError: no such adapter."""
        if self._adapters.pop(name, None) is None:
            raise ModelError(f"there is no adapter {name!r}")

    def find(self, name: str) -> tuple[ServedModel, Any]:
        """Return the model of this name, and None; or the model and the adapter of this name. An empty name means the
        first model. ModelError: unknown name."""
        if (known := self._adapters.get(name)) is not None:
            return known[2], known[1]
        return self._base(name), None

    def _base(self, name: str) -> ServedModel:
        found = self._models.get(name) or self._by_path.get(name) if name else self.default
        if found is None:
            there = ", ".join(map(repr, [*self._models, *list(self._adapters)][:_MAX_TOLD]))
            raise ModelError(f"there is no model {name!r}; available: {there}")
        return found

    def described(self) -> list[dict[str, Any]]:
        """Return the entries of ``/v1/models``, adapters last."""
        adapters = dict(self._adapters)  # one may be removed meanwhile
        models = [self._entry(name, model) for name, model in self._models.items()]
        return models + [self._entry(name, model, folder) for name, (folder, _, model) in adapters.items()]

    def one(self, name: str) -> dict[str, Any]:
        """Return the entry of one model. ModelError: unknown name."""
        if (known := self._adapters.get(name)) is not None:
            return self._entry(name, known[2], known[0])
        return self._entry(name, self._base(name))

    def _entry(self, name: str, model: ServedModel, folder: str = "") -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._began,
            "owned_by": "deepspeed",
            "root": folder or name,
            "parent": model.name if folder else None,
            "max_model_len": model.max_length,
            "type": model.type,
        }
