"""Expressions that compute the original module's weights from a transformed module's.

An *expression* names tensors of the transformed module's state dict and says how they make one tensor of the
original. Expressions are plain data recorded in a checkpoint, so an export needs neither the model nor the transform.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.logging import logger

Shape = tuple[int, ...]
ORIGINALS = "originals"
"""Key of ``Originals.packed`` in the index of a checkpoint."""


class Expression:
    """One tensor, computed from tensors of a state dict. Subclasses are frozen dataclasses whose fields are
    expressions, tuples of expressions, and plain values."""

    __slots__ = ()

    def shape(self, shape_of: Callable[[str], Shape]) -> Shape:
        """Return the shape, from the shapes of the named tensors. ValueError: they do not fit together."""
        raise NotImplementedError

    def value(self, read: Callable[[str], Tensor]) -> Tensor:
        """Return the tensor; it may share memory with the results of ``read``."""
        raise NotImplementedError

    def names(self) -> list[str]:
        """Return the names of the tensors that it reads, in order of first use."""
        return list(dict.fromkeys(name for child in self._children() for name in child.names()))

    def dtype(self, dtype_of: Callable[[str], torch.dtype]) -> torch.dtype:
        """Return the dtype of the most precise tensor in it."""
        return reduce(torch.promote_types, map(dtype_of, self.names()))

    def substituted(self, table: Mapping[str, Expression]) -> Expression:
        """Return the expression with named tensors replaced by the expressions of ``table``."""
        return self._mapped(lambda child: child.substituted(table))

    def packed(self) -> tuple[Any, ...]:
        """Return nested tuples, for a file."""
        return (type(self).__name__, *(_packed(getattr(self, field.name)) for field in _fields(self)))

    def _children(self) -> Iterable[Expression]:
        for field in _fields(self):
            value = getattr(self, field.name)
            yield from value if _are_expressions(value) else [value] if isinstance(value, Expression) else []

    def _mapped(self, change: Callable[[Expression], Expression]) -> Expression:
        return type(self)(*(_changed(getattr(self, field.name), change) for field in _fields(self)))


@dataclass(frozen=True, slots=True)
class Weight(Expression):
    """A tensor of the transformed module, unchanged."""

    name: str

    def shape(self, shape_of: Callable[[str], Shape]) -> Shape:
        return shape_of(self.name)

    def value(self, read: Callable[[str], Tensor]) -> Tensor:
        return read(self.name)

    def names(self) -> list[str]:
        return [self.name]

    def substituted(self, table: Mapping[str, Expression]) -> Expression:
        return table.get(self.name, self)


@dataclass(frozen=True, slots=True)
class Part(Expression):
    """Elements ``start`` to ``stop`` of ``whole`` along ``dim``: undoes a fusion."""

    whole: Expression
    dim: int
    start: int
    stop: int

    def shape(self, shape_of: Callable[[str], Shape]) -> Shape:
        shape = list(self.whole.shape(shape_of))
        if not 0 <= self.start <= self.stop <= shape[self.dim]:
            raise ValueError(
                f"{self.start} to {self.stop} is not within dimension {self.dim} of {tuple(shape)}"
            )
        shape[self.dim] = self.stop - self.start
        return tuple(shape)

    def value(self, read: Callable[[str], Tensor]) -> Tensor:
        return self.whole.value(read).narrow(self.dim, self.start, self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Joined(Expression):
    """``parts`` one after another along ``dim``: undoes a split."""

    parts: tuple[Expression, ...]
    dim: int = 0

    def shape(self, shape_of: Callable[[str], Shape]) -> Shape:
        shapes = [list(part.shape(shape_of)) for part in self.parts]
        joined = sum(shape[self.dim] for shape in shapes)
        for shape in shapes:
            shape[self.dim] = joined
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(f"the parts do not fit each other along dimension {self.dim}")
        return tuple(shapes[0])

    def value(self, read: Callable[[str], Tensor]) -> Tensor:
        return torch.cat([part.value(read) for part in self.parts], self.dim)


@dataclass(frozen=True, slots=True)
class Transposed(Expression):
    """The transpose of a matrix."""

    matrix: Expression

    def shape(self, shape_of: Callable[[str], Shape]) -> Shape:
        rows, columns = self.matrix.shape(shape_of)
        return columns, rows

    def value(self, read: Callable[[str], Tensor]) -> Tensor:
        return self.matrix.value(read).t()


@dataclass(frozen=True, slots=True)
class LowRank(Expression):
    """``base + scale * left @ right``, of shapes [m, n], [m, r] and [r, n]: merges an adapter (Hu et al.: LoRA, 2021).
    Computed in fp32 or wider, and rounded once to the dtype of the result."""

    base: Expression
    left: Expression
    right: Expression
    scale: float = 1.0

    def shape(self, shape_of: Callable[[str], Shape]) -> Shape:
        base, left, right = (part.shape(shape_of) for part in (self.base, self.left, self.right))
        if base != (left[0], right[-1]) or left[1:] != right[:1]:
            raise ValueError(f"matrices of shapes {left} and {right} cannot be added to one of {base}")
        return base

    def value(self, read: Callable[[str], Tensor]) -> Tensor:
        parts = [part.value(read) for part in (self.base, self.left, self.right)]
        dtype = reduce(torch.promote_types, [part.dtype for part in parts])
        wide = torch.promote_types(dtype, torch.float32)
        base, left, right = (part.to(wide) for part in parts)
        return torch.addmm(base, left, right, alpha=self.scale).to(dtype)


KINDS: dict[str, type[Expression]] = {
    kind.__name__: kind for kind in (Weight, Part, Joined, Transposed, LowRank)
}
"""Expression types that a checkpoint may hold, by name."""


@dataclass(frozen=True, slots=True)
class ExportedTensors:
    """The content of an export: tensors in the original's order; ``aliases``: other name -> name in ``tensors``."""

    tensors: dict[str, Expression]
    aliases: dict[str, str]


@dataclass(frozen=True, slots=True)
class Originals:
    """The mapping from a transformed module's state dict to the original's.

    ``order``: the names of the original's state dict. ``made_of``: its tensors whose name or value changed.
    ``dropped``: tensors that only the transformed module has.
    """

    order: tuple[str, ...]
    made_of: Mapping[str, Expression]
    dropped: frozenset[str] = frozenset()

    def then(self, made_of: Mapping[str, Expression], dropped: Iterable[str] = ()) -> Originals:
        """Return the mapping after one more transform, whose expressions ``made_of`` give the tensors that this one
        names."""
        inner = {name for expression in self.made_of.values() for name in expression.names()}
        table = {name: expression.substituted(made_of) for name, expression in self.made_of.items()}
        gone = set(dropped)
        for name in self.dropped:
            gone.update(made_of[name].names() if name in made_of else [name])
        for name, expression in made_of.items():
            if name not in inner and name not in self.dropped:
                table[name] = expression
        return Originals(self.order, table, frozenset(gone))

    def exported(self, names: Iterable[str], aliases: Mapping[str, str]) -> ExportedTensors:
        """Return the export of a transformed state dict with tensors ``names`` and ``aliases`` (other name -> name).
        If an input of an expression is missing (frozen weights may be left out), its other inputs keep their own
        names."""
        known = dict.fromkeys([*names, *aliases])
        usable = {name: made for name, made in self.made_of.items() if known.keys() >= set(made.names())}
        untouched = set(self.order) - self.made_of.keys()
        used = {name for made in usable.values() for name in made.names()} - untouched
        table: dict[str, Expression] = {
            name: Weight(name) for name in known if name not in used | self.dropped
        }
        table |= usable
        place = {name: number for number, name in enumerate(self.order)}
        first = {alias: Weight(name) for alias, name in aliases.items()}
        tensors: dict[str, Expression] = {}
        others: dict[str, str] = {}
        seen: dict[Expression, str] = {}
        for name in sorted(table, key=lambda name: place.get(name, len(place))):
            made = table[name].substituted(first)
            if isinstance(made, Weight) and made in seen:
                others[name] = seen[made]
            else:
                tensors[name] = made
                seen[made] = name
        return ExportedTensors(tensors, others)

    def packed(self) -> dict[str, Any]:
        """Return plain data for the index of a checkpoint."""
        return {
            "order": list(self.order),
            "made_of": {name: expression.packed() for name, expression in self.made_of.items()},
            "dropped": sorted(self.dropped),
        }

    @classmethod
    def unpacked(cls, packed: Mapping[str, Any]) -> Originals:
        """Restore from ``packed``; weights of an unknown expression type keep their transformed names, with a
        warning."""
        made_of: dict[str, Expression] = {}
        unknown: dict[str, list[str]] = {}
        for name, expression in packed["made_of"].items():
            try:
                made_of[name] = _unpacked(expression)
            except KeyError as kind:
                unknown.setdefault(str(kind.args[0]), []).append(name)
        for kind, names in unknown.items():
            logger.warning(
                f"{len(names)} weights ({names[0]}, ...) keep the names of the transformed module: this "
                f"version cannot undo {kind!r}; use engine.save_16bit_model in the run that trained them"
            )
        return cls(tuple(packed["order"]), made_of, frozenset(packed["dropped"]))


def _fields(expression: Expression) -> tuple[Any, ...]:
    return fields(expression)  # type: ignore[arg-type]  # every subclass is a dataclass


def _are_expressions(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(entry, Expression) for entry in value)


def _changed(value: Any, change: Callable[[Expression], Expression]) -> Any:
    if isinstance(value, Expression):
        return change(value)
    return tuple(map(change, value)) if _are_expressions(value) else value


def _packed(value: Any) -> Any:
    if isinstance(value, Expression):
        return value.packed()
    return [entry.packed() for entry in value] if _are_expressions(value) else value


def _unpacked(packed: tuple[Any, ...]) -> Expression:
    kind, *values = packed
    return KINDS[kind](*(_unpacked_field(value) for value in values))


def _unpacked_field(value: Any) -> Any:
    if isinstance(value, tuple):
        return _unpacked(value)
    return tuple(map(_unpacked, value)) if isinstance(value, list) else value
