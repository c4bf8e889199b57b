"""Key names of the section `data_efficiency` and of its samplers' and schedules' states.

Keys with a default also have a constant for it: `DATA_SAMPLING_NUM_EPOCHS_DEFAULT` is 1000.
"""

from __future__ import annotations

from typing import Any

from deepspeed.config.keys import constant_of
from deepspeed.config.sections import data as config

CURRICULUM_LEARNING = "curriculum_learning"
CURRICULUM_LEARNING_ENABLED = "enabled"
DATA_EFFICIENCY = "data_efficiency"
DATA_ROUTING = "data_routing"
DATA_SAMPLING = "data_sampling"
DATA_SAMPLING_ENABLED = "enabled"
DATA_SAMPLING_NUM_WORKERS = "num_workers"
DYNAMIC_BATCHING = "dynamic_batching"
RANDOM_LTD = "random_ltd"
RANDOM_LTD_ENABLED = "enabled"
RANDOM_LTD_GLOBAL_BATCH_SIZE = "global_batch_size"
RANDOM_LTD_LAYER_ID = "random_ltd_layer_id"
RANDOM_LTD_LAYER_NUM = "random_ltd_layer_num"
RANDOM_LTD_LAYER_TOKEN_LR_ENABLED = "enabled"
RANDOM_LTD_LAYER_TOKEN_LR_SCHEDULE = "layer_token_lr_schedule"
RANDOM_LTD_MICRO_BATCH_SIZE = "micro_batch_size"

_SECTIONS: dict[str, Any] = {
    "DATA_EFFICIENCY": config.DataEfficiencyConfig,
    "DATA_SAMPLING": config.DataSamplingConfig,
    "CURRICULUM_LEARNING": config.DataSamplingCurriculumConfig,
    "DYNAMIC_BATCHING": config.DynamicBatchingConfig,
    "DATA_ROUTING": config.DataRoutingConfig,
    "RANDOM_LTD": config.RandomLTDConfig,
    "RANDOM_LTD_LAYER_TOKEN_LR": config.LayerTokenLRScheduleConfig,
}


def __getattr__(name: str) -> Any:
    return constant_of(name, _SECTIONS)
