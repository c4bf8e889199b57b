"""Statistics of a mixture of experts for observers: tokens per expert, and time spent in the exchange."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class RouteWatch:
    """Sums over the forwards of a layer since ``reset``, on this rank, without waiting for the device.

    ``chosen`` [E]: tokens that chose each expert, before any were dropped. ``kept``: how many of all those choices were
    kept, a scalar. ``seconds``: of the host in the exchange, forward and backward, waiting for other ranks included;
    where the exchange is in the background of a device, this is the time to start it.
    """

    chosen: Tensor | None = None
    kept: Tensor | None = None
    seconds: float = 0.0
    unseen: int = 0
    """Forwards of regions that will run again with a graph: these are counted then, others when they run first."""

    def routed(self, chosen: Tensor, kept: Tensor, training: bool = True) -> None:
        """``kept`` [tokens, k] says which choices are. ``training``: the mode of the layer."""
        again = torch._C._current_graph_task_id() != -1
        if not torch.is_grad_enabled():
            self.unseen += training and not again  # an evaluation in training mode is forgotten at ``reset``
            return
        if again:
            if not self.unseen:
                return
            self.unseen -= 1
        count = kept.sum()
        self.chosen = chosen.clone() if self.chosen is None else self.chosen + chosen
        self.kept = count if self.kept is None else self.kept + count

    def reset(self) -> None:
        self.chosen = self.kept = None
        self.seconds = 0.0
        self.unseen = 0

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begin
