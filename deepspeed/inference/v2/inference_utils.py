"""Dtypes of the ragged engine."""

from __future__ import annotations

from deepspeed.runtime.config_utils import DtypeEnum

__all__ = ["DtypeEnum"]
