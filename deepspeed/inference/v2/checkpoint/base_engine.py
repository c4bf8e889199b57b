"""Interface of a source of weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from torch import Tensor


class CheckpointEngineBase(ABC):
    """``model_config``: the config of a model of Transformers, with ``max_seq_length``, the tokens of its longest
    sequence."""

    model_config: Any

    @abstractmethod
    def parameters(self) -> Iterable[tuple[str, Tensor]]:
        """Name and whole value of every weight, in any order; each call starts anew."""
