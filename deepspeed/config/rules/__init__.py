"""Rules between several sections of a config: their findings, and keys that several rules share.

`all` lists and runs the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from deepspeed.config.problems import DeepSpeedConfigError, Remedy
from deepspeed.config.schema import TrainingConfig

FP16, BF16, AMP = "fp16.enabled", "bf16.enabled", "amp.enabled"
STAGE = "zero_optimization.stage"
OFFLOAD = "zero_optimization.offload_optimizer"


@dataclass(frozen=True, slots=True)
class Finding:
    keys: tuple[str, ...]
    message: str
    is_error: bool = True
    remedy: Remedy | None = None
    raised_as: type[DeepSpeedConfigError] | None = None


Rule = Callable[[TrainingConfig], Iterator[Finding]]


def offload_device(section: Any) -> str:
    """Return the device of an offload section, "none" if the section is missing."""
    return section.device if section is not None else "none"
