"""Small helpers that the rest of the package stands on."""

from .logging import log_dist, log_dist_once, logger, set_log_level_from_string, warning_once

__all__ = ["log_dist", "log_dist_once", "logger", "set_log_level_from_string", "warning_once"]
