"""A linear layer as a grid of smaller ones that run in sequence.

Under ZeRO stage 3 a module's parameters are gathered for its call. A layer with a huge weight (a vocabulary head)
then needs memory for all of it at once; a tiled one needs memory for one tile at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.exceptions import SplitError
from deepspeed.base.sharded import full_shape, is_zero_param
from deepspeed.zero.gathering.gathered_parameters import GatheredParameters

Output = Any
"""What one tile returns: a tensor, or ``(tensor, bias or None)`` for layers that leave the bias to the caller."""


def split_tensor_along_last_dim(
    tensor: Tensor, partitions: Sequence[int], contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split [..., n] into parts of the given sizes, which add up to n; views unless contiguous parts are requested."""
    parts = tensor.split(list(partitions), dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


class TiledLinear(nn.Module):
    """``linear_cls(in_features, out_features)`` split into ``out_splits`` x ``in_splits`` tiles.

    Outside the repeated blocks of a model, stage 3 gathers one row of tiles at a time; a block is gathered whole.

    The tiles of one row add up to one part of the output; only the last tile of a row has a bias. Sizes need not be
    divisible: the first parts are then one element larger. The result equals the whole layer's up to the order of
    summation, and exactly if ``in_splits`` is 1.

    Args:
        in_features, out_features, bias: as for ``torch.nn.Linear``.
        in_splits, out_splits: numbers of parts of the input and output features.
        input_is_already_split: ``forward`` takes a sequence of ``in_splits`` tensors instead of one.
        combine_out_splits: False makes ``forward`` return the ``out_splits`` parts as a list.
        linear_cls: class of the tiles.
        init_linear: a whole layer whose values are copied to the tiles; None keeps their own initialization, which
            depends on the size of the tile.
        kwargs: passed to every tile.

    Attributes:
        linears: ``ModuleList`` of rows, each a ``ModuleList`` of tiles: ``linears[out_part][in_part]``.
        in_parts, out_parts: bounds of the parts: tile ``linears[i][j]`` holds the rows ``out_parts[i]`` to
            ``out_parts[i + 1]`` and the columns ``in_parts[j]`` to ``in_parts[j + 1]``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bool(bias)
        self.in_splits = in_splits
        self.out_splits = out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self.in_sizes = _sizes("in", in_features, in_splits)
        self.out_sizes = _sizes("out", out_features, out_splits)
        self.in_parts = [0, *itertools.accumulate(self.in_sizes)]
        self.out_parts = [0, *itertools.accumulate(self.out_sizes)]
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(size, rows, bias=self.use_bias and i == in_splits - 1, **kwargs)
                for i, size in enumerate(self.in_sizes)
            )
            for rows in self.out_sizes
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Output:
        inputs = self._inputs(input_)
        outputs = [
            self._sum([tile(part) for tile, part in zip(row, inputs, strict=True)])  # type: ignore[arg-type]
            for row in self.linears
        ]
        return self._combine(outputs) if self.combine_out_splits else outputs

    def _inputs(self, input_: Any) -> Sequence[Tensor]:
        if self.input_is_already_split or not isinstance(input_, Tensor):
            if isinstance(input_, Tensor) or len(input_) != self.in_splits:
                found = "one tensor" if isinstance(input_, Tensor) else f"{len(input_)} tensors"
                raise SplitError(f"input_is_already_split: pass {self.in_splits} tensors, not {found}")
            return input_
        if input_.shape[-1] != self.in_features:
            raise ValueError(f"in_features={self.in_features}, but the input has shape {tuple(input_.shape)}")
        return split_tensor_along_last_dim(input_, self.in_sizes)

    def _sum(self, outputs: list[Output]) -> Output:
        """Add up the outputs of the tiles of one row."""
        total = outputs[0]
        for output in outputs[1:]:
            total = total + output
        return total

    def _combine(self, outputs: list[Output]) -> Output:
        """Join the parts of the output."""
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def copy_params_from(self, other: nn.Module) -> None:
        """Copy weight [out_features, in_features] and bias [out_features] of a whole layer. Collective under ZeRO-3.

        Raises:
            ValueError: ``other`` has another shape, or one of the two lacks a bias.
        """
        weight, bias = other.weight, getattr(other, "bias", None)
        if tuple(full_shape(weight)) != (self.out_features, self.in_features):  # type: ignore[arg-type]
            raise ValueError(
                f"a weight of shape {tuple(full_shape(weight))} does not fit a TiledLinear of shape "  # type: ignore[arg-type]
                f"{(self.out_features, self.in_features)}"
            )
        if (bias is not None) != self.use_bias:
            has = "a bias" if bias is not None else "no bias"
            raise ValueError(f"bias={self.use_bias}, but the source layer has {has}")
        with GatheredParameters([p for p in (weight, bias) if p is not None]), torch.no_grad():
            rows = weight.data.split(self.out_sizes)  # type: ignore[operator,union-attr]
            for row, values in zip(self.linears, rows, strict=True):
                for tile, value in zip(row, values.split(self.in_sizes, dim=1), strict=True):  # type: ignore[arg-type]
                    _set(tile.weight, value)
            if bias is not None:
                for row, value in zip(self.linears, bias.data.split(self.out_sizes), strict=True):  # type: ignore[operator,union-attr]
                    _set(row[-1].bias, value)  # type: ignore[index]

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"in_splits={self.in_splits}, out_splits={self.out_splits}"
        )


class TiledLinearReturnBias(TiledLinear):
    """``TiledLinear`` for tiles that return ``(output, bias or None)``, as this does; the caller adds the bias."""

    def _sum(self, outputs: list[Output]) -> Output:
        total = super()._sum([output for output, _ in outputs])
        biases = [bias for _, bias in outputs if bias is not None]
        return total, (super()._sum(biases) if biases else None)

    def _combine(self, outputs: list[Output]) -> Output:
        biases = [bias for _, bias in outputs]
        joined = super()._combine([output for output, _ in outputs])
        return joined, (None if any(bias is None for bias in biases) else super()._combine(biases))


def _sizes(side: str, features: int, splits: int) -> list[int]:
    if not 1 <= splits <= features:
        raise SplitError(f"{side}_splits={splits} must lie between 1 and {side}_features={features}")
    small, larger = divmod(features, splits)
    return [small + (i < larger) for i in range(splits)]


def _set(param: Any, value: Tensor) -> None:
    """Write a parameter, partitioned or not, from a value that is equal on all ranks."""
    rank = param.ds_owner.all_ranks.ranks[0] if is_zero_param(param) else None
    with GatheredParameters(param, modifier_rank=rank):
        param.data.copy_(value)
