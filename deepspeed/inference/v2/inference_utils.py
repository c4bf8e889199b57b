"""Dtypes of the ragged engine."""

from __future__ import annotations

from deepspeed.config.sections import DtypeEnum

__all__ = ["DtypeEnum"]
