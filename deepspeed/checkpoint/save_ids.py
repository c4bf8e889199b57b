"""The id of a save, which each of its files carries: a folder with files of two saves is refused."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.checkpoint.errors import mixed_saves
from deepspeed.checkpoint.names import INDEX, SAVE, SAVED_BY


def new_id() -> int:
    """Return a random number of 62 bits; the largest of all ranks' is the id of a save."""
    return secrets.randbits(62)


def save_entry(number: int, global_steps: Any) -> dict[str, Any]:
    """Return what a file says of its save."""
    return {"id": f"{number:016x}", "global_steps": global_steps}


def marked(state: Mapping[str, Any], save: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return a state dict that carries its save beside its entries, of which a strict load would refuse one more.

    ``_metadata`` of a state dict is stored with it; ``load_state_dict`` looks up the paths of modules there, and this
    is none.
    """
    result = OrderedDict(state)
    result._metadata = OrderedDict({SAVED_BY: dict(save)})  # type: ignore[attr-defined]
    return result


class MarkedFiles:
    """A checkpoint engine that marks the state dicts that it saves."""

    def __init__(self, checkpoint_engine: Any, save: Mapping[str, Any]) -> None:
        self._engine, self._save = checkpoint_engine, save

    def save(self, state: Mapping[str, Any], path: str) -> None:
        self._engine.save(marked(state, self._save), path)


def save_of(content: Any, note: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
    """Return which save a file of this ``content`` is of, in any layout; None where it does not say. ``note``: what the
    file says beside its content (``Archive.note``)."""
    if note and SAVED_BY in note:
        return note[SAVED_BY]
    if not isinstance(content, Mapping):
        return None
    metadata: Any = getattr(content, "_metadata", None) or {}
    return (content.get(INDEX) or {}).get(SAVE) or content.get(SAVED_BY) or metadata.get(SAVED_BY)


class FileOfSave(NamedTuple):
    """A file, and which save it is of; None where it does not say."""

    path: Path
    save: Mapping[str, Any] | None


def check_save_of(
    path: Path, content: Any, first: FileOfSave | None, note: Mapping[str, Any] | None = None
) -> None:
    """CheckpointError if this file's ``content`` or ``note`` says that it is of another save than ``first``. Of files
    that say nothing, nothing is known: release 0.19 may have written them."""
    found = save_of(content, note)
    if found and first and first.save and found["id"] != first.save["id"]:
        raise mixed_saves(path, found, *first)
