"""Loading: fill live state from a catalog; each rank reads and verifies only the bytes of its own fragments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.checkpoint.catalog import Catalog, ParamGroup, SavedFragment
from deepspeed.checkpoint.contents import module_state
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.names import buffers_file
from deepspeed.checkpoint.numbered import names_elsewhere, names_of_siblings
from deepspeed.checkpoint.placement import placement_of
from deepspeed.checkpoint.reader import read_rank_file
from deepspeed.checkpoint.sharded_weights import ShardedWeights
from deepspeed.checkpoint.shards import ShardIndex, StridedCopy, covers, intersect
from deepspeed.checkpoint.state import MASTER, ParamEntry, TrainingState
from deepspeed.ops.adam.multi_tensor_adam import as_in

IMPLEMENTATION_OPTIONS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Group options that choose an implementation, not a result: the running optimizer's values are kept."""
TORCH_OPTIONS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
}
"""Group options that torch's optimizers require. Ours lack some: exports add them, and loading drops them again."""


@dataclass(slots=True)
class LoadReport:
    """A report on what was restored, for the log and for tests."""

    parameters: int = 0
    total_parameters: int = 0
    states: int = 0
    total_states: int = 0
    bytes_read: int = 0
    notes: list[str] = field(default_factory=list)

    def line(self, catalog: Catalog) -> str:
        text = f"restored {self.parameters}/{self.total_parameters} parameters"
        if self.total_states:
            text += f", {self.states}/{self.total_states} optimizer states"
        step = catalog.model_states.get("global_steps")
        text += f", step {step}" if step is not None else ""
        text += f", {self.bytes_read / 2**20:.1f} MiB read by this rank, from {catalog.folder}"
        return "; ".join([text, *self.notes])


class FragmentReader:
    """Copies fragments, verifies them, and counts the bytes read."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.bytes_read = 0

    def fill(self, target: ShardIndex, into: Tensor, sources: list[SavedFragment], what: str) -> None:
        """Fill ``into`` [target.numel], of any dtype. CheckpointError: ``sources`` do not cover it."""
        try:
            copies, missing = intersect(target, [source.index for source in sources])
        except ValueError as error:
            raise CheckpointError(f"{self.catalog.folder} does not fit the model: {error}") from error
        if missing:
            files = sorted({source.file.name for source in sources})
            raise CheckpointError(
                f"{self.catalog.folder} does not hold all of {what}: {missing[0]} is not in any of "
                f"{', '.join(files) or 'its files'}"
            )
        for copy in copies:
            self._copy(copy, sources[copy.source], into)

    def _copy(self, copy: StridedCopy, source: SavedFragment, into: Tensor) -> None:
        data = source.view(copy)
        self.bytes_read += source.archive.verify(data)
        if copy.contiguous:
            into.narrow(0, copy.target_offset, copy.numel).copy_(data)
        else:
            offset = into.storage_offset() + copy.target_offset
            into.as_strided(copy.shape, copy.target_strides, offset).copy_(data)


@dataclass(eq=False)
class Restorer:
    """Loads one catalog into a module and its training state. Every rank makes the same calls in the same order.

    ``is_stage``: a pipeline stage; names of other stages in the checkpoint are expected.
    """

    catalog: Catalog
    module: nn.Module
    state: TrainingState | None
    _: KW_ONLY
    strict: bool
    is_stage: bool = False

    def __post_init__(self) -> None:
        self.reader = FragmentReader(self.catalog)
        self.report = LoadReport()
        self.entries: list[ParamEntry] = list(self.state.trainable()) if self.state is not None else []
        self.sharded_weights = ShardedWeights(self.module)
        params = self.module.named_parameters(remove_duplicate=False)
        found = {name: placement_of(param) for name, param in params}
        self.placements = {name: placement for name, placement in found.items() if placement.boxes}
        self.names_elsewhere = names_elsewhere(self.module)

    @property
    def rewrites_names(self) -> bool:
        """Return whether the module's own loading code must see the saved state dict under the old names."""
        return _rewrites_names(self.module) and not self.sharded_weights

    @property
    def nested(self) -> dict[str, Any]:
        """Dicts in the saved state dict, for a model that loads them itself: Megatron-LM's, whose scripts save the
        result of ``state_dict_for_save_checkpoint``. Not for a sharded module (stage 3), whose weights are all found
        by name."""
        if type(self.module).load_state_dict is nn.Module.load_state_dict:
            return {}
        return {name: value for name, value in self.catalog.extra.items() if isinstance(value, dict)}

    def needed_shards(self, *, masters: bool, optimizer: bool) -> list[ShardIndex]:
        """Return the shards that this rank will read, by their names in the checkpoint, of which only the first file
        is open. ``masters``: read trained weights from the masters; ``optimizer``: read its state.

        Unsharded weights are included if the first file does not have them (a stage 3 checkpoint).
        """
        shared = {entry.name: entry.shared_names for entry in self.entries}
        from_masters = {name for item in shared.items() for name in (item[0], *item[1])} if masters else set()
        live = [index for index, _ in self._shards()] if masters or optimizer else []
        live += [index for index, _ in self.sharded_weights.fragments() if index.name not in from_masters]
        found = {index: self.catalog.find([index.name, *shared.get(index.name, ())]) for index in live}
        needed = [replace(index, name=name) for index, name in found.items() if name is not None]
        for name, param in self.module.named_parameters():
            sharded = name in from_masters or hasattr(param, "ds_owner")
            saved = None if sharded else self.catalog.find([name])
            if saved is not None:
                target = placement_of(param).index(saved)
                if not covers(target, [source.index for source in self.catalog.module.get(saved, [])]):
                    needed.append(target)
        return needed

    def check_names(self) -> None:
        """Report names that are only in the model or only in the checkpoint: an error if strict. Names within nested
        dicts are left to the model."""
        own = module_state(self.module)
        saved = {*self.catalog.module, *self.catalog.extra, *self.catalog.fragments}
        saved |= self.catalog.module_dtypes.keys()  # all parts of some may be on other nodes
        saved |= {alias for alias, name in self.catalog.aliases.items() if name in saved}
        nested = self.nested
        missing = [name for name in own if name not in saved and (self.sharded_weights or not nested)]
        here = {
            *own,
            *self.catalog.aliases,
            *(entry.name for entry in self.entries),
            *self.names_elsewhere,
            *nested,
        }
        unexpected = [] if self.is_stage or nested else sorted(saved - here)
        if not missing and not unexpected:
            return
        text = "; ".join(
            f"{count} {what}: {', '.join(some[:5])}{', ...' if count > 5 else ''}"
            for some, what in ((missing, "not in the checkpoint"), (unexpected, "not in the model"))
            if (count := len(some))
        )
        if self.strict:
            excluded = set(self.catalog.index.get("excluded", ())).intersection(missing)
            hint = " (it was saved with exclude_frozen_parameters=True)" if excluded else ""
            raise CheckpointError(
                f"{self.catalog.folder}{hint} and the model differ: {text}. load_module_strict=False loads what they "
                "have in common"
            )
        self.report.notes.append(text)

    def check_states(self) -> None:
        """Raise CheckpointError if the state is of a different optimizer, or if strict and there is none, or none of
        a parameter frozen then."""
        folder, trained = self.catalog.folder, self.catalog.index.get("trained")
        if self.strict and not self.catalog.has_optimizer:
            raise CheckpointError(
                f"{folder} holds no optimizer state. load_optimizer_states=False loads the weights alone"
            )
        bare = [entry.name for entry in self.entries if not self._has_state(self._find(entry))]
        known = [name for name in bare if self.catalog.find([name]) is not None]
        thawed = [name for name in known if trained is not None and name not in trained]
        if self.strict and thawed and len(bare) < len(self.entries):
            raise CheckpointError(
                f"{thawed[0]} is trainable now, but was frozen when {folder} was saved: it has no optimizer state. "
                "load_module_strict=False initializes it"
            )
        self._check_kinds({entry.name for entry in self.entries}.difference(bare))

    def load_weights_through_module(self) -> None:
        """Load weights and buffers through the model's ``load_state_dict``, then refresh the masters from them."""
        self._fill_shards(trained=True)
        cut = self._sharded_names()
        tensors = self._module_tensors(only=lambda name: name not in cut)
        self._load_into_module(tensors, partly=bool(self.sharded_weights))
        self._load_nested()
        named = dict(self.module.named_parameters())
        self.report.total_parameters = len(named)
        self.report.parameters = sum(self.catalog.find([name]) is not None for name in named)
        if self.state is not None:
            self.state.weights_loaded()

    def load_rank_buffers(self, rank: int, ranks: int) -> None:
        """Restore per-rank buffers if the world size is the same; otherwise all ranks keep those of rank 0."""
        index = self.catalog.index
        if not index.get("buffers_differ"):
            return
        if index.get("world_size") != ranks:
            self.report.notes.append(
                f"buffers that differed between ranks are loaded from rank 0: {index.get('world_size')} ranks saved"
            )
            return
        own = dict(self.module.named_buffers())
        for name, saved in read_rank_file(self.catalog, buffers_file(rank))["buffers"].items():
            if name in own and own[name].shape != saved.shape:
                raise CheckpointError(
                    f"the buffer {name} has shape {tuple(own[name].shape)}, not {tuple(saved.shape)}"
                )
            if name in own:
                own[name].copy_(saved)

    def load_custom(self, custom_load_fn: Callable[..., Any]) -> None:
        """Load by ``custom_load_fn(src=saved state dict, dst=module)``, then refresh the masters from the weights (if
        those are sharded, the caller does so when it shards them again)."""
        custom_load_fn(src={**self._module_tensors(), **self.nested}, dst=self.module)
        if self.state is not None and not self.sharded_weights:
            self.state.weights_loaded()

    def load_weights_from_masters(self) -> None:
        """Load masters by intersection, each rank its own shards, and frozen weights and buffers from the model
        file."""
        self._load_rest()
        # Masters are live; what else a shard has may be decoded copies, which are freed here.
        named = [
            (index, tensors[MASTER], name)
            for index, tensors in self._shards()
            if (name := self._name_of(index)) is not None
        ]
        self._check_shapes(
            (index.name, source.index.global_shape, index.global_shape)
            for index, _, name in named
            for source in self.catalog.masters(name)[:1]
        )
        for index, master, name in named:
            self.reader.fill(index, master, self.catalog.masters(name), f"the weights of {index.name}")
        loaded = [entry for entry in self.entries if self._find(entry) is not None]
        self.report.parameters += len(loaded)
        self.report.total_parameters += len(self.entries)

    def load_optimizer_states(self) -> None:
        """Load per-element state by intersection, other values as saved, and the optimizer's groups."""
        assert self.state is not None
        if not self.catalog.has_optimizer:
            self.report.notes.append("no optimizer state was saved")
            return
        with_state = {entry.name for entry in self.entries if self._has_state(self._find(entry))}
        self.state.allocate_state(with_state)
        if with_state:
            self._count_states()
            values: dict[str, dict[str, Tensor]] = {}
            for index, tensors in self._shards():
                if index.name in with_state:
                    self._fill_states(index, {k: t for k, t in tensors.items() if k != MASTER}, values)
            for kind, by_name in values.items():
                self.state.set_scalar_state(kind, by_name)
        self._load_groups()

    def _count_states(self) -> None:
        """Count the per-element states of the model's parameters; an incomplete one raises when it is filled."""
        own = {kind for _, tensors in self._shards() for kind, tensor in tensors.items() if tensor.dim()} - {
            MASTER
        }
        for entry in self.entries:
            saved = set(self.catalog.fragments.get(self._find(entry) or "", {})) - {MASTER}
            self.report.total_states += len(saved)
            self.report.states += len(saved & own)

    def _check_kinds(self, names: set[str]) -> None:
        """Raise CheckpointError if the saved state, that of ``names``, is of a different optimizer."""
        assert self.state is not None
        saved, wanted = self.catalog.kinds(), self.state.kinds(names)
        if wanted - saved:
            raise CheckpointError(
                f"the optimizer keeps {', '.join(sorted(wanted))}, but {self.catalog.folder} holds "
                f"{', '.join(sorted(saved))}: it was saved with another optimizer. "
                "load_optimizer_states=False loads the weights alone"
            )

    def _has_state(self, name: str | None) -> bool:
        """Return whether the saved parameter ``name`` has optimizer state: not if it never had a gradient."""
        kinds = self.catalog.fragments.get(name or "", {})
        return any(kind != MASTER for kind in kinds) or bool(self.catalog.values.get(name or ""))

    def _fill_states(
        self, index: ShardIndex, tensors: dict[str, Tensor], collected: dict[str, dict[str, Tensor]]
    ) -> None:
        """Fill per-element state in place; add other values to ``collected``, by kind and parameter."""
        name = self._name_of(index) or ""
        fragments, values = self.catalog.fragments.get(name, {}), self.catalog.values.get(name, {})
        for kind, tensor in tensors.items():
            per_element = tensor.dim() == 1 and tensor.numel() == index.numel
            if kind in fragments and not per_element and index.global_shape in ((), (1,)):
                value = fragments[kind][0].data  # a scalar parameter: per-element state and values look alike
            else:
                value = values.get(kind)
            if per_element and value is not None:
                tensor.copy_(torch.as_tensor(value))
            elif per_element:
                self.reader.fill(index, tensor, fragments.get(kind, []), f"{kind} of {index.name}")
            elif value is not None:
                collected.setdefault(kind, {})[index.name] = torch.as_tensor(value).clone().view(tensor.shape)
            else:
                raise CheckpointError(f"{self.catalog.folder} does not hold {kind} of {index.name}")

    def _load_groups(self) -> None:
        """Load into each group the hyperparameters saved for its parameters."""
        assert self.state is not None
        own = self.state.param_groups
        names: list[set[str]] = [set() for _ in own]
        siblings = names_of_siblings(self.module)
        for entry in self.entries:
            if entry.group_index >= 0:  # saved groups may name another rank's modules of a shared list
                names[entry.group_index] |= {self._find(entry) or entry.name, *siblings.get(entry.name, ())}
        matched = [_matching(number, members, self.catalog.groups) for number, members in enumerate(names)]
        for number, (group, saved) in enumerate(zip(own, matched, strict=True)):
            if saved is None:
                self.report.notes.append(
                    f"parameter group {number} had different members and keeps its current hyperparameters"
                )
                continue
            group.update(
                {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in as_in(group, saved.options).items()
                    if key not in IMPLEMENTATION_OPTIONS and not _added(key, value, group)
                }
            )
        self.state.param_groups = own

    def _load_rest(self) -> None:
        """Load frozen weights, buffers and everything else outside the training state."""
        if self.rewrites_names:
            self._load_into_module(self._module_tensors())  # its own code translates old names
            return
        self._fill_shards(trained=False)
        trained, cut = {id(entry.param) for entry in self.entries}, self._sharded_names()
        own = self.module.state_dict(keep_vars=True)
        rest = self._module_tensors(
            only=lambda name: id(own.get(name, self)) not in trained and name not in cut
        )
        self._load_into_module(rest, partly=True)
        if not own.keys() <= {*self.catalog.module, *self.catalog.fragments, *self.catalog.aliases}:
            self._load_nested()
        frozen = {id(p): name for name, p in self.module.named_parameters() if id(p) not in trained}
        self.report.total_parameters += len(frozen)
        self.report.parameters += sum(self.catalog.find([name]) is not None for name in frozen.values())

    def _fill_shards(self, *, trained: bool) -> None:
        """Fill this rank's shards of weights (stage 3); ``trained``: also those of the optimizer."""
        known = {entry.name for entry in self.entries}
        for index, part in self.sharded_weights.fragments():
            name = self.catalog.find([index.name])
            if name is None or (index.name in known and not trained):
                continue
            self.reader.fill(index, part, self._weights(name), f"the weights of {index.name}")

    def _sharded_names(self) -> set[str]:
        """Return the names of all sharded parameters."""
        params = self.module.named_parameters(remove_duplicate=False)
        return {name for name, param in params if hasattr(param, "ds_owner")}

    def _load_into_module(self, tensors: dict[str, Any], *, partly: bool = False) -> None:
        own = module_state(self.module)
        self._check_shapes(
            (name, value.shape, have.shape)
            for name, value in tensors.items()
            if isinstance(value, Tensor) and isinstance(have := own.get(name), Tensor)
        )
        if not self.nested:
            self._call_loader(self.module.load_state_dict, tensors, strict=self.strict and not partly)
        elif tensors:  # flat names, which the model's own loader does not know
            self._call_loader(partial(nn.Module.load_state_dict, self.module), tensors, strict=False)

    def _check_shapes(self, shapes: Iterable[tuple[str, Sequence[int], Sequence[int]]]) -> None:
        """Compare (name, saved shape, own shape). CheckpointError: some differ, of which it names up to eight."""
        pairs = {name: (tuple(saved), tuple(own)) for name, saved, own in shapes}
        lines = [
            f"{name}: shape {saved}, in the model {own}"
            for name, (saved, own) in pairs.items()
            if saved != own
        ]
        if lines:
            more = f"; and {len(lines) - 8} more" if len(lines) > 8 else ""
            raise CheckpointError(
                f"{self.catalog.folder} does not fit the model: {'; '.join(lines[:8])}{more}"
            )

    def _load_nested(self) -> None:
        if self.nested and not self.sharded_weights:
            own = module_state(self.module)
            beside = self._module_tensors(only=lambda name: name not in own)  # such as Megatron-LM's experts
            self._call_loader(self.module.load_state_dict, {**beside, **self.nested}, strict=self.strict)

    def _call_loader(self, load: Callable[..., Any], tensors: dict[str, Any], *, strict: bool) -> None:
        try:
            load(tensors, strict=strict)
        except RuntimeError as error:
            raise CheckpointError(
                f"{self.catalog.folder} does not fit the model (load_module_strict=False loads what they have in "
                f"common): {error}"
            ) from error

    def _module_tensors(self, only: Callable[[str], bool] = lambda name: True) -> dict[str, Any]:
        """Return the saved state dict under all its names, mapped from the files; ``only``: filter on names."""
        own = module_state(self.module)
        tensors: dict[str, Any] = {}
        for name in [*self.catalog.module, *(name for name in self.catalog.fragments if name in own)]:
            if (
                name in tensors
                or name in self.names_elsewhere
                or not only(name)
                or (self.is_stage and name not in own)
            ):
                continue
            sources = self._weights(name)
            if not sources and name not in own:
                continue  # not in the model, so it was not fetched
            if not sources:
                raise CheckpointError(f"{self.catalog.folder} does not hold {name}")
            tensors[name] = self._tensor(name, own.get(name), sources)
        for alias, name in self.catalog.aliases.items():
            if name in tensors and only(alias):
                tensors.setdefault(alias, tensors[name])
        nested = self.nested
        return {**tensors, **{name: item for name, item in self.catalog.extra.items() if name not in nested}}

    def _tensor(self, name: str, own: Any, sources: list[SavedFragment]) -> Tensor:
        """Return this rank's tensor ``name``: mapped if a file has exactly this part, else assembled from several
        (stage 3, tensor parallelism)."""
        saved = sources[0].index
        placement = self.placements.get(name)
        target = placement.index(name) if placement is not None else replace(saved, boxes=()).whole()
        shape = own.shape if placement is not None and own is not None else target.local_shape
        for source in sources:
            if source.index == replace(target, name=source.index.name):
                self.reader.bytes_read += source.archive.verify(source.data)
                return source.data.view(shape)
        made = torch.empty(target.numel, dtype=sources[0].data.dtype)
        self.reader.fill(target, made, sources, name)
        return made.view(shape)

    def _weights(self, name: str) -> list[SavedFragment]:
        """Return the sources of a parameter: the model's weights, then masters for parts that no model file holds."""
        masters = self.catalog.fragments.get(name, {}).get(MASTER, [])
        return [*self.catalog.module.get(name, []), *masters]

    def _shards(self) -> Iterable[tuple[ShardIndex, dict[str, Tensor]]]:
        assert self.state is not None
        return self.state.shards()

    def _name_of(self, index: ShardIndex) -> str | None:
        """Return the saved name of a live fragment. CheckpointError if it is missing and required."""
        if not hasattr(self, "_by_name"):
            self._by_name = {entry.name: self._find(entry) for entry in self.entries}
        found = self._by_name.get(index.name)
        if found is None and self.strict:
            raise CheckpointError(f"{self.catalog.folder} does not hold the parameter {index.name}")
        return found

    def _find(self, entry: ParamEntry) -> str | None:
        return self.catalog.find([entry.name, *entry.shared_names])

    def finish(self) -> LoadReport:
        self.report.bytes_read = self.reader.bytes_read
        return self.report


def _matching(number: int, members: set[str], groups: list[ParamGroup]) -> ParamGroup | None:
    """Return the saved group that holds ``members``; empty groups are matched by position."""
    if not members:
        return groups[number] if number < len(groups) and not groups[number].names else None
    holders = [group for group in groups if members.intersection(group.names)]
    return holders[0] if len(holders) == 1 else None


def _added(key: str, value: Any, group: dict[str, Any]) -> bool:
    """Return whether a saved option is a torch default that this optimizer lacks."""
    return key not in group and key in TORCH_OPTIONS and value == TORCH_OPTIONS[key]


def _rewrites_names(module: nn.Module) -> bool:
    """Return whether loading runs the model's own code, which may rename or reshape saved tensors."""
    for child in module.modules():
        if not all(getattr(hook, "keeps_names", False) for hook in child._load_state_dict_pre_hooks.values()):
            return True
        owner = type(child)._load_from_state_dict
        if getattr(owner, "keeps_names", False):
            continue
        if owner is not nn.Module._load_from_state_dict and not type(child).__module__.startswith(
            "torch.nn."
        ):
            return True
    return False
