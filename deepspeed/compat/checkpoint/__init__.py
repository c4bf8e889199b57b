"""Documented helpers for checkpoints of Megatron-DeepSpeed."""
