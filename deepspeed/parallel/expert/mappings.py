"""Tokens that tensor-parallel ranks all have, each taking a part of them, and back, with gradients: of the ranks of the
newest engine's mesh, and with one of them the input is returned. For layers that a script writes itself also the
exchange of tokens between ranks with different experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed.comm import documented_groups as groups
from deepspeed.comm.collectives import Communicator, communicator
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.parallel.tensor.mappings import join_sequence, split_sequence


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


class AllToAll(torch.autograd.Function):
    """``AllToAll.apply(group, input)``: the first dim of ``input`` in as many equal parts as ``group`` has ranks, each
    sent to its rank; the result has their parts in rank order. Gradients travel back likewise. Without a group the
    result is ``input``. Collective, also in backward."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup | None, input: Tensor) -> Tensor:
        ctx.ranks = Communicator(None) if group is None else communicator(group)
        return _exchanged(input, ctx.ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, _exchanged(grads[0], ctx.ranks)


def _exchanged(parts: Tensor, ranks: Communicator) -> Tensor:
    if parts.shape[0] % ranks.size:
        raise ValueError(f"{parts.shape[0]} rows cannot be sent to {ranks.size} ranks in equal parts")
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    ranks.all_to_all(received, parts.contiguous()).wait()
    return received


def _tensor_parallel() -> Communicator:
    mesh = groups.get_mesh()
    return mesh.communicator("tp") if isinstance(mesh, ProcessMesh) else Communicator(None)
