"""ZenFlow's warm-up: steps that update everything, as long as deferred updates would harm the loss."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from deepspeed.base.logging import log_dist, warning_once
from deepspeed.zero.offload.columns import ColumnChoice

SETTLED = 0.01
"""Without a number of rounds, the warm-up ends once a round of updates changes the weights by less than this part of
their norm and the learning rates no longer rise: the gradient of an earlier step is then still close to the current."""
_SAMPLED = 61
"""Of each parameter, one element in so many shows how far the weights move, whatever the stage and number of ranks."""


@dataclass(eq=False)
class WarmUp:
    """``rounds``: their number; None: until the weights settle. ``interval``: steps per round."""

    rounds: int | None
    interval: int
    choice: ColumnChoice
    settled: bool = False
    rates: list[float] = field(default_factory=list)  # when the previous round ended

    def includes(self, step: int) -> bool:
        """Return whether ``step``, from 0, updates everything."""
        return not self.settled if self.rounds is None else step < self.rounds * self.interval

    def run(self, step: int, update: Callable[[], None]) -> None:
        """Run ``update`` for ``step``. The last step of a round decides whether the warm-up ends. Collective."""
        if self.rounds is not None or (step + 1) % self.interval:
            update()
            return
        before = self._sample()
        update()
        moved = sum(_squares(new - old) for new, old in zip(self._sample(), before, strict=True))
        change = self.interval * self.choice.share(moved, sum(map(_squares, before))) ** 0.5
        rates = [float(group["lr"]) for group in self.choice.store.optimizer.param_groups]
        steady = bool(self.rates) and not any(map(operator.gt, rates, self.rates))
        self.rates, self.settled = rates, steady and change < SETTLED
        if self.settled:
            log_dist(
                f"a round of ZenFlow's updates changes the weights by {change:.1%}: from step {step + 2} on, columns "
                "outside the topk_ratio are updated once per round",
                ranks=[0],
            )
        elif steady:
            warning_once(
                "ZenFlow updates everything in every step, because the loss would suffer otherwise, until a round "
                f"changes the weights by less than {SETTLED:.0%} of their norm "
                "(zenflow.full_warm_up_rounds: the number of such rounds, 0 for none)"
            )

    def _sample(self) -> list[Tensor]:
        return [
            owned.master.detach()[-owned.fragment.param_offset % _SAMPLED :: _SAMPLED].double()
            for owned in self.choice.store.fragments
        ]


def _squares(values: Tensor) -> float:
    return float(values.square().sum())
