"""The error of a pipeline that is used wrongly, or of which a stage failed."""

from deepspeed.base.exceptions import ExplainedError


class PipelineError(ExplainedError):
    """Errors of pipeline parallelism: a call that makes no sense on a pipeline, or a message that does not fit."""
