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

from deepspeed.checkpoint import names
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.file_format import (
    OPTIMIZER_MAP,
    PARTS_MAP,
    SHARD_MAPS,
    flat_kinds,
    pack_groups,
    pack_section,
)
from deepspeed.checkpoint.files.hashing import hash_tensor
from deepspeed.checkpoint.numbered import names_elsewhere
from deepspeed.checkpoint.placement import NUMBERED_EXPERTS, kinds_of_experts, placement_of
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.renaming import WRAPPER, wrapper_of
from deepspeed.checkpoint.save_ids import new_id, save_entry
from deepspeed.checkpoint.shard_map import FileShards, ShardMapInput, make_shard_map
from deepspeed.checkpoint.sharded_weights import ShardedWeights
from deepspeed.checkpoint.shards import ShardCut, ShardIndex
from deepspeed.checkpoint.state import ParamEntry, TrainingState
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCoordinates:
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
    def on(cls, mesh: ProcessMesh, ranks: Ranks) -> RankCoordinates:
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
class StateToSave:
    """The state of one rank's training that ``save`` reads; nothing in it is a copy.

    ``header``: values of the documented top-level keys. ``index_entries``: further entries of the index (micro-steps,
    precision...). ``rank_state``: per-rank state (RNG states, data position).
    """

    module: nn.Module
    state: TrainingState | None
    zero_stage: int
    bf16: bool
    ds_config: Mapping[str, Any]
    header: Mapping[str, Any]
    client_state: Mapping[str, Any] = field(default_factory=dict)
    index_entries: Mapping[str, Any] = field(default_factory=dict)
    rank_state: Mapping[str, Any] = field(default_factory=dict)
    own_state: Mapping[str, Any] | None = None
    """Optimizer state of this rank alone, written to a separate file; None on all ranks or on none."""
    write_layers: Callable[[Path, Mapping[str, Any]], None] | None = None
    """Writes the documented per-layer files (pipelines) into a folder, marked with the id of the save. Collective: it
    gathers weights, so every rank stays to the end even if its own writes fail."""
    experts_of_stages: frozenset[str] = frozenset()
    """``kinds_of_experts`` over all pipeline stages, so that every stage writes the same set of files."""


class CheckpointFiles:
    """The content of one rank's checkpoint files, and what ranks exchange to write them.

    ``values`` holds everything that training changes; the rest (names, shapes, placements) is fixed when this object
    is made. With a copy of ``values`` the remaining steps may therefore run later, in another thread.
    """

    def __init__(
        self,
        to_save: StateToSave,
        coordinates: RankCoordinates,
        *,
        exclude_frozen: bool = False,
        node_local: bool = False,
    ) -> None:
        self.coordinates = coordinates
        self.node_local = node_local
        self.zero_stage, self.bf16 = to_save.zero_stage, to_save.bf16
        self.has_own_state = to_save.own_state is not None
        self.held_shards: list[tuple[ShardIndex, list[str]]] = []
        self.cuts: Mapping[str, ShardCut] = {}
        self._describe(to_save, exclude_frozen)
        self.values = self._values(to_save)
        # Set by measure:
        self.map_inputs: dict[str, ShardMapInput] = {}
        self.buffer_hashes: list[int] = []
        # Set by merge:
        self.save_number = new_id()
        self.save: dict[str, Any] = {}
        self.pending = False
        self.rank_states: list[dict[str, Any]] = []
        self.shard_maps: dict[str, Any] = dict.fromkeys(SHARD_MAPS)
        self.covered: dict[str, list[str]] = {}
        self.differing: list[str] = []
        self.frozen_elsewhere: list[str] = []
        self.of_all_stages: dict[str, Any] = {}
        self.buffers_differ = False

    # At the call --------------------------------------------------------------------------------------------

    def _describe(self, to_save: StateToSave, exclude_frozen: bool) -> None:
        module, state = to_save.module, to_save.state
        self.wrapper = wrapper_of(module)
        self.sharded_weights = ShardedWeights(module)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        self.placements = {name: placement_of(param) for name, param in parameters.items()}
        self.expert_names = {name for name, param in parameters.items() if kinds_of_experts([param])}
        self.has_experts = bool(self.expert_names or to_save.experts_of_stages)
        if self.expert_names and state is None and not self.sharded_weights:
            raise CheckpointError(
                f"{len(self.expert_names)} parameters differ between ranks (experts): these are saved with the "
                "optimizer state, but this engine has no optimizer"
            )
        self.writes_model_file = bool(self.sharded_weights) or self.coordinates.writes_model
        self.writes_optimizer_files = state is not None and (self.zero_stage > 0 or self.has_experts)
        self.has_numbered_experts = (
            bool(names_elsewhere(module)) or NUMBERED_EXPERTS in to_save.experts_of_stages
        )
        self.trained = [name for name, p in parameters.items() if p.requires_grad]
        self.frozen = [name for name, p in parameters.items() if not p.requires_grad]
        self.excluded = sorted(self.frozen) if exclude_frozen else []
        self.sharded_names = [name for name, param in parameters.items() if hasattr(param, "ds_owner")]
        self.aliases = _shared(parameters.items())
        self.entries = list(state.trainable()) if state is not None else []
        self.shapes = {e.name: tuple(e.shape) for e in self.entries} if state is not None else None
        self.param_shapes = None
        if state is not None and self.writes_optimizer_files and self.writes_model_file:
            self.param_shapes = _param_shapes(self.entries, len(state.param_groups))

    def _values(self, to_save: StateToSave) -> dict[str, Any]:
        """Return the live values; nothing is copied."""
        module, state = to_save.module, to_save.state
        weights = module_state(module, exclude=self.excluded)
        for name in self.sharded_names:
            if name in weights:
                weights[name] = weights[name].new_empty(0)  # even if it is gathered right now
        buffers = {name: weights[name] for name, _ in module.named_buffers() if name in weights}
        self.buffer_names = list(buffers)
        rest = self._untrained(weights) if self.writes_model_file else []
        self.untrained = [index for index, _ in rest]
        return {
            "weights": weights if self.writes_model_file else {},
            "frozen_experts": self._frozen_experts(weights),
            "buffers": {name: buffer for name, buffer in buffers.items() if _has_numbers(buffer)},
            "section": self._section(state, weights) if state is not None else None,
            "untrained": [part for _, part in rest],
            "pending": state.pending_gradients() if state is not None else None,
            "own_state": to_save.own_state,
            "rank_state": to_save.rank_state,
            "header": to_save.header,
            "client_state": to_save.client_state,
            "index_entries": to_save.index_entries,
            "ds_config": to_save.ds_config,
        }

    def _section(self, state: TrainingState, weights: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """Return this rank's section of the training state, None if it writes none."""
        if not (self.writes_optimizer_files or self.writes_model_file):
            return None
        shards = list(state.shards() if self.coordinates.writes_replicas else state.distinct_shards())
        self.cuts = state.cuts() if self.writes_optimizer_files else {}
        self.held_shards = [(index, flat_kinds(index, tensors)) for index, tensors in shards]
        return {
            "zero_stage": self.zero_stage,
            "partition_count": self.coordinates.dp_size,
            names.DS_VERSION: __version__,
            **pack_groups(state.param_groups, self.entries),
            "scalars": state.scalars(),
            **pack_section(shards, self._in_model_file(weights)),
        }

    def _in_model_file(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the weights in the model file of this rank's model-parallel rank, whichever rank writes it."""
        if self.coordinates.dp_rank == 0:
            return weights
        return {name: value for name, value in weights.items() if name not in self.expert_names}

    def _frozen_experts(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return frozen weights that no model file holds: experts of which this rank is the first holder."""
        if self.writes_model_file:
            return {}
        first = {
            name
            for name in self.expert_names
            if NUMBERED_EXPERTS in self.placements[name].split
            or self.coordinates.dp_rank < self.placements[name].global_shape[0]
        }
        return {name: weights[name] for name in self.frozen if name in first & weights.keys()}

    def _untrained(self, weights: Mapping[str, Tensor]) -> list[tuple[ShardIndex, Tensor]]:
        """Return the weights that are not in the training state: whole, or this rank's shards where they are
        sharded."""
        if self.sharded_weights:
            shapes = self._part_shapes()
            fragments = self.sharded_weights.fragments(replicas=self.coordinates.writes_replicas)
            return [(index, part) for index, part in fragments if index.name in shapes]
        return [
            (self.placements[name].index(name), weights[name])
            for name in self.frozen
            if name in weights and name not in self.aliases
        ]

    def _part_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of sharded weights that are not in the training state; the same on all ranks."""
        trained = self.shapes or {}
        left = {name for name in self.sharded_weights.shapes if name not in self.excluded}
        return {
            n: s
            for n, s in self.sharded_weights.shapes.items()
            if n in left and (n not in trained or not prod(s))
        }

    @property
    def signature(self) -> tuple[int, int] | None:
        """Numbers of trained parameters and of their elements."""
        return None if self.shapes is None else (len(self.shapes), sum(map(prod, self.shapes.values())))

    @property
    def saved_step(self) -> tuple[Any, Any]:
        """The global step and micro-step of the values."""
        return self.values["header"].get("global_steps"), self.values["index_entries"].get("micro_steps")

    # Among ranks --------------------------------------------------------------------------------------------

    def measure(self) -> None:
        """Collect what ``merge`` compares between ranks: hashes of the buffers, and the input to each shard map, by
        index key."""
        self.buffer_hashes = [hash_tensor(buffer) for buffer in self.values["buffers"].values()]
        if self.node_local:
            return
        if self.writes_optimizer_files and self.shapes is not None:
            self.map_inputs[OPTIMIZER_MAP] = self._map_input(self.shapes, self.cuts, self.held_shards)
        if self.sharded_weights:
            parts = [(index, ()) for index in self.untrained]
            self.map_inputs[PARTS_MAP] = self._map_input(
                self._part_shapes(), self.sharded_weights.cuts(), parts
            )

    def _map_input(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        cuts: Mapping[str, ShardCut],
        shards: Iterable[tuple[ShardIndex, Iterable[str]]],
    ) -> ShardMapInput:
        names, known = list(shapes), [cuts.get(name) for name in shapes]
        shards_in_file = FileShards.of(shards, names)
        return ShardMapInput(names, list(shapes.values()), known, shards_in_file, self.coordinates.number)

    def merge(self, ranks: Ranks) -> None:
        """Agree on the entries of the first file, and find buffers that differ between ranks. Collective.

        Only one message grows with the world size: the RNG states that rank 0 receives at stage 0, where other ranks
        have no file."""
        pending, number = ranks.largest([self.values["pending"] is not None, self.save_number])
        self.pending = bool(pending)
        self.save = save_entry(number, self.saved_step[0])
        buffers = list(self.values["buffers"])
        if self.coordinates.stages > 1:
            self._merge_stages(ranks, dict(zip(buffers, self.buffer_hashes, strict=True)))
        elif ranks.agree(buffers):
            alike = ranks.agree_each(self.buffer_hashes)
            self.differing = [name for name, same in zip(buffers, alike, strict=True) if not same]
        else:
            self.differing = buffers
        self.buffers_differ = ranks.any(bool(self.differing))
        if not self.writes_optimizer_files and not self.sharded_weights:
            states = ranks.gather_at_writers((self.coordinates.number, dict(self.values["rank_state"])))
            self.rank_states = [state for _, state in sorted(states or (), key=lambda each: each[0])]
        elif self.has_numbered_experts:
            self._names_of_all(ranks)
        elif not self.node_local:
            for key, own in self.map_inputs.items():
                self.shard_maps[key] = make_shard_map(own, ranks)
                self.covered[key] = self._on_all_stages(own.names, ranks)

    def _on_all_stages(self, names: Sequence[str], ranks: Ranks) -> list[str]:
        """Return ``names`` merged with those of the other stages. Collective if there are several stages."""
        if self.coordinates.stages == 1:
            return list(names)
        reports = ranks.gather(list(names) if self.coordinates.dp_rank == 0 else [])
        return list(dict.fromkeys(name for report in reports for name in report))

    def _names_of_all(self, ranks: Ranks) -> None:
        """Put the parameter names of all ranks into the first file, where ranks hold different experts of one list.
        There is no shard map then: a loader searches the files. Collective."""
        own = {key: list(each.names) for key, each in self.map_inputs.items()}
        reports = ranks.gather_at_writers(
            (self.coordinates.number, own, self.trained, list(self.values["frozen_experts"]))
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
        names = {
            "trained": self.trained,
            "aliases": self.aliases,
            "excluded": self.excluded,
            "cut": self.sharded_names,
        }
        reports = ranks.gather(
            (self.coordinates.stage, own, names if self.coordinates.dp_rank == 0 else None)
        )
        alike = [other for stage, other, _ in reports if stage == self.coordinates.stage]
        self.differing = [name for name in own if any(other.get(name) != own[name] for other in alike)]
        every = [found for _, _, found in sorted(reports, key=lambda report: report[0]) if found is not None]
        for key in ("trained", "excluded"):
            self.of_all_stages[key] = list(dict.fromkeys(name for found in every for name in found[key]))
        self.of_all_stages["aliases"] = {a: n for found in every for a, n in found["aliases"].items()}
        self.of_all_stages["stages"] = self.coordinates.stages

    # In files -----------------------------------------------------------------------------------------------

    def contents(self, rank: int) -> dict[str, Callable[[], dict[str, Any]]]:
        """Return a function per file of this rank, by name, that makes its content."""
        own, values = self.coordinates, self.values
        contents: dict[str, Callable[[], dict[str, Any]]] = {}
        if self.writes_optimizer_files:
            name = names.optim_file(own.dp_rank, own.mp_rank, bf16=self.bf16)
            contents[name] = self._optim_states
        if self.sharded_weights:
            contents[names.zero_model_file(own.dp_rank, own.mp_rank)] = self._model_states
        elif own.writes_model:
            contents[names.model_file(own.mp_rank)] = self._model_states
        if self.pending:
            contents[names.pending_file(rank)] = lambda: self._with_index(
                {"pending_gradients": values["pending"]}
            )
        if self.has_own_state:
            contents[names.own_state_file(rank)] = lambda: self._with_index(values["own_state"])
        if self.buffers_differ:
            buffers = {name: values["buffers"][name] for name in self.differing}
            contents[names.buffers_file(rank)] = lambda: self._with_index({"buffers": buffers})
        return contents

    def _with_index(self, content: Mapping[str, Any]) -> dict[str, Any]:
        return {**content, names.INDEX: self._common_index()}

    def _common_index(self) -> dict[str, Any]:
        """Return the entries that the index of every file begins with."""
        return {"format": names.FORMAT, names.SAVE: self.save}

    def _optim_states(self) -> dict[str, Any]:
        index = {**self._common_index(), "rank_state": dict(self.values["rank_state"])}
        content = {names.OPTIMIZER_STATE: self.values["section"], **self._versions(), names.INDEX: index}
        own = self.values["frozen_experts"]
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
        values, rest = self.values, list(zip(self.untrained, self.values["untrained"], strict=True))
        return {
            "module": values["weights"],
            "buffer_names": self.buffer_names,
            "optimizer": None if self.writes_optimizer_files else values["section"],
            "param_shapes": self.param_shapes,
            "frozen_param_shapes": OrderedDict((i.name, torch.Size(i.global_shape)) for i in self.untrained),
            "shared_params": self.aliases,
            "frozen_param_fragments": OrderedDict((i.name, part) for i, part in rest),
            "lr_scheduler": None,
            "data_sampler": None,
            "random_ltd": None,
            "sparse_tensor_module_names": [],
            **values["header"],
            "dp_world_size": self.coordinates.dp_size,
            "mp_world_size": self.coordinates.mp_size,
            **self._versions(),
            **values["client_state"],
            names.INDEX: self._index(),
        }

    def _index(self) -> dict[str, Any]:
        """Return a model file's index (Note: index, in `file_format.py`)."""
        optimizer = None if self.shapes is None else names.OPTIMIZER_IN_MODEL_FILE
        parts = [(i.name, i.global_shape, i.boxes, i.start, i.stop) for i in self.untrained]
        return {
            **self._common_index(),
            WRAPPER: self.wrapper,
            "zero_stage": self.zero_stage,
            "optimizer": names.OPTIMIZER_IN_OWN_FILES if self.writes_optimizer_files else optimizer,
            "dp_mp_sizes": (self.coordinates.dp_size, self.coordinates.mp_size),
            "bf16": self.bf16,
            "aliases": self.aliases,
            "excluded": self.excluded,
            "trained": self.trained,
            "cut": self.sharded_names,
            "weights_in_optimizer_files": self.has_experts and not self.sharded_weights,
            "module_boxes": self._boxes(self.values["weights"]) if not self.sharded_weights else {},
            "parts": parts if self.sharded_weights else None,
            "part_files": names.PARTS_IN_MODEL_FILES if self.sharded_weights else None,
            "pending": self.pending,
            "own_state": self.has_own_state,
            "buffers_differ": self.buffers_differ,
            **self.of_all_stages,
            **self.values["index_entries"],
            **self.shard_maps,
            "frozen_elsewhere": self.frozen_elsewhere,
            "covered": {key: found for key, found in self.covered.items() if self.shard_maps[key] is None},
            **self._rank_states(),
        }

    def _rank_states(self) -> dict[str, Any]:
        """Return the ranks' states for the model file; a rank that writes its own file keeps its state there."""
        if self.writes_optimizer_files:
            return {}
        if self.sharded_weights:
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
