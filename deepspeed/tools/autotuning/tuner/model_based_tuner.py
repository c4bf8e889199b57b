"""A tuner that predicts from the measured experiments which one to run next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed.tools.autotuning.tuner.base_tuner import BaseTuner
from deepspeed.tools.autotuning.tuner.cost_model import XGBoostCostModel
from deepspeed.tools.autotuning.utils import get_val_by_key

INITIAL = 2
"""Number of experiments to measure before the model is used."""


class ModelBasedTuner(BaseTuner):
    """Runs first both ends of the list, then the experiment with the best value predicted by a regression.

    The numeric keys of the experiments' configs are its features. ``tuning_space``: the config whose lists are the
    values to try.
    """

    def __init__(
        self, exps: list[dict[str, Any]], resource_manager: Any, metric: str, tuning_space: dict[str, Any]
    ) -> None:
        super().__init__(exps, resource_manager, metric)
        self.tuning_space = tuning_space
        self.keys = sorted({key for exp in exps for key in _numbers(exp["ds_config"])})
        self.cost_model = XGBoostCostModel("reg")
        self.evaluated: list[tuple[list[float], float]] = []

    def find_estimated_top_configs(self) -> list[dict[str, Any]]:
        """Return the remaining experiments, the most promising first."""
        if len(self.evaluated) < INITIAL:
            ends = [*self.all_exps[-1:], *self.all_exps[:-1]]
            return ends
        self.cost_model.fit(*zip(*self.evaluated, strict=True))
        expected = self.cost_model.predict([self._features(exp) for exp in self.all_exps])
        sign = 1 if self.metric == "latency" else -1
        order = sorted(range(len(self.all_exps)), key=lambda place: sign * expected[place])
        return [self.all_exps[place] for place in order]

    def next_batch(self, sample_size: int) -> list[dict[str, Any]]:
        batch = self.find_estimated_top_configs()[:sample_size]
        self.all_exps = [exp for exp in self.all_exps if exp not in batch]
        return batch

    def has_next(self) -> bool:
        return len(self.all_exps) > 0

    def update(self) -> None:
        known = [(self._features(exp), value) for exp, value in self.rm.results]
        self.evaluated += [(features, value) for features, value in known if value is not None]

    def _features(self, exp: dict[str, Any]) -> list[float]:
        config = exp["ds_config"]
        return dict_to_feature({key: get_val_by_key(config, key) or 0 for key in self.keys}, self.keys)


def _numbers(config: dict[str, Any]) -> list[str]:
    found = []
    for key, value in config.items():
        if isinstance(value, dict):
            found += _numbers(value)
        elif isinstance(value, (int, float)):
            found.append(key)
    return found


# Feature vectors of configs.


def flatten(d: Mapping[str, Any], parent_key: str = "", sep: str = "_") -> dict[str, Any]:
    """Flatten nested dicts into one, with keys joined by ``sep``."""
    flat: dict[str, Any] = {}
    for key, value in d.items():
        path = f"{parent_key}{sep}{key}" if parent_key else key
        flat |= flatten(value, path, sep) if isinstance(value, Mapping) else {path: value}
    return flat


def dict_to_feature(
    feature_dict: Mapping[str, Any], keys: Sequence[str], max_value: Mapping[str, float] | None = None
) -> list[float]:
    """Return the values of the keys, at any depth, as floats; non-numbers are 0. With ``max_value``, each is divided by
    its key's maximum."""
    feature: list[float] = []
    for key, value in feature_dict.items():
        if isinstance(value, Mapping):
            feature += dict_to_feature(value, keys, max_value)
        elif key in keys:
            number = float(value) if isinstance(value, (int, float)) else 0.0
            largest = max_value.get(key) if max_value else None
            feature.append(number / largest if largest else number)
    return feature
