"""The one exception that the launcher's users see."""

from __future__ import annotations


class LaunchError(ValueError):
    """A request that cannot be fulfilled; the message names the option, its value and the remedy."""
