"""Export of any readable checkpoint to the layout of release 0.19.8 of the documented system.

    python -m deepspeed.checkpoint.foreign.upstream_export CHECKPOINTS OUTPUT --zero_stage 2 --world_size 8

That layout is specific to one ZeRO stage and world size, so both are chosen here; ``upstream_format`` describes it.
Works only on files: no engine, no process group, and one tensor in memory at a time.
"""

from __future__ import annotations

import argparse
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.tool_arguments import add_options, takes
from deepspeed.checkpoint import names
from deepspeed.checkpoint.catalog import Catalog, SavedFragment
from deepspeed.checkpoint.consolidate import resolve_folder
from deepspeed.checkpoint.constants import (
    CHECKPOINT_PARALLEL_DIMS,
    CHECKPOINT_PP_DEGREE,
    CHECKPOINT_TP_DEGREE,
)
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.files.archive_writer import LazyTensor, write_archive, write_errors_at
from deepspeed.checkpoint.files.safe_types import DynamicLossScaler, FragmentAddress, LossScaler
from deepspeed.checkpoint.files.writers import StagedFolder, putting_in_place
from deepspeed.checkpoint.foreign.universal_format import saved_by
from deepspeed.checkpoint.foreign.upstream_format import round_robin
from deepspeed.checkpoint.foreign.upstream_settings import UpstreamSettings, with_attributes
from deepspeed.checkpoint.load import TORCH_OPTIONS, FragmentReader
from deepspeed.checkpoint.reader import materialize, open_checkpoint
from deepspeed.checkpoint.shards import ShardIndex
from deepspeed.checkpoint.state import MASTER

LAYOUT = "0.19.8"
"""Value of ``ds_version``, by which readers choose the layout."""

CLASS_NAMES = {
    LossScaler: "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    DynamicLossScaler: "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    FragmentAddress: "deepspeed.utils.tensor_fragment.fragment_address",
}
"""That release's names for the classes of the plain objects in its files."""

Stretch = tuple[str, list[SavedFragment], int, int]
"""Elements [start, stop) of a tensor with these sources; zeros without sources."""


def export_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    tag: str | None = None,
    zero_stage: int | None = None,
    world_size: int | None = None,
) -> Path:
    """Write ``checkpoint_dir/tag`` to ``output_dir/tag`` so that release 0.19.8 resumes from it; return that folder.

    ``tag`` defaults to ``latest``, ``zero_stage`` (0 to 3) and ``world_size`` (data-parallel ranks) to those of the
    checkpoint. The engine that loads it must have that stage and world size, the same precision and the same
    optimizer groups. State without a place in the layout is dropped: RNG states, the data position, and gradients of
    an unfinished accumulation. CheckpointError: the source is damaged, or its state cannot be expressed in that
    layout.
    """
    folder = resolve_folder(Path(checkpoint_dir), tag)
    catalog = open_checkpoint(folder)
    tag = folder.name if tag is None else tag
    stage = catalog.zero_stage if zero_stage is None else zero_stage
    ranks = int(catalog.model_states["dp_world_size"]) if world_size is None else world_size
    if stage not in range(4) or ranks < 1:
        raise ValueError(
            f"zero_stage={stage}, world_size={ranks}: expected a stage from 0 to 3 and at least one rank"
        )
    staged = StagedFolder(Path(output_dir), tag.lstrip("."), exclusive=False)
    if staged.final.resolve() == folder.resolve():
        raise ValueError(f"{folder} would be overwritten by its own export: choose another output_dir")
    files = UpstreamFiles(catalog, stage, ranks)
    with putting_in_place(staged, names.LATEST):
        files.write(staged.staging)
    return staged.final


class UpstreamFiles:
    """The files of one exported checkpoint; tensors are read from the source's fragments when a file is written."""

    def __init__(self, catalog: Catalog, stage: int, ranks: int) -> None:
        self.catalog = catalog
        self.stage = stage
        self.ranks = ranks
        self.reader = FragmentReader(catalog)
        self.settings = UpstreamSettings(catalog, stage)
        self.groups = _ordered_groups(catalog)
        self.flat_order = [
            round_robin(group, ranks) if self.settings.round_robin else group for group in self.groups
        ]
        """The order of each group's parameters in its flat tensor (stages 1 and 2)."""
        self.trained = [name for group in self.groups for name in group]
        self.shapes = {name: catalog.masters(name)[0].index.global_shape for name in self.trained}
        held = {*catalog.buffer_names, *self.trained, *catalog.aliases}
        self.frozen = [name for name in catalog.module_dtypes if name not in held]
        self._check()

    def _check(self) -> None:
        if self.catalog.has_optimizer and self.trained:
            return
        if self.catalog.zero_stage == 0 and self.catalog.model_states.get("optimizer") is not None:
            raise CheckpointError(
                f"{self.catalog.folder} holds optimizer state by index, not by name: load it into an "
                "engine, save, and export that checkpoint"
            )
        if self.stage:
            raise CheckpointError(
                f"{self.catalog.folder} holds no optimizer state: export with zero_stage=0, which needs none"
            )

    def write(self, folder: Path) -> None:
        for rank in range(self.ranks if self.stage else 0):
            name = names.optim_file(rank, 0, bf16=self.settings.bf16)
            state = self._partition(rank) if self.stage < 3 else self._even_parts(rank)
            self._put(folder / name, {names.OPTIMIZER_STATE: state, **self._versions()})
        self.write_model_files(folder)

    def write_model_files(self, folder: Path) -> None:
        if self.stage < 3:
            self._put(folder / names.model_file(0), self._model_states(self._weights(), self._whole_frozen()))
        for rank in range(self.ranks if self.stage == 3 else 0):
            content = self._model_states(self._no_weights(), self._frozen_parts(rank), first=rank == 0)
            self._put(folder / names.zero_model_file(rank, 0), content)

    def _put(self, path: Path, content: dict[str, Any]) -> None:
        with write_errors_at(path):
            write_archive(path, content, class_names=CLASS_NAMES)

    def _versions(self) -> dict[str, Any]:
        return {names.DS_CONFIG: self.settings.raw, names.DS_VERSION: LAYOUT, **saved_by(self.catalog)}

    # Model files --------------------------------------------------------------------------------------------

    def _model_states(
        self,
        module: OrderedDict[str, Any],
        frozen: OrderedDict[str, LazyTensor] | None,
        *,
        first: bool = True,
    ) -> dict[str, Any]:
        saved, sharded = self.catalog.model_states, self.stage > 0
        shapes = [OrderedDict((n, torch.Size(self.shapes[n])) for n in group) for group in self.flat_order]
        modules = self.catalog.module
        frozen_shapes = OrderedDict((n, torch.Size(modules[n][0].index.global_shape)) for n in frozen or ())
        aliases = {alias: name for alias, name in self.catalog.aliases.items() if name in module}
        return {
            "module": module,
            "buffer_names": [name for name in self.catalog.buffer_names if name in module],
            "optimizer": None if sharded or not self.trained else self._whole_state(),
            "param_shapes": shapes if sharded else None,
            "frozen_param_shapes": frozen and frozen_shapes,
            "shared_params": (aliases if first else {}) if sharded else None,
            "frozen_param_fragments": frozen,
            "lr_scheduler": materialize(saved.get("lr_scheduler")),
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": saved.get("skipped_steps", 0),
            "global_steps": saved["global_steps"],
            "global_samples": saved.get("global_samples", 0),
            "dp_world_size": self.ranks,
            "mp_world_size": 1,
            CHECKPOINT_PARALLEL_DIMS: {CHECKPOINT_PP_DEGREE: 1, CHECKPOINT_TP_DEGREE: 1},
            **self._versions(),
            **self.catalog.client_state,
        }

    def _weights(self) -> OrderedDict[str, Any]:
        """Return the whole module in its own dtypes; tied tensors appear once."""
        made: OrderedDict[str, Any] = OrderedDict()
        for name, dtype in self.catalog.module_dtypes.items():
            original = self.catalog.aliases.get(name, name)
            made[name] = made[original] if original in made else self._tensor(original, dtype)
        return OrderedDict(**made, **self.catalog.extra)

    def _no_weights(self) -> OrderedDict[str, Any]:
        """Return buffers, and an empty tensor for each parameter, as stage 3 saves them."""
        dtypes, buffers = self.catalog.module_dtypes, self.catalog.buffer_names
        made: dict[str, Any] = {name: torch.empty(0, dtype=dtype) for name, dtype in dtypes.items()}
        made |= {name: self._tensor(name, dtype) for name, dtype in dtypes.items() if name in buffers}
        return OrderedDict(**made, **self.catalog.extra)

    def _tensor(self, name: str, dtype: torch.dtype) -> LazyTensor:
        return self.whole(name, self.catalog.module.get(name) or self.catalog.masters(name), dtype)

    def _whole_frozen(self) -> OrderedDict[str, LazyTensor] | None:
        if self.stage < 2:
            return None
        return OrderedDict(
            (name, self._tensor(name, self.catalog.module_dtypes[name])) for name in self.frozen
        )

    def _frozen_parts(self, rank: int) -> OrderedDict[str, LazyTensor]:
        held = {name: self.catalog.module[name] for name in self.frozen}
        return OrderedDict(
            (name, self._joined(self._even_share(name, sources, rank), sources[0].data.dtype))
            for name, sources in held.items()
        )

    # Tensors that are read when they are written -----------------------------------------------------------------

    def _shape(self, name: str, sources: list[SavedFragment]) -> tuple[int, ...]:
        return sources[0].index.global_shape if sources else self.shapes[name]

    def whole(self, name: str, sources: list[SavedFragment], dtype: torch.dtype) -> LazyTensor:
        """Return a whole tensor; zeros if it has no such state yet."""
        shape = self._shape(name, sources)
        return LazyTensor(shape, dtype, lambda: [self._read((name, sources, 0, prod(shape)), dtype)])

    def _joined(self, stretches: Sequence[Stretch], dtype: torch.dtype) -> LazyTensor:
        """Return the stretches end to end, 1-D."""
        numel = sum(stop - start for _, _, start, stop in stretches)
        return LazyTensor((numel,), dtype, lambda: (self._read(stretch, dtype) for stretch in stretches))

    def _even_share(self, name: str, sources: list[SavedFragment], rank: int) -> list[Stretch]:
        """Return one rank's shard of a tensor that is split evenly, and its padding."""
        total = prod(self._shape(name, sources))
        numel = _rounded(total, self.ranks) // self.ranks
        start, stop = (min(edge * numel, total) for edge in (rank, rank + 1))
        return [(name, sources, start, stop), ("", [], 0, numel - (stop - start))]

    def _read(self, stretch: Stretch, dtype: torch.dtype) -> Tensor:
        name, sources, start, stop = stretch
        values = torch.zeros(stop - start, dtype=dtype)
        if sources:
            target = ShardIndex(name, sources[0].index.global_shape, (), start, stop)
            self.reader.fill(target, values, sources, name)
        return values

    # Optimizer state: common to all stages --------------------------------------------------------------------

    def kinds(self, group: Sequence[str]) -> dict[str, torch.dtype]:
        """Return the kinds of per-element state that any of the parameters has, with their dtypes."""
        found: dict[str, torch.dtype] = {}
        for name in group:
            for kind, sources in self.catalog.fragments.get(name, {}).items():
                if kind != MASTER and sources:
                    found.setdefault(kind, sources[0].data.dtype)
        return found

    def values(self, group: Sequence[str]) -> dict[str, Any]:
        """Return state that is not per element; parameters of one flat tensor share one value per kind, the largest."""
        found: dict[str, Any] = {}
        for name in group:
            for kind, value in self.catalog.values.get(name, {}).items():
                if isinstance(value, Tensor) and value.numel() != 1:
                    raise CheckpointError(
                        f"{kind} of {name} is neither a scalar nor one value per element: the layout of "
                        f"{LAYOUT} cannot store it"
                    )
                value = value.clone().view(()) if isinstance(value, Tensor) else value
                found[kind] = value if kind not in found else max(found[kind], value)
        return found

    def param_groups(self, numbers: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        saved = [materialize(group.options) for group in self.catalog.groups]
        pairs = zip(saved, numbers, strict=True)
        return [{**own, **(TORCH_OPTIONS | own), "params": list(members)} for own, members in pairs]

    def scaler_entries(self) -> dict[str, Any]:
        scaler = self.settings.loss_scaler(self.catalog)
        return {"loss_scaler": scaler, "dynamic_loss_scale": vars(scaler)["dynamic"], "overflow": False}

    def _state(self, members: Sequence[str], make: Callable[[str], LazyTensor]) -> dict[str, Any]:
        """Return the state of parameters that share one flat tensor per kind, which ``make`` returns."""
        return self.values(members) | {kind: make(kind) for kind in self.kinds(members)}

    def _sources(self, kind: str, name: str) -> list[SavedFragment]:
        found = self.catalog.fragments.get(name, {}).get(kind, [])
        return self.catalog.masters(name) if kind == MASTER else found

    def _dtype(self, kind: str, group: Sequence[str]) -> torch.dtype:
        return next((s[0].data.dtype for name in group if (s := self._sources(kind, name))), torch.float32)

    # Stages 1 and 2: a group's tensors end to end, split evenly ---------------------------------------------------

    def _partition(self, rank: int) -> dict[str, Any]:
        """Return one rank's partition of every group. Moments include the padding at the end, masters do not; that
        release's bf16 optimizer, used when gradients accumulate in fp32, pads both and records less (not even the
        stage, so its own zero_to_fp32 refuses the files; here it is recorded).
        """
        state: dict[int, dict[str, Any]] = {}
        masters: list[LazyTensor] = []
        paddings: list[int] = []
        slices: list[OrderedDict[str, FragmentAddress]] = []
        for number, (group, order) in enumerate(zip(self.groups, self.flat_order, strict=True)):
            total = sum(prod(self.shapes[name]) for name in group)
            per_rank = _rounded(total, 2 * self.ranks) // self.ranks
            start = rank * per_rank
            stop = min(start + per_rank, total)
            paddings.append(per_rank - max(0, stop - start))
            pads_masters = self.settings.bf16_optimizer
            masters.append(self._flat(MASTER, order, start, stop, paddings[-1] if pads_masters else 0))
            make = partial(self._flat, order=order, start=start, stop=stop, padding=paddings[-1])
            state[number] = self._state(group, make)
            slices.append(
                OrderedDict(
                    (name, with_attributes(FragmentAddress(), numel=high - low, start=position - start + low))
                    for name, position, low, high in self._within(group, start, stop)
                )
            )
        numbers = [[number] for number in range(len(self.groups))]
        stepped = {number: entries for number, entries in state.items() if entries}
        general = not self.settings.bf16_optimizer
        return {
            **(self.scaler_entries() if general else {}),
            "clip_grad": self.settings.clipping,
            "base_optimizer_state": {"state": stepped, "param_groups": self.param_groups(numbers)},
            "single_partition_of_fp32_groups": masters,
            "zero_stage": self.stage,
            "group_paddings": paddings,
            **({"param_alignment_paddings": [[0] * len(group) for group in self.groups]} if general else {}),
            "partition_count": [self.ranks] * len(self.groups),
            names.DS_VERSION: LAYOUT,
            "param_slice_mappings": slices,
        }

    def _within(self, order: Sequence[str], start: int, stop: int) -> Iterator[tuple[str, int, int, int]]:
        """Yield ``(name, position, low, high)``: [low, high) of each parameter within [start, stop) of the group."""
        position = 0
        for name in order:
            numel = prod(self.shapes[name])
            low, high = max(start - position, 0), min(stop - position, numel)
            if low < high:
                yield name, position, low, high
            position += numel

    def _flat(self, kind: str, order: Sequence[str], start: int, stop: int, padding: int) -> LazyTensor:
        """Return [start, stop) of a group's flat tensor, and its padding."""
        within = self._within(order, start, stop)
        stretches = [(name, self._sources(kind, name), low, high) for name, _, low, high in within]
        return self._joined([*stretches, ("", [], 0, padding)], self._dtype(kind, order))

    # Stage 3: each tensor split evenly, a rank's parts end to end -----------------------------------------------

    def _even_parts(self, rank: int) -> dict[str, Any]:
        state: dict[int, dict[str, Any]] = {}
        masters: list[LazyTensor] = []
        numbers: list[list[int]] = []
        for group in self.groups:
            numbers.append([])
            for members in self._sub_groups(group):
                number = len(masters)
                numbers[-1].append(number)
                make = partial(self._joined_shares, members=members, rank=rank)
                masters.append(make(MASTER))
                state[number] = self._state(members, make)
        stepped = {number: entries for number, entries in state.items() if entries}
        return {
            "zero_stage": self.stage,
            **self.scaler_entries(),
            "partition_count": self.ranks,
            names.OPTIMIZER_STATE: {"state": stepped, "param_groups": self.param_groups(numbers)},
            "fp32_flat_groups": masters,
        }

    def _sub_groups(self, group: Sequence[str]) -> Iterator[list[str]]:
        """Yield runs of consecutive parameters; a sub-group ends once a rank's parts reach its size."""
        members: list[str] = []
        numel = 0
        for name in group:
            members.append(name)
            numel += _rounded(prod(self.shapes[name]), self.ranks) // self.ranks
            if numel >= self.settings.sub_group_numel:
                yield members
                members, numel = [], 0
        if members:
            yield members

    def _joined_shares(self, kind: str, members: Sequence[str], rank: int) -> LazyTensor:
        shares = [self._even_share(name, self._sources(kind, name), rank) for name in members]
        return self._joined(list(chain(*shares)), self._dtype(kind, members))

    # Stage 0: whole tensors by number ---------------------------------------------------------------------------

    def _whole_state(self) -> dict[str, Any]:
        """Return the optimizer's torch state dict, plus masters if the weights are 16-bit."""
        sixteen = self.settings.bf16 or self.settings.fp16
        groups = [[n for n in group if prod(self.shapes[n]) or not sixteen] for group in self.groups]
        numbers: list[list[int]] = []
        state: dict[int, dict[str, Any]] = {}
        for group in groups:
            first = sum(map(len, numbers))
            numbers.append(list(range(first, first + len(group))))
            for number, name in zip(numbers[-1], group, strict=True):
                if own := self._state([name], partial(self._whole_kind, name=name)):
                    state[number] = own
        inner = {"state": state, "param_groups": self.param_groups(numbers)}
        if not sixteen:
            return inner
        scaler = vars(self.settings.loss_scaler(self.catalog))
        kept = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
        return {
            "dynamic_loss_scale": scaler["dynamic"],
            "cur_iter": int(self.catalog.model_states["global_steps"]),
            **{key: scaler[key] for key in kept if key in scaler},
            names.OPTIMIZER_STATE: inner,
            "fp32_groups": [[self._whole_kind(MASTER, name) for name in group] for group in groups],
        }

    def _whole_kind(self, kind: str, name: str) -> LazyTensor:
        return self.whole(name, self._sources(kind, name), self._dtype(kind, [name]))


def _ordered_groups(catalog: Catalog) -> list[list[str]]:
    """Return the names of trained parameters by optimizer group, in the order of the optimizer that saved them."""
    order: Sequence[Sequence[str]] = catalog.index.get("optimizer_order") or ()
    made: list[list[str]] = []
    for number, group in enumerate(catalog.groups):
        wanted = order[number] if number < len(order) else ()  # the first pipeline stage may lack a group
        first = [name for name in dict.fromkeys(wanted) if name in group.names]
        made.append([*first, *(name for name in group.names if name not in first)])
    return made


def _rounded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def main() -> None:
    parser = argparse.ArgumentParser(description=f"Write a checkpoint in the layout of release {LAYOUT}.")
    options = {
        "checkpoint_dir": "folder of checkpoints",
        "output_dir": "folder for the exported checkpoint",
        "-t --tag": takes("checkpoint to export (default: the one named in 'latest')"),
        "--zero_stage": takes("0 to 3 (default: the checkpoint's stage)", type=int),
        "--world_size": takes("number of data-parallel ranks (default: the checkpoint's)", type=int),
    }
    add_options(parser, options)
    args = parser.parse_args()
    try:
        folder = export_checkpoint(
            args.checkpoint_dir,
            args.output_dir,
            tag=args.tag,
            zero_stage=args.zero_stage,
            world_size=args.world_size,
        )
    except ValueError as error:
        parser.exit(1, f"upstream_export: {error}\n")
    print(f"exported to {folder}")


if __name__ == "__main__":
    main()
