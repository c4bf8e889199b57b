"""Universal checkpoints, in the layout of release 0.19.8, from any checkpoint that can be read here.

Our own checkpoints need no conversion; this is for that release's ``load_universal`` and for tools that read its
layout (described in ``universal_format``). Works on files alone, with one tensor in memory per process.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from math import prod
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from deepspeed.checkpoint import names
from deepspeed.checkpoint.catalog import Catalog, SavedFragment
from deepspeed.checkpoint.constants import (
    CAT_DIM,
    CHECKPOINT_PARALLEL_DIMS,
    CHECKPOINT_PP_DEGREE,
    CHECKPOINT_TP_DEGREE,
    PARAM,
    PARAM_N_SUB_PARAMS,
)
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.files.archive_reader import read_archive
from deepspeed.checkpoint.files.archive_writer import LazyTensor, write_archive, write_errors_at
from deepspeed.checkpoint.files.writers import StagedFolder, putting_in_place
from deepspeed.checkpoint.foreign.universal_format import COMMON, FOLDER, STEP, SUFFIX, is_universal, saved_by
from deepspeed.checkpoint.foreign.upstream_export import CLASS_NAMES, LAYOUT, UpstreamFiles
from deepspeed.checkpoint.reader import open_checkpoint
from deepspeed.checkpoint.state import MASTER

PER_PROCESS = 64
"""Parameters per process and task; fewer do not pay for another process."""


def convert(
    input_folder: str | os.PathLike[str],
    output_folder: str | os.PathLike[str],
    *,
    processes: int = 1,
    verify: bool = True,
    inject_missing_state: bool = False,
    zero_stage: int | None = None,
) -> Path:
    """Write the checkpoint in ``input_folder`` (the folder of a tag) to ``output_folder``, and that folder's name to
    ``latest_universal`` next to it; return the folder.

    ``zero_stage``: the stage at which release 0.19.8 will load it (stages 1 and 2 need other files than stage 3);
    default: the checkpoint's. ``processes``: number of worker processes. ``verify``: open all files again before
    publishing. ``inject_missing_state``: also write weights without optimizer state, and zero optimizer state for
    parameters that never had a gradient.

    The folder appears once complete; after an error or Ctrl-C it is unchanged. CheckpointError: the source is
    damaged, has no optimizer state, or has state that the layout cannot hold.
    """
    source, target = Path(input_folder), Path(os.path.abspath(output_folder))
    conversion = _Conversion(source, zero_stage, inject_missing_state)
    staged = StagedFolder(target.parent, target.name, exclusive=False)
    if staged.final.resolve() == source.resolve():
        raise ValueError(f"{source} would be overwritten by its own conversion: choose another output folder")
    with putting_in_place(staged, names.LATEST_UNIVERSAL):
        conversion.write_rest(staged.staging)
        _write_parameters(conversion, staged.staging, processes)
        if verify:
            _verify(staged.staging, conversion)
    return staged.final


def write_value(folder: Path, kind: str, content: Any, note: Mapping[str, Any] | None = None) -> None:
    """Write the file of one kind into a parameter's folder. ``note``: see ``write_archive``."""
    path = folder / f"{kind}{SUFFIX}"
    with write_errors_at(path):
        write_archive(path, content, note=note)


class _Conversion:
    """The content of the universal checkpoint made from ``source``."""

    def __init__(self, source: Path, zero_stage: int | None, inject: bool) -> None:
        if is_universal(source):
            raise CheckpointError(f"{source} is already a universal checkpoint")
        self.source = source
        self.catalog: Catalog = open_checkpoint(source)
        self.inject = inject
        self.options = (source, zero_stage, inject)
        self.own = names.INDEX in self.catalog.model_states
        stage = max(self.catalog.zero_stage if zero_stage is None else zero_stage, 1)
        if stage not in (1, 2, 3):
            raise ValueError(f"zero_stage={stage}: must be 1, 2 or 3")
        self.stage = stage
        self.flat = stage == 3 and not self._split  # format of that release's stage 3
        self.files = UpstreamFiles(self.catalog, stage, int(self.catalog.model_states["dp_world_size"]))
        self.trained = self.files.trained
        self.kinds = self.files.kinds(self.trained)
        injected = self.catalog.module_dtypes if inject and not self.flat else ()
        self.weights_only = [name for name in injected if name not in self.trained]

    @property
    def parameters(self) -> list[str]:
        return [*self.trained, *self.weights_only]

    # A parameter --------------------------------------------------------------------------------------------

    def write_parameter(self, folder: Path, name: str) -> None:
        """Write ``folder/NAME/*.pt``."""
        made = folder / name
        with write_errors_at(made):
            made.mkdir(parents=True)
        original = self.catalog.aliases.get(name, name)
        masters = self.catalog.masters(original)
        layout = _layout(masters)
        self._put(made, MASTER, self._tensor(name, masters, torch.float32), layout)
        if name not in self.trained:
            return
        states = self.catalog.fragments.get(name, {})
        values = self.files.values([name])
        missing = self.inject and not values and not any(kind != MASTER for kind in states)
        for kind, dtype in self.kinds.items():
            if states.get(kind) or missing:
                self._put(made, kind, self._tensor(name, states.get(kind, []), dtype), layout)
        if missing and self.kinds:
            values = {STEP: torch.zeros(())}
        for kind, value in values.items():
            write_value(made, kind, value, saved_by(self.catalog))

    def _tensor(self, name: str, sources: list[SavedFragment], dtype: torch.dtype) -> LazyTensor:
        tensor = self.files.whole(name, sources, dtype)
        return replace(tensor, shape=(prod(tensor.shape),)) if self.flat else tensor

    def _put(self, folder: Path, kind: str, tensor: LazyTensor, layout: Mapping[str, int]) -> None:
        save = saved_by(self.catalog)
        if self.flat:
            write_value(folder, kind, tensor, save)
        else:
            write_value(folder, kind, {PARAM: tensor, **layout, **save})

    # Everything else ----------------------------------------------------------------------------------------

    def write_rest(self, folder: Path) -> None:
        """Write the model files and the state shared by all parameters."""
        (folder / FOLDER).mkdir()
        with write_errors_at(folder / FOLDER / COMMON):
            write_archive(folder / FOLDER / COMMON, self._common(), class_names=CLASS_NAMES)
        for path in sorted(self.source.glob(f"*{names.MODEL_SUFFIX}")):
            is_part = self._split and not names.has_sharded_weights(path.name)
            if names.model_ranks(path.name) is not None and (not self.own or is_part):
                self._copy_model_file(path, folder / path.name)
        if self.own and not self._split:
            self.files.write_model_files(folder)

    @property
    def _split(self) -> bool:
        """Return whether tensor-parallel ranks saved parts of weights, one model file each. For our own pipelines one
        file is written, since each stage's file has other parameters."""
        ranks = int(self.catalog.model_states.get("mp_world_size") or 1)
        staged = self.catalog.index.get("stages", 1) > 1
        return ranks > 1 and not staged and (self.catalog.zero_stage < 3 or not self.own)

    def _copy_model_file(self, path: Path, target: Path) -> None:
        """Copy a file of release 0.19 unchanged; of our own, only the entries that release knows."""
        if not self.own:
            with write_errors_at(target):
                shutil.copyfile(path, target)
            return
        held = self.catalog.renamed(read_archive(path))
        content = {k: v for k, v in held.items() if k not in (names.INDEX, names.CHECKSUMS)}
        ranks = int(content["mp_world_size"])
        content |= {
            "optimizer": None,
            CHECKPOINT_PARALLEL_DIMS: {CHECKPOINT_PP_DEGREE: 1, CHECKPOINT_TP_DEGREE: ranks},
            names.DS_VERSION: LAYOUT,
            **saved_by(self.catalog),
        }
        with write_errors_at(target):
            write_archive(target, content, class_names=CLASS_NAMES)

    def _common(self) -> dict[str, Any]:
        count = len(self.files.groups)
        numbers = [[number] for number in range(count)]
        groups = self.files.param_groups(numbers)
        values = {number: self.files.values(group) for number, group in enumerate(self.files.groups)}
        common: dict[str, Any] = {
            "zero_stage": self.stage,
            **self.files.scaler_entries(),
            "clip_grad": self.files.settings.clipping,
            "group_paddings": [0] * count,
            "partition_count": self.files.ranks if self.flat else [self.files.ranks] * count,
            names.DS_VERSION: LAYOUT,
            **saved_by(self.catalog),
            "param_groups": groups,
        }
        if self.flat:
            common[names.OPTIMIZER_STATE] = {"state": values, "param_groups": groups}
        return common


def _layout(sources: Sequence[SavedFragment]) -> dict[str, int]:
    """Return that release's description of a tensor-parallel cut, from the saved parts: the dim, and the number of
    equal matrices side by side."""
    parts = [source.index for source in sources if source.index.boxes]
    if not parts:
        return {CAT_DIM: 0}
    shape, boxes = parts[0].global_shape, parts[0].boxes
    dims = [dim for dim, size in enumerate(shape) if any(box[dim] != (0, size) for box in boxes)]
    if len(dims) != 1:
        return {CAT_DIM: 0}
    starts = [box[dims[0]][0] for box in boxes]
    stride = shape[dims[0]] // len(boxes)
    if len(boxes) > 1 and starts == [starts[0] + number * stride for number in range(len(boxes))]:
        return {CAT_DIM: dims[0], PARAM_N_SUB_PARAMS: len(boxes)}
    return {CAT_DIM: dims[0]}


def _write_parameters(conversion: _Conversion, folder: Path, processes: int) -> None:
    """Write all parameters, distributed over ``processes``."""
    parameters, into = conversion.parameters, folder / FOLDER
    count = min(processes, -(-len(parameters) // PER_PROCESS))
    with tqdm(total=len(parameters), desc="parameters", unit="", disable=None) as bar:
        if count <= 1:
            for name in parameters:
                conversion.write_parameter(into, name)
                bar.update()
            return
        pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"))
        shares = [parameters[start : start + PER_PROCESS] for start in range(0, len(parameters), PER_PROCESS)]
        try:
            for written in pool.map(partial(_write_share, conversion.options, into), shares):
                bar.update(written)
        finally:
            pool.shutdown(cancel_futures=True)


def _write_share(options: tuple[Path, int | None, bool], folder: Path, share: Sequence[str]) -> int:
    """Write a share in a worker process; return the number of parameters written."""
    conversion = _Conversion(*options)
    for name in share:
        conversion.write_parameter(folder, name)
    return len(share)


def _verify(folder: Path, conversion: _Conversion) -> None:
    """Raise CheckpointError unless the written folder opens and holds every parameter."""
    catalog = open_checkpoint(folder)
    catalog.files.check_complete()
    for name in conversion.trained:
        found = sum(source.index.numel for source in catalog.masters(name))
        if found != prod(conversion.files.shapes[name]):
            raise CheckpointError(f"{folder} holds {found} elements of {name} after the conversion")
