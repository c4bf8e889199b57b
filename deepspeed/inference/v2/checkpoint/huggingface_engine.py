"""Weights in the layout of Transformers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from deepspeed.checkpoint.foreign.plain_weights import find_plain, tensors_of

# Interface of a weight source.


class CheckpointEngineBase(ABC):
    """A source of weights. ``model_config``: a Transformers config, with ``max_seq_length``, the maximum sequence
    length in tokens."""

    model_config: Any

    @abstractmethod
    def parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Yield name and whole value of every weight, in any order; each call starts over."""


class HuggingFaceCheckpointEngine(CheckpointEngineBase):
    """A folder of ``save_pretrained``, or the name of a model on the Hugging Face Hub.

    Args:
        model_name_or_path: the folder or model name.
        auth_token: for the Hub.
        config: of the model; None: it is read.
        hf_kwargs: for ``AutoConfig.from_pretrained``, such as ``trust_remote_code``.

    Raises:
        FileNotFoundError: there are no weights.
    """

    def __init__(
        self, model_name_or_path: str, auth_token: str | None = None, *, config: Any = None, **hf_kwargs: Any
    ) -> None:
        from transformers import AutoConfig, GenerationConfig

        self.model_name_or_path = model_name_or_path
        folder = Path(model_name_or_path)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(model_name_or_path, token=auth_token))
        found = find_plain(folder)
        if found is None:
            raise FileNotFoundError(f"{folder} holds no weights (.safetensors or .bin)")
        self._weights = found
        self.model_config = config or AutoConfig.from_pretrained(folder, **hf_kwargs)
        self.model_config.max_seq_length = longest_sequence(self.model_config)
        if (folder / "generation_config.json").is_file():
            self.generation_config = GenerationConfig.from_pretrained(folder)

    def parameters(self) -> Iterable[tuple[str, Tensor]]:
        yield from tensors_of(self._weights)


def longest_sequence(config: Any) -> int:
    """Return the maximum sequence length of a model with this config, in tokens; 2,048 if unknown."""
    text = config.get_text_config(decoder=True)
    for name in ("max_seq_length", "max_position_embeddings", "n_positions", "seq_length", "max_seq_len"):
        if getattr(text, name, None):
            return int(getattr(text, name))
    return 2048


# Weights of an existing model.


class InMemoryModelEngine(CheckpointEngineBase):
    """``model``: of Transformers. Its weights are shared, not copied; the model is not modified."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.model_config = model.config
        self.model_config.max_seq_length = longest_sequence(self.model_config)

    def parameters(self) -> Iterable[tuple[str, Tensor]]:
        yield from self.model.state_dict().items()
