"""Rollouts: generation of answers with a model in training, behind one interface."""

from __future__ import annotations

from typing import Any

from deepspeed.engine.rollout.base import (
    RolloutBatch,
    RolloutConfig,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
    importance_weights,
    rollout_mismatch,
)
from deepspeed.engine.rollout.hybrid_engine_rollout import HybridEngineRollout, HybridEngineRolloutConfig

_NAMES = (HybridEngineRollout.name, "serving", "serving_ahead")

__all__ = [
    "HybridEngineRollout", "HybridEngineRolloutConfig", "RolloutBatch", "RolloutConfig", "RolloutEngine",
    "RolloutRequest", "SamplingConfig", "build_rollout", "importance_weights", "rollout_mismatch",
]  # fmt: skip


def build_rollout(
    rollout_cfg: RolloutConfig, student_engine: Any = None, tokenizer: Any = None, **kwargs: Any
) -> RolloutEngine:
    """Create the rollout engine named by ``rollout_cfg.engine``, an attribute that any object may have. ``kwargs``:
    fields of ``ServingRolloutConfig``, for rollouts by the serving engine; ignored by the hybrid engine.

    ValueError: an unknown name, or no ``student_engine``.
    """
    name = rollout_cfg.engine
    if name not in _NAMES:
        raise ValueError(f"Unknown rollout engine {name!r}: use {', '.join(map(repr, _NAMES))}")
    if student_engine is None:
        raise ValueError(
            f"a rollout engine {name!r} needs both student_engine= and tokenizer= (which may be None where the model's "
            "generation config names its special tokens)"
        )
    if name == HybridEngineRollout.name:
        return HybridEngineRollout(
            student_engine,
            tokenizer,
            HybridEngineRolloutConfig(getattr(rollout_cfg, "use_graph_capture", False)),
        )
    from deepspeed.engine.rollout import serving_rollout as serving  # imports the serving engine

    kind = serving.ServingRollout if name == serving.ServingRollout.name else serving.ServingRolloutAhead
    return kind(student_engine, tokenizer, serving.ServingRolloutConfig(**kwargs))
