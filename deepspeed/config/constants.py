"""Names that configs and clients share.

In addition to the names below, each top-level key of the config has two constants, its spelling and its documented
default: `GRADIENT_CLIPPING` is "gradient_clipping", `GRADIENT_CLIPPING_DEFAULT` is 1.0. So do the keys of some
sections: `FP16_HYSTERESIS` is "hysteresis".
"""

from __future__ import annotations

from typing import Any

from deepspeed.config.sections.checkpoint import ValidationMode as ValidationMode

ROUTE_TRAIN = "train"
ROUTE_EVAL = "eval"
ROUTE_PREDICT = "predict"

PIPE_REPLICATED = "ds_pipe_replicated"

ADAM_OPTIMIZER = "adam"
ADAMW_OPTIMIZER = "adamw"
ADAGRAD_OPTIMIZER = "adagrad"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"
ONEBIT_ADAM_OPTIMIZER = "onebitadam"
ONEBIT_LAMB_OPTIMIZER = "onebitlamb"
ZERO_ONE_ADAM_OPTIMIZER = "zerooneadam"
MUADAM_OPTIMIZER = "muadam"
MUADAMW_OPTIMIZER = "muadamw"
MUSGD_OPTIMIZER = "musgd"

TORCH_ADAM_PARAM = "torch_adam"
ADAM_W_MODE = "adam_w_mode"
ADAM_W_MODE_DEFAULT = True

# Names in the documentation; the config object has these in lower case.
DEEPSPEED_OPTIMIZERS = (
    ADAGRAD_OPTIMIZER, ADAM_OPTIMIZER, ADAMW_OPTIMIZER, LAMB_OPTIMIZER, ONEBIT_ADAM_OPTIMIZER,
    ONEBIT_LAMB_OPTIMIZER, ZERO_ONE_ADAM_OPTIMIZER, MUADAM_OPTIMIZER, MUADAMW_OPTIMIZER, MUSGD_OPTIMIZER,
    LION_OPTIMIZER, MUON_OPTIMIZER,
)  # fmt: skip

OPTIMIZER_PARAMS = SCHEDULER_PARAMS = "params"
OPTIMIZER_TYPE_DEFAULT = SCHEDULER_TYPE_DEFAULT = None
GRADIENT_ALLREDUCE_OP_MEAN, GRADIENT_ALLREDUCE_OP_SUM = "mean", "sum"
BFLOAT16, BFLOAT16_OLD = "bf16", "bfloat16"  # spellings of the section
BFLOAT16_MASTER_WEIGHTS_AND_GRADS_DEFAULT = BFLOAT16_OPTIMIZER_STATES_DEFAULT = False

# Entries for ranks in an `mpu` or a parameter group.
DATA_PARALLEL_GROUP = "data_parallel_group"
GLOBAL_RANK = "global_rank"

WARMUP_LR_SCHEDULES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
VALID_LR_SCHEDULES = ("LRRangeTest", "OneCycle", *WARMUP_LR_SCHEDULES)


def __getattr__(name: str) -> Any:
    """Return the constant of a config key from the schema, imported late because it imports this module; as
    ``__all__`` the names of all constants, for ``import *``."""
    if name == "__all__":
        from deepspeed.config.getters import constants_of_keys

        return [own for own in globals() if not own.startswith("_")] + constants_of_keys()
    if name.isupper() and not name.startswith("_"):
        from deepspeed.config.getters import constant_of_key

        return constant_of_key(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
