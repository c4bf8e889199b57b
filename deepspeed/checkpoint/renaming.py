"""Parameter names without the prefixes of module wrappers, and files read under other names.

``torch.compile(module)`` adds ``_orig_mod.`` wherever the compiled module is, ``DataParallel`` and
``DistributedDataParallel`` a leading ``module.``. A checkpoint keeps the names of the saved module. Readers get the
names of the loading module, or the plain names without one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from deepspeed.checkpoint.names import INDEX, OPTIMIZER_STATE

WRAPPER = "wrapper"
"""Index key of the prefix that a wrapper adds to every name, if any."""
_PREFIX = "module."
_COMPILED = re.compile(r"(?:^|(?<=\.))_orig_mod\.")

Rename = Callable[[str], str]

_NAMED = (
    "module", "buffer_names", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
    "buffers",
)  # fmt: skip
"""Keys of a file below which every string, in nested dicts and lists, is a name."""
_NAMED_IN_INDEX = (
    "aliases", "excluded", "trained", "cut", "module_boxes", "parts", "covered", "frozen_elsewhere",
    "optimizer_order", "originals", "optimizer_directory", "parts_directory",
)  # fmt: skip
_NAMED_IN_SECTION = ("shards", "group_params", "param_slice_mappings")


def plain_name(name: str) -> str:
    """Return ``name`` as in the module before ``torch.compile``."""
    return _COMPILED.sub("", name) if "_orig_mod." in name else name


def wrapper_of(module: nn.Module) -> str:
    """Return the prefix that ``DataParallel`` and ``DistributedDataParallel`` add to the plain names of ``module``:
    ``"module."`` per wrapper, mostly empty."""
    found = ""
    while True:
        compiled = getattr(module, "_orig_mod", None)
        if isinstance(compiled, nn.Module):
            module = compiled
        elif isinstance(module, (DataParallel, DistributedDataParallel)):
            found, module = found + _PREFIX, module.module
        else:
            return found


def exported_name(name: str, wrapper: str) -> str:
    """Return the name of a tensor in an export of plain weights."""
    return plain_name(name).removeprefix(wrapper)


def renaming(saved: Collection[str], own: Iterable[str] | None, wrapper: str) -> Rename | None:
    """Return the renaming from ``saved`` names to the loading module's names ``own``; None if names are equal or
    unrelated. ``own=None``: for an export; ``wrapper``: ``wrapper_of`` the saved module."""
    if own is None:
        changes = bool(wrapper) or any("_orig_mod." in name for name in saved)
        return (lambda name: exported_name(name, wrapper)) if changes else None
    known = {plain_name(name): name for name in own}
    plain = {plain_name(name) for name in saved}
    ways: tuple[Rename, ...] = (str, lambda name: name.removeprefix(_PREFIX), lambda name: _PREFIX + name)
    way = max(ways, key=lambda way: len(known.keys() & set(map(way, plain))))  # the first in a tie

    def rename(name: str) -> str:
        found = plain_name(name)
        return known.get(way(found), found)

    return rename if any(rename(name) != name for name in saved) else None


def renamed(content: Mapping[str, Any], rename: Rename) -> dict[str, Any]:
    """Return the content of a checkpoint's file with all names of parameters and buffers renamed; tensors are not
    copied."""
    made = dict(content)
    _change(made, _NAMED, rename)
    for key in ("optimizer", OPTIMIZER_STATE):
        if isinstance(made.get(key), dict):
            made[key] = dict(made[key])
            _change(made[key], _NAMED_IN_SECTION, rename)
    if isinstance(made.get(INDEX), dict):
        made[INDEX] = dict(made[INDEX])
        _change(made[INDEX], _NAMED_IN_INDEX, rename)
    return made


def _change(table: dict[str, Any], keys: Iterable[str], rename: Rename) -> None:
    table.update({key: _deep(table[key], rename) for key in keys if key in table})


def _deep(value: Any, rename: Rename) -> Any:
    if isinstance(value, str):
        return rename(value)
    if isinstance(value, dict):
        made = copy.copy(value)  # an OrderedDict with its version numbers
        made.clear()
        made.update((_deep(key, rename), _deep(item, rename)) for key, item in value.items())
        return made
    if type(value) in (list, tuple):
        return type(value)(_deep(item, rename) for item in value)
    return value
