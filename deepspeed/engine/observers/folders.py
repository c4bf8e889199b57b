"""Folders that observers write to."""

from __future__ import annotations

from pathlib import Path


def make_folder(key: str, path: str) -> Path:
    """Return the folder ``path``, created if needed. ValueError: it cannot be created; the message names the config
    ``key``."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{key}={path!r} cannot be used as a folder: {error}. Choose a writable one."
        ) from None
    return folder
