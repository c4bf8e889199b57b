"""In-memory replicas of the training state that survive rank failures: after each step, a checkpoint in shared memory.

The folder belongs to each machine's launcher: it survives any end of a rank, and is removed with the launcher. Each
rank writes its own files, as in a checkpoint on disk, so loading works the same (other world sizes, other stages,
data positions). A rank killed while writing leaves the previous state.

On several machines, the first rank of each sends the machine's files to the next machine in a ring before the state
is committed: the loss of one machine, or of several non-adjacent ones, loses no state. All machines list all files of
a state; on start `Replicas.newest` finds the newest state that is still complete, and sends every machine the files
that it lacks.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from deepspeed.checkpoint.contents import RankCoordinates, StateToSave
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.names import LATEST, default_tag
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.save import SaveRequest, save
from deepspeed.comm import get_local_rank
from deepspeed.comm.mesh import ProcessMesh

MANIFEST = "manifest.json"
"""Name of the list of all files of a state on all machines: name -> size in bytes."""
KEPT_ON_ONE_MACHINE, KEPT_ON_SEVERAL = 1, 2
"""Numbers of states to keep, on one machine or several. Machines commit a state at different times: if one dies in
between, the newest may be incomplete, but the previous one is complete."""

Files = Mapping[str, int]


class MachineRanks(Ranks):
    """All ranks; the first on each machine keeps a folder there, and together the folders are one checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.shares_folder, self.keeps_folder = False, get_local_rank() == 0
        own = int(os.environ.get("GROUP_RANK", os.environ.get("CROSS_RANK", 0)))
        reports = self.gather((own, self.keeps_folder))
        self.machine = own
        self.first_ranks = {machine: rank for rank, (machine, first) in enumerate(reports) if first}
        """Machine -> its first rank."""

    def gather_at_writers(self, value: Any) -> list[Any] | None:
        everything = self.gather(value)
        return everything if self.keeps_folder else None


@dataclass(frozen=True, slots=True)
class ReplicaTransfer:
    """One file that the first rank of a machine lacks."""

    name: str
    size: int
    source: int
    target: int


class Replicas:
    """The states of one engine, in a folder of memory on each machine."""

    def __init__(self, memory: Path) -> None:
        self.ranks = MachineRanks()
        self.folder, self._mark = _own_folder(memory)
        self._several = len(self.ranks.first_ranks) > 1
        self._channel: Any = None

    def close(self) -> None:
        """Release the folder for another engine of this process."""
        self._mark.unlink(missing_ok=True)

    def keep(self, to_save: StateToSave, mesh: ProcessMesh, step: int) -> None:
        """Make ``to_save`` the newest state. Collective."""
        # Per-layer files are redundant here; the hook is used for the exchange between machines.
        to_save = replace(to_save, write_layers=self._exchange if self._several else None)
        try:
            own = RankCoordinates.on(mesh, self.ranks)
            keep_last = KEPT_ON_SEVERAL if self._several else KEPT_ON_ONE_MACHINE
            save(to_save, SaveRequest(self.folder, default_tag(step), own, keep_last=keep_last), self.ranks)
        except CheckpointError as error:
            room = shutil.disk_usage(self.folder)
            raise CheckpointError(
                f"elasticity.replicate_state: the state does not fit in {self.folder} ({room.free >> 20} of "
                f"{room.total >> 20} MiB free; it needs twice the size of a checkpoint): enlarge it, set "
                f"DEEPSPEED_ELASTIC_MEMORY to another folder, or disable the key. {error}"
            ) from error

    def newest(self) -> str | None:
        """Return the tag of the newest surviving state, None if there is none; afterwards it is whole on every
        machine. Collective."""
        kept = self._kept() if self.ranks.keeps_folder else {}
        reports = self.ranks.gather((self.ranks.machine, kept))
        by_machine = {machine: states for machine, states in reports if states}
        found = newest_complete(by_machine)
        if found is None:
            return None
        tag, files = found
        have = {
            rank: by_machine.get(machine, {}).get(tag, ReplicaState()).files
            for machine, rank in self.ranks.first_ranks.items()
        }
        with self.ranks.together("preparing the state in memory"):
            if self.ranks.keeps_folder:
                (self.folder / tag).mkdir(parents=True, exist_ok=True)
        self._move(self.folder / tag, missing(files, have))
        with self.ranks.together("completing the state in memory"):
            if self.ranks.keeps_folder:
                _write_manifest(self.folder / tag, files)
                (self.folder / LATEST).write_text(tag)
        return tag

    def _kept(self) -> dict[str, ReplicaState]:
        """Return this machine's states by tag."""
        found = {}
        for folder in self.folder.iterdir():
            if not folder.is_dir() or folder.name.startswith("."):
                continue
            files = _sizes(folder)
            try:
                listed = json.loads((folder / MANIFEST).read_text())
            except FileNotFoundError:  # saved by a job on one machine
                listed = files
            found[folder.name] = ReplicaState(files, listed, _step_of(folder.name))
        return found

    # Between machines ---------------------------------------------------------------------------------------

    def _exchange(self, staging: Path, save: Mapping[str, Any]) -> None:
        """Send this machine's files to the next machine. Every rank calls it."""
        own = _sizes(staging) if self.ranks.keeps_folder else {}
        reports = self.ranks.gather(own)
        files = {name: size for report in reports for name, size in report.items()}
        circle = [self.ranks.first_ranks[machine] for machine in sorted(self.ranks.first_ranks)]
        moves = [
            ReplicaTransfer(name, size, rank, following)
            for rank, following in zip(circle, [*circle[1:], circle[0]], strict=True)
            for name, size in reports[rank].items()
            if name not in reports[following]  # such as weights that every machine writes
        ]
        self._move(staging, moves)
        if self.ranks.keeps_folder:
            _write_manifest(staging, files)

    def _move(self, folder: Path, transfers: Iterable[ReplicaTransfer]) -> None:
        """Copy files between the folders of first ranks, straight from and into mapped memory. Every rank calls it."""
        transfers = list(transfers)
        if not transfers:
            return
        if self._channel is None:
            self._channel = torch.distributed.new_group(backend="gloo")
        running = []
        for number, move in enumerate(transfers):
            if move.size == 0:
                if self.ranks.rank == move.target:
                    (folder / move.name).touch()
            elif self.ranks.rank == move.source:
                content = _mapped(folder / move.name, move.size)
                running.append(torch.distributed.isend(content, move.target, group=self._channel, tag=number))
            elif self.ranks.rank == move.target:
                content = _mapped(folder / move.name, move.size)
                running.append(torch.distributed.irecv(content, move.source, group=self._channel, tag=number))
        for work in running:
            if work is not None:
                work.wait()


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One machine's part of a state. ``listed``: the state's files on all machines."""

    files: Files = field(default_factory=dict)
    listed: Files = field(default_factory=dict)
    step: int = -1


def newest_complete(by_machine: Mapping[int, Mapping[str, ReplicaState]]) -> tuple[str, Files] | None:
    """Return the tag and the files of the newest state whose listed files all survive, in their size, on some machine;
    None if there is none."""
    tags = {tag: state.step for states in by_machine.values() for tag, state in states.items()}
    for tag in sorted(tags, key=lambda tag: tags[tag], reverse=True):
        states = [held[tag] for held in by_machine.values() if tag in held]
        left = {file for state in states for file in state.files.items()}
        for listed in (state.listed for state in states):
            if listed and listed.items() <= left:
                return tag, listed
    return None


def missing(files: Files, have: Mapping[int, Files]) -> list[ReplicaTransfer]:
    """Return the transfers that complete ``files`` on each rank of ``have`` (rank -> its files)."""
    found = []
    for name, size in sorted(files.items()):
        sources = [rank for rank in sorted(have) if have[rank].get(name) == size]
        lacking = [rank for rank in sorted(have) if have[rank].get(name) != size]
        found += [
            ReplicaTransfer(name, size, sources[number % len(sources)], rank)
            for number, rank in enumerate(lacking)
        ]
    return found


def _own_folder(memory: Path) -> tuple[Path, Path]:
    """Return this engine's folder and its mark. A process may have several engines, made in the same order on every
    rank and after every restart; a mark of another process is from before the restart."""
    for number in itertools.count():
        mark = memory / f"engine{number}.of_local_rank_{get_local_rank()}"
        if not mark.exists() or mark.read_text() != str(os.getpid()):
            mark.write_text(str(os.getpid()))
            folder = memory / f"engine{number}"
            folder.mkdir(exist_ok=True)
            return folder, mark
    raise AssertionError("itertools.count ended")


def _sizes(folder: Path) -> dict[str, int]:
    return {
        entry.name: entry.stat().st_size
        for entry in folder.iterdir()
        if entry.is_file() and entry.name != MANIFEST
    }


def _write_manifest(folder: Path, files: Files) -> None:
    (folder / MANIFEST).write_text(json.dumps(dict(files)))


def _mapped(path: Path, size: int) -> torch.Tensor:
    """Return the bytes of a file, memory-mapped; the file is created if needed."""
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _step_of(tag: str) -> int:
    digits = tag.removeprefix("global_step")
    return int(digits) if digits.isdigit() else -1
