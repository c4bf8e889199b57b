"""The meshes of the engines of this process, which ``documented_groups.py`` reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch.distributed import ProcessGroup

from deepspeed.base.newest import Newest


class Mesh(Protocol):
    """The part of ``deepspeed.comm.mesh.ProcessMesh`` used here."""

    splits_experts: bool

    def size(self, *axes: str) -> int: ...
    def rank(self, *axes: str) -> int: ...
    def ranks(self, *axes: str) -> tuple[int, ...]: ...
    def group(self, *axes: str) -> ProcessGroup: ...
    def sharing_experts(self, size: int, *, same: bool = False) -> tuple[int, ...]: ...
    def among(self, ranks: tuple[int, ...], *, same: bool = False) -> HasGroup: ...


class HasGroup(Protocol):
    """The part of ``deepspeed.comm.collectives.Communicator`` used here."""

    @property
    def group(self) -> ProcessGroup | None: ...


@dataclass
class Meshes:
    engines: Newest[Mesh] = field(default_factory=Newest)
    by_hand: Mesh | None = None
    # Set manually by code that reads tensor-parallel checkpoints without running in parallel.
    tensor_parallel: dict[str, int] = field(default_factory=dict)

    def follow(self, mesh: Mesh) -> None:
        """Make the getters report ``mesh``, that of a new engine, until the engine goes or a newer one comes."""
        self.engines.add(mesh)
        self.by_hand = None
        self.tensor_parallel.clear()

    def leave(self, mesh: Mesh) -> None:
        """Its engine is destroyed: the getters report the one before it."""
        self.engines.remove(mesh)


meshes = Meshes()
