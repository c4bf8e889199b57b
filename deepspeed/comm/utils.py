"""The ranks that the launcher assigned, before any process group exists."""

from __future__ import annotations

import os

from deepspeed.utils.environment import this_process


def get_local_rank_from_launcher() -> int:
    return this_process(os.environ).local_rank


def get_world_rank_from_launcher() -> int:
    return this_process(os.environ).rank


def get_world_size_from_launcher() -> int:
    return this_process(os.environ).world_size
