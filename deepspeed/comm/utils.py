"""Ranks as the launcher told them, before any process group exists."""

from __future__ import annotations

import os

from . import environment
from .environment import Identity


def _identity() -> Identity:
    found = environment.discover(os.environ, 0)
    return found or Identity(
        rank=0, world_size=1, local_rank=int(os.environ.get("LOCAL_RANK", 0)), source="alone"
    )


def get_local_rank_from_launcher() -> int:
    return _identity().local_rank


def get_world_rank_from_launcher() -> int:
    return _identity().rank


def get_world_size_from_launcher() -> int:
    return _identity().world_size
