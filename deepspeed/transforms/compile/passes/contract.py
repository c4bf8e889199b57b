"""Contracts of passes, to check schedules against: capabilities required from earlier passes, and conflicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed.base.exceptions import ExplainedError

CAP_Z3_GATHER_RELEASE = "z3_gather_release"
"""Capability of ``zero3_compile``: parameters are gathered and released around the compiled blocks."""


class PassContractError(ExplainedError, ValueError):
    """A schedule violates the contract of a pass."""


@dataclass(frozen=True)
class PassContract:
    """Contract of a pass. ``requires``: capabilities that earlier passes of the same step must have in ``provides``;
    ``conflicts_with``: names of passes.

    ``phase`` ("forward", "backward" or "both"): graphs that the pass concerns; it is not checked.
    """

    name: str = ""
    provides: frozenset[str] = frozenset()
    requires: frozenset[str] = frozenset()
    conflicts_with: frozenset[str] = frozenset()
    phase: str = "both"


_pass_contracts: dict[str, PassContract] = {}

Names = Mapping[Any, Any] | Iterable[tuple[Any, str]]


def register_pass_contract(name: str | PassContract, contract: PassContract | None = None) -> None:
    """Set the contract of the pass ``name``; None removes it. A contract with a name may be given as the only
    argument."""
    if isinstance(name, PassContract):
        name, contract = name.name, name
    if not name:
        raise ValueError("register_pass_contract: a contract needs the name of its pass")
    if contract is None:
        _pass_contracts.pop(name, None)
    else:
        _pass_contracts[name] = contract


def get_pass_contract(name: str) -> PassContract | None:
    return _pass_contracts.get(name)


def validate_schedule(
    schedule: Sequence[tuple[int, Sequence[Any]]], name_registry: Names | None = None
) -> None:
    """Raise ``PassContractError`` if a pass lacks a requirement, or conflicts with another one.

    Args:
        schedule: ``[(step, passes), ...]``; a pass is a name or a function.
        name_registry: names of functions: ``{function: name or names}``, or pairs ``(function, name)``.

    Every step is checked separately. Passes without a contract may be anywhere.
    """
    for step, passes in schedule:
        provided: set[str] = set()
        before: list[str] = []
        for entry in passes:
            name = _name_of(entry, name_registry)
            contract = get_pass_contract(name) if name is not None else None
            if name is None or contract is None:
                continue
            if missing := contract.requires - provided:
                raise PassContractError(
                    f"step {step}: pass {name!r} requires {sorted(missing)}, which no earlier pass in this "
                    f"step provides ({before or 'there is none'})"
                )
            if clash := [other for other in before if _conflict(name, contract, other)]:
                raise PassContractError(
                    f"step {step}: pass {name!r} conflicts with {clash}: remove one of them"
                )
            provided |= contract.provides
            before.append(name)


def _conflict(name: str, contract: PassContract, other: str) -> bool:
    theirs = get_pass_contract(other)
    return other in contract.conflicts_with or (theirs is not None and name in theirs.conflicts_with)


def _name_of(entry: str | Callable[..., Any], registry: Names | None) -> str | None:
    if isinstance(entry, str):
        return entry
    pairs = registry.items() if isinstance(registry, Mapping) else registry or ()
    names: list[str] = []
    for function, named in pairs:
        if function is entry:
            names += [named] if isinstance(named, str) else list(named)
    if len(names) > 1:
        raise PassContractError(
            f"{entry!r} is registered under multiple names, {sorted(names)}: pass the name"
        )
    return names[0] if names else None
