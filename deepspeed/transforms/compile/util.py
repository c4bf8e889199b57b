"""Queries of client code before it compiles."""

from __future__ import annotations

from typing import Any

from deepspeed.base.compiler import is_compile_supported
from deepspeed.base.logging import log_dist


def is_deepcompile_supported() -> bool:
    """Return whether ``compile.deepcompile`` works here: wherever ``torch.compile`` does."""
    return is_compile_supported()


def is_backend_inductor(backend: Any) -> bool:
    return backend == "inductor"


def log_rank0(msg: str, enable: bool = False) -> None:
    """Log on rank 0, if ``enable``."""
    if enable:
        log_dist(msg, ranks=[0])
