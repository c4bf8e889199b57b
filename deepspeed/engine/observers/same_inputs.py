"""Looks once whether the ranks that share each layer are given the same batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed.base.exceptions import ExplainedError
from deepspeed.base.logging import logger
from deepspeed.parallel.tensor.layers import TensorParallelLayer
from deepspeed.parallel.tensor.same_inputs import differing_inputs

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine


DOCUMENTED = "Data inconsistency within the TP group. Please check the Dataloader implementation to ensure consistency."


class DifferentInputs(ExplainedError, ValueError, AssertionError):
    """Its text is the documented one, which scripts compare; what differs is in its notes and in the log."""

    def __init__(self, details: str) -> None:
        super().__init__(DOCUMENTED)
        self.details = details
        self.__notes__ = [details]


class SameInputs:
    """Compares the tensors of an engine's first training forward over its tensor-parallel ranks, then unsubscribes.

    They must be equal where layers of ours are in the module, or the config shares layers: ``DifferentInputs`` on every
    rank of the group. The layers of others may know what to do with different ones: a warning.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.group = engine.mesh.communicator("tp")
        engine.events.on("before_forward", self.compare)

    def compare(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], **_: Any) -> None:
        module = self.engine.module
        if not module.training:
            return
        self.engine.events.off("before_forward", self.compare)
        found = differing_inputs(module.forward, inputs, kwargs, self.group, self.engine.device)
        if not found:
            return
        names = "; ".join(f"{name} (ranks {ranks})" for name, ranks in found.items())
        text = (
            f"ranks {list(self.group.ranks)} share the layers of the model and must be given the same batch, but these "
            f"inputs are not those of rank {self.group.ranks[0]}: {names}. Give the sampler of the data loader the "
            f"number of data-parallel ranks ({self.engine.mesh.size('dp')}) and this rank's place among them, or use "
            "engine.deepspeed_io or the training_data argument of deepspeed.initialize"
        )
        shared = self.engine._config.tensor_parallel_config.autotp_size > 1
        if shared or any(isinstance(each, TensorParallelLayer) for each in module.modules()):
            logger.error(text)
            raise DifferentInputs(text)
        logger.warning(text)
