"""What each kind of part is told."""

from __future__ import annotations

from enum import Enum
from typing import Any

from deepspeed.config.section import DeepSpeedConfigModel, Float, Int
from deepspeed.inference.v2.inference_utils import ActivationType, DtypeEnum, NormTypeEnum
from deepspeed.inference.v2.modules.ds_module import DSModuleConfig

__all__ = [
    "DSEmbeddingsConfig",
    "DSLinearConfig",
    "DSMoEConfig",
    "DSNormConfig",
    "DSSelfAttentionConfig",
    "DSUnembedConfig",
    "MaskingType",
    "NormTypeEnum",
    "PositionalEmbeddingType",
    "RotateHalfConfig",
]


class PositionalEmbeddingType(Enum):
    """How attention knows positions."""

    none = "none"
    rotate_half = "rotate_half"
    rotate_every_other = "rotate_every_other"
    alibi = "alibi"


class MaskingType(Enum):
    """Who sees whom. ``symmetric``: a mask per token; ``asymmetric``: one per pair of tokens."""

    none = "none"
    causal = "causal"
    local = "local"
    symmetric = "symmetric"
    asymmetric = "asymmetric"


class RotateHalfConfig(DeepSpeedConfigModel):
    """``use_trained_freqs``: frequencies are given, instead of those of ``theta_base``. ``rotate_dim``: the first so
    many elements of each head are rotated; None: all."""

    use_trained_freqs: bool = False
    theta_base: Float = 10_000.0
    rotate_dim: Int | None = None


class DSSelfAttentionConfig(DSModuleConfig):
    """Heads as this rank has them."""

    n_heads_q: Int
    n_heads_kv: Int
    head_size: Int
    max_sequences: Int
    scale_factor: Float = 1.0
    input_dtype: DtypeEnum = DtypeEnum.fp16
    output_dtype: DtypeEnum = DtypeEnum.fp16
    masking_type: MaskingType = MaskingType.causal
    masking_args: dict[Any, Any] = {}
    positional_embedding_type: PositionalEmbeddingType = PositionalEmbeddingType.none
    positional_embedding_config: RotateHalfConfig | None = None


class DSEmbeddingsConfig(DSModuleConfig):
    """``positional_offset`` is added to positions; ``output_normalization``: a norm behind the sum."""

    residual_dtype: DtypeEnum = DtypeEnum.fp16
    embedding_dim: Int
    positional_embedding: bool = False
    positional_offset: Int = 0
    use_token_type: bool = False
    output_normalization: NormTypeEnum | None = None


class DSLinearConfig(DSModuleConfig):
    """With a gated activation the weight has ``2 * out_channels`` rows."""

    in_channels: Int
    out_channels: Int
    activation: ActivationType = ActivationType.IDENTITY
    input_dtype: DtypeEnum = DtypeEnum.fp16
    output_dtype: DtypeEnum = DtypeEnum.fp16


class DSMoEConfig(DSModuleConfig):
    """``normalize_scores``: those of the chosen experts sum up to one."""

    model_dim: Int
    intermediate_features: Int
    n_experts: Int
    top_k: Int = 1
    input_dtype: DtypeEnum = DtypeEnum.fp16
    output_dtype: DtypeEnum = DtypeEnum.fp16
    activation: ActivationType = ActivationType.IDENTITY
    normalize_scores: bool = False


class DSNormConfig(DSModuleConfig):
    type: NormTypeEnum
    channels: Int
    residual_dtype: DtypeEnum = DtypeEnum.fp16
    input_dtype: DtypeEnum = DtypeEnum.fp16
    output_dtype: DtypeEnum = DtypeEnum.fp16
    eps: Float = 1e-5


class DSUnembedConfig(DSModuleConfig):
    """``norm_type``: of the norm in front of the product with the vocabulary."""

    dtype: DtypeEnum = DtypeEnum.fp16
    norm_type: NormTypeEnum | None = None
    model_dim: Int
    max_sequences: Int
    vocab_size: Int
