"""Dropout that keeps nothing for backward: which elements are dropped is a function of their index and of a seed.

The seed is drawn from torch's generator, so runs repeat, and recomputation with its random state restored drops the
same elements. One native pass on the host, or one Triton kernel on a GPU, also adds the residual, with the same bits;
elsewhere it is torch's dropout.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from deepspeed.ops import gpu, native


class _DropoutCall(ctypes.Structure):
    """``struct ds_dropout_call``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("output", "input", "residual")),
        ("numel", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("limit", ctypes.c_uint32),
        ("scale", ctypes.c_float),
        ("dtype", ctypes.c_int32),
    ]


def dropout(x: Tensor, ratio: float, residual: Tensor | None = None) -> Tensor:
    """``x`` with elements dropped with probability ``ratio``, the others scaled, plus ``residual``."""
    if ratio <= 0.0:
        return x if residual is None else x + residual
    if not runs_here(x, ratio) or (residual is not None and residual.dtype != x.dtype):
        dropped = functional.dropout(x, ratio)
        return dropped if residual is None else dropped + residual
    return _Dropout.apply(x, residual, ratio, new_seed())


def runs_here(x: Tensor, ratio: float) -> bool:
    """Return whether the native pass or the kernel takes it."""
    if x.dtype not in native.DTYPE_CODES or ratio >= 1.0 or torch.compiler.is_compiling():
        return False
    if x.is_cuda:  # a captured graph would drop the same elements at every replay
        return gpu.usable(x) and not torch.cuda.is_current_stream_capturing()
    return x.device.type == "cpu" and native.library() is not None


def new_seed() -> int:
    return int(torch.randint(2**62, ()).item())


def dropped(x: Tensor, ratio: float, seed: int, residual: Tensor | None = None) -> Tensor:
    """The pass itself; the same for values and for gradients. Call it where ``runs_here``."""
    if x.is_cuda:
        from deepspeed.ops.gpu import dropout as kernels  # imports Triton

        return kernels.dropped(x, ratio, seed, residual)
    x, lib = x.contiguous(), native.library()
    assert lib is not None
    out = torch.empty_like(x)
    rest = None if residual is None else residual.contiguous()
    call = _DropoutCall(
        out.data_ptr(),
        x.data_ptr(),
        None if rest is None else rest.data_ptr(),
        x.numel(),
        seed,
        int(ratio * 2**32),
        1.0 / (1.0 - ratio),
        native.DTYPE_CODES[x.dtype],
    )
    lib.ds_dropout(ctypes.addressof(call), torch.get_num_threads())
    return out


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, ratio: float, seed: int) -> Tensor:
        ctx.ratio, ctx.seed = ratio, seed
        return dropped(x, ratio, seed, residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        of_x = dropped(grad, ctx.ratio, ctx.seed) if ctx.needs_input_grad[0] else None
        return of_x, grad if ctx.needs_input_grad[1] else None, None, None
