"""The sections `comm` and `comms_logger`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from deepspeed.config.section import DeepSpeedConfigModel, Float, OneOf, Switched, key


class CommConfig(DeepSpeedConfigModel):
    """Communication between ranks."""

    shared_memory: bool = key(
        True, "Move CPU tensors between ranks of one host through shared memory (else through gloo)."
    )
    hang_report_seconds: Float = key(
        30.0,
        "Without progress in communication for this long, report who waits for whom; 0: never.",
        ge=0,
    )


def _codecs() -> Iterable[str]:
    from deepspeed.ops.formats.codecs import CODECS

    return CODECS


class GradientCompressionConfig(DeepSpeedConfigModel):
    """Gradients travel in a few bits per element, at every stage."""

    codec: Annotated[str, OneOf(_codecs)] = Field(
        description="Gradient encoding: integers or 8-bit floats with a scale per block, signs, or only the largest "
        "elements."
    )
    share: Float = key(0.01, 'Fraction of the elements that is sent; only for "top_k".', gt=0, le=1)
    rounding: Literal["nearest", "stochastic"] = key(
        "nearest", 'Rounding of "int8" and "int4"; stochastic: at random, unbiased.'
    )
    error_feedback: bool = key(True, "Add the encoding error to the next gradients.")


class CommsLoggerConfig(Switched):
    """Count, size and time of collective calls."""

    prof_all: bool = key(True, "Record every operation.")
    prof_ops: list[str] = key([], "Operations to record when `prof_all` is false.")
    verbose: bool = key(False, "Log a line per call.")
    debug: bool = key(False, "Add the name of the calling function to each record.")


class DeepSpeedCommsConfig:
    """The argument of `deepspeed.comm.configure`: the `comms_logger` section of a config dict."""

    def __init__(self, ds_config: Mapping[str, Any]) -> None:
        section = ds_config.get("comms_logger")
        self.comms_logger_enabled = section is not None
        self.comms_logger = (
            CommsLoggerConfig(**section) if isinstance(section, Mapping) else section or CommsLoggerConfig()
        )
