"""Engines from files."""

from __future__ import annotations

import logging
from pathlib import Path

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.inference.v2.checkpoint.huggingface_engine import HuggingFaceCheckpointEngine
from deepspeed.inference.v2.config_v2 import RaggedInferenceEngineConfig
from deepspeed.inference.v2.engine_v2 import MARK, InferenceEngineV2
from deepspeed.inference.v2.policy import InferenceV2Policy

__all__ = ["HuggingFaceCheckpointEngine", "build_engine_from_ds_checkpoint", "build_hf_engine"]

_MARK_OF_OTHERS = "ds_model_config.pkl"


def build_hf_engine(
    path: str, engine_config: RaggedInferenceEngineConfig, debug_level: int = logging.INFO
) -> InferenceEngineV2:
    """An engine of a causal model of Transformers.

    Args:
        path: a folder of ``save_pretrained`` or of ``InferenceEngineV2.serialize``, or a model's name in the hub.
        engine_config: limits and ranks.
        debug_level: accepted for compatibility; the level of the package's log is the caller's.

    Raises:
        DeepSpeedConfigError: weights are missing, or the config asks for what this release does not have.
        LayoutError: the model cannot be run over a paged cache.
    """
    if (Path(path) / MARK).is_file() or (Path(path) / _MARK_OF_OTHERS).is_file():
        return build_engine_from_ds_checkpoint(path, engine_config, debug_level)
    return InferenceEngineV2(InferenceV2Policy(HuggingFaceCheckpointEngine(path)), engine_config)


def build_engine_from_ds_checkpoint(
    path: str, engine_config: RaggedInferenceEngineConfig, debug_level: int = logging.INFO
) -> InferenceEngineV2:
    """An engine from a folder of ``InferenceEngineV2.serialize``; for the arguments see ``build_hf_engine``.

    DeepSpeedConfigError: the folder is none, or was written by another implementation.
    """
    if not (Path(path) / MARK).is_file():
        pickled = (Path(path) / _MARK_OF_OTHERS).is_file()
        why = "holds pickled layers of another implementation" if pickled else f"has no {MARK}"
        raise DeepSpeedConfigError(f"{path} {why}: give the folder of the model to build_hf_engine instead")
    return InferenceEngineV2(InferenceV2Policy(HuggingFaceCheckpointEngine(path)), engine_config)
