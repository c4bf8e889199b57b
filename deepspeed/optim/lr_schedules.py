"""Learning-rate schedules: LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR.

A schedule is a plain object whose `step()` follows each optimizer step and writes the learning rate
(OneCycle: and the momentum) for the next one into the optimizer's groups. With i = `last_batch_iteration`,
which is -1 before the first `step()` and then 0, 1, ..., each rate is a function of i alone, so resuming a
schedule needs only i.

L. N. Smith: Cyclical Learning Rates for Training Neural Networks (2017) for LRRangeTest; L. N. Smith: A
disciplined approach to neural network hyper-parameters (2018) for OneCycle; I. Loshchilov, F. Hutter: SGDR
(2017) for the cosine.
"""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from deepspeed.base.logging import logger

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"

CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
DECAY_LR_RATE = "decay_lr_rate"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MOMENTUM = "cycle_momentum"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MAX_MOM = "cycle_max_mom"
DECAY_MOM_RATE = "decay_mom_rate"

WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"
WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"


# ---- helpers ---------------------------------------------------------------------------------------------


def get_torch_optimizer(optimizer: Any) -> Optimizer:
    """Return the torch optimizer itself, or the one that a wrapper holds as `.optimizer`. TypeError: neither."""
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, Optimizer):
            return candidate
    raise TypeError(
        f"{type(optimizer).__name__} is not a torch.optim.Optimizer and has none in its attribute `optimizer`"
    )


def update_lr(param_groups: Iterable[dict[str, Any]], lrs: Iterable[float]) -> list[float]:
    """Write one rate per group; return them."""
    for group, lr in zip(param_groups, lrs, strict=False):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)  # in place: a captured graph reads this tensor
        else:
            group["lr"] = lr
    return [float(group["lr"]) for group in param_groups]


def _per_group(value: float | Sequence[float], groups: Sequence[Any], name: str) -> list[float]:
    if not isinstance(value, (list, tuple)):
        return [value] * len(groups)  # type: ignore[list-item]  # a number here
    if len(value) != len(groups):
        raise ValueError(
            f"{name} has {len(value)} values, but the optimizer has {len(groups)} parameter groups"
        )
    return list(value)


def _positive_int(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value


def _warmup_steps(value: Any) -> int:
    """Return the number of warm-up steps, at least 2 (log(1) is 0); 0, which clients use for no warm-up, is allowed."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{WARMUP_NUM_STEPS} must be a positive integer, got {value!r}")
    return max(2, value)


def _warmup_type(value: str) -> str:
    if value not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
        logger.warning(f"{WARMUP_TYPE}={value!r} is unknown (log or linear): using log")
        return WARMUP_LOG_RATE
    return value


def _warmup_fraction(iteration: int, num_steps: int, kind: str) -> float:
    if kind == WARMUP_LOG_RATE:
        return math.log(iteration + 1) / math.log(num_steps)
    return iteration / num_steps


# ---- schedules -------------------------------------------------------------------------------------------


class _Schedule:
    """Base of all schedules: the iteration, its state, and writing rates into the groups."""

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = get_torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[float] | None = None

    def _start(self) -> None:
        """Set the rate of the first optimizer step; a resumed schedule leaves the groups alone."""
        if self.last_batch_iteration == -1:
            update_lr(self.optimizer.param_groups, self.get_lr())

    def get_lr(self) -> list[float]:
        """Return the rates at the current iteration, one per group."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """Return the rates that the last `step()` wrote; before the first, the groups' initial rates."""
        if self._last_lr is None:
            return [float(group["lr"]) for group in self.optimizer.param_groups]
        return self._last_lr

    def _advance(self, iteration: int | None) -> None:
        self.last_batch_iteration = self.last_batch_iteration + 1 if iteration is None else iteration
        self._last_lr = update_lr(self.optimizer.param_groups, self.get_lr())

    def step(self, batch_iteration: int | None = None) -> None:
        self._advance(batch_iteration)

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        self.last_batch_iteration = sd["last_batch_iteration"]
        if self.last_batch_iteration >= 0:
            self._advance(self.last_batch_iteration)


class LRRangeTest(_Schedule):
    """Learning-rate range test: `min_lr * (1 + step_rate * (i + 1) / step_size)`; `lr_range_test_staircase` floors
    the quotient."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        groups = self.optimizer.param_groups
        self.min_lr = _per_group(lr_range_test_min_lr, groups, LR_RANGE_TEST_MIN_LR)
        self.step_size = _positive_int(lr_range_test_step_size, LR_RANGE_TEST_STEP_SIZE)
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._start()

    def get_lr(self) -> list[float]:
        interval = (self.last_batch_iteration + 1) / self.step_size
        if self.staircase:
            interval = math.floor(interval)
        return [lr * (1 + self.step_rate * interval) for lr in self.min_lr]


class OneCycle(_Schedule):
    """One cycle of learning rate and momentum, then decay.

    The rate rises from `cycle_min_lr` to `cycle_max_lr` in `cycle_first_step_size` steps and falls back in
    `cycle_second_step_size` (default: as many), linearly or in `*_stair_count` equal stairs;
    momentum (the first of `betas`) mirrors it between `cycle_max_mom` and `cycle_min_mom`. Rates and momenta
    are one number for all groups, or a list with one per group. After the cycle, every
    `decay_step_size` steps (0: no decay), the rate is `cycle_min_lr / (1 + decay_lr_rate * n)` and the
    momentum `cycle_max_mom * (1 + decay_mom_rate * n)`, n growing continuously.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        groups = self.optimizer.param_groups
        if not cycle_first_step_size > 0:
            raise ValueError(f"{CYCLE_FIRST_STEP_SIZE} must be positive, got {cycle_first_step_size!r}")
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if not second >= 0:
            raise ValueError(
                f"{CYCLE_SECOND_STEP_SIZE} must not be negative, got {cycle_second_step_size!r}: leave it "
                "out for as many steps down as up, or set 0 for no descent"
            )
        self.first_step_size, self.second_step_size = cycle_first_step_size, second
        # The command line uses -1 for "same as the first"; 0 omits the stairs.
        self.first_stair_count = cycle_first_stair_count
        stairs = cycle_second_stair_count
        self.second_stair_count = cycle_first_stair_count if stairs is None or stairs < 0 else stairs
        self.decay_step_size = decay_step_size
        self.min_lrs = _per_group(cycle_min_lr, groups, CYCLE_MIN_LR)
        self.max_lrs = _per_group(cycle_max_lr, groups, CYCLE_MAX_LR)
        self.decay_lr_rate = decay_lr_rate
        self.cycle_momentum = cycle_momentum
        if cycle_momentum and "betas" not in self.optimizer.defaults:
            logger.warning(f"OneCycle: {type(self.optimizer).__name__} has no betas; momentum is not cycled")
            self.cycle_momentum = False
        self.min_moms = _per_group(cycle_min_mom, groups, CYCLE_MIN_MOM)
        self.max_moms = _per_group(cycle_max_mom, groups, CYCLE_MAX_MOM)
        self.decay_mom_rate = decay_mom_rate
        self._start()
        if self.cycle_momentum and last_batch_iteration == -1:
            self._write_momentum(self.min_moms)

    @property
    def total_size(self) -> int:
        """Return the number of steps of the whole cycle."""
        return self.first_step_size + self.second_step_size

    def _height(self) -> float | None:
        """Return the position between the minimum (0) and the maximum (1); None after the cycle."""
        done = self.last_batch_iteration + 1
        if done > self.total_size:
            return None
        if done <= self.first_step_size:
            height, stairs = done / self.first_step_size, self.first_stair_count
        else:
            height, stairs = (
                1 - (done - self.first_step_size) / self.second_step_size,
                self.second_stair_count,
            )
        return math.floor(height * stairs + 1e-9) / stairs if stairs > 0 else height

    def _decays(self) -> float:
        if self.decay_step_size == 0:
            return 0.0
        return (self.last_batch_iteration + 1 - self.total_size) / self.decay_step_size

    def get_lr(self) -> list[float]:
        height = self._height()
        if height is None:
            factor = 1 + self.decay_lr_rate * self._decays()
            return [low / factor for low in self.min_lrs]
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, ...]] | None:
        """Return `betas` at the current iteration, a tuple per group; None if momentum is not cycled."""
        if not self.cycle_momentum:
            return None
        groups = self.optimizer.param_groups
        return [(mom, *group["betas"][1:]) for mom, group in zip(self._momenta(), groups, strict=False)]

    def _momenta(self) -> list[float]:
        height = self._height()
        if height is None:
            factor = 1 + self.decay_mom_rate * self._decays()
            return [high * factor for high in self.max_moms]
        return [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)]

    def _write_momentum(self, momenta: Sequence[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=False):
            group["betas"] = (momentum, *group["betas"][1:])

    def _advance(self, iteration: int | None) -> None:
        super()._advance(iteration)
        if self.cycle_momentum:
            self._write_momentum(self._momenta())


class WarmupLR(_Schedule):
    """Warm-up from `warmup_min_lr` to `warmup_max_lr` (None: the optimizer's rate) in `warmup_num_steps`, then
    constant.

    The fraction is log(i + 1) / log(num_steps), or i / num_steps with `warmup_type="linear"`.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        groups = self.optimizer.param_groups
        max_lr = [float(group["lr"]) for group in groups] if warmup_max_lr is None else warmup_max_lr
        self.min_lrs = _per_group(warmup_min_lr, groups, WARMUP_MIN_LR)
        self.max_lrs = _per_group(max_lr, groups, WARMUP_MAX_LR)
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        self._start()

    def _fraction(self) -> float:
        """Return the fraction of the way from the minimum to the maximum."""
        if self.last_batch_iteration < 0:
            return 0.0
        if self.last_batch_iteration < self.warmup_num_steps:
            return _warmup_fraction(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)
        return self._fraction_after()

    def _fraction_after(self) -> float:
        return 1.0

    def get_lr(self) -> list[float]:
        share = self._fraction()
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def step(self, last_batch_iteration: int | None = None) -> None:
        self._advance(last_batch_iteration)


class WarmupDecayLR(WarmupLR):
    """WarmupLR, then a linear decay to `warmup_min_lr` at step `total_num_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )
        _warn_if_short(total_num_steps, self.warmup_num_steps)

    def _fraction_after(self) -> float:
        remaining = self.total_num_steps - self.last_batch_iteration
        return max(0.0, remaining / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Schedule):
    """Warm-up and cosine decay of the optimizer's initial rates: their multiple rises from `warmup_min_ratio` to 1 in
    `warmup_num_steps`, then falls along half a cosine to `cos_min_ratio` at step `total_num_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.warmup_type = _warmup_type(warmup_type)
        self.org_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        _warn_if_short(total_num_steps, self.warmup_num_steps)
        self._start()

    def get_lr_ratio(self) -> float:
        """Return the multiple of the initial rates at the current iteration; 0 before the first `step()`."""
        i = self.last_batch_iteration
        if i < 0:
            return 0.0
        if i < self.warmup_num_steps:
            share = _warmup_fraction(i, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * share
        length = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (i - self.warmup_num_steps + 1) / length)
        return self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]

    def step(self, last_batch_iteration: int | None = None) -> None:
        self._advance(last_batch_iteration)


def _warn_if_short(total_num_steps: int, warmup_num_steps: int) -> None:
    if total_num_steps < warmup_num_steps:
        logger.warning(
            f"{TOTAL_NUM_STEPS}={total_num_steps} is less than {WARMUP_NUM_STEPS}={warmup_num_steps}"
        )


# ---- command line ----------------------------------------------------------------------------------------

# flag -> (type, default, meaning); bool flags are switches
_FLAGS: dict[str, tuple[type, Any, str]] = {
    LR_RANGE_TEST_MIN_LR: (float, 0.001, "rate at the start"),
    LR_RANGE_TEST_STEP_RATE: (float, 1.0, "growth per interval, in multiples of the first rate"),
    LR_RANGE_TEST_STEP_SIZE: (int, 1000, "steps per interval"),
    LR_RANGE_TEST_STAIRCASE: (bool, False, "change the rate only once per interval"),
    CYCLE_FIRST_STEP_SIZE: (int, 1000, "steps from the lowest to the highest rate"),
    CYCLE_FIRST_STAIR_COUNT: (int, -1, "stairs on the way up; not positive: a straight line"),
    CYCLE_SECOND_STEP_SIZE: (int, -1, "steps back to the lowest rate; 0: none, negative: as many as up"),
    CYCLE_SECOND_STAIR_COUNT: (int, -1, "stairs on the way down; 0: straight, negative: as many as up"),
    DECAY_STEP_SIZE: (int, 1000, "steps per interval of the decay after the cycle; 0: no decay"),
    CYCLE_MIN_LR: (float, 0.01, "lowest rate of the cycle"),
    CYCLE_MAX_LR: (float, 0.1, "highest rate of the cycle"),
    DECAY_LR_RATE: (float, 0.0, "decay of the rate per interval"),
    CYCLE_MOMENTUM: (bool, False, "cycle the momentum too"),
    CYCLE_MIN_MOM: (float, 0.8, "lowest momentum of the cycle"),
    CYCLE_MAX_MOM: (float, 0.9, "highest momentum of the cycle"),
    DECAY_MOM_RATE: (float, 0.0, "growth of the momentum per interval of the decay"),
    WARMUP_MIN_LR: (float, 0, "rate at the start"),
    WARMUP_MAX_LR: (float, 0.001, "rate after the warm-up"),
    WARMUP_NUM_STEPS: (int, 1000, "steps of the warm-up"),
    WARMUP_TYPE: (str, WARMUP_LOG_RATE, "log or linear"),
    WARMUP_MIN_RATIO: (float, 0.01, "WarmupCosineLR: multiple of the rate at the start"),
    COS_MIN_RATIO: (float, 0.01, "WarmupCosineLR: multiple of the rate at the end"),
}
_NEGATIVE_IS_UNSET = (CYCLE_FIRST_STAIR_COUNT, CYCLE_SECOND_STEP_SIZE, CYCLE_SECOND_STAIR_COUNT)


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags that choose and tune a schedule; return the parser."""
    group = parser.add_argument_group("Convergence Tuning", "learning-rate schedule")
    group.add_argument(
        f"--{LR_SCHEDULE}", type=str, default=None, help=f"one of {', '.join(VALID_LR_SCHEDULES)}"
    )
    for name, (kind, default, meaning) in _FLAGS.items():
        if kind is bool:
            group.add_argument(f"--{name}", action="store_true", default=default, help=meaning)
        else:
            group.add_argument(f"--{name}", type=kind, default=default, help=meaning)
    return parser


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse the tuning flags on this process's command line; return them and the remaining arguments."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def get_config_from_args(args: argparse.Namespace) -> tuple[dict[str, Any] | None, str | None]:
    """Return (the `scheduler` section that the flags describe, None), or (None, the reason for none)."""
    name = getattr(args, LR_SCHEDULE, None)
    if name is None:
        return None, f"--{LR_SCHEDULE} is not given"
    if name not in VALID_LR_SCHEDULES:
        return None, f"{name} is not a supported LR schedule"
    params: dict[str, Any] = {}
    accepted = inspect.signature(globals()[name]).parameters  # schedules are named like their classes
    for flag in [flag for flag in _FLAGS if flag in accepted]:
        value = getattr(args, flag, None)
        if value is not None and not (flag in _NEGATIVE_IS_UNSET and value < 0):
            params[flag] = value
    return {"type": name, "params": params}, None
