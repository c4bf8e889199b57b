"""Errors of interfaces, kept for their names."""


class NoOptimizerError(RuntimeError, AssertionError):
    """An engine without an optimizer cannot train. An AssertionError, too, as release 0.19 raises it."""


class UnusedParametersError(RuntimeError, AssertionError):
    """Parameters did not contribute to the loss, which the config forbids. Documented as an AssertionError."""


class SplitError(ValueError, RuntimeError):
    """Sizes or inputs that do not fit the number of splits. Documented as a RuntimeError."""


class DeprecatedException(Exception):
    """A documented entry that has been replaced by another."""
