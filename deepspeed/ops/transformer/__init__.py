"""A transformer layer for training."""

from deepspeed.ops.transformer.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

__all__ = ["DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"]
