"""The content of each checkpoint file, from a rank's live tensors or from a snapshot of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.checkpoint import directory, names
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.files.hashing import hash_tensor
from deepspeed.checkpoint.numbered import names_elsewhere
from deepspeed.checkpoint.own_format import (
    DIRECTORIES,
    OPTIMIZER_DIRECTORY,
    PARTS_DIRECTORY,
    flat_kinds,
    pack_groups,
    pack_section,
)
from deepspeed.checkpoint.placement import NUMBERED_EXPERTS, kinds_of_experts, placement_of
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.renaming import WRAPPER, wrapper_of
from deepspeed.checkpoint.save_ids import new_id, save_entry
from deepspeed.checkpoint.sharded_weights import ShardedWeights
from deepspeed.checkpoint.shards import ShardCut, ShardIndex
from deepspeed.checkpoint.state import ParamEntry, TrainingState
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """This rank's coordinates, which number its files, and the files that it writes.

    ``writes_replicas``: write shards that other ranks hold too (where ranks share no folder).
    """

    dp_rank: int
    dp_size: int
    mp_rank: int
    mp_size: int
    writes_model: bool
    writes_replicas: bool = False
    stage: int = 0
    stages: int = 1
    """Pipeline stages, each with its own parameters."""

    @classmethod
    def on(cls, mesh: ProcessMesh, ranks: Ranks) -> RankPlace:
        """Return the coordinates of this rank on the mesh."""
        dp_rank, tp_size = mesh.rank("dp", "sp"), mesh.size("tp")
        mp_size = mesh.size("pp") * tp_size
        return cls(
            dp_rank=dp_rank,
            dp_size=mesh.size("dp", "sp"),
            mp_rank=mesh.rank("pp") * tp_size + mesh.rank("tp"),
            mp_size=mp_size,
            writes_model=dp_rank == 0 or (ranks.keeps_folder and mp_size == 1),
            writes_replicas=ranks.node_local,
            stage=mesh.rank("pp"),
            stages=mesh.size("pp"),
        )

    @property
    def number(self) -> int:
        """Return the number of this rank's files among those of all ranks, as ``names.dp_mp_ranks`` counts."""
        return self.mp_rank * self.dp_size + self.dp_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The state of one rank's training that ``save`` reads.

    ``header``: values of the documented top-level keys. ``positions``: further entries of the index (micro-steps,
    precision...). ``rank_state``: per-rank state (RNG states, data position).
    """

    module: nn.Module
    state: TrainingState | None
    zero_stage: int
    bf16: bool
    ds_config: Mapping[str, Any]
    header: Mapping[str, Any]
    client_state: Mapping[str, Any] = field(default_factory=dict)
    positions: Mapping[str, Any] = field(default_factory=dict)
    rank_state: Mapping[str, Any] = field(default_factory=dict)
    own_state: Mapping[str, Any] | None = None
    """Optimizer state of this rank alone, written to a separate file; None on all ranks or on none."""
    write_layers: Callable[[Path, Mapping[str, Any]], None] | None = None
    """Writes the documented per-layer files (pipelines) into a folder, marked with the id of the save. Collective: it
    gathers weights, so every rank stays to the end even if its own writes fail."""
    experts_of_stages: frozenset[str] = frozenset()
    """``kinds_of_experts`` over all pipeline stages, so that every stage writes the same set of files."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's report to the others: the contents of its files by directory key, and hashes of its buffers."""

    held: dict[str, directory.Contents]
    buffer_hashes: list[int]


class SavedFiles:
    """The content of one rank's files, and the facts that ranks exchange to write them.

    ``values`` holds everything that training changes; the rest (names, shapes, placements) is fixed when this object
    is made. With a copy of ``values`` the remaining steps may therefore run later, in another thread.
    """

    def __init__(
        self, training: Training, place: RankPlace, *, exclude_frozen: bool = False, node_local: bool = False
    ) -> None:
        self.place = place
        self.node_local = node_local
        self.zero_stage, self.bf16 = training.zero_stage, training.bf16
        self.has_own_state = training.own_state is not None
        self.held_shards: list[tuple[ShardIndex, list[str]]] = []
        self.cuts: Mapping[str, ShardCut] = {}
        self._describe(training, exclude_frozen)
        self.values = self._values(training)
        # Set by merge_reports:
        self.save_number = new_id()
        self.save: dict[str, Any] = {}
        self.pending = False
        self.rank_states: list[dict[str, Any]] = []
        self.directories: dict[str, Any] = dict.fromkeys(DIRECTORIES)
        self.covered: dict[str, list[str]] = {}
        self.differing: list[str] = []
        self.frozen_elsewhere: list[str] = []
        self.of_all_stages: dict[str, Any] = {}
        self.buffers_differ = False

    # At the call --------------------------------------------------------------------------------------------

    def _describe(self, training: Training, exclude_frozen: bool) -> None:
        module, state = training.module, training.state
        self.wrapper = wrapper_of(module)
        self.parts = ShardedWeights(module)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        self.placements = {name: placement_of(param) for name, param in parameters.items()}
        self.kinds = {name for name, param in parameters.items() if kinds_of_experts([param])}
        self.has_kinds = bool(self.kinds or training.experts_of_stages)
        if self.kinds and state is None and not self.parts:
            raise CheckpointError(
                f"{len(self.kinds)} parameters differ between ranks (experts): these are saved with the "
                "optimizer state, but this engine has no optimizer"
            )
        self.model_file = bool(self.parts) or self.place.writes_model
        self.optimizer_files = state is not None and (self.zero_stage > 0 or self.has_kinds)
        self.numbered = bool(names_elsewhere(module)) or NUMBERED_EXPERTS in training.experts_of_stages
        self.trained = [name for name, p in parameters.items() if p.requires_grad]
        self.frozen = [name for name, p in parameters.items() if not p.requires_grad]
        self.excluded = sorted(self.frozen) if exclude_frozen else []
        self.cut = [name for name, param in parameters.items() if hasattr(param, "ds_owner")]
        self.aliases = _shared(parameters.items())
        self.entries = list(state.trainable()) if state is not None else []
        self.shapes = {e.name: tuple(e.shape) for e in self.entries} if state is not None else None
        self.param_shapes = None
        if state is not None and self.optimizer_files and self.model_file:
            self.param_shapes = _param_shapes(self.entries, len(state.param_groups))

    def _values(self, training: Training) -> dict[str, Any]:
        """Return the live values; nothing is copied."""
        module, state = training.module, training.state
        weights = module_state(module, exclude=self.excluded)
        for name in self.cut:
            if name in weights:
                weights[name] = weights[name].new_empty(0)  # even if it is gathered right now
        self.weight_names = frozenset(weights)
        buffers = {name: weights[name] for name, _ in module.named_buffers() if name in weights}
        self.buffer_names = list(buffers)
        rest = self._untrained(weights) if self.model_file else []
        self.rest = [index for index, _ in rest]
        return {
            "weights": weights if self.model_file else {},
            "own_weights": self._own_weights(weights),
            "buffers": {name: buffer for name, buffer in buffers.items() if _has_numbers(buffer)},
            "section": self._section(state, weights) if state is not None else None,
            "rest": [part for _, part in rest],
            "pending": state.pending_gradients() if state is not None else None,
            "own_state": training.own_state,
            "rank_state": training.rank_state,
            "header": training.header,
            "client_state": training.client_state,
            "positions": training.positions,
            "ds_config": training.ds_config,
        }

    def _section(self, state: TrainingState, weights: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """Return this rank's section of the training state, None if it writes none."""
        if not (self.optimizer_files or self.model_file):
            return None
        shards = list(state.shards() if self.place.writes_replicas else state.distinct_shards())
        self.cuts = state.cuts() if self.optimizer_files else {}
        self.held_shards = [(index, flat_kinds(index, tensors)) for index, tensors in shards]
        return {
            "zero_stage": self.zero_stage,
            "partition_count": self.place.dp_size,
            names.DS_VERSION: __version__,
            **pack_groups(state.param_groups, self.entries),
            "scalars": state.scalars(),
            **pack_section(shards, self._in_model_file(weights)),
        }

    def _in_model_file(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the weights in the model file of this rank's model-parallel rank, whichever rank writes it."""
        if self.place.dp_rank == 0:
            return weights
        return {name: value for name, value in weights.items() if name not in self.kinds}

    def _own_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return frozen weights that no model file holds: experts of which this rank is the first holder."""
        if self.model_file:
            return {}
        first = {
            name
            for name in self.kinds
            if NUMBERED_EXPERTS in self.placements[name].split
            or self.place.dp_rank < self.placements[name].global_shape[0]
        }
        return {name: weights[name] for name in self.frozen if name in first & weights.keys()}

    def _untrained(self, weights: Mapping[str, Tensor]) -> list[tuple[ShardIndex, Tensor]]:
        """Return the weights that are not in the training state: whole, or this rank's shards where they are
        sharded."""
        if self.parts:
            shapes = self._part_shapes()
            fragments = self.parts.fragments(replicas=self.place.writes_replicas)
            return [(index, part) for index, part in fragments if index.name in shapes]
        return [
            (self.placements[name].index(name), weights[name])
            for name in self.frozen
            if name in weights and name not in self.aliases
        ]

    def _part_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of sharded weights that are not in the training state; the same on all ranks."""
        trained = self.shapes or {}
        left = {name for name in self.parts.shapes if name not in self.excluded}
        return {n: s for n, s in self.parts.shapes.items() if n in left and (n not in trained or not prod(s))}

    @property
    def signature(self) -> tuple[int, int] | None:
        """Numbers of trained parameters and of their elements."""
        return None if self.shapes is None else (len(self.shapes), sum(map(prod, self.shapes.values())))

    @property
    def saved_step(self) -> tuple[Any, Any]:
        """The global step and micro-step of the values."""
        return self.values["header"].get("global_steps"), self.values["positions"].get("micro_steps")

    # Among ranks --------------------------------------------------------------------------------------------

    def report(self) -> RankReport:
        """Return this rank's report to the others."""
        hashes = [hash_tensor(buffer) for buffer in self.values["buffers"].values()]
        return RankReport({} if self.node_local else self._held(), hashes)

    def _held(self) -> dict[str, directory.Contents]:
        """Return the contents of this rank's files per parameter, by directory key."""
        found: dict[str, directory.Contents] = {}
        if self.optimizer_files and self.shapes is not None:
            found[OPTIMIZER_DIRECTORY] = self._contents(self.shapes, self.cuts, self.held_shards)
        if self.parts:
            parts = [(index, ()) for index in self.rest]
            found[PARTS_DIRECTORY] = self._contents(self._part_shapes(), self.parts.cuts(), parts)
        return found

    def _contents(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        cuts: Mapping[str, ShardCut],
        shards: Iterable[tuple[ShardIndex, Iterable[str]]],
    ) -> directory.Contents:
        held = directory.held(shards, list(shapes))
        known = [cuts.get(name) for name in shapes]
        return directory.Contents(list(shapes), list(shapes.values()), known, held, self.place.number)

    def merge_reports(self, ranks: Ranks, report: RankReport) -> None:
        """Agree on the entries of the first file, and find buffers that differ between ranks. Collective.

        Only one message grows with the world size: the RNG states that rank 0 receives at stage 0, where other ranks
        have no file."""
        pending, number = ranks.largest([self.values["pending"] is not None, self.save_number])
        self.pending = bool(pending)
        self.save = save_entry(number, self.saved_step[0])
        buffers = list(self.values["buffers"])
        if self.place.stages > 1:
            self._merge_stages(ranks, dict(zip(buffers, report.buffer_hashes, strict=True)))
        elif ranks.agree(buffers):
            alike = ranks.agree_each(report.buffer_hashes)
            self.differing = [name for name, same in zip(buffers, alike, strict=True) if not same]
        else:
            self.differing = buffers
        self.buffers_differ = ranks.any(bool(self.differing))
        if not self.optimizer_files and not self.parts:
            states = ranks.gather_at_writers((self.place.number, dict(self.values["rank_state"])))
            self.rank_states = [state for _, state in sorted(states or (), key=lambda each: each[0])]
        elif self.numbered:
            self._names_of_all(ranks, report.held)
        elif not self.node_local:
            for key, contents in report.held.items():
                self.directories[key] = directory.make(contents, ranks)
                self.covered[key] = self._on_all_stages(contents.names, ranks)

    def _on_all_stages(self, names: Sequence[str], ranks: Ranks) -> list[str]:
        """Return ``names`` merged with those of the other stages. Collective if there are several stages."""
        if self.place.stages == 1:
            return list(names)
        reports = ranks.gather(list(names) if self.place.dp_rank == 0 else [])
        return list(dict.fromkeys(name for report in reports for name in report))

    def _names_of_all(self, ranks: Ranks, held: Mapping[str, directory.Contents]) -> None:
        """Put the parameter names of all ranks into the first file, where ranks hold different experts of one list.
        There is no directory then: a loader searches the files. Collective."""
        own = {key: list(contents.names) for key, contents in held.items()}
        reports = ranks.gather_at_writers(
            (self.place.number, own, self.trained, list(self.values["own_weights"]))
        )
        if reports is None:
            return
        ordered = [report[1:] for report in sorted(reports, key=lambda report: report[0])]
        for key in own:
            self.covered[key] = list(dict.fromkeys(name for names, _, _ in ordered for name in names[key]))
        self.trained = list(dict.fromkeys(name for _, names, _ in ordered for name in names))
        self.frozen_elsewhere = list(dict.fromkeys(name for _, _, names in ordered for name in names))

    def _merge_stages(self, ranks: Ranks, own: dict[str, int]) -> None:
        """Find buffers that differ between the ranks of one stage, and collect the names of all stages for the first
        file."""
        facts = {"trained": self.trained, "aliases": self.aliases, "excluded": self.excluded, "cut": self.cut}
        reports = ranks.gather((self.place.stage, own, facts if self.place.dp_rank == 0 else None))
        alike = [other for stage, other, _ in reports if stage == self.place.stage]
        self.differing = [name for name in own if any(other.get(name) != own[name] for other in alike)]
        every = [found for _, _, found in sorted(reports, key=lambda report: report[0]) if found is not None]
        for key in ("trained", "excluded"):
            self.of_all_stages[key] = list(dict.fromkeys(name for found in every for name in found[key]))
        self.of_all_stages["aliases"] = {a: n for found in every for a, n in found["aliases"].items()}
        self.of_all_stages["stages"] = self.place.stages

    # In files -----------------------------------------------------------------------------------------------

    def contents(self, rank: int) -> dict[str, Callable[[], dict[str, Any]]]:
        """Return a function per file of this rank, by name, that makes its content."""
        place, values = self.place, self.values
        contents: dict[str, Callable[[], dict[str, Any]]] = {}
        if self.optimizer_files:
            name = names.optim_file(place.dp_rank, place.mp_rank, bf16=self.bf16)
            contents[name] = self._optim_states
        if self.parts:
            contents[names.zero_model_file(place.dp_rank, place.mp_rank)] = self._model_states
        elif place.writes_model:
            contents[names.model_file(place.mp_rank)] = self._model_states
        if self.pending:
            contents[names.pending_file(rank)] = lambda: self._of_rank(
                {"pending_gradients": values["pending"]}
            )
        if self.has_own_state:
            contents[names.own_state_file(rank)] = lambda: self._of_rank(values["own_state"])
        if self.buffers_differ:
            own = {name: values["buffers"][name] for name in self.differing}
            contents[names.buffers_file(rank)] = lambda: self._of_rank({"buffers": own})
        return contents

    def _of_rank(self, content: Mapping[str, Any]) -> dict[str, Any]:
        return {**content, names.INDEX: self._begun_index()}

    def _begun_index(self) -> dict[str, Any]:
        """Return the entries that the index of every file begins with."""
        return {"format": names.FORMAT, names.SAVE: self.save}

    def _optim_states(self) -> dict[str, Any]:
        index = {**self._begun_index(), "rank_state": dict(self.values["rank_state"])}
        content = {names.OPTIMIZER_STATE: self.values["section"], **self._versions(), names.INDEX: index}
        own = self.values["own_weights"]
        if own:
            content["module"] = own
            index["module_boxes"] = self._boxes(own)
        return content

    def _boxes(self, held: Iterable[str]) -> dict[str, Any]:
        """Return the global shape and boxes of each tensor that is part of a larger one."""
        placements = {name: self.placements[name] for name in held if name in self.placements}
        return {name: (p.global_shape, p.boxes) for name, p in placements.items() if p.boxes}

    def _versions(self) -> dict[str, Any]:
        return {names.DS_CONFIG: dict(self.values["ds_config"]), names.DS_VERSION: __version__}

    def _model_states(self) -> dict[str, Any]:
        values, rest = self.values, list(zip(self.rest, self.values["rest"], strict=True))
        return {
            "module": values["weights"],
            "buffer_names": self.buffer_names,
            "optimizer": None if self.optimizer_files else values["section"],
            "param_shapes": self.param_shapes,
            "frozen_param_shapes": OrderedDict((i.name, torch.Size(i.global_shape)) for i in self.rest),
            "shared_params": self.aliases,
            "frozen_param_fragments": OrderedDict((i.name, part) for i, part in rest),
            "lr_scheduler": None,
            "data_sampler": None,
            "random_ltd": None,
            "sparse_tensor_module_names": [],
            **values["header"],
            "dp_world_size": self.place.dp_size,
            "mp_world_size": self.place.mp_size,
            **self._versions(),
            **values["client_state"],
            names.INDEX: self._index(),
        }

    def _index(self) -> dict[str, Any]:
        """Return a model file's index (Note: index, in `own_format.py`)."""
        optimizer = None if self.shapes is None else names.OPTIMIZER_IN_MODEL_FILE
        parts = [(i.name, i.global_shape, i.boxes, i.start, i.stop) for i in self.rest]
        return {
            **self._begun_index(),
            WRAPPER: self.wrapper,
            "zero_stage": self.zero_stage,
            "optimizer": names.OPTIMIZER_IN_OWN_FILES if self.optimizer_files else optimizer,
            "dp_mp_sizes": (self.place.dp_size, self.place.mp_size),
            "bf16": self.bf16,
            "aliases": self.aliases,
            "excluded": self.excluded,
            "trained": self.trained,
            "cut": self.cut,
            "weights_in_optimizer_files": self.has_kinds and not self.parts,
            "module_boxes": self._boxes(self.values["weights"]) if not self.parts else {},
            "parts": parts if self.parts else None,
            "part_files": names.PARTS_IN_MODEL_FILES if self.parts else None,
            "pending": self.pending,
            "own_state": self.has_own_state,
            "buffers_differ": self.buffers_differ,
            **self.of_all_stages,
            **self.values["positions"],
            **self.directories,
            "frozen_elsewhere": self.frozen_elsewhere,
            "covered": {key: found for key, found in self.covered.items() if self.directories[key] is None},
            **self._rank_states(),
        }

    def _rank_states(self) -> dict[str, Any]:
        """Return the ranks' states for the model file; a rank that writes its own file keeps its state there."""
        if self.optimizer_files:
            return {}
        if self.parts:
            return {"rank_state": dict(self.values["rank_state"])}
        return {"rank_states": self.rank_states}


def module_state(module: nn.Module, *, exclude: list[str] | None = None) -> dict[str, Any]:
    """Return the module's state dict, its tensors detached and in place, without the names in ``exclude``. Parameters
    are as this rank holds them, even if hooks of the module's state dict change them."""
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = value.detach()
    for name in exclude or ():
        state.pop(name, None)
    return state


def shared_names(module: nn.Module) -> dict[str, str]:
    """Return other name -> first name for every parameter registered several times (tied weights)."""
    return _shared(module.named_parameters(remove_duplicate=False))


def _shared(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, str]:
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, param in parameters:
        if first.setdefault(id(param), name) != name:
            aliases[name] = first[id(param)]
    return aliases


def _param_shapes(entries: Iterable[ParamEntry], groups: int) -> list[OrderedDict[str, torch.Size]]:
    """Return the shapes by optimizer group, in the documented format."""
    shapes: list[OrderedDict[str, torch.Size]] = [OrderedDict() for _ in range(groups)]
    for entry in entries:
        if entry.group_index >= 0:
            shapes[entry.group_index][entry.name] = torch.Size(entry.shape)
    return shapes


def _has_numbers(buffer: Any) -> bool:
    return isinstance(buffer, Tensor) and buffer.layout == torch.strided and buffer.device.type != "meta"
