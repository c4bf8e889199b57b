"""Findings of a config check, and their text form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from deepspeed.base.dtypes import Dtype
from deepspeed.base.tables import counted
from deepspeed.config.analysis import BATCH_KEYS
from deepspeed.config.batch import BatchSizes
from deepspeed.config.problems import DeepSpeedConfigError, Problem, cut, cut_list, first_lines, shown
from deepspeed.config.schema import TrainingConfig

STAGES = (
    "nothing is partitioned across the ranks",
    "optimizer state is partitioned across the ranks",
    "optimizer state and gradients are partitioned across the ranks",
    "optimizer state, gradients and parameters are partitioned across the ranks",
)


@dataclass(frozen=True)
class ConfigReport:
    """Findings of a config check, and the settings that a run would use."""

    source: str
    ranks: int
    ranks_from: str
    errors: list[Problem] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    auto_keys: list[str] = field(default_factory=list)
    """Keys that are "auto": Trainer or Accelerate fills them in, else the default applies."""
    batch: BatchSizes | None = None
    """None if the batch sizes contradict each other, or are left to Trainer or Accelerate."""
    config: TrainingConfig | None = None
    """The config with every default filled in; None if it could not be read."""
    client: str | None = None
    """"Accelerate" or "Trainer" if the file is a config file of that client."""
    filled: dict[str, Any] = field(default_factory=dict)
    """Keys that were "auto", with the values that the client's file gives them."""

    @property
    def ok(self) -> bool:
        return not self.errors

    def raise_for_errors(self) -> None:
        """Raise DeepSpeedConfigError with all errors, if there are any."""
        if self.errors:
            raise DeepSpeedConfigError.of(self.errors, self.source)

    def __str__(self) -> str:
        return "\n".join(report_lines(self, Style(False)))


class Style:
    """ANSI styles for a terminal; plain text if ``on`` is False."""

    def __init__(self, on: bool) -> None:
        self.on = on

    def __call__(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.on else text

    def bold(self, text: str) -> str:
        return self(text, "1")

    def good(self, text: str) -> str:
        return self(text, "1;32")

    def bad(self, text: str) -> str:
        return self(text, "1;31")

    def warn(self, text: str) -> str:
        return self(text, "1;33")


def report_lines(report: ConfigReport, style: Style) -> Iterator[str]:
    whose = f" of {report.client}" if report.client else ""
    yield style.bold(report.source) + f"{whose}: {counted(report.ranks, 'rank')} ({report.ranks_from})"
    if report.config is not None:
        for label, text in summary(report):
            yield f"  {label:<11}{text}"
    if report.warnings:
        yield style.warn(counted(len(report.warnings), "warning"))
        yield from (f"  {warning}" for warning in report.warnings)
    if report.errors:
        yield style.bad(counted(len(report.errors), "error"))
        yield from first_lines(report.errors)
    else:
        yield style.good("no errors")


def summary(report: ConfigReport) -> Iterator[tuple[str, str]]:
    """Yield a summary of the config as (label, text)."""
    config = report.config
    assert config is not None
    if report.batch is not None:
        yield "batch", str(report.batch)
    elif any(key in BATCH_KEYS for key in report.auto_keys):
        yield "batch", "left to Trainer or Accelerate"
    stage = int(config.zero_optimization.stage)
    yield "ZeRO", f"stage {stage}: {STAGES[stage]}"
    yield "precision", precision(config)
    default = "" if "gradient_clipping" in config.model_fields_set else " (default)"
    yield (
        "clipping",
        f"global norm {config.gradient_clipping:g}{default}" if config.gradient_clipping else "none",
    )
    yield "optimizer", _named(config.optimizer)
    yield "schedule", _named(config.scheduler)
    if report.filled:
        yield "filled in", ", ".join(f"{key}={shown(value)}" for key, value in report.filled.items())
    if report.auto_keys:
        yield (
            '"auto"',
            f"{cut_list(report.auto_keys)} (filled in by Trainer or Accelerate, else defaults)",
        )


def precision(config: TrainingConfig) -> str:
    """Describe the training precision in a few words."""
    if config.fp16.enabled:
        scale = (
            f"static loss scale {config.fp16.loss_scale:g}"
            if config.fp16.loss_scale
            else "dynamic loss scale"
        )
        masters = "fp16" if config.fp16.fp16_master_weights_and_grads else "fp32"
        return f"fp16, {scale}, {masters} master weights"
    if config.bf16.enabled:
        return f"bf16, {'bf16' if config.bf16.bf16_master_weights_and_grads else 'fp32'} master weights"
    if config.torch_autocast.enabled:
        dtype = config.torch_autocast.dtype or Dtype.bf16
        return f"weights as in the model, matrix products in {dtype.long_name} (torch.autocast)"
    if config.amp.enabled:
        return "mixed precision by torch.amp"
    return "as in the model (fp32 unless it says otherwise)"


def _named(section: Any) -> str:
    if section is None or section.type is None:
        return "passed to initialize, or none"
    arguments = [f"{cut(str(key))}={cut(str(value))}" for key, value in (section.params or {}).items()]
    return f"{cut(section.type)}({cut_list(arguments)})"
