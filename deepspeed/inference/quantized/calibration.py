"""Integer weights chosen by what a model computes on a small text: GPTQ, and scaling in the manner of AWQ.

*GPTQ* (Frantar et al. 2022) rounds a matrix column by column, and has the columns that are left make up for the error
on the inputs of the text: with the inverse of their second moments ``H = X X^T``, of which a Cholesky factor gives all
that is needed in one pass. Columns with the largest inputs come first; scales are chosen beforehand, so that integers
stay in their places.

*AWQ* (Lin et al. 2023) makes the columns with large inputs larger before rounding, which makes their error smaller:
``s = mean |x| ** a``, with the ``a`` whose outputs are nearest. The inputs are divided by ``s`` when the layer runs.

Blocks of the model are done in order, each with the inputs that the ones before, which have integers already, give it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.base.module_utils import keep_hooks
from deepspeed.inference.kernels import IntegerLinear
from deepspeed.ops.small_product import RUNS, QuantizedMatrix
from deepspeed.zero.partitioning import blocks_of

Method = Literal["gptq", "awq", "nearest"]
METHODS: tuple[Method, ...] = ("gptq", "awq", "nearest")
_DAMPING = 0.01
_SHRINKS = tuple(1 - 0.05 * step for step in range(9))
"""Parts of a group's largest value that become its largest integer."""
_EXPONENTS = tuple(step / 10 for step in range(10))
_COLUMNS = 128
"""That GPTQ rounds before it tells the columns behind them."""


class ScaledIntegerLinear(IntegerLinear):
    """A layer whose weights were multiplied by ``factors`` [inputs], by which it divides its inputs."""

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
    """``errors``: of each layer's outputs on the text, relative to their norm. ``bytes_before``, ``bytes_after``: of
    the weights that became integers."""

    method: str
    bits: int
    errors: dict[str, float]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        worst = max(self.errors, key=lambda name: self.errors[name])
        return (
            f"{len(self.errors)} linear layers have weights of {self.bits} bits by {self.method}: "
            f"{self.bytes_before / 1e6:.1f} MB became {self.bytes_after / 1e6:.1f} MB; the largest error of outputs is "
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
    """Give the linear layers in the blocks of ``module`` integer weights, in place; embeddings and head stay.

    Args:
        module: any model with repeated blocks.
        batches: inputs of its forward: a tensor of token numbers [rows, tokens], a tuple or a dict each. Some thousand
            tokens of text like that which it will see.
        bits: 8 or 4.
        group_size: columns of a row with one scale: a multiple of 64 (8 bits) or 128 (4 bits).
        method: "gptq", "awq", or "nearest", which needs the text for the report only.
        dtype: of the layers' inputs and outputs; None: of their weights.

    Raises:
        ValueError: no batches, no linear layers in blocks, or sizes that are not possible.
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
        raise ValueError(
            "quantize_calibrated: no batches were given: some thousand tokens of text are needed"
        )
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
            keep_hooks(layer, made)
    return CalibrationReport(method, bits, errors, before, after)


# ------------------------------------------------------------------------------------------------- the text


@dataclass(eq=False, slots=True)
class Moments:
    """Moments of a layer's inputs: ``second`` fp32 [inputs, inputs], the sum of x x^T; ``absolute`` [inputs], of
    |x|."""

    second: Tensor
    absolute: Tensor
    count: int = 0

    def add(self, inputs: Tensor) -> None:
        rows = inputs.reshape(-1, inputs.shape[-1]).float()
        self.second.addmm_(rows.t(), rows)
        self.absolute += rows.abs().sum(0)
        self.count += len(rows)


class _BlockDone(Exception):
    """The block has run: what comes after it is not needed."""


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
    padded = -(-weight.shape[1] // group) * group
    extra = padded - weight.shape[1]
    second = functional.pad(inputs.second, (0, extra, 0, extra))
    wide = functional.pad(weight, (0, extra))
    factors: Tensor | None = None
    if method == "awq":
        factors = _factors(wide, second, inputs, bits, group)
        wide = wide * factors
    elif method == "gptq":
        scales = _scales(wide, second.diagonal(), bits, group)
        levels = _gptq(wide, second, scales, bits, group)
    if method != "gptq":
        importance = second.diagonal() if method == "awq" else torch.ones(padded, device=wide.device)
        scales = _scales(wide, importance, bits, group) if method == "awq" else _largest(wide, bits, group)
        levels = _levels(wide, scales, bits, group)
    words = QuantizedMatrix.from_levels(levels.to(torch.int32), bits)
    matrix = QuantizedMatrix(bits, weight.shape[1], words, scales)
    made = (
        IntegerLinear(matrix, layer.bias, dtype)
        if factors is None
        else ScaledIntegerLinear(matrix, layer.bias, dtype, factors[: weight.shape[1]].contiguous())
    )
    values = matrix.values(torch.float32)
    if factors is not None:
        values = values / factors[: weight.shape[1]]
    return made, _output_error(weight, values, inputs.second)


def _output_error(weight: Tensor, values: Tensor, second: Tensor) -> float:
    """||(W - Q) X|| / ||W X||."""
    difference = weight - values
    wrong = ((difference @ second) * difference).sum()
    return float((wrong.clamp(min=0) / ((weight @ second) * weight).sum().clamp(min=1e-30)).sqrt())


def _largest(wide: Tensor, bits: int, group: int) -> Tensor:
    """fp32 [outputs, groups]: the scale with which a group's largest value is the largest integer."""
    scales = wide.view(len(wide), -1, group).abs().amax(-1) / (2 ** (bits - 1) - 1)
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def _scales(wide: Tensor, importance: Tensor, bits: int, group: int) -> Tensor:
    """[outputs, groups]: of a few parts of the largest value, the one with the least error, each column's weighted by
    its inputs' squares."""
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
    """fp32 [columns]."""
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
    """Integers [outputs, columns]."""
    most = 2 ** (bits - 1) - 1
    hessian = second.double()
    diagonal = hessian.diagonal()
    diagonal += _DAMPING * float(diagonal.mean()) + 1e-12  # an input that is always 0 rounds alone
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
