"""Gather units of a module: its repeated blocks, and the modules between them."""

from __future__ import annotations

from torch import nn


def assign_units(module: nn.Module) -> dict[nn.Parameter, int]:
    """Map every parameter of ``module`` to the number of its unit, in registration order.

    A unit is one block (see ``blocks_of``) or a maximal run of parameters that belong to no block. A tied parameter
    belongs to the unit that registers it first.
    """
    units: dict[nn.Parameter, int] = {}
    counter = _Counter()
    _walk(module, units, counter)
    return units


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The outermost repeated blocks of a model, in order.

    A block is an element of a container (``ModuleList``, ``Sequential``, ``ModuleDict``) or a composite child of any
    module, of a class that occurs at least twice there and makes up at least half of the candidates.
    """
    found: list[nn.Module] = []
    repeated = _repeated_children(module)
    for child in module.children():
        if child in repeated:
            found.append(child)
        else:
            found.extend(blocks_of(child))
    return found


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
    container = isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
    candidates = [
        child
        for child in module.children()
        if (container or next(child.children(), None) is not None)
        and next(child.parameters(), None) is not None
    ]
    by_class: dict[type, list[nn.Module]] = {}
    for child in candidates:
        by_class.setdefault(type(child), []).append(child)
    return {
        child
        for same in by_class.values()
        if len(same) >= 2 and 2 * len(same) >= len(candidates)
        for child in same
    }
