"""Optimizer files of a 3D-parallel checkpoint, joined for fewer ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import reduce
from typing import Any

from torch import Tensor

from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    GROUP_PADDINGS,
    OPTIMIZER_STATE_DICT,
    PARTITION_COUNT,
)
from deepspeed.compat.checkpoint.reshape_3d_utils import get_model_3d_descriptor, model_3d_desc
from deepspeed.compat.checkpoint.reshape_utils import (
    basic_folder_validation,
    get_zero_files,
    merge_state,
    read_states,
    validate_files,
)


class ZeROCheckpoint:
    """The optimizer files in ``dir``. ``source_3d``: its degrees of parallelism, found by default.

    ValueError if there are fewer files than ranks.
    """

    def __init__(self, dir: str | os.PathLike[str], source_3d: model_3d_desc | None = None) -> None:
        basic_folder_validation(dir)
        self.dir = dir
        self.file_list = get_zero_files(dir)
        self.num_files = len(self.file_list)
        validate_files(self.file_list)
        self.src_3d = source_3d if source_3d is not None else get_model_3d_descriptor(dir)
        if self.num_files and self.num_files != self.src_3d.world_size():
            raise ValueError(
                f"{dir} holds {self.num_files} optimizer files, but {self.src_3d.get_desc()} has "
                f"{self.src_3d.world_size()} ranks"
            )
        self.reshape(self.src_3d)

    def reshape(self, target_3d: model_3d_desc) -> None:
        """From now on the ranks are those of ``target_3d``. ValueError: a degree grows or does not divide the old
        one."""
        self._3d_file_map = self.src_3d.reshape(target_3d)
        self.target_3d = target_3d

    def get_file_indices_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[int]:
        """Positions in ``file_list`` of what makes up a rank's state. IndexError: there is no such rank."""
        valid, problems = self.target_3d.is_valid(pp_index, tp_index, dp_index)
        if not valid:
            raise IndexError("; ".join(problems))
        return self._3d_file_map[dp_index].get_data(pp_index, tp_index)

    def get_files_for_rank(self, pp_index: int, tp_index: int, dp_index: int) -> list[str]:
        return [
            self.file_list[number] for number in self.get_file_indices_for_rank(pp_index, tp_index, dp_index)
        ]

    def get_state_for_rank(
        self,
        pp_index: int,
        tp_index: int,
        dp_index: int,
        keys_to_ignore: Sequence[str] = (),
        strip_tensor_paddings: bool = True,
    ) -> dict[str, Any]:
        """The states of a rank's files, joined as ``merge_state`` does.

        ``keys_to_ignore``: entries of the optimizer's state that are left out. ``strip_tensor_paddings``: without the
        padding at the end of each file's moments; ``group_paddings`` is 0 then.
        """
        states: list[dict[str, Any]] = []
        for path in self.get_files_for_rank(pp_index, tp_index, dp_index):
            state = read_states(path)
            section = state[OPTIMIZER_STATE_DICT]
            for key in keys_to_ignore:
                section.pop(key, None)
            if strip_tensor_paddings:
                _strip(section)
            states.append(state)
        joined = reduce(merge_state, states)
        section = joined[OPTIMIZER_STATE_DICT]
        if PARTITION_COUNT in section:
            counts = section[PARTITION_COUNT]
            count = self.target_3d.dp_degree
            section[PARTITION_COUNT] = [count] * len(counts) if isinstance(counts, list) else count
        return joined


def _strip(section: dict[str, Any]) -> None:
    """Cut the padding off the moments of stages 1 and 2; masters are saved without it."""
    paddings = section.get(GROUP_PADDINGS)
    base = section.get(BASE_OPTIMIZER_STATE)
    if not paddings or not isinstance(base, dict):
        return
    for number, padding in enumerate(paddings):
        for kind, value in base["state"].get(number, {}).items():
            if padding and isinstance(value, Tensor) and value.dim():
                base["state"][number][kind] = value[: value.numel() - padding]
    section[GROUP_PADDINGS] = [0] * len(paddings)
