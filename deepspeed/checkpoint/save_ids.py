"""Save ids: every file of a save carries the same id, so a folder with files of two saves is refused."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.checkpoint.errors import mixed_saves
from deepspeed.checkpoint.names import INDEX, SAVE, SAVED_BY


def new_id() -> int:
    """Return a random 62-bit number; the maximum over ranks becomes the save's id."""
    return secrets.randbits(62)


def save_entry(number: int, global_steps: Any) -> dict[str, Any]:
    """Return the entry by which a file identifies its save."""
    return {"id": f"{number:016x}", "global_steps": global_steps}


def marked(state: Mapping[str, Any], save: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a state dict that carries its save outside its entries, since a strict load would refuse an extra one.

    It is in ``_metadata``, which is pickled with a state dict; ``load_state_dict`` only looks up module paths there.
    """
    result = OrderedDict(state)
    result._metadata = OrderedDict({SAVED_BY: dict(save)})  # type: ignore[attr-defined]
    return result


class MarkedFiles:
    """Wraps a checkpoint engine to mark the state dicts that it saves."""

    def __init__(self, checkpoint_engine: Any, save: Mapping[str, Any]) -> None:
        self._engine, self._save = checkpoint_engine, save

    def save(self, state: Mapping[str, Any], path: str) -> None:
        self._engine.save(marked(state, self._save), path)


def save_of(content: Any, note: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
    """Return the save that a file records, in any layout; None if it records none. ``note``: ``Archive.note`` of the
    file."""
    if note and SAVED_BY in note:
        return note[SAVED_BY]
    if not isinstance(content, Mapping):
        return None
    metadata: Any = getattr(content, "_metadata", None) or {}
    return (content.get(INDEX) or {}).get(SAVE) or content.get(SAVED_BY) or metadata.get(SAVED_BY)


class FileOfSave(NamedTuple):
    """A file and the save that it records, None if it records none."""

    path: Path
    save: Mapping[str, Any] | None


def check_save_of(
    path: Path, content: Any, first: FileOfSave | None, note: Mapping[str, Any] | None = None
) -> None:
    """Raise CheckpointError if ``content`` or ``note`` records another save than ``first``. Files without a record
    pass: release 0.19 may have written them."""
    found = save_of(content, note)
    if found and first and first.save and found["id"] != first.save["id"]:
        raise mixed_saves(path, found, *first)
