"""Samplers that a config requests for the engine's own loader; the samplers themselves are imported on demand."""

from __future__ import annotations

from typing import Any, Protocol

from deepspeed.config.problems import DeepSpeedConfigError


class _Config(Protocol):
    data_efficiency_enabled: bool
    data_efficiency_config: dict[str, Any]


def _is_enabled(config: _Config, way: str) -> bool:
    sampling = config.data_efficiency_config["data_sampling"]
    return bool(config.data_efficiency_enabled and sampling["enabled"] and sampling[way]["enabled"])


def has_curriculum(config: _Config) -> bool:
    """Return whether samples are chosen by their difficulty."""
    return _is_enabled(config, "curriculum_learning")


def varies_batches(config: _Config) -> bool:
    """Return whether batches are made by token count. DeepSpeedConfigError: a curriculum is enabled as well."""
    if not _is_enabled(config, "dynamic_batching"):
        return False
    if config.data_efficiency_config["data_sampling"]["curriculum_learning"]["enabled"]:
        raise DeepSpeedConfigError(
            "data_efficiency.data_sampling: dynamic_batching and curriculum_learning both choose the "
            "samples of a batch: disable one of them, or pass the samples of each difficulty as "
            "dataset_filter_ids to get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed()"
        )
    return True
