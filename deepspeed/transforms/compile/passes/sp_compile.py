"""Inputs of a compiled model with sharded sequences."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class AutoSPInputs(NamedTuple):
    """Prepared inputs, in argument order."""

    input_id: Tensor
    label_id: Tensor | None
    position_id: Tensor | None
    attention_mask: Tensor | None


def prepare_autosp_inputs(
    input_id: Tensor,
    label_id: Tensor | None,
    position_id: Tensor | None = None,
    attention_mask: Tensor | None = None,
    seq_dim: int = 1,
) -> AutoSPInputs:
    """Mark a batch's sequence dim as dynamic, so that ``torch.compile`` makes one graph for all lengths. Each tensor
    gets its argument name as the attribute ``tag``.

    Args:
        input_id: [batch, tokens], int64; the others are likewise, or None.
        seq_dim: the sequence dim.

    The engine shards the batch if ``sequence_parallel_size`` is set: see docs/sequence_parallelism.md.

    ValueError: ``input_id`` is None, or a tensor has no dim ``seq_dim``.
    """
    if input_id is None:
        raise ValueError("prepare_autosp_inputs: input_id is None, but a batch needs tokens")
    inputs = AutoSPInputs(input_id, label_id, position_id, attention_mask)
    for name, tensor in inputs._asdict().items():
        if tensor is None:
            continue
        if not 0 <= seq_dim < tensor.dim():
            raise ValueError(
                f"prepare_autosp_inputs: seq_dim={seq_dim} is not a dimension of {name} of shape {list(tensor.shape)}"
            )
        torch._dynamo.mark_dynamic(tensor, seq_dim)
        tensor.tag = name  # type: ignore[attr-defined]
    return inputs
