"""Rollouts: answers to prompts from a model that is being trained, by one interface."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.rollout.base import (
    RolloutBatch,
    RolloutConfig,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
)
from deepspeed.runtime.rollout.hybrid_engine_rollout import HybridEngineRollout, HybridEngineRolloutConfig

__all__ = [
    "HybridEngineRollout",
    "HybridEngineRolloutConfig",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutRequest",
    "SamplingConfig",
    "build_rollout",
]


def build_rollout(
    rollout_cfg: RolloutConfig, student_engine: Any = None, tokenizer: Any = None, **kwargs: Any
) -> RolloutEngine:
    """The rollout engine that ``rollout_cfg.engine`` names. ``kwargs`` are not used by the one there is.

    ValueError: another name, or no ``student_engine``.
    """
    if rollout_cfg.engine != HybridEngineRollout.name:
        raise ValueError(f"Unknown rollout engine {rollout_cfg.engine!r}: use {HybridEngineRollout.name!r}")
    if student_engine is None:
        raise ValueError("rollouts by the hybrid engine need student_engine=")
    return HybridEngineRollout(
        student_engine, tokenizer, HybridEngineRolloutConfig(rollout_cfg.use_graph_capture)
    )
