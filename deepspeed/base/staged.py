"""The interface by which `initialize` recognises a pipeline, without importing pipelines."""

from __future__ import annotations

from typing import Any

from torch import nn


class Staged:
    """A module that is one stage of a model, and a model-parallel unit itself."""

    idle = False
    """True: this stage trains nothing although others do, and takes part in every step without weights of its own."""

    def mpu(self) -> Any:
        raise NotImplementedError

    def share_layers(self, parts: int) -> None:
        """Let runs of ``parts`` neighbouring ranks share the layers of a stage. Collective over all ranks.

        DeepSpeedConfigError: the ranks were arranged otherwise.
        """
        raise NotImplementedError

    def share_sequences(self, ranks: int) -> None:
        """Let runs of ``ranks`` neighbouring replicas of a stage share sequences. Collective over all ranks.

        DeepSpeedConfigError: there are not as many replicas.
        """
        raise NotImplementedError

    def shard_sequences(self, mesh: Any) -> str | None:
        """Train on shards of the sequences that it is given; says how. None: it is given shards."""
        return None

    def whole_meta(self) -> nn.Module:
        """The model of all stages, with its parameters' names, on the meta device. Only to be looked at: it has no
        values."""
        raise NotImplementedError

    def meta_inputs(self) -> dict[str, Any] | None:
        """Make inputs of the whole model on the meta device. None: those of a model of Transformers."""
        return None


def is_idle(module: nn.Module) -> bool:
    return isinstance(module, Staged) and module.idle
