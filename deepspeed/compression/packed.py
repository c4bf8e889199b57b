"""Layers of cleaned models that store weights as packed integers: `bits` per element, plus scales.

They are made from ordinary layers in place, as compressed ones are. `weight` is dequantized on every access.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.compression.packing import Codes, Grid
from deepspeed.compression.techniques import Compressible, QuantAct
from deepspeed.compression.utils import SYMMETRIC, AsymQuantizer, SymQuantizer
from deepspeed.ops.formats.integers import asymmetric_levels, symmetric_levels
from deepspeed.ops.formats.packing import pack_bits, unpack_bits
from deepspeed.ops.small_product import RUNS, QuantizedMatrix, quantized_product


@cache
def sums_integers_exactly() -> bool:
    """Return whether torch's int8 GEMM on the host is exact. Without VNNI (AVX2 only), the sum of two adjacent
    products saturates at 16 bits."""
    most = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(most, most.t()) == 64 * 127**2).all())


@dataclass(frozen=True, slots=True)
class PackingFormat:
    """Byte layout of a weight. ``in_runs``: as the small-product kernels read it; else codes are contiguous."""

    codes: Codes
    shape: tuple[int, ...]
    in_runs: bool = False

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return torch.Size(self.shape[1:]).numel()


@dataclass(frozen=True, slots=True)
class Inputs:
    """Quantization of a layer's inputs. ``fixed``: the range is the buffer ``x_min_max``; else each token or image has
    its own."""

    bits: int
    symmetric: bool
    fixed: bool


class PackedWeight(nn.Module):
    """Base of packed layers.

    Buffers: ``weight_packed`` (uint8, or int32 for the kernels), ``weight_scales`` (fp32 [groups]); if asymmetric,
    ``weight_zeros`` [groups]; if columns were removed from groups, ``weight_groups`` (int16), the group of each column
    within its row.
    """

    weight_packed: Tensor
    weight_scales: Tensor
    weight_zeros: Tensor | None
    weight_groups: Tensor | None
    packing: PackingFormat
    weight_dtype: torch.dtype
    inputs: Inputs | None

    @classmethod
    def take(
        cls, module: nn.Module, grid: Grid, groups: Tensor | None, inputs: Inputs | None
    ) -> PackedWeight:
        """Convert ``module``, whose class is a base of this one, to hold its weight packed as the settled ``grid``."""
        weight = cast(Tensor, module._parameters.pop("weight"))
        module.__class__ = cls
        made = cast(PackedWeight, module)
        made.weight_dtype, made.inputs = weight.dtype, inputs
        in_runs = groups is None and made._suits_kernel(grid)
        made.packing = PackingFormat(grid.codes, tuple(grid.levels.shape), in_runs)
        if in_runs:
            packed = QuantizedMatrix.from_levels(grid.levels.to(torch.int32), grid.codes.bits)
        else:
            packed = pack_bits(grid.codes.of(grid.levels).flatten(), grid.codes.bits)
        made.register_buffer("weight_packed", packed)
        made.register_buffer("weight_scales", grid.scales.clone())
        made.register_buffer("weight_zeros", None if grid.zeros is None else grid.zeros.clone())
        made.register_buffer("weight_groups", groups)
        bias = made._parameters.get("bias")
        if bias is not None:
            bias.requires_grad_(False)
        return made

    def _suits_kernel(self, grid: Grid) -> bool:
        return False

    @property
    def weight(self) -> Tensor:
        """The weight, dequantized to ``weight_dtype``, in the ordinary layer's shape."""
        packing = self.packing
        if packing.in_runs:
            return self._matrix().values(self.weight_dtype)
        codes = unpack_bits(self.weight_packed, packing.codes.bits, packing.rows * packing.columns)
        return self._scaled(packing.codes.levels(codes).float()).to(self.weight_dtype).view(packing.shape)

    def _scaled(self, levels: Tensor) -> Tensor:
        scales, zeros = self.weight_scales[:, None], self.weight_zeros
        if self.weight_groups is not None:
            chosen = self.weight_groups.long()
            levels = levels.view(self.packing.rows, -1)
            scales = self.weight_scales.view(self.packing.rows, -1)[:, chosen]
            zeros = None if zeros is None else zeros.view(self.packing.rows, -1)[:, chosen]
        else:
            levels = levels.view(self.weight_scales.numel(), -1)
            zeros = None if zeros is None else zeros[:, None]
        levels = levels.mul_(scales)
        return levels if zeros is None else levels.add_(zeros)

    def _matrix(self) -> QuantizedMatrix:
        rows, groups = self.packing.rows, self.weight_scales.numel()
        scales = self.weight_scales
        scales = scales.repeat_interleave(rows // groups)[:, None] if groups < rows else scales.view(rows, -1)
        return QuantizedMatrix(self.packing.codes.bits, self.packing.columns, self.weight_packed, scales)

    def _quantized_input(self, input: Tensor, groups: int) -> Tensor:
        """Fake-quantize the input, as in training."""
        if self.inputs is None:
            return input
        low, high = self._range()
        kind = SymQuantizer if self.inputs.symmetric else AsymQuantizer
        return kind.apply(input, self.inputs.bits, low, high, groups if low is None else 1)

    def _range(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the fixed range of inputs; (None, None): each token or image has its own."""
        if self.inputs is None or not self.inputs.fixed:
            return None, None
        low, high = cast(QuantAct, self.activation_quantizer).x_min_max.float()
        return low, high

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Apply ``fn``, but keep the dtype of scales and zero points; a new dtype applies to the dequantized weight."""
        exact = {name: getattr(self, name) for name in ("weight_scales", "weight_zeros")}
        self.weight_dtype = fn(
            torch.empty(0, dtype=self.weight_dtype, device=self.weight_packed.device)
        ).dtype
        super()._apply(fn, recurse)
        for name, tensor in exact.items():
            if tensor is not None:
                setattr(self, name, tensor.to(self.weight_packed.device))
        return self

    def extra_repr(self) -> str:
        inputs = "" if self.inputs is None else f", inputs of {self.inputs.bits} bits"
        bits, groups = self.packing.codes.bits, self.weight_scales.numel()
        return f"{super().extra_repr()}, bits={bits}, groups={groups}{inputs}"


class PackedLinear(PackedWeight, nn.Linear):
    """A linear layer with packed weights.

    - Inputs quantized in training to at most 8 bits: integer GEMM on the host.
    - Unquantized inputs and symmetric 8- or 4-bit weights whose columns suit the kernels: up to 64 rows of bfloat16 by
      the kernel that reads integers.
    - Otherwise the weight is dequantized for the product and dropped.
    """

    def _suits_kernel(self, grid: Grid) -> bool:
        bits, columns = grid.codes.bits, grid.shape[1]
        if self.inputs is not None or grid.zeros is not None or bits not in RUNS or not grid.codes.has_zero:
            return False
        per_row = max(grid.scales.numel() // max(grid.shape[0], 1), 1)
        return grid.aligned and columns > 0 and columns % (RUNS[bits] * per_row) == 0

    def forward(self, input: Tensor) -> Tensor:
        graph = torch.is_grad_enabled() and input.requires_grad
        if self.packing.in_runs and not graph and (self.bias is None or self.bias.dtype is input.dtype):
            return quantized_product(input, self._matrix(), self.bias)
        if not graph and self._multiplies_integers(input):
            return self._integer_product(input)
        rows = max(input.numel() // max(input.shape[-1], 1), 1)
        return functional.linear(self._quantized_input(input, rows), self.weight, self.bias)

    def _multiplies_integers(self, input: Tensor) -> bool:
        """Return whether inputs and weights are integers on the host, with one scale per output."""
        if (
            self.inputs is None
            or self.inputs.bits > 8
            or input.numel() == 0
            or self.weight_groups is not None
        ):
            return False
        host = input.device.type == "cpu" and torch.backends.mkldnn.is_available()
        return host and self.packing.rows % self.weight_scales.numel() == 0 and sums_integers_exactly()

    def _integer_product(self, input: Tensor) -> Tensor:
        """Compute the sum over columns of (a s + u) (b t + v), with int8 a and b, s and u per token, t and v per
        output."""
        a, s, u = self._integer_inputs(input.reshape(-1, input.shape[-1]).float())
        b, (t, v) = self._integer_weight(), self._scales_per_output()
        output = torch._int_mm(a, b.t()).float().mul_(s).mul_(t)
        if v is not None:
            output += (a.sum(dim=1, keepdim=True, dtype=torch.float32) * s) * v
        if u is not None:
            column_sums = b.sum(dim=1, dtype=torch.float32) * t
            if v is not None:
                column_sums += v * b.shape[1]
            output += u * column_sums
        if self.bias is not None:
            output += self.bias
        return output.to(input.dtype).view(*input.shape[:-1], -1)

    def _integer_inputs(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return int8 [tokens, columns], scale, and zero point if asymmetric."""
        assert self.inputs is not None
        low, high = self._range()
        if self.inputs.symmetric:
            largest = None if low is None or high is None else torch.maximum(low.abs(), high.abs())
            levels, scale = symmetric_levels(rows, self.inputs.bits, largest)
            return levels.to(torch.int8), scale, None
        levels, scale, zero = asymmetric_levels(rows, self.inputs.bits, low, high)
        middle = 2 ** (self.inputs.bits - 1)
        return levels.sub_(middle).to(torch.int8), scale, zero + middle * scale

    def _integer_weight(self) -> Tensor:
        """Return int8 [outputs, columns]; asymmetric codes are shifted down by half their range."""
        packing = self.packing
        codes = unpack_bits(self.weight_packed, packing.codes.bits, packing.rows * packing.columns)
        if packing.codes.step != 1:
            levels = packing.codes.levels(codes).to(torch.int8)
        elif self.weight_zeros is None and packing.codes.bits <= 2:
            levels = codes.to(torch.int8) + packing.codes.first
        else:  # uint8 arithmetic wraps around; its bits are read as int8
            levels = codes.sub(2 ** (packing.codes.bits - 1)).view(torch.int8)
        return levels.view(packing.rows, packing.columns)

    def _scales_per_output(self) -> tuple[Tensor, Tensor | None]:
        """Return scales [outputs] for the levels of ``_integer_weight``, and zero points [outputs] if asymmetric."""
        each = self.packing.rows // self.weight_scales.numel()
        scales = self.weight_scales.repeat_interleave(each)
        if self.weight_zeros is None:
            return scales, None
        return scales, self.weight_zeros.repeat_interleave(each) + 2 ** (self.packing.codes.bits - 1) * scales


class PackedConv2d(PackedWeight, nn.Conv2d):
    """A convolution with packed weights, dequantized for each forward."""

    def forward(self, input: Tensor) -> Tensor:
        images = input.shape[0] if input.dim() == 4 else 1
        return self._conv_forward(self._quantized_input(input, images), self.weight, self.bias)


class PackedEmbedding(PackedWeight, nn.Embedding):
    """An embedding with a packed table; only the rows looked up are unpacked."""

    def forward(self, input: Tensor) -> Tensor:
        packing, groups = self.packing, self.weight_scales.numel()
        if packing.columns * packing.codes.bits % 8 or packing.rows % groups:
            return functional.embedding(input, self.weight)
        packed = self.weight_packed.view(packing.rows, -1)[input]
        levels = packing.codes.levels(unpack_bits(packed, packing.codes.bits, packing.columns)).float()
        group = input // (packing.rows // groups)
        levels = levels.mul_(self.weight_scales[group][..., None])
        if self.weight_zeros is not None:
            levels.add_(self.weight_zeros[group][..., None])
        return levels.to(self.weight_dtype)


PACKED: dict[type[nn.Module], type[PackedWeight]] = {
    nn.Linear: PackedLinear,
    nn.Conv2d: PackedConv2d,
    nn.Embedding: PackedEmbedding,
}


def pack_weights(model: nn.Module) -> str:
    """Turn the compressed modules of ``model``, whose techniques are permanent, into ordinary ones in place, packed if
    their weights were quantized. Returns a line with the sizes and what stays in floating point."""
    owners = Counter(id(param) for layer in model.modules() for param in layer._parameters.values())
    before = after = count = 0
    left = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, Compressible):
            continue
        grid, inputs, observer = module.grid, _inputs_of(module), module.activation_quantizer
        size, shared = module.weight.nbytes, owners[id(module.weight)] > 1
        plain = module.release()
        if grid is None:
            continue
        settled = grid.compacted()
        if type(plain) not in PACKED or shared or settled is None:
            why = "its weight is shared" if shared else type(plain).__name__
            left.append(f"{name} ({why if settled is not None else 'its groups lost elements'})")
            continue
        packed = PACKED[type(plain)].take(plain, *settled, inputs)
        if isinstance(observer, QuantAct):
            packed.activation_quantizer = observer
        count, before = count + 1, before + size
        after += sum(buffer.nbytes for key, buffer in packed.named_buffers(recurse=False))
    line = f"{count} weights are packed: {before / 1e6:.3f} MB became {after / 1e6:.3f} MB"
    return line + (f"; kept in floating point: {', '.join(left)}" if left else "")


def _inputs_of(module: Compressible) -> Inputs | None:
    if module.activation_quantization_bits is None or module.activation_quantization_range is None:
        return None
    calibration, _, kind = module.activation_quantization_range.partition("_")
    return Inputs(module.activation_quantization_bits, kind == SYMMETRIC, calibration == "static")
