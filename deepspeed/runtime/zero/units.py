"""Gather units of a module: its repeated blocks, and what lies between them."""

from __future__ import annotations

from torch import nn


def assign_units(module: nn.Module) -> dict[nn.Parameter, int]:
    """Map every parameter of ``module`` to the number of its unit, in registration order.

    A unit is one element of an outermost list of blocks (a ``ModuleList``, ``Sequential`` or any module with two
    or more children of one class, at least half of its parametrised children), or a maximal run of parameters
    that belong to no block. A tied parameter belongs to the unit that registers it first.
    """
    units: dict[nn.Parameter, int] = {}
    counter = _Counter()
    _walk(module, units, counter)
    return units


class _Counter:
    """Hands out unit numbers; ``between`` stays the same until a block intervenes."""

    def __init__(self) -> None:
        self.last = -1
        self._between: int | None = None

    def between(self) -> int:
        if self._between is None:
            self.last += 1
            self._between = self.last
        return self._between

    def block(self) -> int:
        self._between = None
        self.last += 1
        return self.last


def _walk(module: nn.Module, units: dict[nn.Parameter, int], counter: _Counter) -> None:
    for parameter in module._parameters.values():
        if parameter is not None and parameter not in units:
            units[parameter] = counter.between()
    blocks = _repeated_children(module)
    for child in module.children():
        if child in blocks:
            unit = counter.block()
            for parameter in child.parameters():
                units.setdefault(parameter, unit)
        else:
            _walk(child, units, counter)


def _repeated_children(module: nn.Module) -> set[nn.Module]:
    """Children that are blocks: composite, of a class that occurs at least twice and makes up half of them."""
    composite = [child for child in module.children() if any(True for _ in child.children())]
    by_class: dict[type, list[nn.Module]] = {}
    for child in composite:
        if next(child.parameters(), None) is not None:
            by_class.setdefault(type(child), []).append(child)
    blocks: set[nn.Module] = set()
    for children in by_class.values():
        if len(children) >= 2 and 2 * len(children) >= len(composite):
            blocks.update(children)
    return blocks
