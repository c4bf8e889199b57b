"""The one exception that the launcher's users see."""

from deepspeed.base.exceptions import ExplainedError


class LaunchError(ExplainedError, ValueError):
    """A request that cannot be fulfilled; the message names the option, its value and the remedy."""
