"""The batch triangle: `train_batch_size = micro_batch_per_rank * gradient_accumulation_steps * data_parallel_ranks`.

Pure arithmetic on the three numbers a user may give; any two (or one) determine the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.config.axes import divisors

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
GAS = "gradient_accumulation_steps"

GIVEN = "given"
DERIVED = "derived"
DEFAULT = "default"


class BatchError(ValueError):
    """The three numbers are inconsistent; `key` is the config key to change first."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """Three consistent numbers, and the origin of each ("given", "derived", "default" or "elasticity")."""

    train: int
    micro: int
    accumulation: int
    dp_world: int
    origin: dict[str, str]

    def __str__(self) -> str:
        return (
            f"{TRAIN} {self.train} ({self.origin[TRAIN]}) = {MICRO} {self.micro} ({self.origin[MICRO]})"
            f" x {GAS} {self.accumulation} ({self.origin[GAS]}) x {_ranks(self.dp_world)}"
        )


def resolve(
    train: int | None, micro: int | None, accumulation: int | None, dp_world: int, *, world_from: str = ""
) -> BatchSizes:
    """Resolve the full triangle for `dp_world` data-parallel ranks.

    Missing numbers are derived; `accumulation` is 1 if only one batch size is given. `world_from` names the source of
    the number of ranks in messages. Raises BatchError naming all numbers, their origin, and the nearest values that
    fit.
    """
    for key, value in ((TRAIN, train), (MICRO, micro), (GAS, accumulation)):
        if value is not None and value < 1:
            raise BatchError(key, f"{key} is {value}, but must be at least 1")
    if dp_world < 1:
        raise BatchError(TRAIN, f"there are {dp_world} data-parallel ranks, but at least 1 is needed")
    origin = {
        key: GIVEN if value is not None else DERIVED
        for key, value in ((TRAIN, train), (MICRO, micro), (GAS, accumulation))
    }
    ranks = _ranks(dp_world) + (f" ({world_from})" if world_from else "")

    if train is None:
        if micro is None:
            raise BatchError(TRAIN, f"neither {TRAIN} nor {MICRO} is given: set at least one of them")
        if accumulation is None:
            accumulation, origin[GAS] = 1, DEFAULT
        return BatchSizes(micro * accumulation * dp_world, micro, accumulation, dp_world, origin)

    if micro is None and accumulation is None:
        accumulation, origin[GAS] = 1, DEFAULT
    if micro is not None and accumulation is not None:
        return _check_all(train, micro, accumulation, dp_world, ranks, origin)
    if micro is not None:
        accumulation = _rest(train, (MICRO, micro), dp_world, ranks, origin)
    else:
        assert accumulation is not None
        micro = _rest(train, (GAS, accumulation), dp_world, ranks, origin)
    return BatchSizes(train, micro, accumulation, dp_world, origin)


def _rest(train: int, known: tuple[str, int], dp_world: int, ranks: str, origin: dict[str, str]) -> int:
    """Return the missing factor of `train`, given the other one, `known`: (key, number). BatchError: it is not a whole
    number."""
    key, number = known
    unit = number * dp_world
    if train % unit == 0:
        return train // unit
    ways = [f"{TRAIN} {_either(_neighbours(train, unit))}"]
    fitting = divisors(train // dp_world) if train % dp_world == 0 else []
    if fitting:
        ways.append(f"{key} {_either(_nearest(fitting, number))}")
    given = f"{key} {number} ({origin[key]}) x {ranks} = {unit}"
    raise BatchError(
        TRAIN, f"{TRAIN} {train} (given) is not a multiple of {given}. Nearest that fit: {', or '.join(ways)}"
    )


def _check_all(
    train: int, micro: int, accumulation: int, dp_world: int, ranks: str, origin: dict[str, str]
) -> BatchSizes:
    product = micro * accumulation * dp_world
    if product == train:
        return BatchSizes(train, micro, accumulation, dp_world, origin)
    ways = [f"{TRAIN} {product}"]
    if train % (micro * dp_world) == 0:
        ways.append(f"{GAS} {train // (micro * dp_world)}")
    if train % (accumulation * dp_world) == 0:
        ways.append(f"{MICRO} {train // (accumulation * dp_world)}")
    if train % (micro * accumulation) == 0:
        ways.append(f"{train // (micro * accumulation)} data-parallel ranks")
    raise BatchError(
        TRAIN,
        f"{TRAIN} {train} (given) is not {MICRO} {micro} (given) x {GAS} {accumulation} (given) x {ranks} = "
        f"{product}. Change one of them: {', or '.join(ways)}; or leave out one batch key to have it derived",
    )


def _ranks(count: int) -> str:
    return f"{count} data-parallel rank{'s' if count != 1 else ''}"


def _either(values: list[int]) -> str:
    return " or ".join(str(value) for value in values)


def _neighbours(value: int, unit: int) -> list[int]:
    """Return the multiples of `unit` around `value`, except zero."""
    below = value // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple > 0]


def _nearest(candidates: list[int], value: int) -> list[int]:
    """Return at most two of `candidates`: the closest below and the closest above `value`."""
    below = [c for c in candidates if c < value][-1:]
    above = [c for c in candidates if c > value][:1]
    return below + above
