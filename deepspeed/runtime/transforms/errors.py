"""The error of transforms."""

from __future__ import annotations


class TransformError(RuntimeError):
    """A transform failed, came too late, or conflicts with another one; the message names it."""
