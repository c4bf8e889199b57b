"""Norms, activations and products that write where they are told, computed by PyTorch on any device.

The engine uses none of them: it has kernels for whole forwards (``deepspeed/ops/host_graph.py``, ``ops/gpu``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed.inference.v2.inference_utils import ActivationType, is_gated
from deepspeed.inference.v2.modules.implementations import activate

__all__ = [
    "BlasLibLinear",
    "CUDABiasActivation",
    "CUDAFPLN",
    "CUDAFPPostLN",
    "CUDAFPPreLN",
    "CUDAGatedActivation",
    "CUDARMSNorm",
    "CUDARMSPreNorm",
]

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32)


def _check_dtype(name: str, dtype: torch.dtype, supported: Sequence[torch.dtype]) -> None:
    if dtype not in supported:
        raise ValueError(f"{name}: dtype={dtype}: supported are {', '.join(map(str, supported))}")


def _check_row(name: str, channels: int, dtype: torch.dtype, grain: int) -> None:
    if channels * dtype.itemsize % grain:
        raise ValueError(f"{name}: channels={channels}: rows have to be multiples of {grain} bytes")


class CUDABiasActivation:
    """``activation`` [tokens, channels] plus ``bias``, through a function, in place.

    ValueError: another dtype than 16 bits, a gated function, or channels that 8 does not divide.
    """

    supported_dtypes = HALVES
    supported_act_fns = (
        ActivationType.IDENTITY,
        ActivationType.GELU,
        ActivationType.RELU,
        ActivationType.SILU,
    )

    def __init__(self, channels: int, dtype: torch.dtype, act_fn: ActivationType) -> None:
        name = type(self).__name__
        _check_row(name, channels, torch.uint8, 8)
        _check_dtype(name, dtype, self.supported_dtypes)
        self.act_fn = ActivationType(act_fn)
        if self.act_fn not in self.supported_act_fns:
            raise ValueError(f"{name}: {self.act_fn!r} takes two inputs: use CUDAGatedActivation")

    def __call__(self, activation: Tensor, bias: Tensor | None = None) -> Tensor:
        """In fp32, rounded once."""
        wide = activation.float() if bias is None else activation.float() + bias.float()
        return activation.copy_(activate(wide, self.act_fn))


class CUDAGatedActivation:
    """Pairs of neighbouring channels, the first of them through a function, times the second.

    ValueError: another dtype, a function that is not gated, or rows that are no multiples of 8 bytes.
    """

    supported_dtypes = FLOATS
    supported_act_fns = (ActivationType.GEGLU, ActivationType.ReGLU, ActivationType.SiGLU)

    def __init__(self, channels: int, fp_dtype: torch.dtype, act_fn: ActivationType) -> None:
        name = type(self).__name__
        _check_dtype(name, fp_dtype, self.supported_dtypes)
        self.act_fn = ActivationType(act_fn)
        if not is_gated(self.act_fn):
            raise ValueError(f"{name}: {self.act_fn!r} takes one input: use CUDABiasActivation")
        _check_row(name, channels, fp_dtype, 8)

    def __call__(self, output: Tensor, input: Tensor, bias: Tensor | None = None) -> None:
        """``output`` [.., channels] of ``input`` [.., 2 channels] plus ``bias``."""
        wide = input.float() if bias is None else input.float() + bias.float()
        output.copy_(activate(wide, self.act_fn))


class BlasLibLinear:
    """``hidden_states`` [.., inputs] times ``weights`` [outputs, inputs], into ``output``.

    ValueError: another dtype.
    """

    supported_dtypes = FLOATS

    def __init__(self, fp_dtype: torch.dtype) -> None:
        _check_dtype(type(self).__name__, fp_dtype, self.supported_dtypes)

    def __call__(self, output: Tensor, hidden_states: Tensor, weights: Tensor) -> Tensor:
        return output.copy_(F.linear(hidden_states, weights))


class _Norm:
    """ValueError: another dtype, or rows that are no multiples of 16 bytes."""

    supported_dtypes = FLOATS

    def __init__(self, channels: int, fp_dtype: torch.dtype, epsilon: float = 1e-5) -> None:
        name = type(self).__name__
        _check_dtype(name, fp_dtype, self.supported_dtypes)
        _check_row(name, channels, fp_dtype, 16)
        self.epsilon = epsilon

    def _layer(self, wide: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        return F.layer_norm(wide, wide.shape[-1:], gamma.float(), beta.float(), self.epsilon)

    def _rms(self, wide: Tensor, gamma: Tensor) -> Tensor:
        return F.rms_norm(wide, wide.shape[-1:], gamma.float(), self.epsilon)


class CUDAFPLN(_Norm):
    def __call__(self, output_z: Tensor, input_x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        """``output_z`` may be ``input_x``."""
        return output_z.copy_(self._layer(input_x.float(), gamma, beta))


class CUDAFPPostLN(_Norm):
    def __call__(
        self, output_z: Tensor, input_x: Tensor, input_y: Tensor, gamma: Tensor, beta: Tensor
    ) -> Tensor:
        """Of the sum of both inputs, either of which may be ``output_z``."""
        return output_z.copy_(self._layer(input_x.float() + input_y.float(), gamma, beta))


class CUDAFPPreLN(_Norm):
    def __call__(
        self, z_res: Tensor, z_hid: Tensor, x_res: Tensor, y_hid: Tensor, gamma: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``z_res``: the sum of ``x_res`` and ``y_hid``, either of which it may be. ``z_hid``: its norm."""
        total = x_res.float() + y_hid.float()
        return z_res.copy_(total), z_hid.copy_(self._layer(total, gamma, beta))


class CUDARMSNorm(_Norm):
    def __call__(self, output_z: Tensor, input_x: Tensor, gamma: Tensor) -> Tensor:
        """``output_z`` may be ``input_x``."""
        return output_z.copy_(self._rms(input_x.float(), gamma))


class CUDARMSPreNorm(_Norm):
    def __call__(
        self, z_res: Tensor, z_hid: Tensor, x_res: Tensor, y_hid: Tensor, gamma: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As of ``CUDAFPPreLN``."""
        total = x_res.float() + y_hid.float()
        return z_res.copy_(total), z_hid.copy_(self._rms(total, gamma))
