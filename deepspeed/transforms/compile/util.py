"""Queries for client code before compiling."""

from __future__ import annotations

from deepspeed.base.compiler import is_compile_supported


def is_deepcompile_supported() -> bool:
    """Return whether ``compile.deepcompile`` works in this environment: wherever ``torch.compile`` does."""
    return is_compile_supported()
