"""The exception of pipeline parallelism."""

from deepspeed.base.exceptions import ExplainedError


class PipelineError(ExplainedError):
    """An invalid use of a pipeline, or a message between stages that does not match."""
