"""The launcher's log, and the one exception that its users see."""

import logging

from deepspeed.base.exceptions import ExplainedError

logger = logging.getLogger("deepspeed.tools.launcher")


class LaunchError(ExplainedError, ValueError):
    """A request that cannot be fulfilled; the message names the option, its value and the remedy."""
