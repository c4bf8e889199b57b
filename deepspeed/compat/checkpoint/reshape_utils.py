"""Files of a 3D-parallel checkpoint by name, and merging of their contents."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.constants import BF16_ZERO_FILE_PREFIX, FP16_ZERO_FILE_PREFIX, ZERO_FILE_PREFIX
from deepspeed.checkpoint.files.archive_reader import read_archive

_NUMBER = re.compile(r"(\d+)")


def basic_folder_validation(dir: str | os.PathLike[str]) -> None:
    """Raise FileNotFoundError or NotADirectoryError unless ``dir`` is a folder."""
    if not os.path.exists(dir):
        raise FileNotFoundError(f"{dir} does not exist")
    if not os.path.isdir(dir):
        raise NotADirectoryError(f"{dir} is not a folder")


def get_files(dir: str | os.PathLike[str]) -> list[str]:
    """Return the paths of all files in ``dir`` and below, sorted."""
    return sorted(os.path.join(folder, name) for folder, _, files in os.walk(dir) for name in files)


def get_files_with_prefix(all_files: Sequence[str], prefix: str) -> list[str]:
    """Return the files whose base names begin with ``prefix``, sorted."""
    return sorted(path for path in all_files if os.path.basename(path).startswith(prefix))


def validate_files(file_list: Sequence[str]) -> None:
    """Raise FileNotFoundError for the first missing file."""
    for path in file_list:
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path} does not exist")


def sort_zero_files(files: Sequence[str], prefix: str) -> list[str]:
    """Sort optimizer files by data-parallel, then model-parallel rank: the numbers after ``prefix`` in their names."""

    def ranks(path: str) -> list[int]:
        return [int(number) for number in _NUMBER.findall(os.path.basename(path)[len(prefix) :])]

    return sorted(files, key=ranks)


def get_zero_files(dir: str | os.PathLike[str]) -> list[str]:
    """Return the optimizer files of a checkpoint folder, in the order of ``sort_zero_files``; empty at stage 0."""
    found = get_files(dir)
    for prefix in (ZERO_FILE_PREFIX, FP16_ZERO_FILE_PREFIX, BF16_ZERO_FILE_PREFIX):
        files = get_files_with_prefix(found, prefix)
        if files:
            return sort_zero_files(files, prefix)
    return []


def partition_data(data_list: Sequence[Any], num_partitions: int) -> list[list[Any]]:
    """Split into consecutive runs of equal length. ValueError: not divisible."""
    length, left = divmod(len(data_list), num_partitions)
    if left or not length:
        raise ValueError(f"{len(data_list)} items cannot be divided into {num_partitions} equal parts")
    return [list(data_list[start : start + length]) for start in range(0, len(data_list), length)]


def merge_state(state_a: Any, state_b: Any, key_list: Sequence[Any] = ()) -> Any:
    """Merge two states of the same structure: tensors are concatenated along their first dim, dicts and lists merged
    item by item; for anything else, including scalars such as a step, ``state_a``'s is kept.

    ``key_list``: the key path from the root, for messages. ValueError: the structures differ.
    """
    both: tuple[Any, Any] = (state_a, state_b)
    if type(state_a) is not type(state_b) and not all(isinstance(state, Tensor) for state in both):
        what = f"a {type(state_a).__name__} and a {type(state_b).__name__}"
        raise ValueError(f"{what} cannot be joined{_under(key_list)}")
    if isinstance(state_a, dict):
        return merge_state_dict(state_a, state_b, key_list)
    if isinstance(state_a, (list, tuple)):
        return type(state_a)(merge_state_list(state_a, state_b, key_list))
    if isinstance(state_a, Tensor) and state_a.dim():
        return torch.cat([state_a, state_b])
    return state_a


def merge_state_dict(
    dict_a: dict[Any, Any], dict_b: dict[Any, Any], key_list: Sequence[Any]
) -> dict[Any, Any]:
    """Merge values of common keys with ``merge_state``; keep values of other keys."""
    merged = {**dict_a, **{key: value for key, value in dict_b.items() if key not in dict_a}}
    for key in dict_a:
        if key in dict_b:
            merged[key] = merge_state(dict_a[key], dict_b[key], [*key_list, key])
    return type(dict_a)(merged)


def merge_state_list(list_a: Sequence[Any], list_b: Sequence[Any], key_list: Sequence[Any]) -> list[Any]:
    """Merge two lists item by item with ``merge_state``. ValueError: their lengths differ."""
    if len(list_a) != len(list_b):
        raise ValueError(
            f"Cannot merge lists of different lengths: lists of {len(list_a)} and of {len(list_b)} items"
            f"{_under(key_list)}"
        )
    return [merge_state(a, b, key_list) for a, b in zip(list_a, list_b, strict=True)]


def _under(key_list: Sequence[Any]) -> str:
    return f", under {'.'.join(map(str, key_list))}" if key_list else ""


def read_states(path: str) -> dict[str, Any]:
    """Read the content of a checkpoint file. CheckpointError: it is damaged or holds anything but plain data and
    tensors.
    """
    return read_archive(Path(path))
