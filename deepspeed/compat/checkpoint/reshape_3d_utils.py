"""Pipeline, tensor and data parallel degrees of a checkpoint, and the mapping of its ranks to smaller degrees."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from typing import Any

from deepspeed.checkpoint.constants import (
    CHECKPOINT_PARALLEL_DIMS,
    CHECKPOINT_PP_DEGREE,
    CHECKPOINT_TP_DEGREE,
    LAYER_FILE_PREFIX,
    MODEL_FILE_PREFIX,
)
from deepspeed.checkpoint.errors import CheckpointDegreesError
from deepspeed.compat.checkpoint.reshape_utils import (
    get_files,
    get_files_with_prefix,
    get_zero_files,
    partition_data,
    read_states,
)

# Mapping of a grid of pipeline stages and tensor-parallel ranks to a smaller grid.


class meg_2d_parallel_map:
    """A list of items per cell (pipeline stage, tensor-parallel rank) of a grid."""

    def __init__(self, pp_degree: int, tp_degree: int) -> None:
        self.pp_degree = pp_degree
        self.tp_degree = tp_degree
        self.map: dict[str, list[Any]] = {}

    def simple_init(self) -> None:
        """Set each cell to its own number, counted stage by stage."""
        self.map = {
            self._key(pp, tp): [pp * self.tp_degree + tp]
            for pp in range(self.pp_degree)
            for tp in range(self.tp_degree)
        }

    def add_data(self, pp_index: int, tp_index: int, data: list[Any]) -> None:
        """Append ``data`` to a cell. IndexError: there is no such cell; TypeError: not a list."""
        self._check(pp_index, tp_index)
        if not isinstance(data, list):
            raise TypeError(f"data must be a list, not {type(data).__name__}")
        self.map.setdefault(self._key(pp_index, tp_index), []).extend(data)

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[Any]:
        """Return the concatenated data of a stage, of a tensor-parallel rank, or (both) of one cell; by default of
        all cells. IndexError: there is no such cell; KeyError: it is empty."""
        self._check(pp_index or 0, tp_index or 0)
        stages = range(self.pp_degree) if pp_index is None else [pp_index]
        ranks = range(self.tp_degree) if tp_index is None else [tp_index]
        return [item for pp in stages for tp in ranks for item in self.map[self._key(pp, tp)]]

    def _check(self, pp_index: int, tp_index: int) -> None:
        if not (0 <= pp_index < self.pp_degree and 0 <= tp_index < self.tp_degree):
            raise IndexError(
                f"stage {pp_index}, tensor-parallel rank {tp_index} is not in a grid of {self.pp_degree} x "
                f"{self.tp_degree}"
            )

    @staticmethod
    def _key(pp_index: int, tp_index: int) -> str:
        return f"{pp_index},{tp_index}"


def reshape_meg_2d_parallel(
    old_pp_degree: int, old_tp_degree: int, new_pp_degree: int, new_tp_degree: int
) -> meg_2d_parallel_map:
    """Return the old ranks that are merged into each cell of the new grid: adjacent ones along each dim.

    ValueError: a degree grows, or does not divide the old one.
    """
    for what, old, new in (
        ("pp_degree", old_pp_degree, new_pp_degree),
        ("tp_degree", old_tp_degree, new_tp_degree),
    ):
        if old % new:
            raise ValueError(f"{what} {old} cannot become {new}: the new degree must divide the old one")
    old = meg_2d_parallel_map(old_pp_degree, old_tp_degree)
    old.simple_init()
    new = meg_2d_parallel_map(new_pp_degree, new_tp_degree)
    stages = partition_data(range(old_pp_degree), new_pp_degree)
    ranks = partition_data(range(old_tp_degree), new_tp_degree)
    for pp, old_stages in enumerate(stages):
        for tp, old_ranks in enumerate(ranks):
            joined = [old.get_data(stage, rank) for stage in old_stages for rank in old_ranks]
            new.add_data(pp, tp, list(itertools.chain(*joined)))
    return new


PP_DIM, TP_DIM, DP_DIM = "PP", "TP", "DP"
_LAYER_FILE = re.compile(rf"{LAYER_FILE_PREFIX}(\d+)-model_")


class model_3d_desc:
    """Degrees of parallelism. Optimizer files are numbered data-parallel rank by data-parallel rank."""

    def __init__(self, pp_degree: int = 1, tp_degree: int = 1, dp_degree: int = 1) -> None:
        self.pp_degree = pp_degree
        self.tp_degree = tp_degree
        self.dp_degree = dp_degree

    def reshape(self, target_3d_desc: model_3d_desc) -> list[meg_2d_parallel_map]:
        """Return, per data-parallel rank of the target, the old files for each cell of its grid. ValueError: a degree
        grows or does not divide the old one."""
        possible, problems = self.can_reshape(target_3d_desc)
        if not possible:
            raise ValueError("; ".join(problems))
        grid = reshape_meg_2d_parallel(
            self.pp_degree, self.tp_degree, target_3d_desc.pp_degree, target_3d_desc.tp_degree
        )
        made = [meg_2d_parallel_map(grid.pp_degree, grid.tp_degree) for _ in range(target_3d_desc.dp_degree)]
        of_one_rank = self.pp_degree * self.tp_degree
        for pp, tp in itertools.product(range(grid.pp_degree), range(grid.tp_degree)):
            cell = grid.get_data(pp, tp)
            files = [number + dp * of_one_rank for number in cell for dp in range(self.dp_degree)]
            # Equal runs, since the data-parallel ranks' partitions are consecutive.
            for target, run in zip(made, partition_data(files, len(made)), strict=True):
                target.add_data(pp, tp, run)
        return made

    def get_desc(self) -> str:
        return f"{PP_DIM},{TP_DIM},{DP_DIM} = ({self.pp_degree}, {self.tp_degree}, {self.dp_degree})"

    def world_size(self) -> int:
        return self.pp_degree * self.tp_degree * self.dp_degree

    def is_valid(self, pp_index: int, tp_index: int, dp_index: int) -> tuple[bool, list[str]]:
        """Return whether there is such a rank, and the problems if not."""
        problems = [
            f"{what} indexing error: index {index} >= degree {degree}"
            for (what, degree), index in zip(self._degrees(), (pp_index, tp_index, dp_index), strict=True)
            if index >= degree
        ]
        return not problems, problems

    def can_reshape(self, target_3d_desc: model_3d_desc) -> tuple[bool, list[str]]:
        """Return whether every degree of the target divides this one's, and the problems if not."""
        problems: list[str] = []
        for (what, own), (_, wanted) in zip(self._degrees(), target_3d_desc._degrees(), strict=True):
            if wanted > own:
                problems.append(f"Expansion reshape not supported - {what}: {own} ---> {wanted}")
            elif own % wanted:
                problems.append(f"{what}: {wanted} does not divide {own}")
        return not problems, problems

    def _degrees(self) -> list[tuple[str, int]]:
        return [(PP_DIM, self.pp_degree), (TP_DIM, self.tp_degree), (DP_DIM, self.dp_degree)]


def get_model_3d_descriptor(dir: str | os.PathLike[str]) -> model_3d_desc:
    """Return the parallel degrees of the checkpoint in ``dir``, from its files."""
    files = get_files(dir)
    models = get_files_with_prefix(files, MODEL_FILE_PREFIX)
    metadata = [(path, read_states(path)) for path in models]
    return get_model_3d_descriptor_from_metadata(files, get_zero_files(dir), metadata)


def get_model_3d_descriptor_from_metadata(
    file_list: Sequence[str],
    zero_file_list: Sequence[str],
    model_state_metadata: Sequence[tuple[str, dict[str, Any]]],
) -> model_3d_desc:
    """Return the parallel degrees from file names and ``model_state_metadata``, pairs of a model file's path and its
    content.

    Degrees recorded in the model files take precedence; else the tensor-parallel degree is the number of files per
    layer (``layer_01-model_*``), or, without such files, of model files. CheckpointDegreesError: only some model
    files record degrees, or they differ.
    """
    models = len(get_files_with_prefix(file_list, MODEL_FILE_PREFIX))
    recorded = _recorded_degrees(model_state_metadata)
    if recorded:
        tp_degree, pp_degree = int(recorded[CHECKPOINT_TP_DEGREE]), int(recorded[CHECKPOINT_PP_DEGREE])
    else:
        tp_degree = _files_of_a_layer(file_list) or models or 1
        pp_degree = max(1, models // tp_degree)
    dp_degree = max(1, len(zero_file_list) // (pp_degree * tp_degree))
    return model_3d_desc(pp_degree, tp_degree, dp_degree)


def _recorded_degrees(model_state_metadata: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any] | None:
    found = {path: held.get(CHECKPOINT_PARALLEL_DIMS) for path, held in model_state_metadata}
    recorded = {path: degrees for path, degrees in found.items() if degrees}
    if not recorded:
        return None
    if missing := [path for path in found if path not in recorded]:
        raise CheckpointDegreesError(
            f"{CHECKPOINT_PARALLEL_DIMS} is missing from model-state files {missing}, but "
            f"{next(iter(recorded))} has it: they belong to different checkpoints"
        )
    first = next(iter(recorded.values()))
    if any(degrees != first for degrees in recorded.values()):
        raise CheckpointDegreesError(
            f"{CHECKPOINT_PARALLEL_DIMS} disagrees across model-state files: {recorded}"
        )
    return first


def _files_of_a_layer(file_list: Sequence[str]) -> int:
    """Return the number of files per layer, 0 if none has a file (layers without weights have none)."""
    numbers = [match[1] for path in file_list if (match := _LAYER_FILE.match(os.path.basename(path)))]
    return numbers.count(numbers[0]) if numbers else 0
