"""Matrix products of layers, for training on the host.

torch computes fp32 products with MKL, which uses only half the vector width on AMD processors with AVX-512. There,
layers use the native library's products (``csrc/linear/matrix_products.cpp``), forward and backward; elsewhere torch's.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import has_torch_function
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from deepspeed.ops import native

_WORTHWHILE = 1 << 22
"""Least number of multiplications for which a native call pays."""


class _ProductCall(ctypes.Structure):
    """``struct ds_matrix_product``."""

    _fields_ = native.fields("a b bias c", "rows columns depth a_row a_step b_step b_column c_row")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``, x [..., columns]."""
    if not runs_here(x, weight) or (bias is not None and bias.dtype is not torch.float32):
        return functional.linear(x, weight, bias)
    return _LinearProduct.apply(x, weight, bias)


class NativeLinear(nn.Linear):
    """A linear layer that uses `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def runs_here(one: Tensor, other: Tensor) -> bool:
    """Return whether the native library can compute products of these matrices, faster than torch. Torch's operations
    are used under dispatch modes, which must see them."""
    return (
        one.device.type == other.device.type == "cpu"
        and one.dtype is other.dtype is torch.float32
        and one.numel() * max(other.shape) >= _WORTHWHILE
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and is_faster()
        and not has_torch_function((one, other))
        and not _get_current_dispatch_mode_stack()
    )


def is_faster() -> bool:
    """Return whether this processor has vectors of which torch's products use only half the width."""
    lib = native.library()
    return lib is not None and bool(lib.ds_matrix_product_is_fast())


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``a @ b + bias`` of fp32 matrices on the host, each possibly transposed."""
    lib = native.library()
    assert lib is not None
    out = torch.empty(a.shape[0], b.shape[1], dtype=torch.float32)
    call = _ProductCall(
        *map(native.address, (a, b, bias, out)),
        *(*out.shape, a.shape[1]),
        *(*a.stride(), *b.stride(), out.shape[1]),
    )
    done = lib.ds_matrix_product_run(ctypes.addressof(call), torch.get_num_threads())
    assert done, "the library was built without this kernel"
    return out


def linear_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, *, x_needs: bool = True, weight_needs: bool = True
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of ``x`` and ``weight`` of `linear`."""
    rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    # For double backward, the operations must be torch's.
    own = not torch.is_grad_enabled() and runs_here(grad, weight)
    multiply = product if own else torch.matmul
    grad_x = multiply(grad_rows, weight).view(x.shape) if x_needs else None
    return grad_x, multiply(grad_rows.mT, rows) if weight_needs else None


class _LinearProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        own = None if bias is None else bias.contiguous()
        return product(x.reshape(-1, x.shape[-1]), weight.mT, own).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), needs = grads, ctx.needs_input_grad
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = linear_gradients(grad, x, weight, x_needs=needs[0], weight_needs=needs[1])
        return grad_x, grad_weight, grad.flatten(0, -2).sum(0) if needs[2] else None
