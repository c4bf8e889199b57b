"""Weights as Transformers saves them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed.checkpoint.foreign.plain_weights import find_plain, tensors_of
from deepspeed.inference.v2.checkpoint.base_engine import CheckpointEngineBase


class HuggingFaceCheckpointEngine(CheckpointEngineBase):
    """A folder of ``save_pretrained``, or the name of a model in the Hugging Face hub.

    Args:
        model_name_or_path: of the folder or model.
        auth_token: for the hub.
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
    """Tokens that a model with this config was made for; 2,048 if it does not say."""
    text = config.get_text_config(decoder=True)
    for name in ("max_seq_length", "max_position_embeddings", "n_positions", "seq_length", "max_seq_len"):
        if getattr(text, name, None):
            return int(getattr(text, name))
    return 2048
