"""Biases of convolutions whose channels lie next to each other in memory."""

from __future__ import annotations

from torch import Tensor


def nhwc_bias_add(
    activation: Tensor, bias: Tensor, other: Tensor | None = None, other_bias: Tensor | None = None
) -> Tensor:
    """``activation + bias``, plus ``other``, plus ``other_bias``; all but the first two may be left out.

    Shapes: activations [batch, channels, height, width], biases [channels]. Memory formats are kept.
    """
    if other_bias is not None and other is None:
        raise ValueError("other_bias was given without other, to which it belongs")
    result = activation + bias.view(1, -1, 1, 1)
    if other is None:
        return result
    return result + (other if other_bias is None else other + other_bias.view(1, -1, 1, 1))
