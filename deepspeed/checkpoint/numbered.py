"""Module lists distributed over ranks: each rank holds some modules, under their global numbers.

So a weight has the same name on every rank, and checkpoints and exports are independent of the distribution: they are
those of one rank with the whole list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn


class NumberedModules(nn.ModuleList):
    """Modules ``first``, ``first + 1``, ... of ``total``, all of one type; ``self[0]`` is module ``first``."""

    first = 0
    total = 0

    def __init__(self, modules: Iterable[nn.Module] | None = None) -> None:
        super().__init__(modules)
        self.total = len(self)

    def renumber(self, first: int, total: int) -> None:
        modules = list(self)
        self.first, self.total = first, total
        self._modules.clear()
        for number, module in enumerate(modules, first):
            self._modules[str(number)] = module

    @property
    def shares(self) -> int:
        """Number of ranks that share the list."""
        return self.total // len(self) if len(self) else 1

    def number_on(self, share: int, number: int) -> int:
        """Return the number of the module of rank ``share`` at the same local position as ``number`` here."""
        return share * len(self) + number - self.first

    def _get_abs_string_index(self, idx: Any) -> str:
        return str(int(super()._get_abs_string_index(idx)) + self.first)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        found: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, found, error_msgs
        )
        unexpected_keys += [key for key in found if not self._has(key[len(prefix) :])]

    _load_from_state_dict.keeps_names = True  # type: ignore[attr-defined]

    def _has(self, name: str) -> bool:
        """Return whether some rank has a module of this name."""
        number = name.partition(".")[0]
        return number.isdigit() and int(number) < self.total


def shared_lists(module: nn.Module) -> Iterator[tuple[str, NumberedModules]]:
    """Yield the lists that are distributed over several ranks, with their paths."""
    for path, each in module.named_modules():
        if isinstance(each, NumberedModules) and each.shares > 1:
            yield path, each


def names_on_all(module: nn.Module) -> dict[str, list[str]]:
    """Return name of each tensor of a shared list -> its names on all ranks that share the list, in rank order."""
    found: dict[str, list[str]] = {}
    for path, each in shared_lists(module):
        for name in each.state_dict(keep_vars=True):
            number, _, rest = name.partition(".")
            found[f"{path}.{name}"] = [
                f"{path}.{each.number_on(share, int(number))}.{rest}" for share in range(each.shares)
            ]
    return found


def names_elsewhere(module: nn.Module) -> set[str]:
    """Return the names of tensors that only other ranks hold."""
    return {name for own, names in names_on_all(module).items() for name in names if name != own}


def names_of_siblings(module: nn.Module) -> dict[str, list[str]]:
    """Return name of each parameter in a list of numbered modules -> names of that parameter in all modules of the
    list, distributed or not."""
    found: dict[str, list[str]] = {}
    for path, each in module.named_modules():
        if isinstance(each, NumberedModules):
            for name, _ in each.named_parameters():
                rest = name.partition(".")[2]
                found[f"{path}.{name}"] = [f"{path}.{number}.{rest}" for number in range(each.total)]
    return found
