"""The `checkpoint` section."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from deepspeed.config.sections import Int, LenientConfigModel


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


class ValidationMode(str, Enum):
    """What happens when ranks save under different tags."""

    IGNORE = "IGNORE"
    WARN = "WARN"
    FAIL = "FAIL"


class CheckpointWriterType(str, Enum):
    MOCK = "MOCK"
    PYTHON = "PYTHON"
    FAST = "FAST"


class CheckpointDataParallel(str, Enum):
    REPLICA = "REPLICA"
    SOCKET = "SOCKET"
    MACHINE = "MACHINE"


class ParallelWriteConfig(LenientConfigModel):
    """Sharing the writing of a checkpoint."""

    pipeline_stage: bool = Field(
        default=False, description="Spread the layer files of a pipeline stage over its data-parallel ranks."
    )


class CheckpointWriterConfig(LenientConfigModel):
    """The fast writer."""

    type: Annotated[CheckpointWriterType, BeforeValidator(_upper)] = Field(
        default=CheckpointWriterType.FAST,
        description="FAST and PYTHON: the tensors' memory goes to the files as it is; MOCK: nothing is written.",
    )
    decoupled: bool = Field(
        default=False, description="Copy the state and write it while training continues."
    )
    io_buffer_size: Int = Field(
        default=64 * 1024 * 1024, ge=1, description="No effect: files are written without a buffer."
    )
    io_buffer_double: bool = Field(default=True, description="No effect, likewise.")
    show_statistics: bool = Field(default=False, description="Log how long training waits for each save.")
    data_parallel: Annotated[CheckpointDataParallel | None, BeforeValidator(_upper)] = Field(
        default=None, description="No effect: each rank writes the part that it holds."
    )
    io_multiplier: Int = Field(default=1, ge=1, description="No effect.")


class CheckpointConfig(LenientConfigModel):
    """Saving and loading."""

    tag_validation: Annotated[ValidationMode, BeforeValidator(_upper)] = Field(
        default=ValidationMode.WARN,
        description="When ranks give different tags: say nothing, warn, or raise. Case-insensitive.",
    )
    load_universal: bool = Field(default=False, description="The checkpoint to load is a universal one.")
    use_node_local_storage: bool = Field(
        default=False, description="Every node has a folder of its own, not a shared one."
    )
    parallel_write: ParallelWriteConfig = Field(default=ParallelWriteConfig(), description="Who writes what.")
    checkpoint_serialization: bool = Field(
        default=True, description="Write `torch.save` archives in the zip format."
    )
    writer: CheckpointWriterConfig | None = Field(default=None, description="The fast checkpoint writer.")
    keep_last: Int | None = Field(
        default=None,
        ge=1,
        description="Checkpoints that stay in a folder; older ones are removed after a save.",
    )
