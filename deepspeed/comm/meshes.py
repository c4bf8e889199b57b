"""The meshes of the engines of this process, which ``documented_groups.py`` reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deepspeed.base.newest import Newest

if TYPE_CHECKING:
    from deepspeed.comm.mesh import ProcessMesh


@dataclass
class Meshes:
    engines: Newest[ProcessMesh] = field(default_factory=Newest)
    by_hand: ProcessMesh | None = None
    # Set manually by code that reads tensor-parallel checkpoints without running in parallel.
    tensor_parallel: dict[str, int] = field(default_factory=dict)

    def follow(self, mesh: ProcessMesh) -> None:
        """Make the getters report ``mesh``, that of a new engine, until the engine goes or a newer one comes."""
        self.engines.add(mesh)
        self.by_hand = None
        self.tensor_parallel.clear()

    def leave(self, mesh: ProcessMesh) -> None:
        """Its engine is destroyed: the getters report the one before it."""
        self.engines.remove(mesh)


meshes = Meshes()
