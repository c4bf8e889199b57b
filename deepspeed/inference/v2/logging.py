"""The log of the ragged engine."""

from __future__ import annotations

import logging

from deepspeed.base.logging import logger


def inference_logger(level: int = logging.INFO) -> logging.Logger:
    """A logger below the package's own, with a level of its own."""
    made = logger.getChild("inference")
    made.setLevel(level)
    return made
