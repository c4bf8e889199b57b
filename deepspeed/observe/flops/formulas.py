"""Formulas for the multiply-accumulates (MACs) and floating-point operations (flops) of torch's operations.

MACs are counted for GEMMs, convolutions, attention and recurrent layers. Flops are two per MAC, plus those that the
documented profile counts: biases of convolutions and recurrent layers, activations, softmax, pooling and resizing (one
per element), normalization (four or five per element). Plain arithmetic, comparisons, copies and look-ups count as
zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor


class OpWork(NamedTuple):
    """Cost of one operation."""

    macs: int
    flops: int


Formula = Callable[[Sequence[Any], dict[str, Any], Any], OpWork]
"""Maps the arguments, the keyword arguments and the result of an operation to its work."""


def products(macs: int, besides: int = 0) -> OpWork:
    return OpWork(macs, 2 * macs + besides)


def _argument(args: Sequence[Any], kwargs: dict[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


# GEMMs ----------------------------------------------------------------------------------------------------------


def _matmul(left: int) -> Formula:
    """Return the formula of a (batched) GEMM without broadcasting of the arguments ``left`` and ``left + 1``."""

    def formula(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpWork:
        return products(args[left].numel() * args[left + 1].shape[-1])

    return formula


def _by_vector(left: int) -> Formula:
    """Return the formula of a matrix or vector (the argument ``left``) times a vector."""
    return lambda args, kwargs, out: products(args[left].numel())


def _general_matmul(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpWork:
    """Count ``torch.matmul``, with its broadcasting rules."""
    return products(out.numel() * args[0].shape[-1])


def _linear(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpWork:
    """Count ``input @ weight.T``. The weight may be packed, so the columns are taken from the result."""
    return products(args[0].numel() * out.shape[-1])


def _grouped(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpWork:
    """Count a grouped GEMM: groups of rows (or columns), each multiplied with its own matrix. 2-d arguments hold the
    groups end to end, 3-d ones in the first dim."""
    a, b = args[0], args[1]
    rows = a.shape[0] * a.shape[1] if a.dim() == 3 and b.dim() == 3 else a.shape[-2]
    return products(rows * a.shape[-1] * b.shape[-1])


def _trilinear(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpWork:
    """Count the sum of products of three broadcast factors (``nn.Bilinear``), without the product of the two smaller
    ones."""
    shapes = []
    for factor, added in zip(args[:3], args[3:6], strict=True):
        shape = list(factor.shape)
        for dim in sorted(added):
            shape.insert(dim, 1)
        shapes.append(shape)
    return products(prod(torch.broadcast_shapes(*shapes)))


# Convolutions ---------------------------------------------------------------------------------------------------


def _convolution_macs(of: Tensor, weight: Tensor) -> int:
    """Count a convolution's MACs: one kernel per element of ``of``, the result or a transposed convolution's input."""
    return of.numel() * prod(weight.shape[1:])


def _convolution(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpWork:
    bias, transposed = _argument(args, kwargs, 2, "bias"), _argument(args, kwargs, 6, "transposed")
    macs = _convolution_macs(args[0] if transposed else out, args[1])
    return products(macs, out.numel() if bias is not None else 0)


def _plain_convolution(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpWork:
    """Count a non-transposed convolution with arguments input, weight and optional bias."""
    bias = next((a for a in args[2:4] if isinstance(a, Tensor)), None)
    return products(_convolution_macs(out, args[1]), out.numel() if bias is not None else 0)


def _convolution_backward(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpWork:
    gradient, given, weight = args[:3]
    transposed, wanted = _argument(args, kwargs, 7, "transposed"), _argument(args, kwargs, 10, "output_mask")
    macs = _convolution_macs(given if transposed else gradient, weight)
    return products(macs * (bool(wanted[0]) + bool(wanted[1])), gradient.numel() if wanted[2] else 0)


# Recurrent layers in one kernel ---------------------------------------------------------------------------------


def _recurrent_products(tokens: int, weights: Sequence[Tensor]) -> OpWork:
    matrices = sum(weight.numel() for weight in weights if weight.dim() > 1)
    return products(
        tokens * matrices, tokens * sum(weight.numel() for weight in weights if weight.dim() == 1)
    )


def _recurrent(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpWork:
    """Count ``_cudnn_rnn`` and ``miopen_rnn``: all layers and directions in one call."""
    return _recurrent_products(args[0].numel() // args[0].shape[-1], args[1])


def _recurrent_backward(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpWork:
    macs = _recurrent(args, kwargs, out).macs
    return products(2 * macs)


def _recurrent_layer(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpWork:
    """Count ``mkldnn_rnn_layer``: one layer in one direction."""
    weights = [weight for weight in args[1:5] if isinstance(weight, Tensor)]
    tokens = args[0].numel() // args[0].shape[-1]
    return _recurrent_products(tokens, weights)


def _recurrent_layer_backward(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpWork:
    return products(2 * _recurrent_layer(args, kwargs, out).macs)


# Attention ------------------------------------------------------------------------------------------------------


def _attention_macs(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Count the MACs of scores and of their product with the values, [..., heads, sequence, head_dim]. Masked pairs
    count, too."""
    return query.numel() * key.shape[-2] + prod(query.shape[:-1]) * key.shape[-2] * value.shape[-1]


def _attention(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpWork:
    return products(_attention_macs(*args[:3]))


def _attention_backward(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpWork:
    """Count two GEMMs for each of the forward's; scores that a kernel recomputes are not counted."""
    return products(2 * _attention_macs(*args[1:4]))


def _attention_by_position(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpWork:
    """Count attention over [batch, sequence, heads, head_dim]."""
    return products(_attention_macs(*(tensor.transpose(-3, -2) for tensor in args[:3])))


def _attention_by_position_backward(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpWork:
    return products(2 * _attention_macs(*(tensor.transpose(-3, -2) for tensor in args[1:4])))


def _packed_attention(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpWork:
    """Count ``_native_multi_head_attention`` over [batch, sequence, width], with the projections packed in one
    weight."""
    query, key, width = args[0], args[1], args[3]
    batch, length, others = query.shape[0], query.shape[1], key.shape[1]
    projections = batch * width * width * (2 * length + 2 * others)
    return products(projections + 2 * batch * length * others * width)


def _encoder_layer(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpWork:
    """Count ``_transformer_encoder_layer_fwd``: self-attention, two linear layers, two norms and an activation."""
    source, width = args[0], args[1]
    batch, length, hidden = source.shape[0], source.shape[1], args[14].shape[0]
    macs = batch * length * (4 * width * width + 2 * width * hidden) + 2 * batch * length * length * width
    norms = 2 * 5 * source.numel()
    return products(macs, norms + batch * length * hidden)


# Elementwise operations and normalizations ----------------------------------------------------------------------


def _per_element(count: int = 1, of: int | None = 0) -> Formula:
    """Return the formula of ``count`` flops per element of the argument ``of``, or of the result (None)."""

    def formula(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpWork:
        tensor = out if of is None else args[of]
        return OpWork(0, count * tensor.numel())

    return formula


def _norm(weight: int, training: int | None = None, of: int = 0, times: int = 1) -> Formula:
    """Return the formula of a normalization: per element four flops (mean, variance, difference, quotient), or one with
    running statistics (the argument ``training`` is false), plus one with a weight; all multiplied by ``times``."""

    def formula(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> OpWork:
        affine = len(args) > weight and args[weight] is not None
        measured = training is None or bool(args[training])
        return OpWork(0, times * (4 * measured + (not measured) + affine) * args[of].numel())

    return formula


_ACTIVATIONS = (
    "relu relu_ gelu silu silu_ elu elu_ leaky_relu leaky_relu_ _prelu_kernel hardtanh hardtanh_ hardswish hardswish_ "
    "mish mish_ softplus hardsigmoid threshold rrelu_with_noise"
)
_POOLS = (
    "avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d "
    "mkldnn_max_pool2d mkldnn_adaptive_avg_pool2d"
)
_RESIZES = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
    "upsample_bicubic2d _upsample_bicubic2d_aa"
)
_BACKWARDS = (
    "gelu silu elu leaky_relu _prelu_kernel hardtanh hardswish mish softplus hardsigmoid threshold _softmax avg_pool2d "
    "avg_pool3d max_pool2d_with_indices max_pool3d_with_indices _adaptive_avg_pool2d _adaptive_avg_pool3d "
    "adaptive_max_pool2d adaptive_max_pool3d"
)

FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm", "_scaled_mm"), _matmul(0)),
    **dict.fromkeys(("addmm", "addmm_", "_addmm_activation"), _matmul(1)),
    **dict.fromkeys(("baddbmm", "baddbmm_", "addbmm", "addbmm_"), _matmul(1)),
    **dict.fromkeys(("mv", "dot", "vdot"), _by_vector(0)),
    **dict.fromkeys(("addmv", "addmv_"), _by_vector(1)),
    "matmul": _general_matmul,
    **dict.fromkeys(("linear", "mkldnn_linear", "_linear_pointwise"), _linear),
    **dict.fromkeys(("_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu", "_weight_int8pack_mm"), _linear),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm"), _grouped),
    "_trilinear": _trilinear,
    **dict.fromkeys(("convolution", "_convolution", "convolution_overrideable"), _convolution),
    **dict.fromkeys(
        ("mkldnn_convolution", "cudnn_convolution", "miopen_convolution", "_convolution_pointwise"),
        _plain_convolution,
    ),
    **dict.fromkeys(("convolution_backward", "convolution_backward_overrideable"), _convolution_backward),
    **dict.fromkeys(("_cudnn_rnn", "miopen_rnn"), _recurrent),
    **dict.fromkeys(("_cudnn_rnn_backward", "miopen_rnn_backward"), _recurrent_backward),
    "mkldnn_rnn_layer": _recurrent_layer,
    "mkldnn_rnn_layer_backward": _recurrent_layer_backward,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_fused_attention_overrideable",
            "_scaled_dot_product_attention_math_for_mps",
            "flex_attention",
        ),
        _attention,
    ),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_flash_attention_for_cpu_backward",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention_backward",
            "_scaled_dot_product_fused_attention_overrideable_backward",
        ),
        _attention_backward,
    ),
    "flex_attention_backward": lambda args, kwargs, out: products(2 * _attention_macs(*args[:3])),
    **dict.fromkeys(("_flash_attention_forward", "_efficient_attention_forward"), _attention_by_position),
    **dict.fromkeys(
        ("_flash_attention_backward", "_efficient_attention_backward"), _attention_by_position_backward
    ),
    "_native_multi_head_attention": _packed_attention,
    "_transformer_encoder_layer_fwd": _encoder_layer,
    **dict.fromkeys(_ACTIVATIONS.split(), _per_element()),
    **dict.fromkeys(_POOLS.split(), _per_element()),
    **dict.fromkeys(_RESIZES.split(), _per_element(of=None)),
    **dict.fromkeys((f"{name}_backward" for name in _BACKWARDS.split()), _per_element()),
    "_softmax": _per_element(),
    "_softmax_backward_data": _per_element(2),
    "native_layer_norm": _norm(2),
    "native_layer_norm_backward": _norm(5, times=2),
    "native_group_norm": _norm(1),
    "native_group_norm_backward": _norm(4, times=2),
    "_fused_rms_norm": _norm(2),
    "_fused_rms_norm_backward": _norm(4, times=2),
    "native_batch_norm": _norm(1, 5),
    "_native_batch_norm_legit": lambda args, kwargs, out: _norm(1, 5 if len(args) > 7 else 3)(
        args, kwargs, out
    ),
    "_native_batch_norm_legit_no_training": lambda args, kwargs, out: OpWork(
        0, (1 + (args[1] is not None)) * args[0].numel()
    ),
    "cudnn_batch_norm": _norm(1, 5),
    "miopen_batch_norm": _norm(1, 5),
    "native_batch_norm_backward": _norm(2, 7, times=2),
    "cudnn_batch_norm_backward": _norm(2, times=2),
    "miopen_batch_norm_backward": _norm(2, times=2),
    "_batch_norm_with_update": _norm(1),
    "_batch_norm_no_update": lambda args, kwargs, out: OpWork(
        0, (1 + (args[1] is not None)) * args[0].numel()
    ),
}
"""Formulas by operation name, without the overload."""
