"""The one exception that the launcher's users see."""


class LaunchError(ValueError):
    """A request that cannot be fulfilled; the message names the option, its value and the remedy."""
