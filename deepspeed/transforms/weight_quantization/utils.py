"""Groupwise quantization to 8- or 4-bit integers with a scale and a minimum per group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.module_utils import move_hooks
from deepspeed.ops.formats.integers import levels_above
from deepspeed.ops.formats.packing import pack_bits, unpack_bits

ALIGN = 64
"""Alignment of the parts of a joined parameter, in bytes."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Quantization format. ``num_bits``: 8 or 4; ``group_size`` values along ``group_dim`` share a scale.
    ``symmetric``: 0 is one of the levels."""

    num_bits: int
    group_size: int
    group_dim: int
    symmetric: bool

    @classmethod
    def of(cls, config: dict[str, Any]) -> Grouping:
        """Parse a config, with defaults for missing keys. ValueError: an unknown key or invalid value."""
        known = {"num_bits", "group_size", "group_dim", "symmetric"}
        unknown = sorted(set(config) - known)
        if unknown:
            raise ValueError(f"quantization: {unknown[0]!r} is not one of {', '.join(sorted(known))}")
        made = cls(
            int(config.get("num_bits", 8)),
            int(config.get("group_size", 64)),
            int(config.get("group_dim", 1)),
            bool(config.get("symmetric", False)),
        )
        if made.num_bits not in (4, 8):
            raise ValueError(f"quantization: num_bits={made.num_bits}: must be 8 or 4")
        if made.group_size < 2 or made.group_size % 2:
            raise ValueError(
                f"quantization: group_size={made.group_size}: expected an even number of at least 2"
            )
        return made

    def fits(self, shape: torch.Size | tuple[int, ...]) -> bool:
        """Return whether groups divide a tensor of this shape."""
        return -len(shape) <= self.group_dim < len(shape) and shape[self.group_dim] % self.group_size == 0

    def split(
        self, shape: torch.Size | tuple[int, ...], size: int | None = None
    ) -> tuple[int, tuple[int, ...]]:
        """Split ``group_dim`` in two; return (dim of the values in a group, new shape). ``size``: of a group."""
        dim, size = self.group_dim % len(shape), size or self.group_size
        return dim + 1, (*shape[:dim], shape[dim] // size, size, *shape[dim + 1 :])


class GroupwiseQuantizer:
    """Quantizer. ``config``: ``num_bits``, ``group_size``, ``group_dim``, ``symmetric``. ValueError: as in
    ``Grouping.of``."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.grouping = Grouping.of(config)

    def quantize(self, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (integers, scales, minima): a value is its integer times the scale plus the minimum.

        Integers are uint8 in the tensor's shape; with 4 bits, two are packed into a byte, and ``group_dim`` is half as
        long. Scales and minima have one number per group: fp16 for fp16 tensors, else fp32.

        ValueError: groups do not divide the tensor.
        """
        grouping = self.grouping
        if not grouping.fits(tensor.shape):
            raise ValueError(
                f"quantization: group_size={grouping.group_size} does not divide dim {grouping.group_dim} of a tensor "
                f"of shape {tuple(tensor.shape)}"
            )
        dim, shape = grouping.split(tensor.shape)
        grouped = tensor.detach().reshape(shape).float()
        if grouping.symmetric:
            middle = 2 ** (grouping.num_bits - 1)
            scale = grouped.abs().amax(dim, keepdim=True) / (middle - 1)
            least = -scale * middle
        else:
            least = grouped.amin(dim, keepdim=True)
            scale = (grouped.amax(dim, keepdim=True) - least) / (2**grouping.num_bits - 1)
        scale_dtype = torch.float16 if tensor.dtype is torch.float16 else torch.float32
        scale, least = scale.to(scale_dtype), least.to(scale_dtype)
        levels = levels_above(grouped, grouping.num_bits, scale.float(), least.float()).to(torch.uint8)
        packed = pack_bits(levels, grouping.num_bits, dim)
        return packed.flatten(dim - 1, dim), scale, least


class GroupwiseDequantizer:
    """Dequantizer. ``config``: as for ``GroupwiseQuantizer``. ``dtype``: of the values."""

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        self.config = config
        self.grouping = Grouping.of(config)
        self.dtype = dtype

    def dequantize(self, tensor: Tensor, quant_scale: Tensor, quant_min: Tensor) -> Tensor:
        """Return the values, in the original shape."""
        grouping = self.grouping
        dim, grouped = grouping.split(tensor.shape, grouping.group_size * grouping.num_bits // 8)
        levels = unpack_bits(tensor.reshape(grouped), grouping.num_bits, dim=dim).float()
        values = torch.addcmul(quant_min.float(), levels, quant_scale.float()).to(self.dtype)
        return values.flatten(dim - 1, dim)


Quantizer, DeQuantizer = GroupwiseQuantizer, GroupwiseDequantizer
"""The documented names."""


def recursive_setattr(model: nn.Module, module_name: str, module: nn.Module) -> None:
    """Replace the submodule at the dotted path ``module_name`` of ``model`` by ``module``, keeping its hooks."""
    parent, _, name = module_name.rpartition(".")
    move_hooks(model.get_submodule(module_name), module)
    setattr(model.get_submodule(parent), name, module)


def concat_to_compat_param(
    quantized_weight: Tensor, quant_scale: Tensor, quant_min: Tensor, return_param: bool = True
) -> nn.Parameter | Tensor:
    """Join integers, scales and minima into one uint8 tensor, which can be partitioned, moved and gathered like any
    parameter; ``parts_of_param`` splits it again. ``return_param``: return a frozen parameter."""
    parts = [_padded(each) for each in (quant_scale, quant_min, quantized_weight)]
    joined = torch.cat(parts)
    return nn.Parameter(joined, requires_grad=False) if return_param else joined


def parts_of_param(
    joined: Tensor, config: dict[str, Any], shape: torch.Size, scale_dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Split a result of ``concat_to_compat_param`` into (integers, scales, minima), as views if aligned. ``shape``: of
    the original tensor; ``scale_dtype``: of scales and minima."""
    grouping = Grouping.of(config)
    dim, grouped = grouping.split(shape)
    small = tuple(1 if number == dim else size for number, size in enumerate(grouped))
    words = list(shape)
    words[grouping.group_dim] //= 8 // grouping.num_bits
    if joined.data_ptr() % scale_dtype.itemsize:  # a misaligned view of a larger buffer
        joined = joined.clone()
    count = torch.Size(small).numel()
    step = -(-count * scale_dtype.itemsize // ALIGN) * ALIGN
    scale, least = (
        joined[at : at + count * scale_dtype.itemsize].view(scale_dtype).view(small) for at in (0, step)
    )
    return joined[2 * step : 2 * step + torch.Size(words).numel()].view(words), scale, least


def _padded(tensor: Tensor) -> Tensor:
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(raw, (0, -raw.numel() % ALIGN))
