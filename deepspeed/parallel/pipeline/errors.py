"""The error of a pipeline that is used wrongly, or of which a stage failed."""


class PipelineError(Exception):
    """Errors of pipeline parallelism: a call that makes no sense on a pipeline, or a message that does not fit."""
