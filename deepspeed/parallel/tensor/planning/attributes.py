"""Integer attributes of modules (heads, widths) that must match a rank's part of the weights."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from torch import Tensor, nn

from deepspeed.parallel.tensor.planning.plan import AttributeChange, PlanError
from deepspeed.parallel.tensor.planning.solver import Axis, SplitRegion
from deepspeed.parallel.tensor.planning.values import LabelledGraph

_NO_WIDTHS = ("head", "num", "position", "rotary", "window", "layer", "buckets")


@dataclass(frozen=True, slots=True)
class _Ratios:
    """Each rank's share of the heads, and of the shared (key/value) heads. ``width``: inputs of the row layer;
    ``shared_width``: outputs that produce the shared keys."""

    heads: tuple[Fraction, ...]
    shared: tuple[Fraction, ...]
    width: int
    shared_width: int = 0


def attribute_changes(
    module: nn.Module,
    regions: Sequence[SplitRegion],
    labelled: LabelledGraph,
    sharable: dict[Axis, Tensor],
    fixed: Container[str] = (),
) -> tuple[AttributeChange, ...]:
    """Return the changes in the modules around the layers of ``regions``, except at paths in ``fixed``.
    (Numbers that do not divide stay unchanged: the part then fails the simulated run.)"""
    found: dict[tuple[str, str, bool], AttributeChange] = {}
    for region in regions:
        ratios = _ratios(region, labelled, sharable)
        if len(region.groups) == ratios.width:  # all channels are independent: no heads
            continue
        for path in modules_around(region):
            if path in fixed:
                continue
            for change in _of_module(path, module.get_submodule(path), ratios):
                known = found.setdefault((path, change.name, change.in_config), change)
                if known.values != change.values:
                    raise PlanError(f"{path}.{change.name} would be {known.values} and {change.values}")
    return tuple(found.values())


def modules_around(region: SplitRegion) -> list[str]:
    """Return the modules around the layers, up to their common ancestor (adapters may be in between)."""
    layers = [name.split(".")[:-1] for name, _ in [*region.columns, *region.rows]]
    common = len(os.path.commonprefix(layers))
    found = [path[:end] for path in layers for end in range(len(path) - 1, max(common, 1) - 1, -1)]
    return list(dict.fromkeys(".".join(path) for path in found))


def _ratios(region: SplitRegion, labelled: LabelledGraph, sharable: dict[Axis, Tensor]) -> _Ratios:
    row = region.cuts[region.rows[0]]
    heads = tuple(Fraction(extent, row.size) for extent in row.extents)
    columns = sum(region.cuts[axis].size for axis in region.columns)
    masks = [
        (region.cuts[axis], sharable[axis])
        for axis in region.columns
        if axis in sharable and sharable[axis].any()
    ]
    if masks:
        total = sum(int(mask.sum()) for _, mask in masks)
        own = [
            sum(int(mask[low:high].sum()) for cut, mask in masks for low, high in cut.parts[rank])
            for rank in range(row.ranks)
        ]
        return _Ratios(heads, tuple(Fraction(each, total) for each in own), row.size, total // 2)
    whole = columns == row.size  # only queries are split
    return _Ratios(heads, (Fraction(1),) * row.ranks if whole else heads, row.size)


def _of_module(path: str, module: nn.Module, ratios: _Ratios) -> Iterator[AttributeChange]:
    text = _source(type(module))
    used = set(re.findall(r"self\.(\w+)", text))
    numbers = {name: value for name, value in vars(module).items() if _is_number(value)}
    for name, value in numbers.items():
        values = _local(name, value, ratios, name in used)
        if values is not None:
            yield AttributeChange(path, name, values)
    config: Any = getattr(module, "config", None)
    for name in sorted(set(re.findall(r"(?:self\.)?config\.(\w+)", text))):
        value: Any = getattr(config, name, None)
        if _is_number(value):
            values = _local(name, value, ratios, "head" in name)
            if values is not None:
                yield AttributeChange(path, name, values, in_config=True)


def _local(name: str, value: int, ratios: _Ratios, used: bool) -> tuple[int, ...] | None:
    low = name.lower()
    shared = "kv" in low or "key_value" in low
    if "group" in low and shared or low == "n_rep":
        parts = [value * h / s for h, s in zip(ratios.heads, ratios.shared, strict=True)]
    elif "head" in low and not any(word in low for word in ("dim", "size", "mask", "rotary")):
        parts = [value * ratio for ratio in (ratios.shared if shared else ratios.heads)]
    elif used and value == ratios.width and not any(word in low for word in _NO_WIDTHS):
        parts = [value * ratio for ratio in ratios.heads]
    elif used and shared and value == ratios.shared_width:
        parts = [value * ratio for ratio in ratios.shared]
    else:
        return None
    if any(Fraction(each).denominator != 1 for each in parts):
        return None
    return tuple(int(each) for each in parts)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _source(kind: type) -> str:
    """Return the source of a class's methods, except ``__init__``."""
    texts = []
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        if name != "__init__" and method.__qualname__.split(".")[0] in {
            c.__name__ for c in kind.__mro__[:-2]
        }:
            try:
                texts.append(inspect.getsource(method))
            except (OSError, TypeError):
                continue
    return "\n".join(texts)
