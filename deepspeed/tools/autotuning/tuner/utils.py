"""Numbers for configs, and configs for numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepspeed.tools.autotuning.utils import get_list


def index_to_feature(p: int, dims: Sequence[int]) -> list[int]:
    """The place of the number ``p`` in a space with ``dims`` values per key: the first key changes fastest."""
    feature = []
    for size in dims:
        feature.append(p % size)
        p //= size
    return feature


def feature_to_index(feature: Sequence[int], dims: Sequence[int]) -> int:
    """The number of a place; the inverse of ``index_to_feature``."""
    number, step = 0, 1
    for place, size in zip(feature, dims, strict=True):
        number += place * step
        step *= size
    return number


def dict_to_dims(tuning_space: Mapping[str, Any]) -> list[int]:
    """Return the number of values of each key, at any depth."""
    dims: list[int] = []
    for value in tuning_space.values():
        dims += dict_to_dims(value) if isinstance(value, Mapping) else [len(get_list(value))]
    return dims


def gen_combinations(d: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Every choice of one value per key, at any depth."""
    values = (list(gen_combinations(v)) if isinstance(v, Mapping) else get_list(v) for v in d.values())
    for chosen in itertools.product(*values):
        yield dict(zip(d, chosen, strict=True))


def flatten(d: Mapping[str, Any], parent_key: str = "", sep: str = "_") -> dict[str, Any]:
    """Nested dicts as one, whose keys are joined by ``sep``."""
    flat: dict[str, Any] = {}
    for key, value in d.items():
        path = f"{parent_key}{sep}{key}" if parent_key else key
        flat |= flatten(value, path, sep) if isinstance(value, Mapping) else {path: value}
    return flat


def dict_to_feature(
    feature_dict: Mapping[str, Any], keys: Sequence[str], max_value: Mapping[str, float] | None = None
) -> list[float]:
    """The numbers of the keys, at any depth; texts and what is missing are 0, and with ``max_value`` each is divided by
    the largest of its key."""
    feature: list[float] = []
    for key, value in feature_dict.items():
        if isinstance(value, Mapping):
            feature += dict_to_feature(value, keys, max_value)
        elif key in keys:
            number = float(value) if isinstance(value, (int, float)) else 0.0
            largest = max_value.get(key) if max_value else None
            feature.append(number / largest if largest else number)
    return feature
