"""Selection of the checkpoint engine by the config."""

from __future__ import annotations

from typing import Any

from deepspeed.checkpoint.storage.checkpoint_engine import CheckpointEngine
from deepspeed.checkpoint.storage.torch_checkpoint_engine import TorchCheckpointEngine


def create_checkpoint_engine(
    config_params: Any, groups: Any, zero_stage: int, has_moe_layers: bool, optimize_dp_state: bool
) -> CheckpointEngine:
    """Create the engine for single files that ``checkpoint.writer`` and ``datastates_ckpt`` of ``config_params``, a
    DeepSpeedConfig, select.

    ``groups``, ``zero_stage`` and ``has_moe_layers`` tell which ranks hold the same data; they have no effect, since
    each rank writes what it holds.
    """
    if config_params is None:
        return TorchCheckpointEngine()
    if config_params.datastates_config is not False:
        from deepspeed.checkpoint.storage.decoupled_checkpoint_engine import DataStatesCheckpointEngine

        return DataStatesCheckpointEngine(config_params, config_params.global_rank)
    writer = config_params.checkpoint_config.writer
    if writer is None:
        return TorchCheckpointEngine(config_params)
    from deepspeed.checkpoint.storage.decoupled_checkpoint_engine import DecoupledCheckpointEngine
    from deepspeed.checkpoint.storage.torch_checkpoint_engine import FastCheckpointEngine

    made = DecoupledCheckpointEngine if writer.decoupled else FastCheckpointEngine
    return made(config_params, None, optimize_dp_state)
