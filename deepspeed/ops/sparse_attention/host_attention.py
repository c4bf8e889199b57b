"""Block-sparse attention on the host: calls of the native kernel (``csrc/attention/sparse_attention.cpp``).

Keys and values are read in place, and gradients accumulated in place. Scratch memory is needed only for sums of 16-bit
gradients (one head per thread), and if there are so few heads that each is cut into parts.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.ops import native

_HEADS = 8
"""Minimum number of heads, over all sequences, for which each is one work item in backward. Fewer heads are cut into
parts, whose number depends only on shapes: otherwise sums would differ."""

_SIZES = ("batch", "heads", "tokens", "size", "block", "parts")


class _AttentionCall(ctypes.Structure):
    """The C struct ``ds_sparse_attention``."""

    _fields_ = native.fields(
        "query key value output lse starts columns layout_of key_bias score_bias "
        "grad_output grad_query grad_key grad_value key_sums value_sums",
        " ".join(_SIZES),
        "scale",
        "dtype causal",
    )


class RowLists:
    """A layout in the form of the kernel: for each row its blocks. ``layout_of`` [heads]: heads with equal layouts
    share one."""

    def __init__(self, layout: Tensor, layout_of: list[int]) -> None:
        rows = layout.shape[1]
        found = layout.nonzero()
        counts = torch.bincount(found[:, 0] * rows + found[:, 1], minlength=len(layout) * rows)
        ends = counts.cumsum(0)
        # One more entry than rows per layout: the end of one layout is the start of the next.
        firsts = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        at = torch.arange(len(layout)).unsqueeze(1) * rows + torch.arange(rows + 1)
        self.starts = firsts[at].contiguous()
        self.columns = found[:, 2].to(torch.int32).contiguous()
        self.layout_of = torch.tensor(layout_of)
        self.longest = int(counts.max()) if len(counts) else 0


def runs_here(query: Tensor, key: Tensor, value: Tensor, block: int) -> bool:
    """Return whether the kernel supports these tensors."""
    return (
        query.device.type == "cpu"
        and query.dtype in native.DTYPE_CODES
        and query.shape == key.shape == value.shape
        and query.dtype == key.dtype == value.dtype
        and query.shape[-1] % 16 == 0
        and query.shape[-1] <= 256
        and block % 16 == 0
        and query.numel() > 0
        and native.library() is not None
    )


class HostAttention(torch.autograd.Function):
    """Computes [batch, heads, tokens, size] -> the same; masks as in ``block_attention.Masks``, in fp32."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: RowLists, block: int, masks: Any, scale: float
    ) -> Tensor:
        q, k, v = (x.contiguous() for x in (q, k, v))
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:3], dtype=torch.float32)
        given = {"key_bias": masks.keys, "score_bias": masks.scores}
        biases = {name: mask.float().contiguous() for name, mask in given.items() if mask is not None}
        tensors = {"query": q, "key": k, "value": v, "output": out, "lse": lse, **biases}
        rest = (rows, block, masks.causal, scale)
        _run("ds_sparse_attention_forward", tensors, *rest, parts=1)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.biases, ctx.rest = biases, rest
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        parts = max(1, _HEADS // (q.shape[0] * q.shape[1]))
        results = [torch.empty_like(x) for x in (q, k, v)]
        tensors = {"query": q, "key": k, "value": v, "output": out, "lse": lse, **ctx.biases}
        tensors |= {"grad_output": grads[0].contiguous()}
        tensors |= dict(zip(("grad_query", "grad_key", "grad_value"), results, strict=True))
        if parts > 1 or q.dtype is not torch.float32:  # otherwise sums are accumulated in the results
            shape = (parts, *q.shape) if parts > 1 else (torch.get_num_threads(), *q.shape[2:])
            tensors |= {name: torch.empty(shape, dtype=torch.float32) for name in ("key_sums", "value_sums")}
        _run("ds_sparse_attention_backward", tensors, *ctx.rest, parts=parts)
        return *results, None, None, None, None


def _run(
    function: str,
    tensors: dict[str, Tensor],
    rows: RowLists,
    block: int,
    causal: bool,
    scale: float,
    *,
    parts: int,
) -> None:
    lib, query = native.library(), tensors["query"]
    assert lib is not None
    lists = {"starts": rows.starts, "columns": rows.columns, "layout_of": rows.layout_of}
    pointers = {name: tensor.data_ptr() for name, tensor in {**tensors, **lists}.items()}
    sizes = dict(zip(_SIZES, (*query.shape, block, parts), strict=True))
    code = native.DTYPE_CODES[query.dtype]
    call = _AttentionCall(**pointers, **sizes, scale=scale, dtype=code, causal=causal)
    done = getattr(lib, function)(ctypes.addressof(call), torch.get_num_threads())
    assert done, "sizes not supported by the kernel"
