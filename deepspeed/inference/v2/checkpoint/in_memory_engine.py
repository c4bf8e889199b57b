"""Weights of a model that is there already."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from deepspeed.inference.v2.checkpoint.base_engine import CheckpointEngineBase
from deepspeed.inference.v2.checkpoint.huggingface_engine import longest_sequence


class InMemoryModelEngine(CheckpointEngineBase):
    """``model``: of Transformers. Its weights are shared, not copied; it is not changed."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.model_config = model.config
        self.model_config.max_seq_length = longest_sequence(self.model_config)

    def parameters(self) -> Iterable[tuple[str, Tensor]]:
        yield from self.model.state_dict().items()
