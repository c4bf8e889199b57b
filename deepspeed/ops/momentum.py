"""Updates by momentum over the root of a frozen variance, natively in one pass (``csrc/adam/momentum.cpp``)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from deepspeed.ops import native


class FrozenUpdate(ctypes.Structure):
    """``struct ds_frozen_update``."""

    _fields_ = native.fields(
        "param momentum variance agreed local low_precision", "numel", "", "dtype keeps_param"
    )


def update(momentum: Tensor, grad: Tensor, grad_scale: float, beta: float) -> bool:
    """Update ``momentum`` = beta * momentum + (1 - beta) * grad_scale * grad. Return False, changing nothing, if the
    native library cannot."""
    lib = native.library()
    if lib is None or not _is_fp32(momentum) or not native.is_native(grad):
        return False
    code = native.DTYPE_CODES[grad.dtype]
    threads = torch.get_num_threads()
    lib.ds_follow_momentum(
        momentum.data_ptr(), grad.data_ptr(), code, momentum.numel(), grad_scale, beta, threads
    )
    return True


def frozen_step(
    param: Tensor,
    momentum: Tensor,
    variance: Tensor,
    low: Tensor | None,
    *,
    variance_correction: float,
    eps: float,
    rate: float,
    decay: float,
    local: tuple[Tensor, Tensor] | None = None,
    keeps_param: bool = False,
) -> bool:
    """Update ``param`` = decay * param - rate * momentum / (sqrt(variance / variance_correction) + eps), and ``low``, a
    copy in its dtype. With ``local`` = (agreed, local): agreed decays, the update is accumulated into local, and
    ``param`` becomes their difference unless ``keeps_param``. Return False, changing nothing, if the native library
    cannot."""
    lib = native.library()
    operands = [param, momentum, variance, *(local or ())]
    if lib is None or not all(_is_fp32(one) for one in operands):
        return False
    if low is not None and not native.is_native(low):
        return False
    agreed, own = local or (None, None)
    described = FrozenUpdate(
        *map(native.address, (param, momentum, variance, agreed, own, low)),
        param.numel(),
        0 if low is None else native.DTYPE_CODES[low.dtype],
        keeps_param,
    )
    threads = torch.get_num_threads()
    lib.ds_frozen_step(ctypes.byref(described), variance_correction, eps, rate, decay, threads)
    return True


def _is_fp32(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and native.is_native(tensor)
