"""Mixture-of-experts statistics for observers: tokens per expert, and time spent in the exchange."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class RoutingStats:
    """Totals over the forwards of a layer since ``reset``, on this rank, without synchronizing with the device.

    ``chosen`` [E]: tokens that chose each expert, before drops. ``kept``: number of choices kept, a scalar.
    ``seconds``: host time in the exchange, forward and backward, including waits for other ranks; if the exchange runs
    in the background of a device, only the time to launch it.
    """

    chosen: Tensor | None = None
    kept: Tensor | None = None
    seconds: float = 0.0
    unseen: int = 0
    """Number of forwards without a graph, in regions that will be recomputed and are counted then."""

    def routed(self, chosen: Tensor, kept: Tensor, training: bool = True) -> None:
        """Count a forward. ``chosen`` [E]; ``kept`` [tokens, k], boolean; ``training``: the mode of the layer."""
        recomputing = torch._C._current_graph_task_id() != -1
        if not torch.is_grad_enabled():
            self.unseen += training and not recomputing  # ``reset`` forgets evaluations in training mode
            return
        if recomputing:
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
