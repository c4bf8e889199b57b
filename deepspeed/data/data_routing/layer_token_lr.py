"""Learning rate schedule by layer tokens (tokens processed, summed over layers) instead of steps."""

from __future__ import annotations

import math
from typing import Any

import torch

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.sections.data import wrong_warmup
from deepspeed.data.data_routing.scheduler import CONSUMED_LAYER_TOKENS, RandomLTDScheduler


class LayerTokenLR:
    """Learning rate from 0 to the optimizer's rate over ``warmup_layer_tokens``, then linearly to 0 at
    ``total_layer_tokens``.

    After n of w warm-up tokens the factor is n / w, or log(n + 1) / log(w + 1) with ``warmup_type="log"``.

    DeepSpeedConfigError: the type is unknown, or the warm-up is not shorter than the total.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: RandomLTDScheduler,
        *,
        total_layer_tokens: int,
        warmup_layer_tokens: int = 0,
        warmup_type: str = "linear",
    ) -> None:
        if wrong := wrong_warmup(warmup_type, warmup_layer_tokens, total_layer_tokens):
            raise DeepSpeedConfigError(wrong)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.total, self.warmup, self.warmup_type = total_layer_tokens, warmup_layer_tokens, warmup_type
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.step()

    def factor(self, tokens: int) -> float:
        """Return the factor of the full rate after ``tokens`` layer tokens."""
        if tokens < self.warmup:
            if self.warmup_type == "log":
                return math.log(tokens + 1) / math.log(self.warmup + 1)
            return tokens / self.warmup
        return max(0.0, (self.total - tokens) / (self.total - self.warmup))

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    get_last_lr = get_lr

    def step(self, *_: Any, **__: Any) -> None:
        """Set the rate of the next step."""
        factor = self.factor(self.scheduler.state[CONSUMED_LAYER_TOKENS])
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * factor

    def state_dict(self) -> dict[str, Any]:
        return {"base_lrs": self.base_lrs, "lrs": self.get_lr()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base_lrs = list(state_dict["base_lrs"])
        for group, rate in zip(self.optimizer.param_groups, state_dict["lrs"], strict=True):
            group["lr"] = rate
