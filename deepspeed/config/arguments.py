"""Valid arguments of optimizers and schedules: `optimizer.params` and `scheduler.params` of a config.

A constructor would catch some mistakes, late and in its own words; a weight decay of null or an epsilon of 1e30 would
train, to nonsense. Names mean the same in all optimizers, so one table serves all of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from deepspeed.config.problems import Remedy

MAX_NUMBER = 1e6
"""Upper bound for rates, decays and factors of a training run."""


@dataclass(frozen=True)
class Allowed:
    """A test of one value, and its requirement in words."""

    test: Callable[[Any], bool]
    text: str

    def or_null(self) -> Allowed:
        return Allowed(lambda value: value is None or self.test(value), f"{self.text}, or null")

    def or_list(self) -> Allowed:
        """Accept a single value, or a list with one value per parameter group."""
        return Allowed(
            lambda value: (
                all(map(self.test, value)) if isinstance(value, (list, tuple)) else self.test(value)
            ),
            f"{self.text}, or a list of these, one per parameter group",
        )


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number (True, which Python counts as 1, is not)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: Any) -> bool:
    return is_number(value) and float(value).is_integer()


def _pair(first: Allowed, second: Allowed, text: str) -> Allowed:
    return Allowed(
        lambda value: (
            isinstance(value, (list, tuple))
            and len(value) == 2
            and first.test(value[0])
            and second.test(value[1])
        ),
        text,
    )


def _whole_from(least: int) -> Allowed:
    return Allowed(lambda value: is_whole(value) and value >= least, f"a whole number >= {least}")


SIZE = Allowed(
    lambda value: is_number(value) and 0 <= value <= MAX_NUMBER, f"a number from 0 to {MAX_NUMBER:g}"
)
NUMBER = Allowed(is_number, "a finite number")
SHARE = Allowed(lambda value: is_number(value) and 0 <= value <= 1, "a number from 0 to 1")
FRACTION = Allowed(
    lambda value: is_number(value) and 0 <= value < 1, "a number from 0 up to, but not including, 1"
)
BETAS = Allowed(
    lambda value: isinstance(value, (list, tuple)) and len(value) >= 2 and all(map(FRACTION.test, value)),
    "a list of numbers from 0 up to, but not including, 1",
)
FLAG = Allowed(lambda value: isinstance(value, bool), "true or false")
WORD = Allowed(lambda value: isinstance(value, str), "text")
STEPS, NO_STEPS = _whole_from(1), _whole_from(0)
WHOLE = Allowed(is_whole, "a whole number")
RATES = SIZE.or_list()


def _all_finite(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_all_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


FINITE = Allowed(_all_finite, "finite numbers")  # for arguments in none of the tables

_EPSILONS = Allowed(  # Adafactor has two, the first of which may be null
    lambda value: (
        len(value) == 2 and SHARE.or_null().test(value[0]) and SHARE.test(value[1])
        if isinstance(value, (list, tuple))
        else SHARE.test(value)
    ),
    SHARE.text,
)

TAKES_AUTO = frozenset({"freeze_step"})
"""Arguments for which "auto" is a valid value, not to be filled in."""

OPTIMIZER: dict[str, Allowed] = {
    **dict.fromkeys(
        ("lr", "muon_lr", "adam_lr", "lr_decay", "weight_decay", "initial_accumulator_value"), SIZE
    ),
    **dict.fromkeys(("lambd", "t0", "d", "momentum_decay", "max_coeff", "min_coeff"), SIZE),
    **dict.fromkeys(("momentum", "alpha", "rho"), SHARE),
    "dampening": NUMBER,
    **dict.fromkeys(("factor_max", "factor_min", "factor_threshold"), SIZE),
    "coeff_beta": SHARE,
    "freeze_step": Allowed(lambda v: v == "auto" or NO_STEPS.test(v), f'{NO_STEPS.text}, or "auto"'),
    **dict.fromkeys(("var_freeze_step", "variance_interval"), NO_STEPS),
    **dict.fromkeys(("var_update_scaler", "local_step_scaler", "local_step_clipper"), STEPS),
    "cuda_aware": FLAG,
    "comm_backend_name": WORD,
    "eps": _EPSILONS,
    "betas": BETAS,
    "etas": _pair(FRACTION, Allowed(lambda v: is_number(v) and v > 1, ""), "two numbers, below and above 1"),
    "step_sizes": _pair(SIZE, SIZE, f"two numbers from 0 to {MAX_NUMBER:g}"),
    "ns_steps": STEPS,
    "ns_method": WORD,
    **dict.fromkeys(
        """
        adam_w_mode amsgrad bias_correction centered decoupled_weight_decay differentiable eps_inside_sqrt
        fp32_optimizer_states maximize nesterov set_grad_none stochastic_rounding torch_adam
        """.split(),
        FLAG,
    ),
    "state_bits": Allowed(lambda v: is_whole(v) and v in (8, 32), "8 or 32"),
    **dict.fromkeys(("foreach", "fused", "capturable"), FLAG.or_null()),
}

_LAST = {"last_batch_iteration": _whole_from(-1)}
_WARMUP = {"warmup_min_lr": RATES, "warmup_max_lr": RATES.or_null(), "warmup_num_steps": NO_STEPS, **_LAST}
_TYPE = {"warmup_type": WORD}

SCHEDULES: dict[str, dict[str, Allowed]] = {
    "LRRangeTest": {
        "lr_range_test_min_lr": RATES,
        "lr_range_test_step_size": STEPS,
        "lr_range_test_step_rate": SIZE,
        "lr_range_test_staircase": FLAG,
        **_LAST,
    },
    "OneCycle": {
        "cycle_min_lr": RATES,
        "cycle_max_lr": RATES,
        "decay_lr_rate": SIZE,
        "cycle_first_step_size": STEPS,
        "cycle_second_step_size": NO_STEPS.or_null(),
        "cycle_first_stair_count": WHOLE,
        "cycle_second_stair_count": WHOLE.or_null(),
        "decay_step_size": NO_STEPS,
        "cycle_momentum": FLAG,
        "cycle_min_mom": FRACTION.or_list(),
        "cycle_max_mom": FRACTION.or_list(),
        "decay_mom_rate": SIZE,
        **_LAST,
    },
    "WarmupLR": {**_WARMUP, **_TYPE},
    "WarmupDecayLR": {**_WARMUP, **_TYPE, "total_num_steps": STEPS},
    "WarmupCosineLR": {
        "total_num_steps": STEPS,
        "warmup_min_ratio": SIZE,
        "cos_min_ratio": SIZE,
        "warmup_num_steps": NO_STEPS,
        **_TYPE,
        **_LAST,
    },
}
REQUIRED = {
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
}
FILLED_IN = frozenset(OPTIMIZER.keys() | {key for table in SCHEDULES.values() for key in table}) - TAKES_AUTO
"""Arguments whose "auto" the client fills in."""
WHOLE_NUMBERS = frozenset(
    key
    for table in SCHEDULES.values()
    for key in table
    if key.endswith(("_steps", "_size", "_count", "_iteration"))
)
"""Arguments of schedules that are counts; JSON may write them as 1e3."""


class WrongArgument(NamedTuple):
    key: str
    value: Any
    text: str
    """The allowed values, in words."""
    fits: Callable[[Any], bool]


def wrong_arguments(
    params: Mapping[str, Any] | None, table: Mapping[str, Allowed]
) -> Iterator[WrongArgument]:
    """Yield the values that cannot be used, by ``OPTIMIZER`` or the table of a schedule."""
    for key, value in (params or {}).items():
        if not _from_json(value):
            continue  # a tensor or function from a script, for a constructor that accepts it
        allowed = table.get(key, FINITE)
        if not allowed.test(value):
            yield WrongArgument(key, value, allowed.text, allowed.test)


def _from_json(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_from_json, value))
    return value is None or isinstance(value, (bool, int, float, str, dict))


def without_quotes(value: Any) -> Any:
    """Return the boolean or finite number that a string spells; None for any other string."""
    if not isinstance(value, str):
        return None
    word = value.strip().lower()
    if word in ("true", "false"):
        return word == "true"
    try:
        number = float(word)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return int(number) if word.lstrip("+-").isdigit() else number


def unquoted_remedy(value: Any, fits: Callable[[Any], bool]) -> Remedy | None:
    """Return a remedy that removes the quotes, if the value is valid then."""
    spelled = without_quotes(value)
    return Remedy(value=spelled, replaces_value=True) if spelled is not None and fits(spelled) else None


def unquote_hint(value: Any) -> str:
    """Return a hint for a string that spells a number or boolean; empty for other values."""
    spelled = without_quotes(value)
    return "" if spelled is None else f"; write {json.dumps(spelled)} without quotes"
