"""Quantized weights of other libraries: GPTQ (Frantar et al. 2022), AWQ (Lin et al. 2023), compressed-tensors, fp8 by
blocks or rows, bitsandbytes (Dettmers et al. 2022, 2023).

A layer of such a file has several packed tensors in place of its weight, laid out for the library's kernels. They are
unpacked here without that library or its devices. The config's ``quantization_config`` specifies the layout.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_IN_8_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)


class PackedWeightsError(ValueError):
    """The layout is not known, or a layer lacks tensors."""


@dataclass(frozen=True, slots=True)
class GroupedIntegers:
    """A weight as integers with one scale per row and group of columns.

    ``levels``: int16 [outputs, inputs], without their zero points. ``scales``: [outputs, groups]. ``groups``: group
    of each column, int64 [inputs].
    """

    levels: Tensor
    scales: Tensor
    groups: Tensor

    @classmethod
    def of(
        cls,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | int,
        *,
        size: int | None,
        groups: Tensor | None = None,
    ) -> GroupedIntegers:
        """Make one from codes by subtracting the zero points.

        Args:
            codes: int16 [outputs, inputs].
            zeros: int16 [outputs, groups], or a single value.
            size: columns per group, the last group may be smaller; None, 0 or -1: groups of equal size.
            groups: group of each column, if groups are not contiguous.
        """
        columns = codes.shape[1]
        if groups is None:
            size = size if size and size > 0 else -(-columns // scales.shape[1])
            groups = torch.arange(columns) // size
        groups = groups.long()
        return cls(codes - (zeros if isinstance(zeros, int) else zeros[:, groups]), scales, groups)

    def dequantized(self) -> Tensor:
        """Return the weight [outputs, inputs] in the dtype of the scales."""
        return self.levels * self.scales[:, self.groups]


def can_unpack(quantization_config: Any) -> bool:
    """Return whether `unpacked` can read this ``quantization_config``; False for None."""
    return quantization_config is not None and method_of(quantization_config) in _FORMATS


def method_of(quantization_config: Any) -> str:
    """Return the quantization method that a ``quantization_config`` (mapping or object) names."""
    return str(_settings(quantization_config).get("quant_method", ""))


def unpacked(
    tensors: Iterable[tuple[str, Tensor]], quantization_config: Any
) -> Iterator[tuple[str, Tensor | GroupedIntegers]]:
    """Yield names and values of weights: first all unpacked tensors, then one packed layer at a time.

    PackedWeightsError: the layout is not known, or a layer lacks tensors.
    """
    settings, method = _settings(quantization_config), method_of(quantization_config)
    if method not in _FORMATS:
        raise PackedWeightsError(
            f"weights of {method or quantization_config!r} are not supported, only {', '.join(_FORMATS)}"
        )
    pattern, unpack = _FORMATS[method]
    layers: dict[str, _Parts] = defaultdict(_Parts)
    for name, value in tensors:
        found = pattern.fullmatch(name)
        if found is None or (found["part"] == "weight" and value.dtype not in _IN_8_BITS):
            yield name, value
        else:
            layers[found["layer"]][found["part"]] = value
    for layer in list(layers):
        parts = layers.pop(layer)
        try:
            weight = unpack(parts, settings)
        except PackedWeightsError as error:
            raise PackedWeightsError(f"{layer}: {error}") from error
        yield f"{layer}.weight", weight


class _Parts(dict[str, Tensor]):
    """The tensors of one layer by name suffix."""

    def __missing__(self, name: str) -> Tensor:
        raise PackedWeightsError(f"there is no {name}, only {', '.join(sorted(self))}")


def _settings(quantization_config: Any) -> dict[str, Any]:
    return (
        dict(quantization_config)
        if isinstance(quantization_config, Mapping)
        else dict(quantization_config.to_dict())
    )


def _unpack_bits(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [rows, columns] to int16 [rows * 32 / bits, columns]: unsigned numbers packed down each column,
    lowest bits first, also across word boundaries."""
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)[None, :, None]
        return ((words[:, None] >> shifts) & (2**bits - 1)).to(torch.int16).flatten(0, 1)
    begins = torch.arange(words.shape[0] * 32 // bits) * bits
    wide = torch.cat([words, words.new_zeros(1, words.shape[1])]).long() & 0xFFFFFFFF
    first, shift = begins // 32, (begins % 32)[:, None]
    return (((wide[first] >> shift) | (wide[first + 1] << (32 - shift))) & (2**bits - 1)).to(torch.int16)


def _gptq(parts: _Parts, settings: dict[str, Any]) -> GroupedIntegers:
    """Unpack GPTQ. qweight: int32 [inputs * bits / 32, outputs], qzeros: int32 [groups, outputs * bits / 32], scales:
    [groups, outputs], g_idx: the group of each input, int32 [inputs]."""
    version = settings.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise PackedWeightsError(
            f"GPTQ: checkpoint_format {version!r} is not supported, only 'gptq' and 'gptq_v2'"
        )
    qweight, groups = parts["qweight"], parts.get("g_idx")
    # The width may vary by layer (`dynamic`).
    bits = int(settings.get("bits", 4)) if groups is None else qweight.shape[0] * 32 // groups.numel()
    zeros = _unpack_bits(parts["qzeros"].T.contiguous(), bits) + int(
        version == "gptq"
    )  # it stores zero points minus one
    codes = _unpack_bits(qweight, bits).T
    return GroupedIntegers.of(codes, parts["scales"].T, zeros, size=settings.get("group_size"), groups=groups)


_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""The nibble of a 32-bit word that holds column i of eight."""


def _awq(parts: _Parts, settings: dict[str, Any]) -> GroupedIntegers:
    """Unpack AWQ. qweight: int32 [inputs, outputs / 8], qzeros: int32 [groups, outputs / 8], scales: [groups,
    outputs]."""
    if settings.get("version", "gemm") != "gemm" or settings.get("bits", 4) != 4:
        raise PackedWeightsError(
            f"AWQ: version {settings.get('version')!r} is not supported, only 'gemm' with 4 bits"
        )

    def columns(words: Tensor) -> Tensor:
        return _unpack_bits(words.T.contiguous(), 4).unflatten(0, (-1, 8))[:, _AWQ_ORDER].flatten(0, 1)

    zeros = columns(parts["qzeros"]) if "qzeros" in parts else 8
    return GroupedIntegers.of(
        columns(parts["qweight"]), parts["scales"].T, zeros, size=settings.get("group_size")
    )


def _compressed(parts: _Parts, settings: dict[str, Any]) -> Tensor | GroupedIntegers:
    """Unpack compressed-tensors. weight_packed: int32 [outputs, inputs * bits / 32], weight_zero_point: int32
    [outputs * bits / 32, groups], weight_scale: [outputs, groups], weight_shape: (outputs, inputs); or weight: int8
    or fp8 [outputs, inputs]."""
    groups = settings.get("config_groups", {}).values()
    weights = [group["weights"] for group in groups if group.get("weights")]
    if "weight_packed" not in parts:
        block = next((each["block_structure"] for each in weights if each.get("block_structure")), None)
        return _scaled(parts["weight"], parts["weight_scale"], parts.get("weight_zero_point"), block)
    packed = parts["weight_packed"]
    kinds = {(int(each["num_bits"]), each.get("type", "int"), each.get("group_size")) for each in weights}
    if packed.dtype is not torch.int32 or len(kinds) != 1 or next(iter(kinds))[1] != "int":
        raise PackedWeightsError(
            f"compressed-tensors: format {settings.get('format')!r} of {sorted(map(str, kinds))} is not "
            "supported, only packed integers of one width, and unpacked int8 and fp8 weights"
        )
    ((bits, _, size),) = kinds
    rows, columns = parts["weight_shape"].tolist()

    def signed(words: Tensor, count: int) -> Tensor:
        return _unpack_bits(words, bits)[:count] - 2 ** (bits - 1)

    zeros = signed(parts["weight_zero_point"], rows) if "weight_zero_point" in parts else 0
    codes = signed(packed.T.contiguous(), columns).T
    return GroupedIntegers.of(
        codes, parts["weight_scale"], zeros, size=size, groups=parts.get("weight_g_idx")
    )


def _scaled(weight: Tensor, scale: Tensor, zero: Tensor | None = None, block: Any = None) -> Tensor:
    """Dequantize 8-bit numbers [outputs, inputs] with scales per tensor, per row, per group of columns, or per block
    (``block``: its rows and columns); fp32."""
    if scale.numel() == 1:
        return (weight.float() - (0 if zero is None else zero.float())) * scale.float()
    sizes = block or [-(-whole // count) for whole, count in zip(weight.shape, scale.shape, strict=True)]
    rows, columns = (torch.arange(whole) // size for whole, size in zip(weight.shape, sizes, strict=True))

    def spread(each: Tensor) -> Tensor:
        return each.float()[rows][:, columns]

    return (weight.float() - (0 if zero is None else spread(zero))) * spread(scale)


def _fp8(parts: _Parts, settings: dict[str, Any]) -> Tensor:
    return _scaled(parts["weight"], parts["weight_scale_inv"], block=settings.get("weight_block_size"))


def _fbgemm(parts: _Parts, settings: dict[str, Any]) -> Tensor:
    return _scaled(parts["weight"], parts["weight_scale"])


def _bitsandbytes(parts: _Parts, settings: dict[str, Any]) -> Tensor:
    """Unpack bitsandbytes. weight: int8 [outputs, inputs] with SCB, the largest magnitude of each row; or two 4-bit
    indices into quant_map per byte, with an absmax per block, which may itself be quantized to 8 bits (nested)."""
    weight = parts["weight"]
    if "SCB" in parts:
        return weight.float() * parts["SCB"].float()[:, None] / 127
    described = next((part for part in parts if part.startswith("weight.quant_state")), "weight.quant_state")
    state = json.loads(bytes(parts[described].tolist()))
    scales = parts["weight.absmax"]
    if "weight.nested_absmax" in parts:
        rounded = parts["weight.nested_quant_map"][scales.long()]
        coarse = _repeated(parts["weight.nested_absmax"], int(state["nested_blocksize"]), rounded.numel())
        scales = rounded * coarse + float(state["nested_offset"])
    packed = weight.flatten()
    values = parts["weight.quant_map"][torch.stack([packed >> 4, packed & 15], 1).flatten().long()]
    values = values * _repeated(scales, int(state["blocksize"]), values.numel())
    return values.view(state["shape"]).to(getattr(torch, str(state["dtype"])))


def _repeated(scales: Tensor, times: int, count: int) -> Tensor:
    return scales.float().repeat_interleave(times)[:count]


def _of_layer(*parts: str) -> re.Pattern[str]:
    return re.compile(rf"(?P<layer>.+)\.(?P<part>{'|'.join(parts)})")


_Format = tuple[re.Pattern[str], Callable[[_Parts, dict[str, Any]], Tensor | GroupedIntegers]]
_FORMATS: dict[str, _Format] = {
    "gptq": (_of_layer("qweight", "qzeros", "scales", "g_idx"), _gptq),
    "awq": (_of_layer("qweight", "qzeros", "scales"), _awq),
    "compressed-tensors": (
        _of_layer("weight", r"weight_(?:packed|scale|zero_point|shape|g_idx)"),
        _compressed,
    ),
    "fp8": (_of_layer("weight", "weight_scale_inv"), _fp8),
    "fbgemm_fp8": (_of_layer("weight", "weight_scale"), _fbgemm),
    "bitsandbytes": (
        _of_layer(
            "weight", r"weight\.(?:absmax|quant_map|nested_\w+|quant_state\..+)", "SCB", "weight_format"
        ),
        _bitsandbytes,
    ),
}
