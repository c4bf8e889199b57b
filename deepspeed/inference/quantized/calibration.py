"""Quantize weights with calibration text: GPTQ, and AWQ-style scaling.

*GPTQ* (Frantar et al. 2022) rounds a matrix column by column, and lets the remaining columns compensate the error on
the calibration inputs: from the inverse of the second moments ``H = X X^T``, whose Cholesky factor supplies every
update in one pass. Columns with the largest inputs come first; scales are fixed beforehand, so columns keep their
groups.

*AWQ* (Lin et al. 2023) scales up columns with large inputs before rounding, which reduces their error:
``s = mean |x| ** a``, with the ``a`` that gives the smallest output error. The layer divides its inputs by ``s``.

Blocks of the model are quantized in order, each with the inputs that the already quantized blocks before it produce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.base.module_utils import move_hooks
from deepspeed.inference.kernels import IntegerLinear
from deepspeed.ops.small_product import RUNS, QuantizedMatrix
from deepspeed.zero.partitioning import blocks_of

Method = Literal["gptq", "awq", "nearest"]
METHODS: tuple[Method, ...] = ("gptq", "awq", "nearest")
_DAMPING = 0.01
_SHRINKS = tuple(1 - 0.05 * step for step in range(9))
"""Fractions of a group's largest value to try as the largest integer."""
_EXPONENTS = tuple(step / 10 for step in range(10))
_COLUMNS = 128
"""Columns that GPTQ rounds before it updates those behind them."""


class ScaledIntegerLinear(IntegerLinear):
    """A layer whose weights were multiplied by ``factors`` [inputs] and which divides its inputs by them."""

    factors: Tensor

    def __init__(
        self, matrix: QuantizedMatrix, bias: Tensor | None, dtype: torch.dtype, factors: Tensor
    ) -> None:
        super().__init__(matrix, bias, dtype)
        self.register_buffer("factors", factors)

    @property
    def weight(self) -> Tensor:
        return self.matrix.values(self.dtype) / self.factors.to(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input / self.factors.to(input.dtype))


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """``errors``: output error of each layer on the text, relative to the output norm. ``bytes_before``,
    ``bytes_after``: of the quantized weights."""

    method: str
    bits: int
    errors: dict[str, float]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        worst = max(self.errors, key=lambda name: self.errors[name])
        return (
            f"{len(self.errors)} linear layers have weights of {self.bits} bits by {self.method}: "
            f"{self.bytes_before / 1e6:.1f} MB became {self.bytes_after / 1e6:.1f} MB; largest output error "
            f"{self.errors[worst]:.1%}, of {worst}"
        )


def quantize_calibrated(
    module: nn.Module,
    batches: Iterable[Any],
    *,
    bits: int = 4,
    group_size: int = 128,
    method: Method = "gptq",
    dtype: torch.dtype | None = None,
) -> CalibrationReport:
    """Quantize the linear layers in the blocks of ``module``, in place; embeddings and head are kept.

    Args:
        module: any model with repeated blocks.
        batches: inputs of its forward: each a tensor of token ids [rows, tokens], a tuple or a dict. A few thousand
            tokens of representative text.
        bits: 8 or 4.
        group_size: columns of a row per scale: a multiple of 64 (8 bits) or 128 (4 bits).
        method: "gptq", "awq", or "nearest", which uses the text only for the report.
        dtype: of the layers' inputs and outputs; None: the dtype of their weights.

    Raises:
        ValueError: no batches, no linear layers in blocks, or invalid sizes.
    """
    given = list(batches)
    blocks = blocks_of(module)
    names = {id(layer): path for path, layer in module.named_modules()}
    if method not in METHODS:
        raise ValueError(f"method={method!r}: expected one of {', '.join(METHODS)}")
    if bits not in RUNS or group_size < 1 or group_size % RUNS[bits]:
        raise ValueError(
            f"bits={bits}, group_size={group_size}: 8 bits in groups of a multiple of 64, or 4 of a multiple of 128"
        )
    if not given:
        raise ValueError("quantize_calibrated: no batches: a few thousand tokens of text are needed")
    if not any(True for block in blocks for _ in linears_of(block)):
        raise ValueError(f"{type(module).__name__} has no blocks with linear layers")
    errors: dict[str, float] = {}
    before = after = 0
    for block in blocks:
        layers = {id(layer): layer for _, _, layer in linears_of(block)}
        moments = input_moments(module, block, layers, given)
        for parent, name, layer in list(linears_of(block)):
            inputs = moments[id(layer)]
            made, error = _quantized(layer, inputs, bits, group_size, method, dtype or layer.weight.dtype)
            errors[names[id(layer)]] = error
            before += layer.weight.nbytes
            after += made.words.nbytes + made.scales.nbytes
            parent._modules[name] = made.train(layer.training)
            move_hooks(layer, made)
    return CalibrationReport(method, bits, errors, before, after)


# ------------------------------------------------------------------------------------------------- the text


@dataclass(eq=False, slots=True)
class Moments:
    """Moments of a layer's inputs x over all rows: ``second`` fp32 [inputs, inputs], the sum of x x^T; ``absolute``
    [inputs], the sum of |x|."""

    second: Tensor
    absolute: Tensor
    count: int = 0

    def add(self, inputs: Tensor) -> None:
        rows = inputs.reshape(-1, inputs.shape[-1]).float()
        self.second.addmm_(rows.t(), rows)
        self.absolute += rows.abs().sum(0)
        self.count += len(rows)


class _BlockDone(Exception):
    """Ends a forward once the block has run, as the rest is not needed."""


def input_moments(
    module: nn.Module, block: nn.Module, layers: Mapping[int, Any], batches: Sequence[Any]
) -> dict[int, Moments]:
    found = {
        key: Moments(
            torch.zeros(layer.in_features, layer.in_features, device=layer.weight.device),
            torch.zeros(layer.in_features, device=layer.weight.device),
        )
        for key, layer in layers.items()
    }

    def seen(key: int) -> Callable[..., None]:
        return lambda _, inputs: found[key].add(inputs[0].detach())

    def stop(*_: Any) -> None:
        raise _BlockDone

    handles = [layer.register_forward_pre_hook(seen(key)) for key, layer in layers.items()]
    handles.append(block.register_forward_hook(stop))
    try:
        with torch.no_grad():
            for batch in batches:
                try:
                    _run(module, batch)
                except _BlockDone:
                    continue
    finally:
        for handle in handles:
            handle.remove()
    return found


def _run(module: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        module(**batch)
    elif isinstance(batch, (tuple, list)):
        module(*batch)
    else:
        module(batch)


def linears_of(block: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for parent in block.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                yield parent, name, child


# ---------------------------------------------------------------------------------------------- one matrix


def _quantized(
    layer: Any, inputs: Moments, bits: int, group: int, method: Method, dtype: torch.dtype
) -> tuple[IntegerLinear, float]:
    weight = layer.weight.detach().float()
    extra = -weight.shape[1] % group
    second = functional.pad(inputs.second, (0, extra, 0, extra))
    wide = functional.pad(weight, (0, extra))
    factors: Tensor | None = None
    if method == "awq":
        factors = _factors(wide, second, inputs, bits, group)
        wide = wide * factors
        factors = factors[: weight.shape[1]].contiguous()
    nearest = method == "nearest"
    scales = _largest(wide, bits, group) if nearest else _scales(wide, second.diagonal(), bits, group)
    gptq = method == "gptq"
    levels = _gptq(wide, second, scales, bits, group) if gptq else _levels(wide, scales, bits, group)
    words = QuantizedMatrix.from_levels(levels.to(torch.int32), bits)
    matrix = QuantizedMatrix(bits, weight.shape[1], words, scales)
    values = matrix.values(torch.float32)
    if factors is None:
        made = IntegerLinear(matrix, layer.bias, dtype)
    else:
        made, values = ScaledIntegerLinear(matrix, layer.bias, dtype, factors), values / factors
    return made, _output_error(weight, values, inputs.second)


def _output_error(weight: Tensor, values: Tensor, second: Tensor) -> float:
    """Return ||(W - Q) X|| / ||W X||."""
    difference = weight - values
    wrong = ((difference @ second) * difference).sum()
    return float((wrong.clamp(min=0) / ((weight @ second) * weight).sum().clamp(min=1e-30)).sqrt())


def _largest(wide: Tensor, bits: int, group: int) -> Tensor:
    """Return scales fp32 [outputs, groups] that map each group's largest value to the largest integer."""
    scales = wide.view(len(wide), -1, group).abs().amax(-1) / (2 ** (bits - 1) - 1)
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def _scales(wide: Tensor, importance: Tensor, bits: int, group: int) -> Tensor:
    """Return scales [outputs, groups] with the least squared error among ``_SHRINKS`` of the largest value, columns
    weighted by ``importance``, the sum of squares of their inputs."""
    largest = _largest(wide, bits, group)
    best, least = largest, torch.full_like(largest, torch.inf)
    weights = importance.view(1, -1, group)
    for part in _SHRINKS:
        scales = largest * part
        rounded = _levels(wide, scales, bits, group).view(len(wide), -1, group) * scales[..., None]
        error = ((rounded - wide.view(rounded.shape)).square() * weights).sum(-1)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    return best


def _levels(wide: Tensor, scales: Tensor, bits: int, group: int) -> Tensor:
    most = 2 ** (bits - 1) - 1
    grouped = wide.view(len(wide), -1, group) / scales[..., None]
    return grouped.round().clamp(-most, most).view(wide.shape)


def _factors(wide: Tensor, second: Tensor, inputs: Moments, bits: int, group: int) -> Tensor:
    """Return AWQ's column scales, fp32 [columns]."""
    mean = functional.pad(inputs.absolute / max(1, inputs.count), (0, wide.shape[1] - len(inputs.absolute)))
    mean = mean.clamp(min=1e-4 * float(mean.max()) + 1e-12)
    best, least = torch.ones_like(mean), float("inf")
    for exponent in _EXPONENTS:
        factors = mean**exponent
        factors = factors / (factors.max() * factors.min()).sqrt()
        scaled = wide * factors
        scales = _largest(scaled, bits, group)
        values = _levels(scaled, scales, bits, group).view(len(wide), -1, group) * scales[..., None]
        error = _output_error(wide, values.view(wide.shape) / factors, second)
        if error < least:
            best, least = factors, error
    return best


def _gptq(wide: Tensor, second: Tensor, scales: Tensor, bits: int, group: int) -> Tensor:
    """Return GPTQ's integers [outputs, columns]."""
    most = 2 ** (bits - 1) - 1
    hessian = second.double()
    diagonal = hessian.diagonal()
    diagonal += _DAMPING * float(diagonal.mean()) + 1e-12  # keeps H invertible if an input is always 0
    order = diagonal.argsort(descending=True)
    left = wide[:, order].clone()
    columns_scale = scales.repeat_interleave(group, 1)[:, order]
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian[order][:, order]))
    upper = torch.linalg.cholesky(inverse, upper=True).float()
    levels = torch.empty_like(left)
    for start in range(0, left.shape[1], _COLUMNS):
        stop = min(start + _COLUMNS, left.shape[1])
        errors = left.new_empty(len(left), stop - start)
        for column in range(start, stop):
            scale = columns_scale[:, column]
            levels[:, column] = (left[:, column] / scale).round().clamp(-most, most)
            error = (left[:, column] - levels[:, column] * scale) / upper[column, column]
            left[:, column:stop] -= error[:, None] * upper[column, column:stop]
            errors[:, column - start] = error
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    return levels[:, order.argsort()]
