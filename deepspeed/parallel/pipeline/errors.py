"""The error of a pipeline that is used wrongly, or of which a stage failed."""

from __future__ import annotations


class PipelineError(Exception):
    """Errors of pipeline parallelism: a call that makes no sense on a pipeline, or a message that does not fit."""
