"""Bias addition for convolutions in channels-last layout; also the op ``spatial_inference``."""

from __future__ import annotations

from torch import Tensor


def nhwc_bias_add(
    activation: Tensor, bias: Tensor, other: Tensor | None = None, other_bias: Tensor | None = None
) -> Tensor:
    """Return ``activation + bias + other + other_bias``; the last two are optional.

    Shapes: activations [batch, channels, height, width], or [batch, positions, channels]; biases [channels]. Memory
    formats are preserved.
    """
    if other_bias is not None and other is None:
        raise ValueError("other_bias needs other")
    shape = (1, -1, 1, 1) if activation.dim() == 4 else (-1,)
    result = activation + bias.view(shape)
    if other is None:
        return result
    return result + (other if other_bias is None else other + other_bias.view(shape))


def nhwc_bias_add_add(activation: Tensor, bias: Tensor, other: Tensor) -> Tensor:
    """Return ``activation + bias + other``."""
    return nhwc_bias_add(activation, bias, other)


def nhwc_bias_add_bias_add(activation: Tensor, bias: Tensor, other: Tensor, other_bias: Tensor) -> Tensor:
    """Return ``activation + bias + (other + other_bias)``."""
    return nhwc_bias_add(activation, bias, other, other_bias)
