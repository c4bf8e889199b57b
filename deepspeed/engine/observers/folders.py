"""Folders that observers write to."""

from __future__ import annotations

from pathlib import Path


def make_folder(key: str, path: str) -> Path:
    """The folder ``path``, made if it is not there. ValueError: it cannot be; ``key`` of the config names it."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{key}={path!r} cannot be a folder: {error}. Name one that can be written."
        ) from None
    return folder
