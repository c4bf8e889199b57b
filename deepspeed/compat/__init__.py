"""Documented paths and names of release 0.19 that are nobody's room: the table that leads to our modules
(`aliases.py`), the import hook that follows it (`finder.py`), and code that exists for an old path alone. Nothing
else imports it.

`deepspeed.compat` is itself a documented module, of the two functions below.
"""

from __future__ import annotations

from typing import Any

_ANNOTATIONS = ("get_annotations", "get_annotations_from_namespace")


def __getattr__(name: str) -> Any:
    if name not in _ANNOTATIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from deepspeed.base import annotations

    return getattr(annotations, name)
