"""Exceptions of transforms."""

from deepspeed.base.exceptions import ExplainedError


class TransformError(ExplainedError, RuntimeError):
    """A transform failed, came too late, or conflicts with another one; the message names it."""


class TransformRefusedError(TransformError, ValueError):
    """A transform refused the model or its settings with a ``ValueError``; still one, for callers that catch it."""
