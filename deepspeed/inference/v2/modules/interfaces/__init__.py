"""The kinds of parts: what each computes, and who does it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from deepspeed.inference.v2.inference_parameter import InferenceParameter
from deepspeed.inference.v2.modules.configs import (
    DSEmbeddingsConfig,
    DSLinearConfig,
    DSMoEConfig,
    DSNormConfig,
    DSSelfAttentionConfig,
    DSUnembedConfig,
)
from deepspeed.inference.v2.modules.ds_module import DSModuleBase, DSModuleConfig
from deepspeed.inference.v2.modules.module_registry import DSModuleRegistryBase
from deepspeed.inference.v2.ragged import RaggedBatchWrapper

__all__ = [
    "DSEmbeddingBase",
    "DSEmbeddingRegistry",
    "DSLinearBase",
    "DSLinearRegistry",
    "DSMoEBase",
    "DSMoERegistry",
    "DSPostNormBase",
    "DSPostNormRegistry",
    "DSPreNormBase",
    "DSPreNormRegistry",
    "DSSelfAttentionBase",
    "DSSelfAttentionRegistry",
    "DSUnembedBase",
    "DSUnembedRegistry",
]

Registered = dict[str, type[DSModuleBase]]


class DSSelfAttentionBase(DSModuleBase):
    """Attention of [tokens, q, k and v heads] over a cache, with its heads joined."""

    @staticmethod
    def config_class() -> type[DSModuleConfig]:
        return DSSelfAttentionConfig

    @property
    def kv_block_size(self) -> int:
        """Tokens per block of the cache."""
        raise NotImplementedError(f"{type(self).__name__}.kv_block_size")

    @property
    def q_block_size(self) -> int:
        """Tokens of a sequence that are computed together."""
        raise NotImplementedError(f"{type(self).__name__}.q_block_size")

    def build_atoms(self, ragged_batch: RaggedBatchWrapper) -> None:
        """What is computed together of a batch; nothing by default."""

    def forward(
        self,
        q_k_v: Tensor,
        kv_cache: Tensor,
        batch: RaggedBatchWrapper,
        attention_mask: Tensor | None = None,
        attention_bias: Tensor | None = None,
        inv_freqs: Tensor | None = None,
    ) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.forward")


class DSSelfAttentionRegistry(DSModuleRegistryBase):
    registry: ClassVar[Registered] = {}

    @staticmethod
    def associated_class() -> type[DSModuleBase]:
        return DSSelfAttentionBase


class DSEmbeddingBase(DSModuleBase):
    """Vectors of tokens: of the word, and of its position and type where the model has those."""

    @staticmethod
    def config_class() -> type[DSModuleConfig]:
        return DSEmbeddingsConfig

    @abstractmethod
    def transform_param(self, embed_param: Tensor) -> InferenceParameter:
        """A table as forward wants it."""

    @property
    @abstractmethod
    def output(self) -> Tensor:
        """The memory of the result, for ``max_tokens`` tokens."""

    def forward(
        self,
        ragged_batch: RaggedBatchWrapper,
        word_embeddings: Tensor,
        position_embeddings: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        token_type_embeddings: Tensor | None = None,
    ) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.forward")


class DSEmbeddingRegistry(DSModuleRegistryBase):
    registry: ClassVar[Registered] = {}

    @staticmethod
    def associated_class() -> type[DSModuleBase]:
        return DSEmbeddingBase


class DSLinearBase(DSModuleBase):
    """activation(hidden_states @ w.T + b)."""

    @staticmethod
    def config_class() -> type[DSModuleConfig]:
        return DSLinearConfig

    @abstractmethod
    def transform_param(self, param: Tensor) -> InferenceParameter:
        """A weight as forward wants it."""

    def forward(self, hidden_states: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__}.forward")

    @property
    @abstractmethod
    def output(self) -> Tensor:
        """The memory of the result, for ``max_tokens`` tokens."""


class DSLinearRegistry(DSModuleRegistryBase):
    registry: ClassVar[Registered] = {}

    @staticmethod
    def associated_class() -> type[DSModuleBase]:
        return DSLinearBase


class DSMoEBase(DSModuleBase):
    """The experts of each token, weighted by a gate."""

    @staticmethod
    def config_class() -> type[DSModuleConfig]:
        return DSMoEConfig

    @abstractmethod
    def transform_gate_param(self, param: Tensor) -> InferenceParameter:
        """The gate's weight."""

    @abstractmethod
    def transform_moe_mlp_1_param(self, param: Tensor) -> InferenceParameter:
        """Weights or biases of the experts' first layers."""

    @abstractmethod
    def transform_moe_mlp_2_param(self, param: Tensor) -> InferenceParameter:
        """Of their second layers."""

    def forward(
        self,
        hidden_states: Tensor,
        gate_w: Tensor,
        mlp_1_w: Tensor,
        mlp_2_w: Tensor,
        mlp_1_b: Tensor | None = None,
        mlp_2_b: Tensor | None = None,
    ) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__}.forward")

    @property
    @abstractmethod
    def output(self) -> Tensor:
        """The memory of the result, for ``max_tokens`` tokens."""


class DSMoERegistry(DSModuleRegistryBase):
    registry: ClassVar[Registered] = {}

    @staticmethod
    def associated_class() -> type[DSModuleBase]:
        return DSMoEBase


class _NormBase(DSModuleBase):
    @staticmethod
    def config_class() -> type[DSModuleConfig]:
        return DSNormConfig

    @abstractmethod
    def transform_param(self, param: Tensor) -> InferenceParameter:
        """A weight as forward wants it."""


class DSPostNormBase(_NormBase):
    """(residual, hidden): both norm(residual + hidden_states)."""

    def forward(
        self, residual: Tensor, hidden_states: Tensor, gamma: Tensor, beta: Tensor | None = None
    ) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.forward")


class DSPostNormRegistry(DSModuleRegistryBase):
    registry: ClassVar[Registered] = {}

    @staticmethod
    def associated_class() -> type[DSModuleBase]:
        return DSPostNormBase


class DSPreNormBase(_NormBase):
    """(residual + hidden_states, norm of it); without ``hidden_states``, (residual, norm of it)."""

    def forward(
        self, residual: Tensor, hidden_states: Tensor | None, gamma: Tensor, beta: Tensor | None = None
    ) -> Any:
        raise NotImplementedError(f"{type(self).__name__}.forward")


class DSPreNormRegistry(DSModuleRegistryBase):
    registry: ClassVar[Registered] = {}

    @staticmethod
    def associated_class() -> type[DSModuleBase]:
        return DSPreNormBase


class DSUnembedBase(DSModuleBase):
    """Logits of the last token of each sequence."""

    @staticmethod
    def config_class() -> type[DSModuleConfig]:
        return DSUnembedConfig

    def forward(
        self,
        hidden_states: Tensor,
        vocab_embedding: Tensor,
        ragged_metadata: RaggedBatchWrapper,
        gamma: Tensor | None = None,
        beta: Tensor | None = None,
    ) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__}.forward")


class DSUnembedRegistry(DSModuleRegistryBase):
    registry: ClassVar[Registered] = {}

    @staticmethod
    def associated_class() -> type[DSModuleBase]:
        return DSUnembedBase
