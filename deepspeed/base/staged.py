"""Interface by which `initialize` recognises a pipeline module without importing pipelines."""

from __future__ import annotations

from typing import Any

from torch import nn


class Staged:
    """Module that is one pipeline stage of a model, and its own model-parallel unit."""

    idle = False
    """True: this stage trains nothing although others do, and joins every step without trainable weights."""

    def mpu(self) -> Any:
        raise NotImplementedError

    def share_layers(self, parts: int) -> None:
        """Split the layers of a stage over each ``parts`` neighbouring ranks. Collective over all ranks.

        DeepSpeedConfigError: the ranks were arranged differently.
        """
        raise NotImplementedError

    def share_sequences(self, ranks: int) -> None:
        """Split sequences over each ``ranks`` neighbouring replicas of a stage. Collective over all ranks.

        DeepSpeedConfigError: there are too few replicas.
        """
        raise NotImplementedError

    def shard_sequences(self, mesh: Any) -> str | None:
        """Shard the given sequences before training; return a description of how. None: inputs are shards already."""
        return None

    def whole_meta(self) -> nn.Module:
        """Return the model of all stages, with its parameter names, on the meta device, for inspection only."""
        raise NotImplementedError

    def meta_inputs(self) -> dict[str, Any] | None:
        """Make inputs of the whole model on the meta device. None: use the inputs of a Transformers model."""
        return None


def is_idle(module: nn.Module) -> bool:
    return isinstance(module, Staged) and module.idle
