"""The base class of communication backends, for those who bring their own."""

from __future__ import annotations


class Backend:
    """Base of communication backends: a name, and whether its process group exists."""

    def __init__(self, name: str = "backend", rank: int = 0, size: int = 1) -> None:
        self.name = name
        self.world_group = None
        self.world_size = size
        self.world_rank = rank
        self.initialized = False

    def is_initialized(self) -> bool:
        return self.initialized

    def new_group(self, ranks):
        raise NotImplementedError(f"backend {self.name!r} makes no groups")

    def init_process_group(self, *args, **kwargs) -> None:
        self.initialized = True
