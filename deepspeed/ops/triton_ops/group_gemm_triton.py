"""Grouped GEMM: consecutive groups of rows times one matrix per group, on a GPU in one launch of a Triton kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.ops import gpu


def group_gemm_triton(mat_a: Tensor, mat_b: Tensor, offs: Tensor, trans_b: bool = False) -> Tensor:
    """Multiply rows of ``mat_a`` [rows, k] by the matrix of their group in ``mat_b`` [groups, k, n], with gradients.

    ``offs`` [groups]: end of each group's rows. ``trans_b``: the matrices are [groups, n, k]. Rows after the last end
    are zero.
    """
    if mat_a.dim() != 2 or mat_b.dim() != 3 or offs.numel() != mat_b.shape[0]:
        raise ValueError(
            "expected rows [m, k], matrices [groups, k, n] and one end offset per group, not "
            f"{tuple(mat_a.shape)}, {tuple(mat_b.shape)} and {tuple(offs.shape)}"
        )
    matrices = mat_b.transpose(1, 2) if trans_b else mat_b
    if gpu.usable(mat_a, mat_b, offs):
        from deepspeed.ops.gpu import grouped_gemm as grouped_products  # imports Triton

        if grouped_products.supports(mat_a, mat_b):
            ends = offs.to(torch.int32).contiguous()
            return grouped_products.GroupedProduct.apply(mat_a, matrices, ends, None)
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    products = [mat_a[a:b] @ matrix for a, b, matrix in zip(starts, ends, matrices, strict=True)]
    rest = mat_a.shape[0] - (ends[-1] if ends else 0)
    products.append(mat_a.new_zeros(rest, matrices.shape[2]))
    return torch.cat(products)
