"""What is known of a decoder before its weights are there.

The engine runs models of Transformers as they are and needs no such class; it is for scripts that describe a model of
their own, with the containers of weights and the parts of ``deepspeed.inference.v2.modules``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from deepspeed.inference.model.rope import rope_theta
from deepspeed.inference.v2.inference_utils import ActivationType, NormTypeEnum, is_gated
from deepspeed.inference.v2.model_implementations.sharding import get_local_heads
from deepspeed.parallel.tensor.ranks import communicator_of

__all__ = ["DSTransformerModelBase"]


class DSTransformerModelBase(ABC):
    """A subclass says the sizes; this one derives others from them.

    Args:
        config: of the model, as Transformers has it.
        engine_config: of the engine.
        base_mp_group: the ranks that share the layers.
    """

    def __init__(self, config: Any, engine_config: Any = None, base_mp_group: Any = None) -> None:
        self._config = config
        self._engine_config = engine_config
        self._base_mp_group = base_mp_group

    @property
    def config(self) -> Any:
        return self._config

    @property
    def engine_config(self) -> Any:
        return self._engine_config

    @property
    def tp_size(self) -> int:
        """Ranks that share the layers."""
        return communicator_of(self._base_mp_group).size

    @property
    def tp_rank(self) -> int:
        """This rank's number among them."""
        return communicator_of(self._base_mp_group).rank

    # ---------------------------------------------------------------------------------------- what a subclass says

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Blocks."""

    @property
    @abstractmethod
    def model_dim(self) -> int:
        """Width of the residual stream."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Tokens, with padding."""

    @property
    @abstractmethod
    def head_size(self) -> int:
        """Width of a head of attention."""

    @property
    @abstractmethod
    def n_heads(self) -> int:
        """Heads of queries, of all ranks together."""

    @property
    @abstractmethod
    def intermediate_dim(self) -> int:
        """Inputs of the second layer of an MLP, of all ranks together."""

    @property
    @abstractmethod
    def activation_dtype(self) -> torch.dtype:
        """Of what flows between layers."""

    @property
    @abstractmethod
    def mlp_activation_fn(self) -> ActivationType:
        """Of the MLP."""

    @property
    @abstractmethod
    def norm_type(self) -> NormTypeEnum:
        """Of the norms."""

    # ------------------------------------------------------------------------------------------ what follows from it

    @property
    def n_heads_q(self) -> int:
        return self.n_heads

    @property
    def n_heads_kv(self) -> int:
        """Heads of keys and values, of all ranks together; a model with fewer than queries says so itself."""
        return self.n_heads

    @property
    def n_heads_q_local(self) -> int:
        """This rank's."""
        return get_local_heads(self.tp_rank, self.tp_size, self.n_heads_q, self.n_heads_kv)[0]

    @property
    def n_heads_kv_local(self) -> int:
        """This rank's."""
        return get_local_heads(self.tp_rank, self.tp_size, self.n_heads_q, self.n_heads_kv)[1]

    @property
    def gated_mlp(self) -> bool:
        """Whether the first layer of an MLP gives a gate and what it is multiplied with."""
        return is_gated(self.mlp_activation_fn)

    @property
    def rope_theta(self) -> float:
        """The base of rotary positions. ValueError: the config has none, or its positions need more than one base."""
        return rope_theta(self._config)
