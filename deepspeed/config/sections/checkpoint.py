"""The `checkpoint` and `nebula` sections."""

from __future__ import annotations

import math
import re
from enum import Enum
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainValidator

from deepspeed.config.section import AllowedValues, Int, LenientConfigModel, LenientSwitched, key, section

SLURM_LIMIT = "slurm"


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


def _time_limit(value: Any) -> float | str | None:
    """Convert to seconds; `SLURM_LIMIT` and None are kept. ValueError: another format."""
    if value is None or (isinstance(value, str) and value.lower() == SLURM_LIMIT):
        return value and SLURM_LIMIT
    if isinstance(value, str):
        found = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", value)
        if found is None:
            raise ValueError("expected seconds, 'HH:MM:SS', 'D-HH:MM:SS' or 'slurm'")
        days, hours, minutes, seconds = (int(number or 0) for number in found.groups())
        value = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("expected seconds, 'HH:MM:SS', 'D-HH:MM:SS' or 'slurm'")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError("must be above 0 and finite")
    return float(value)


TimeLimit = Annotated[
    Any, PlainValidator(_time_limit), AllowedValues("seconds, 'HH:MM:SS', 'D-HH:MM:SS', 'slurm' or null")
]


class ValidationMode(str, Enum):
    """Reaction to ranks that save under different tags."""

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

    pipeline_stage: bool = key(False, "No effect: each rank writes its own part.")


class CheckpointWriterConfig(LenientConfigModel):
    """The fast writer."""

    type: Annotated[CheckpointWriterType, BeforeValidator(_upper)] = key(
        CheckpointWriterType.FAST,
        "FAST and PYTHON: tensor memory is written to the files as it is; MOCK: nothing is written.",
    )
    decoupled: bool = key(False, "Copy the state and write it while training continues.")
    io_buffer_size: Int = key(64 * 1024 * 1024, "No effect: files are written without a buffer.", ge=1)
    io_buffer_double: bool = key(True, "No effect, likewise.")
    show_statistics: bool = key(False, "Log how long training waits for each save.")
    data_parallel: Annotated[CheckpointDataParallel | None, BeforeValidator(_upper)] = key(
        None, "No effect: each rank writes its own part."
    )
    io_multiplier: Int = key(1, "No effect.", ge=1)


class CheckpointConfig(LenientConfigModel):
    """Saving and loading."""

    tag_validation: Annotated[ValidationMode, BeforeValidator(_upper)] = key(
        ValidationMode.WARN.value,
        "When ranks pass different tags: ignore it, warn, or raise. Case-insensitive.",
    )
    load_universal: bool = key(False, "The checkpoint to load is a universal one.")
    use_node_local_storage: bool = key(False, "Each node has its own folder instead of a shared one.")
    parallel_write: ParallelWriteConfig = section("How ranks share the writing.")
    checkpoint_serialization: bool = key(True, "No effect: archives of `torch.save` are in the zip format.")
    writer: CheckpointWriterConfig | None = key(None, "The fast checkpoint writer.")
    keep_last: Int | None = key(
        None,
        "Number of checkpoints to keep in a folder; older ones are removed after a save, except tags with a slash.",
        ge=1,
    )
    folder: str | None = key(
        None,
        "Folder of this run's checkpoints, or a URL such as `s3://bucket/run`, for `resume` and for automatic saves.",
        min_length=1,
    )
    staging_folder: str | None = key(
        None,
        "Local staging folder for checkpoints of URLs; default: a per-user folder in the system's temporary "
        "one. Must not be shared between machines.",
        min_length=1,
    )
    resume: bool = key(
        False,
        "`deepspeed.initialize` loads the newest checkpoint in `folder`; if there is none, the run starts fresh.",
    )
    save_at_sigterm: bool = key(
        False, "On SIGTERM to any rank, all ranks save to `folder` after the step and exit with code 143."
    )
    save_before: TimeLimit = key(
        None,
        "Time limit of the job: all ranks save to `folder` before it and exit with code 124. Counted from "
        "the start of the command; `slurm`: the limit of the allocation.",
    )


class DeepSpeedNebulaConfig(LenientSwitched):
    """Asynchronous checkpoints of the Nebula service."""

    persistent_storage_path: str | None = key(None, "Folder of the kept checkpoints.")
    persistent_time_interval: Int = key(100, "Seconds between kept checkpoints.", ge=1)
    num_of_version_in_retention: Int = key(2, "Number of kept checkpoints.", ge=1)
    enable_nebula_load: bool = key(True, "Load through the service.")
    nebula_load_path: str | None = key(None, "Folder to load from.")
