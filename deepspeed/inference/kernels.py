"""Replace a model's layers with layers that run our kernels: matched by type and behaviour, not by a list of models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.base.module_utils import move_hooks
from deepspeed.checkpoint.foreign.packed_weights import GroupedIntegers
from deepspeed.ops.small_product import (
    RUNS,
    QuantizedMatrix,
    SmallProducts,
    padded_columns,
    product,
    quantized_product,
    rounded_product,
    takes_bfloat16,
)


class HostLinear(nn.Linear):
    """A bfloat16 linear layer on the host; for few rows it is limited by memory bandwidth only."""

    products: SmallProducts

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias, self.products)


class IntegerLinear(nn.Module):
    """A linear layer with 8-bit or 4-bit integer weights, and inputs and outputs of any floating-point dtype.

    Args:
        matrix: [outputs, inputs].
        bias: [outputs], or None.
        dtype: dtype that ``weight`` reports.

    ``rounds_inputs``: inputs are rounded to 8 bits as well.
    """

    rounds_inputs = False
    words: Tensor
    scales: Tensor

    def __init__(self, matrix: QuantizedMatrix, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.shape
        self.bits = matrix.bits
        self.dtype = dtype
        self.register_buffer("words", matrix.words)
        self.register_buffer("scales", matrix.scales)
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(dtype), requires_grad=False)
        self.products = SmallProducts()

    @property
    def matrix(self) -> QuantizedMatrix:
        return QuantizedMatrix(self.bits, self.in_features, self.words, self.scales)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight [outputs, inputs], recomputed at each access."""
        return self.matrix.values(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        if self.rounds_inputs:
            return rounded_product(input, self.matrix, self.bias)
        return quantized_product(input, self.matrix, self.bias, self.products)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply ``fn`` to all but the scales, which keep their dtype."""
        scales = self.scales
        super()._apply(fn, recurse)
        self.scales = scales.to(self.words.device)
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


def inject_kernels(module: nn.Module) -> str:
    """Replace linear layers in place. Return a log line that counts replaced and remaining layers."""
    changed = 0
    for layer in module.modules():
        if type(layer) is nn.Linear and takes_bfloat16(layer.weight) and _is_right(layer):
            layer.__class__ = HostLinear
            layer.products = SmallProducts()  # type: ignore[assignment]
            changed += 1
    left = Counter(
        type(layer).__name__
        for layer in module.modules()
        if not isinstance(layer, HostLinear) and any(True for _ in layer.parameters(recurse=False))
    )
    others = ", ".join(f"{count} {name}" for name, count in left.most_common(6)) or "nothing"
    return f"{changed} linear layers use host kernels; unchanged: {others}"


def _is_right(layer: nn.Linear) -> bool:
    """Return whether the kernel's output matches the layer's, for one row."""
    row = torch.linspace(-1, 1, layer.in_features, dtype=torch.bfloat16)[None]
    with torch.no_grad():
        wanted, found = layer(row).float(), product(row, layer.weight, layer.bias).float()
    return bool((found - wanted).norm() <= 0.02 * wanted.norm() + 1e-6)


def quantize_linears(module: nn.Module, bits: int, groups: int, dtype: torch.dtype) -> str:
    """Quantize every linear layer's weights in place, except weights shared with other modules. Return a log line.

    Args:
        bits: 8 or 4.
        groups: scales per row; columns are padded to a multiple of the packing width.
        dtype: of the layers' inputs and outputs.

    ValueError: other bits, or ``groups`` does not divide the rows of some layer; nothing is changed then.
    """
    owners = Counter(id(param) for layer in module.modules() for param in layer._parameters.values())
    layers = [found for found in _linears(module) if owners[id(found[2].weight)] == 1]
    for _, name, layer in layers:
        _require_groups(name, _matrix_of(layer).shape[1], bits, groups)
    count = before = after = 0
    for parent, name, layer in layers:
        weight, matrix = layer.weight, _matrix_of(layer)
        made = QuantizedMatrix.of(matrix, bits, padded_columns(matrix.shape[1], bits) // groups)
        replaced = IntegerLinear(made, layer.bias, dtype).train(layer.training)
        move_hooks(layer, replaced)
        parent._modules[name] = replaced
        count, before = count + 1, before + weight.nbytes
        after += made.words.nbytes + made.scales.nbytes
    return f"{count} linear layers have weights of {bits} bits: {before / 1e6:.1f} MB became {after / 1e6:.1f} MB"


def _matrix_of(layer: Any) -> Tensor:
    """Return the weight as [outputs, inputs]."""
    return layer.weight.detach() if isinstance(layer, nn.Linear) else layer.weight.detach().T


def _require_groups(name: str, columns: int, bits: int, groups: int) -> None:
    if bits not in RUNS:
        raise ValueError(f"quant.weight.num_bits={bits}: must be 8 or 4")
    runs = padded_columns(columns, bits) // RUNS[bits]
    if runs % groups:
        fitting = [n for n in range(1, runs + 1) if runs % n == 0]
        raise ValueError(
            f"quant.weight.q_groups={groups} does not divide the {columns} columns of {name!r} into groups "
            f"of a multiple of {RUNS[bits]} columns, which {bits} bits need; this layer allows {fitting}, "
            "and 1 works for every layer"
        )


def _linears(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield (parent, name, layer) of torch's linear layers, and of GPT-2's Conv1D, whose weights are transposed."""
    for parent in module.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear or type(child).__name__ == "Conv1D":
                yield parent, name, child


# Integer weights of a checkpoint quantized by another library.


def keep_integers(module: nn.Module, name: str, weight: GroupedIntegers) -> bool:
    """Replace the linear layer that owns the parameter ``name`` by an `IntegerLinear` with these integers and the same
    bias. Return False if there is no such layer, or the kernels have no layout for these groups."""
    path, _, child = name.removesuffix(".weight").rpartition(".")
    try:
        parent = module.get_submodule(path)
    except AttributeError:
        return False
    layer = parent._modules.get(child)
    if type(layer) is not nn.Linear or layer.weight.shape != weight.levels.shape:
        return False
    matrix = quantized_matrix(weight)
    if matrix is None:
        return False
    replaced = IntegerLinear(matrix, layer.bias, layer.weight.dtype).train(layer.training)
    move_hooks(layer, replaced)
    parent._modules[child] = replaced
    return True


def quantized_matrix(weight: GroupedIntegers) -> QuantizedMatrix | None:
    """Repack ``weight`` for the kernels, in 4 bits if its integers fit, else in 8. None: the integers need more bits,
    or the groups are not whole runs of columns."""
    columns, count = weight.levels.shape[1], weight.scales.shape[1]
    size = -(-columns // count)
    if not torch.equal(weight.groups, torch.arange(columns) // size):
        return None
    least, largest = (int(each) for each in weight.levels.aminmax())
    for bits in sorted(RUNS):
        padded = padded_columns(columns, bits)
        fits = -(2 ** (bits - 1)) <= least and largest < 2 ** (bits - 1)
        if fits and (count == 1 or (size % RUNS[bits] == 0 and size * count == padded)):
            levels = functional.pad(weight.levels.to(torch.int32), (0, padded - columns))
            return QuantizedMatrix(
                bits, columns, QuantizedMatrix.from_levels(levels, bits), weight.scales.float().contiguous()
            )
    return None
