"""The `activation_checkpointing` section, read by `deepspeed.transforms.recompute.checkpointing.configure`."""

from __future__ import annotations

from typing import Any

from deepspeed.config.keys import constant_of
from deepspeed.config.section import Float, Int, LenientConfigModel, key

ACT_CHKPT = "activation_checkpointing"


class DeepSpeedActivationCheckpointingConfig(LenientConfigModel):
    """Storage of the inputs of checkpointed regions until backward recomputes these."""

    partition_activations: bool = key(False, "Partition the saved inputs across the model-parallel ranks.")
    cpu_checkpointing: bool = key(
        False, "Keep the inputs in host memory; also of layers that a model checkpoints itself."
    )
    contiguous_memory_optimization: bool = key(
        False, "One buffer for all inputs; needs `number_checkpoints` and `partition_activations`."
    )
    number_checkpoints: Int | None = key(None, "Checkpointed regions per forward.", ge=1)
    synchronize_checkpoint_boundary: bool = key(
        False, "Synchronize the device at the boundaries of each region."
    )
    profile: bool = key(False, "Time forward and backward of each region.")
    memory_budget: Float | None = key(
        None,
        "What the repeated blocks of the model may keep for backward, on the model as it is: at most 1: a "
        "share of keeping everything; more: bytes. The rest is recomputed, with the fewest FLOPs. Own key.",
        gt=0,
    )


def __getattr__(name: str) -> Any:
    """The constants of the section's keys: `ACT_CHKPT_PROFILE` is the spelling of one, `ACT_CHKPT_PROFILE_DEFAULT` its
    default, `ACT_CHKPT_DEFAULT` all defaults."""
    if name == "ACT_CHKPT_DEFAULT":
        return DeepSpeedActivationCheckpointingConfig().model_dump()
    return constant_of(name, {"ACT_CHKPT": DeepSpeedActivationCheckpointingConfig})
