"""What goes into each file of a checkpoint, and the order in which ranks write them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.checkpoint import directory, names
from deepspeed.checkpoint.archive import hash_tensor, naming, write_archive
from deepspeed.checkpoint.background import BackgroundWriter, remove_older
from deepspeed.checkpoint.errors import CheckpointError, CheckpointTagError
from deepspeed.checkpoint.flush import flush_later, wait_for_flushes
from deepspeed.checkpoint.numbered import names_elsewhere
from deepspeed.checkpoint.own_format import (
    DIRECTORIES,
    OPTIMIZER_DIRECTORY,
    PARTS_DIRECTORY,
    flat_kinds,
    pack_groups,
    pack_section,
)
from deepspeed.checkpoint.placement import EXPERTS, NUMBERED_EXPERTS, placement_of
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.sharded_weights import ShardedWeights
from deepspeed.checkpoint.shards import Cut, ShardIndex
from deepspeed.checkpoint.state import TrainingState
from deepspeed.checkpoint.writers import StagedFolder, replace_file, write_latest
from deepspeed.comm import CommunicationError
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.utils.logging import logger
from deepspeed.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This rank's place: the numbers in its files' names, and what it writes.

    ``writes_replicas``: of shards that several ranks hold, each writes its own (where they share no folder).
    """

    dp_rank: int
    dp_size: int
    mp_rank: int
    mp_size: int
    writes_model: bool
    writes_replicas: bool = False
    stage: int = 0
    stages: int = 1
    """Of a pipeline: they have other parameters."""

    @classmethod
    def on(cls, mesh: ProcessMesh, ranks: Ranks) -> Place:
        """The place of this rank, which is its position on the mesh."""
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
        """Number of this rank's files among those of all ranks, as ``names.dp_mp_ranks`` counts."""
        return self.mp_rank * self.dp_size + self.dp_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One rank's training as ``save`` sees it.

    ``header``: values of the documented top-level keys. ``positions``: what the index adds (micro-steps,
    precision...). ``rank_state``: what differs from rank to rank (random states, position in the data).
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
    """What this rank's optimizer does not share with others, in a file of its own; None on all ranks or on none."""
    write_layers: Callable[[Path], None] | None = None
    """Writes the documented files of single layers into a folder (pipelines). It gathers weights, which no rank leaves
    early, whatever fails."""


def save(
    training: Training,
    save_dir: Path,
    tag: str,
    place: Place,
    ranks: Ranks,
    *,
    save_latest: bool = True,
    exclude_frozen: bool = False,
    on_tag_mismatch: str = "WARN",
    background: BackgroundWriter | None = None,
    keep_last: int | None = None,
) -> None:
    """Write ``save_dir/tag``. Collective. Afterwards either all of it is in place, or what was there before.

    ``on_tag_mismatch``: "IGNORE", "WARN" or "FAIL" where ranks give different tags; rank 0's is used.
    ``background``: return when the state is copied; it writes the copy. ``keep_last``: how many checkpoints stay in
    the folder.
    """
    check_client_state(training.client_state)
    if background is not None:
        background.wait(ranks)
    wait_for_flushes()
    tag = _agree(tag, training, place, ranks, on_tag_mismatch)
    pending = training.state.pending_gradients() if training.state is not None else None
    some_pending = ranks.any(pending is not None)
    folder = StagedFolder(save_dir, tag)
    with ranks.together("preparing the checkpoint folder"):
        if ranks.keeps_folder:
            folder.prepare()
    try:
        with ranks.together("writing the checkpoint"):
            files = _Files(training, place, exclude_frozen=exclude_frozen, pending=some_pending)
            held = files.held() if not ranks.node_local else {}
            hashes = files.buffer_hashes()
        files.whole_job(ranks, held, hashes)
        contents = files.contents(pending, ranks.rank)
        with ranks.together("writing the checkpoint"):
            if background is not None:
                copied = background.copy(contents)
            else:
                _put_all(folder.staging, contents)
        if training.write_layers is not None:
            with ranks.together("writing the files of layers"):
                training.write_layers(folder.staging)

        def commit() -> None:
            folder.commit()
            _put_scripts(save_dir)
            if save_latest:
                write_latest(save_dir, tag)
            if keep_last is not None:
                remove_older(save_dir, keep_last, _is_checkpoint)

        if background is not None:
            background.start(folder, copied, ranks, commit)
            return
        with ranks.together("committing the checkpoint"):
            if ranks.keeps_folder:
                commit()
        if not ranks.keeps_folder:
            flush_later(
                folder.final / name for name in contents
            )  # another machine may hold them in its memory
    except CommunicationError:
        raise  # it is unknown what the other ranks are doing
    except Exception:
        if ranks.keeps_folder:
            folder.discard()
        ranks.any(False)  # afterwards it is gone on all ranks
        raise


def _agree(tag: str, training: Training, place: Place, ranks: Ranks, on_tag_mismatch: str) -> str:
    """The tag all ranks use; their tags are exchanged only if they differ, or if stages have other parameters."""
    own = (tag, place.stage, signature(training.state))
    if not ranks.agree(own):
        reports = ranks.gather(own)
        tag = agreed_tag([report[0] for report in reports], on_tag_mismatch)
        for stage in range(place.stages):
            check_signatures([report[2] for report in reports if report[1] == stage])
    return tag


class _Files:
    """The content of this rank's files. ``whole_job`` adds what the first file says about the others."""

    def __init__(self, training: Training, place: Place, *, exclude_frozen: bool, pending: bool) -> None:
        self.training = training
        self.place = place
        self.pending = pending
        self.rank_states: list[dict[str, Any]] = []
        self.directories: dict[str, Any] = dict.fromkeys(DIRECTORIES)
        self.covered: dict[str, list[str]] = {}
        self.differing: list[str] = []
        self.frozen_elsewhere: list[str] = []
        self.of_all_stages: dict[str, Any] = {}
        self.buffers_differ = False
        module = training.module
        self.parts = ShardedWeights(module)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        self.placements = {name: placement_of(param) for name, param in parameters.items()}
        self.kinds = {
            name
            for name, placement in self.placements.items()
            if EXPERTS in placement.split or NUMBERED_EXPERTS in placement.split
        }
        if self.kinds and training.state is None and not self.parts:
            raise CheckpointError(
                f"{len(self.kinds)} parameters differ from rank to rank (experts): they are saved with the optimizer's "
                "state, but this engine has no optimizer"
            )
        self.numbered = names_elsewhere(module)
        self.optimizer_files = training.state is not None and (training.zero_stage > 0 or bool(self.kinds))
        self.trained = [name for name, p in parameters.items() if p.requires_grad]
        self.frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
        self.excluded = sorted(self.frozen) if exclude_frozen else []
        self.weights = module_state(module, exclude=self.excluded)
        self.cut = [name for name, param in parameters.items() if hasattr(param, "ds_home")]
        for name in self.cut:
            if name in self.weights:
                self.weights[name] = self.weights[name].new_empty(0)  # even if it is gathered right now
        self.aliases = shared_names(module)

    def held(self) -> dict[str, directory.Contents]:
        """What this rank's files hold of each parameter, by key of the directory."""
        state = self.training.state
        found: dict[str, directory.Contents] = {}
        if self.optimizer_files and state is not None:
            shapes = {entry.name: tuple(entry.shape) for entry in state.trainable()}
            shards = ((index, flat_kinds(index, tensors)) for index, tensors in self._shards(state))
            found[OPTIMIZER_DIRECTORY] = self._contents(shapes, state.cuts(), shards)
        if self.parts:
            parts = ((index, ()) for index, _ in self._untrained())
            found[PARTS_DIRECTORY] = self._contents(self._part_shapes(), self.parts.cuts(), parts)
        return found

    def _contents(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        cuts: Mapping[str, Cut],
        shards: Iterable[tuple[ShardIndex, Iterable[str]]],
    ) -> directory.Contents:
        held = directory.held(shards, list(shapes))
        known = [cuts.get(name) for name in shapes]
        return directory.Contents(list(shapes), list(shapes.values()), known, held, self.place.number)

    def _shards(self, state: TrainingState) -> Iterator[tuple[ShardIndex, dict[str, Tensor]]]:
        """What this rank writes of the training state."""
        return state.shards() if self.place.writes_replicas else state.distinct_shards()

    def buffer_hashes(self) -> list[int]:
        return [hash_tensor(buffer) for buffer in self._buffers().values()]

    def _buffers(self) -> dict[str, Tensor]:
        found = {name: self.weights.get(name) for name, _ in self.training.module.named_buffers()}
        return {
            name: buffer
            for name, buffer in found.items()
            if isinstance(buffer, Tensor) and buffer.layout == torch.strided and buffer.device.type != "meta"
        }

    def whole_job(
        self, ranks: Ranks, held: Mapping[str, directory.Contents], buffer_hashes: list[int]
    ) -> None:
        """Agree on what must be in the first file, and find out which buffers differ from rank to rank. Collective.

        What grows with the number of ranks is what rank 0 receives where ranks have no files of their own (stage 0):
        their random states."""
        if self.place.stages > 1:
            self._meet_stages(ranks, buffer_hashes)
        elif ranks.agree(list(self._buffers())):
            alike = ranks.agree_each(buffer_hashes)
            self.differing = [name for name, same in zip(self._buffers(), alike, strict=True) if not same]
        else:
            self.differing = list(self._buffers())
        self.buffers_differ = ranks.any(bool(self.differing))
        if not self.optimizer_files and not self.parts:
            states = ranks.gather_at_writers((self.place.number, dict(self.training.rank_state)))
            self.rank_states = [state for _, state in sorted(states or (), key=lambda report: report[0])]
        elif self.numbered:
            self._names_of_all(ranks, held)
        elif not ranks.node_local:
            for key, contents in held.items():
                self.directories[key] = directory.make(contents, ranks)
                self.covered[key] = self._on_all_stages(contents.names, ranks)

    def _on_all_stages(self, names: Sequence[str], ranks: Ranks) -> list[str]:
        """``names`` and those of the other stages. Collective if there are some."""
        if self.place.stages == 1:
            return list(names)
        reports = ranks.gather(list(names) if self.place.dp_rank == 0 else [])
        return list(dict.fromkeys(name for report in reports for name in report))

    def _names_of_all(self, ranks: Ranks, held: Mapping[str, directory.Contents]) -> None:
        """Where ranks hold parts of shared lists, the first file has the names of them all, and no directory: a loader
        searches the files. Collective."""
        own = {key: list(contents.names) for key, contents in held.items()}
        reports = ranks.gather_at_writers((self.place.number, own, self.trained, list(self._own_weights())))
        if reports is None:
            return
        ordered = [report[1:] for report in sorted(reports, key=lambda report: report[0])]
        for key in own:
            self.covered[key] = list(dict.fromkeys(name for names, _, _ in ordered for name in names[key]))
        self.trained = list(dict.fromkeys(name for _, names, _ in ordered for name in names))
        self.frozen_elsewhere = list(dict.fromkeys(name for _, _, names in ordered for name in names))

    def _meet_stages(self, ranks: Ranks, buffer_hashes: list[int]) -> None:
        """Which buffers differ among the ranks of one stage, and the names that the first file lists for all stages."""
        own = dict(zip(self._buffers(), buffer_hashes, strict=True))
        facts = {"trained": self.trained, "aliases": self.aliases, "excluded": self.excluded, "cut": self.cut}
        reports = ranks.gather((self.place.stage, own, facts if self.place.dp_rank == 0 else None))
        alike = [other for stage, other, _ in reports if stage == self.place.stage]
        self.differing = [name for name in own if any(other.get(name) != own[name] for other in alike)]
        every = [found for _, _, found in sorted(reports, key=lambda report: report[0]) if found is not None]
        for key in ("trained", "excluded"):
            self.of_all_stages[key] = list(dict.fromkeys(name for found in every for name in found[key]))
        self.of_all_stages["aliases"] = {a: n for found in every for a, n in found["aliases"].items()}
        self.of_all_stages["stages"] = self.place.stages

    def contents(self, pending: dict[str, Any] | None, rank: int) -> dict[str, Callable[[], dict[str, Any]]]:
        """Name -> content of this rank's files."""
        training, place = self.training, self.place
        contents: dict[str, Callable[[], dict[str, Any]]] = {}
        if self.optimizer_files:
            name = names.optim_file(place.dp_rank, place.mp_rank, bf16=training.bf16)
            contents[name] = self._optim_states
        if self.parts:
            contents[names.zero_model_file(place.dp_rank, place.mp_rank)] = self._model_states
        elif place.writes_model:
            contents[names.model_file(place.mp_rank)] = self._model_states
        if self.pending:
            contents[names.pending_file(rank)] = lambda: {"pending_gradients": pending}
        if training.own_state is not None:
            contents[names.own_state_file(rank)] = lambda: dict(training.own_state or {})
        if self.buffers_differ:
            own = {name: self.weights[name] for name in self.differing}
            contents[names.buffers_file(rank)] = lambda: {"buffers": own}
        return contents

    def _optim_states(self) -> dict[str, Any]:
        index: dict[str, Any] = {"format": names.FORMAT, "rank_state": dict(self.training.rank_state)}
        content = {names.OPTIMIZER_STATE: self._section(), **self._versions(), names.INDEX: index}
        own = self._own_weights()
        if own:
            content["module"] = own
            index["module_boxes"] = self._boxes(own)
        return content

    def _own_weights(self) -> dict[str, Tensor]:
        """Frozen weights that no model file holds: those of a kind (experts) of which this rank is the first holder."""
        if self.parts or self.place.writes_model:
            return {}
        first = {
            name
            for name in self.kinds
            if NUMBERED_EXPERTS in self.placements[name].split
            or self.place.dp_rank < self.placements[name].global_shape[0]
        }
        return {name: self.weights[name] for name in self.frozen if name in first & self.weights.keys()}

    def _boxes(self, held: Iterable[str]) -> dict[str, Any]:
        """Where tensors of the state dict lie in larger ones."""
        placements = {name: self.placements[name] for name in held if name in self.placements}
        return {name: (p.global_shape, p.boxes) for name, p in placements.items() if p.boxes}

    def _section(self) -> dict[str, Any]:
        training, place = self.training, self.place
        assert training.state is not None
        return {
            "zero_stage": training.zero_stage,
            "partition_count": place.dp_size,
            names.DS_VERSION: __version__,
            **pack_groups(training.state),
            "scalars": training.state.scalars(),
            **pack_section(self._shards(training.state), self._in_model_file()),
        }

    def _in_model_file(self) -> dict[str, Any]:
        """The weights that the model file of this rank's model-parallel position holds, whoever writes it."""
        if self.place.dp_rank == 0:
            return self.weights
        return {name: value for name, value in self.weights.items() if name not in self.kinds}

    def _versions(self) -> dict[str, Any]:
        return {names.DS_CONFIG: dict(self.training.ds_config), names.DS_VERSION: __version__}

    def _model_states(self) -> dict[str, Any]:
        training, place = self.training, self.place
        state = training.state
        rest = self._untrained()
        return {
            "module": self.weights,
            "buffer_names": [name for name, _ in training.module.named_buffers() if name in self.weights],
            "optimizer": self._section() if state is not None and not self.optimizer_files else None,
            "param_shapes": _param_shapes(state) if state is not None and self.optimizer_files else None,
            "frozen_param_shapes": OrderedDict((i.name, torch.Size(i.global_shape)) for i, _ in rest),
            "shared_params": self.aliases,
            "frozen_param_fragments": OrderedDict((i.name, part) for i, part in rest),
            "lr_scheduler": None,
            "data_sampler": None,
            "random_ltd": None,
            "sparse_tensor_module_names": [],
            **training.header,
            "dp_world_size": place.dp_size,
            "mp_world_size": place.mp_size,
            **self._versions(),
            **training.client_state,
            names.INDEX: self._index(rest),
        }

    def _part_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the sharded weights that the training state does not hold; the same on all ranks."""
        state = self.training.state
        trained = {entry.name for entry in state.trainable()} if state is not None else set()
        left = {name for name in self.parts.shapes if name not in self.excluded}
        return {n: s for n, s in self.parts.shapes.items() if n in left and (n not in trained or not prod(s))}

    def _untrained(self) -> list[tuple[ShardIndex, Tensor]]:
        """Weights that the training state does not hold: in full, or this rank's parts where they are
        sharded."""
        if self.parts:
            shapes = self._part_shapes()
            fragments = self.parts.fragments(replicas=self.place.writes_replicas)
            return [(index, part) for index, part in fragments if index.name in shapes]
        return [
            (self.placements[name].index(name), self.weights[name])
            for name in self.frozen
            if name in self.weights and name not in self.aliases
        ]

    def _index(self, rest: list[tuple[ShardIndex, Tensor]]) -> dict[str, Any]:
        training, place = self.training, self.place
        optimizer: str | None = "model file" if training.state is not None else None
        return {
            "format": names.FORMAT,
            "zero_stage": training.zero_stage,
            "optimizer": "optimizer files" if self.optimizer_files else optimizer,
            "dp_mp_sizes": (place.dp_size, place.mp_size),
            "bf16": training.bf16,
            "aliases": self.aliases,
            "excluded": self.excluded,
            "trained": self.trained,
            "cut": self.cut,
            "weights_in_optimizer_files": bool(self.kinds) and not self.parts,
            "module_boxes": self._boxes(self.weights) if not self.parts else {},
            "parts": [(i.name, i.global_shape, i.boxes, i.start, i.stop) for i, _ in rest]
            if self.parts
            else None,
            "part_files": "model files" if self.parts else None,
            "pending": self.pending,
            "own_state": training.own_state is not None,
            "buffers_differ": self.buffers_differ,
            **self.of_all_stages,
            **training.positions,
            **self.directories,
            "frozen_elsewhere": self.frozen_elsewhere,
            "covered": {key: names for key, names in self.covered.items() if self.directories[key] is None},
            **self._rank_states(),
        }

    def _rank_states(self) -> dict[str, Any]:
        """Each rank's state goes into its own file, if it writes one anyway."""
        if self.optimizer_files:
            return {}
        if self.parts:
            return {"rank_state": dict(self.training.rank_state)}
        return {"rank_states": self.rank_states}


def _put_all(folder: Path, contents: Mapping[str, Callable[[], dict[str, Any]]]) -> None:
    for name, content in contents.items():
        with naming(folder / name):
            write_archive(folder / name, content(), checksums=True)


def _is_checkpoint(folder: Path) -> bool:
    return any(names.is_ours(entry.name) for entry in folder.iterdir())


def module_state(module: nn.Module, *, exclude: list[str] | None = None) -> dict[str, Any]:
    """The module's state dict, its tensors detached and in place, without the names in ``exclude``. Parameters are as
    this rank holds them, whatever else the module shows in its state dict."""
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if isinstance(value, Tensor):
            state[name] = value.detach()
    for name in exclude or ():
        state.pop(name, None)
    return state


def shared_names(module: nn.Module) -> dict[str, str]:
    """Other name -> first name of every parameter that the module registers several times (tied weights)."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            aliases[name] = first[id(param)]
    return aliases


def check_client_state(client_state: Mapping[str, Any]) -> None:
    """KeyError if the caller's own entries would overwrite those of the checkpoint."""
    taken = sorted(names.RESERVED_KEYS.intersection(client_state))
    if taken:
        raise KeyError(
            f"client_state must not contain {', '.join(map(repr, taken))}: these names belong to the checkpoint "
            "itself; rename them, or put them into a dict under a name of your own"
        )


def agreed_tag(tags: list[str], on_mismatch: str) -> str:
    """Rank 0's tag; the others must have given the same one."""
    differing = {rank: tag for rank, tag in enumerate(tags) if tag != tags[0]}
    if differing and on_mismatch != "IGNORE":
        rank, tag = next(iter(differing.items()))
        message = (
            f"ranks save under different tags: rank 0 gave {tags[0]!r}, rank {rank} gave {tag!r} "
            f"({len(differing)} of {len(tags)} ranks differ). Tags must not contain anything that differs from rank "
            "to rank (checkpoint.tag_validation decides what happens: Ignore, Warn or Fail)"
        )
        if on_mismatch == "FAIL":
            raise CheckpointTagError(message)
        logger.warning(f"{message}; {tags[0]!r} is used")
    return tags[0]


def check_signatures(signatures: list[tuple[int, int] | None]) -> None:
    """The model must be the same on all ranks of a model-parallel position."""
    counts = [signature[0] if signature is not None else 0 for signature in signatures]
    if len(set(counts)) > 1:
        rank = next(i for i, count in enumerate(counts) if count != counts[0])
        raise CheckpointError(
            f"ranks disagree on the model: rank 0 trains {counts[0]} parameters, rank {rank} trains {counts[rank]}. "
            "All ranks must build the same model and freeze the same parameters."
        )


def signature(state: TrainingState | None) -> tuple[int, int] | None:
    """Number of trained parameters and of their elements."""
    if state is None:
        return None
    entries = state.trainable()
    return len(entries), sum(prod(entry.shape) for entry in entries)


def _param_shapes(state: TrainingState) -> list[OrderedDict[str, torch.Size]]:
    """Shapes by optimizer group, as documented."""
    shapes: list[OrderedDict[str, torch.Size]] = [OrderedDict() for _ in state.param_groups]
    for entry in state.trainable():
        if entry.group_index >= 0:
            shapes[entry.group_index][entry.name] = torch.Size(entry.shape)
    return shapes


def _put_scripts(save_dir: Path) -> None:
    """Executable ``zero_to_fp32.py`` and ``zero_to_torch.py`` next to the checkpoints, for a shell."""
    for name in names.SCRIPTS:
        content = resources.files("deepspeed.utils").joinpath(name).read_bytes()
        path = save_dir / name
        if not path.is_file() or path.read_bytes() != content:
            replace_file(path, content, mode=0o744)
