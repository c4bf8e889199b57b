"""Layers that keep the integer weights of a checkpoint quantized by another library."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from deepspeed.base.module_utils import move_hooks
from deepspeed.checkpoint.foreign.packed_weights import GroupedIntegers
from deepspeed.inference.kernels import IntegerLinear
from deepspeed.ops.small_product import RUNS, QuantizedMatrix, padded_columns


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
