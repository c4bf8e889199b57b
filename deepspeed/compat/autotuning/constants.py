"""Names of the section `autotuning`. Each key has two constants, its spelling and its default: `AUTOTUNING_FAST` is
"fast", `AUTOTUNING_FAST_DEFAULT` is True, `MODEL_INFO_HIDDEN_SIZE` is "hidden_size".
"""

from __future__ import annotations

from typing import Any

from deepspeed.config.keys import constant_of
from deepspeed.config.sections.autotuning import (
    AutotuningModelInfoConfig,
    DeepSpeedAutotuningConfig,
    get_default_model_info_config,
)

AUTOTUNING = "autotuning"
MODEL_INFO = "model_info"

AUTOTUNING_TUNER_GRIDSEARCH = "gridsearch"
AUTOTUNING_TUNER_RANDOM = "random"
AUTOTUNING_TUNER_MODELBASED = "model_based"

AUTOTUNING_METRIC_LATENCY = "latency"
AUTOTUNING_METRIC_THROUGHPUT = "throughput"
AUTOTUNING_METRIC_FLOPS = "flops"
AUTOTUNING_METRIC_FORWARD = "forward"
AUTOTUNING_METRIC_STEPS = "step"

GLOBAL_TUNING_SPACE = "global"


def __getattr__(name: str) -> Any:
    if name == "MODEL_INFO_KEY_DEFAULT_DICT":
        return get_default_model_info_config()
    return constant_of(
        name, {"AUTOTUNING": DeepSpeedAutotuningConfig, "MODEL_INFO": AutotuningModelInfoConfig}
    )
