"""Helpers of the autotuner: spaces of configs, names of experiments, texts."""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed.tools.launcher.hostfile import fetch_hostfile as fetch_hostfile

ABBREVIATIONS = {
    "train_micro_batch_size_per_gpu": "tmbspg",
    "gradient_accumulation_steps": "gas",
    "stage": "z",
}


def search_error(filename: str) -> str | None:
    """The last line of a log that tells an error; that there is no log; None if nothing went wrong."""
    path = Path(filename)
    if not path.exists():
        return f"{path.name} does not exist"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    told = [line.strip() for line in lines if re.search(r"\b\w*(Error|Exception)\b|\berror: ", line)]
    return told[-1] if told else None


def was_interrupted(filename: str) -> bool:
    """Tell whether the log says that its run was interrupted from the keyboard; True without a log."""
    path = Path(filename)
    return not path.exists() or "KeyboardInterrupt" in path.read_text(encoding="utf-8", errors="replace")


def find_replace_str(value: Any, replace_dict: Mapping[str, Any]) -> Any:
    """The text with every ``$name`` replaced by the value of that name."""
    if not isinstance(value, str):
        return value
    return re.sub(r"\$\w+", lambda found: str(replace_dict.get(found[0][1:], found[0])), value)


def find_replace(target: Any, replace_dict: Mapping[str, Any]) -> None:
    """``find_replace_str`` for every text in nested dicts and lists, in place."""
    places = target.items() if isinstance(target, dict) else enumerate(target)
    for key, value in list(places):
        if isinstance(value, (dict, list)):
            find_replace(value, replace_dict)
        else:
            target[key] = find_replace_str(value, replace_dict)


def get_list(val: Any) -> list[Any]:
    """The list itself, or a list of the one value."""
    return val if isinstance(val, list) else [val]


def combine_dict(d: dict[str, Any], u: Mapping[str, Any]) -> dict[str, Any]:
    """``d`` with the values of ``u`` appended to those of the same keys, as lists; in place."""
    for key, value in u.items():
        if isinstance(value, Mapping):
            d[key] = combine_dict(d.get(key, {}), value)
        elif key in d:
            d[key] = get_list(d[key]) + get_list(value)
        else:
            d[key] = value
    return d


def del_if_exists(t: str, d: dict[str, Any]) -> None:
    """Remove the key ``t`` wherever it stands in nested dicts."""
    d.pop(t, None)
    for value in d.values():
        if isinstance(value, dict):
            del_if_exists(t, value)


def replace_dict(d: dict[str, Any], u: Mapping[str, Any], ignored_keys: Sequence[str] = []) -> dict[str, Any]:
    """``d`` with the values of ``u`` in place of its own, key by key; in place."""
    for key, value in u.items():
        if key in ignored_keys:
            continue
        here = d.get(key)
        if isinstance(value, Mapping) and isinstance(here, dict):
            replace_dict(here, value, ignored_keys)
        else:
            d[key] = copy.deepcopy(value)
    return d


def get_val_by_key(d: Any, k: str) -> Any:
    """The value of a key anywhere in nested dicts, outermost first; None if it is nowhere."""
    if not isinstance(d, Mapping):
        return None
    if k in d:
        return d[k]
    inner = (get_val_by_key(value, k) for value in d.values())
    return next((value for value in inner if value is not None), None)


def set_val_by_key(d: dict[str, Any], k: str, vv: Any) -> None:
    """Give the key this value wherever it stands in nested dicts."""
    for key, value in d.items():
        if key == k:
            d[key] = vv
        elif isinstance(value, dict):
            set_val_by_key(value, k, vv)


def validate_ds_config(config: Mapping[str, Any]) -> bool:
    """Tell whether the ZeRO section asks for nothing that its stage does not have."""
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0)

    def offloads(key: str) -> bool:
        return (zero.get(key) or {}).get("device", "none") not in (None, "none")

    if offloads("offload_param") and stage < 3:
        return False
    return not (offloads("offload_optimizer") and stage < 1)


def remove_dupe_dicts(l: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:  # noqa: E741 - the documented name
    """The dicts without repetitions, in the same order."""
    found = {json.dumps(each, sort_keys=True): each for each in l}
    return list(found.values())


def prune_config(config: dict[str, Any], ignored_keys: Sequence[str] = []) -> None:
    """Remove the ignored keys, and what an offload that is switched off would be given; in place."""
    for key in ignored_keys:
        del_if_exists(key, config)
    zero = config.get("zero_optimization") or {}
    for section in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(section), dict) and zero[section].get("device") in (None, "none"):
            zero.pop(section)


def prune_configs(
    configs: Iterable[dict[str, Any]], ignored_keys: Sequence[str] = []
) -> list[dict[str, Any]]:
    """Pruned configs without repetitions."""
    pruned = []
    for config in configs:
        prune_config(config, ignored_keys)
        pruned.append(config)
    return remove_dupe_dicts(pruned)


def get_tuning_keys(tuning_space: Mapping[str, Any]) -> list[str]:
    """Keys, at any depth, that have several values to try."""
    keys: list[str] = []
    for key, value in tuning_space.items():
        if isinstance(value, Mapping):
            keys += get_tuning_keys(value)
        elif isinstance(value, list) and len(value) > 1:
            keys.append(key)
    return keys


def get_all_configs(
    tuning_space: Mapping[str, Any], ignore_keys: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Every config of the space: each list stands for the values to try, but those of the ignored keys."""
    choices: list[list[tuple[str, Any]]] = []
    for key, value in tuning_space.items():
        if ignore_keys and key in ignore_keys:
            values: list[Any] = [value]
        elif isinstance(value, Mapping):
            values = list(get_all_configs(value, ignore_keys))
        else:
            values = get_list(value)
        choices.append([(key, each) for each in values])
    return [copy.deepcopy(dict(chosen)) for chosen in itertools.product(*choices)]


def canonical_name(
    config: Mapping[str, Any],
    tuning_keys: Sequence[str] | None = None,
    prefix: str = "",
    omit_val: bool = False,
) -> str:
    """Return a short name of a config: ``z1_gas4_tmbspg2``. The stage comes first, of other keys (``tuning_keys``: only
    those) the initials of their words."""
    found = dict(_leaves(config))
    names = []
    for key in tuning_keys if tuning_keys is not None else sorted(found):
        if key == "stage" and prefix:
            continue
        short = ABBREVIATIONS.get(key) or "".join(word[0] for word in key.split("_") if word)
        names.append(short if omit_val else f"{short}{_short(found.get(key))}")
    return "_".join([prefix.rstrip("_"), *names] if prefix else names)


def _leaves(config: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value)
        else:
            yield key, value


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, (int, float)) and value >= 1000:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e") if value % 1000 == 0 else str(value)
    return str(value)


def get_first_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the first value of each list."""
    first: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            first[key] = get_first_config(value)
        else:
            first[key] = value[0] if isinstance(value, list) and value else value
    return first


def write_experiments(exps: Iterable[Mapping[str, Any]], exps_dir: str) -> list[str]:
    """One JSON file for each experiment, by its name; returns the paths."""
    folder = Path(exps_dir)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for exp in exps:
        path = folder / f"{exp['name']}.json"
        path.write_text(json.dumps(exp, indent=2), encoding="utf-8")
        paths.append(str(path))
    return paths


_BINARY = (("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10), ("", 1))
_DECIMAL = (("B", 10**9), ("M", 10**6), ("K", 10**3), ("", 1))


def memory_to_string(n: float, postfix: str = "", units: str | None = None, precision: int = 2) -> str:
    """Bytes in binary units: ``memory_to_string(1 << 30, "B")`` is ``"1.0 GB"``."""
    return _with_unit(n, postfix, units, precision, _BINARY)


def number_to_string(n: float, postfix: str = "", units: str | None = None, precision: int = 2) -> str:
    """``number_to_string(1234567)`` is ``"1.23 M"``; thousands of millions are ``B``."""
    return _with_unit(n, postfix, units, precision, _DECIMAL)


def _with_unit(
    n: float, postfix: str, units: str | None, precision: int, table: Sequence[tuple[str, int]]
) -> str:
    sizes = dict(table)
    if units is not None and units not in sizes:
        raise ValueError(f"units={units!r}: one of {', '.join(map(repr, sizes))}")
    unit = units if units is not None else next((name for name, size in table if abs(n) >= size), "")
    value = n if not unit else round(n / sizes[unit], precision)
    return f"{value} {unit}{postfix}"
