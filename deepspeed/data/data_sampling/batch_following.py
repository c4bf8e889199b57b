"""Variable batches as the engine sees them while it trains: how much each micro-batch counts."""

from __future__ import annotations

from typing import Any

from deepspeed.data.data_sampling.variable_batch_loader import VariableBatchLoader


def reads_batches(engine: Any) -> bool:
    """Return whether the engine is a pipeline's, which reads whole batches itself."""
    return hasattr(type(engine), "train_batch")


class BatchFollower:
    """The weight of each loss of ``engine``, in the order in which ``loader`` gave the micro-batches out.

    They may be read ahead. A micro-batch ends with ``engine.step()``; after an exception those that were given out
    count as lost, as the engine drops their gradients.
    """

    def __init__(self, engine: Any, loader: VariableBatchLoader, scheduler: Any) -> None:
        self.engine, self.loader, self.scheduler = engine, loader, scheduler
        self._updates = engine.global_steps
        if isinstance(engine.loss_weight, BatchFollower):
            engine.loss_weight.leave()
        engine.loss_weight = self
        if not reads_batches(engine):  # its micro-batches all count the same
            loader.keep_weights()
        self._subscribed = (("after_step", self._end), ("on_error", self._drop), ("on_load", self._resume))
        for event, subscriber in self._subscribed:
            engine.events.on(event, subscriber)

    def leave(self) -> None:
        for event, subscriber in self._subscribed:
            self.engine.events.off(event, subscriber)

    def __call__(self) -> float:
        """The weight of the micro-batch that is trained now; 1 for data of another source."""
        if not self.loader.to_train:
            return 1.0
        if self.engine.train_batch_size() != self.loader.per_batch:
            raise ValueError(
                f"train_batch_size={self.engine.train_batch_size()} was set after the batches had been made of "
                f"{self.loader.per_batch} packs: make the loader again"
            )
        return self.loader.to_train[0]

    def _end(self, **_: Any) -> None:
        if self.loader.to_train:
            self.loader.to_train.popleft()
        updated = self.engine.global_steps != self._updates
        self._updates = self.engine.global_steps
        if updated and self.scheduler is not None and not self.engine.was_step_applied():
            self.scheduler.skip()

    def _drop(self, **_: Any) -> None:
        if self.loader.to_train:
            self.loader.to_train.clear()

    def _resume(self, **_: Any) -> None:
        self._updates = self.engine.global_steps
