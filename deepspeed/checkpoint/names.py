"""File names and top-level keys of a checkpoint, as documented."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
"""The same for universal checkpoints (`load_universal`)."""
UNIVERSAL_FOLDER = "zero"
"""Folder of a universal checkpoint that holds a folder per parameter."""
RECOVERY_SCRIPT = "zero_to_fp32.py"
SCRIPTS = (RECOVERY_SCRIPT, "zero_to_torch.py")
"""Scripts stored next to the checkpoints, to run from a shell."""
FORMAT = 3
"""Version of the index that our files carry under ``INDEX``. Format 1 had sums as checksums, and all ranks' RNG
states in every model file; format 2 listed every fragment in its shard maps."""

MODEL_SUFFIX = "_model_states.pt"
OPTIM_SUFFIX = "_optim_states.pt"
OPTIMIZER_STATE = "optimizer_state_dict"
DS_CONFIG = "ds_config"
DS_VERSION = "ds_version"
INDEX = "checkpoint_index"
"""Key of entries beyond the documented ones (Note: index, in `file_format.py`)."""
OPTIMIZER_IN_MODEL_FILE, OPTIMIZER_IN_OWN_FILES = "model file", "optimizer files"
"""Values of the index key ``optimizer``."""
PARTS_IN_MODEL_FILES = "model files"
"""Value of the index key ``part_files``, at stage 3."""
SAVE = "save"
"""Index key of the save that wrote a file, ``{"id": text, "global_steps": number}``. All files of a save have the
same random id."""
SAVED_BY = "deepspeed_save"
"""The same key in files of release 0.19's layouts, which have no index; that release ignores it."""
CHECKSUMS = "checkpoint_checksums"
"""Key of the hashes of every tensor in the same file."""

DOCUMENTED_KEYS = (
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", DS_CONFIG,
    DS_VERSION, "universal_checkpoint_info",
)  # fmt: skip
RESERVED_KEYS = frozenset(
    (*DOCUMENTED_KEYS, "checkpoint_parallel_dimensions", INDEX, SAVED_BY, CHECKSUMS)
) - {"universal_checkpoint_info"}
"""Keys that a client state must not contain, and that are dropped when it is returned. The client may pass
``universal_checkpoint_info`` for a model that does not provide it."""

_OURS = re.compile(
    r".*_(model|optim)_states\.pt|(pending_gradients|buffers|own_state)_rank_\d+\.pt"
    r"|layer_\d+(-\w+)*-model_states\.pt"
)
_OPTIM_FILE = re.compile(r"(bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_ZERO_MODEL_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt")
_MODEL_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")


def is_url(folder: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint folder is a URL, such as `s3://bucket/run`."""
    return "://" in os.fspath(folder)


def default_tag(global_steps: int) -> str:
    return f"global_step{global_steps}"


def model_file(mp_rank: int) -> str:
    """Return the name of a model file with full parameters (stages 0 to 2)."""
    return f"mp_rank_{mp_rank:02d}{MODEL_SUFFIX}"


def zero_model_file(dp_rank: int, mp_rank: int) -> str:
    """Return the name of one rank's model file with sharded parameters (stage 3)."""
    return f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}{MODEL_SUFFIX}"


def has_sharded_weights(model_file_name: str) -> bool:
    """Return whether a model file holds one rank's shards of the weights (stage 3)."""
    return model_file_name.startswith("zero_")


def optim_file(dp_rank: int, mp_rank: int, *, bf16: bool) -> str:
    return f"{'bf16_' if bf16 else ''}zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}{OPTIM_SUFFIX}"


def dp_mp_ranks(dp_size: int, mp_size: int) -> list[tuple[int, int]]:
    """Return (dp_rank, mp_rank) by file number, as a checkpoint's shard maps count ranks."""
    return [(dp, mp) for mp in range(mp_size) for dp in range(dp_size)]


def pending_file(rank: int) -> str:
    """Return the name of the file of ``rank``'s accumulated gradients, for a save between two updates."""
    return f"pending_gradients_rank_{rank}.pt"


def buffers_file(rank: int) -> str:
    """Return the name of the file of ``rank``'s buffers, if they differ by rank (BatchNorm statistics)."""
    return f"buffers_rank_{rank}.pt"


def own_state_file(rank: int) -> str:
    """Return the name of the file of ``rank``'s unshared optimizer state (error feedback)."""
    return f"own_state_rank_{rank}.pt"


def by_rank(paths: Iterable[str]) -> list[str]:
    """Sort model files by model-parallel rank, numerically: it may have more than two digits."""
    return sorted(paths, key=lambda path: (model_ranks(os.path.basename(path)) or (0, 0))[::-1])


def by_numbers(paths: Iterable[str]) -> list[str]:
    """Sort files by the numbers in their names: file 100 comes after file 11."""
    return sorted(
        paths, key=lambda path: [int(number) for number in re.findall(r"\d+", os.path.basename(path))]
    )


def is_ours(name: str) -> bool:
    """Return whether a file in a checkpoint folder is ours (the client's files are kept)."""
    return _OURS.fullmatch(name) is not None


def optim_ranks(name: str) -> tuple[int, int] | None:
    """Return (dp_rank, mp_rank) of an optimizer file's name; None for other names."""
    match = _OPTIM_FILE.fullmatch(name)
    return (int(match[2]), int(match[3])) if match else None


def model_ranks(name: str) -> tuple[int, int] | None:
    """Return (dp_rank, mp_rank) of a model file's name, None for other names; dp_rank is 0 if parameters are not
    sharded."""
    if match := _MODEL_FILE.fullmatch(name):
        return 0, int(match[1])
    match = _ZERO_MODEL_FILE.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None
