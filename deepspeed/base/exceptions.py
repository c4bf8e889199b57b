"""Base of the errors that the documentation explains, and documented error types."""

from __future__ import annotations

from functools import cached_property


class ExplainedError(Exception):
    """Error whose class has a row in docs/troubleshooting.md, to which its first note refers.

    Python 3.11 and newer print notes after a traceback, `exit_quietly` after a tool's message.
    """

    @cached_property
    def __notes__(self) -> list[str]:
        return [f"explained in docs/troubleshooting.md#{type(self).__name__.lower()}"]


class NoOptimizerError(ExplainedError, RuntimeError, AssertionError):
    """An engine without an optimizer cannot train. An AssertionError, too, as release 0.19 raises it."""


class UnusedParametersError(ExplainedError, RuntimeError, AssertionError):
    """Parameters did not contribute to the loss, which the config forbids. Documented as an AssertionError."""


class SplitError(ExplainedError, ValueError, RuntimeError):
    """Sizes or inputs that do not fit the number of splits. Documented as a RuntimeError."""


class DeprecatedException(ExplainedError):
    """A documented entry point that has been replaced."""
