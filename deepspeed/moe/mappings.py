"""Tokens that tensor-parallel ranks all have, each taking a part of them, and back, with gradients.

What the ranks of the newest engine's mesh hold; with one tensor-parallel rank the input is returned.
"""

from __future__ import annotations

from torch import Tensor

from deepspeed.comm.collectives import Communicator
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.runtime.tensor_parallel.mappings import join_sequence, split_sequence
from deepspeed.utils import groups

__all__ = ["drop_tokens", "gather_tokens"]


def drop_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """This rank's part along ``dim``; its gradient is gathered from all ranks. Collective in backward.

    Raises:
        AssertionError: the tensor-parallel ranks do not divide the extent.
    """
    ranks = _tensor_parallel()
    extent = input_.shape[dim]
    assert extent % ranks.size == 0, (
        f"{extent} tokens in dim {dim} cannot be divided among {ranks.size} tensor-parallel ranks"
    )
    return split_sequence(input_, ranks, dim)


def gather_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """The parts of all ranks, one after the other along ``dim``; the gradient is this rank's part. Collective."""
    return join_sequence(input_, _tensor_parallel(), dim)


def _tensor_parallel() -> Communicator:
    mesh = groups.get_mesh()
    return mesh.communicator("tp") if isinstance(mesh, ProcessMesh) else Communicator(None)
