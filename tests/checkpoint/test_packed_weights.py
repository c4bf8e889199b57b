"""Layouts of other libraries, written here number by number from their descriptions, and read as the weights."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.checkpoint.foreign.packed_weights import (
    GroupedIntegers,
    PackedWeightsError,
    can_unpack,
    unpacked,
)
from tests.checkpoint.bit_streams import bits_of

ROWS, COLUMNS = 64, 256


def read(stored: dict[str, Tensor], **told: Any) -> dict[str, Tensor]:
    named = [(f"block.layer.{name}", value) for name, value in stored.items()]
    found = dict(unpacked([*named, ("norm.weight", torch.ones(2))], told))
    assert torch.equal(found.pop("norm.weight"), torch.ones(2))
    return {
        name: value if isinstance(value, Tensor) else value.dequantized() for name, value in found.items()
    }


def only(found: dict[str, Tensor]) -> Tensor:
    assert list(found) == ["block.layer.weight"]
    return found["block.layer.weight"]


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits: int, in_order: bool, version: str) -> None:
    groups = torch.arange(COLUMNS) // 64
    if not in_order:
        groups = groups[torch.randperm(COLUMNS)]
    whole = torch.randint(0, 2**bits, (ROWS, COLUMNS))
    zeros = torch.randint(1, 2**bits, (ROWS, 4))
    scales = torch.rand(ROWS, 4).half()
    stored = {
        "qweight": bits_of(whole.T, bits),
        "qzeros": bits_of(zeros - int(version == "gptq"), bits).T,
        "scales": scales.T,
        "g_idx": groups.int(),
    }
    found = only(read(stored, quant_method="gptq", bits=bits, checkpoint_format=version))
    assert torch.equal(found, (whole - zeros[:, groups]) * scales[:, groups])


def test_awq() -> None:
    whole, zeros = torch.randint(0, 16, (ROWS, COLUMNS)), torch.randint(0, 16, (ROWS, 2))
    scales = torch.rand(ROWS, 2).half()

    def interleaved(numbers: Tensor) -> Tensor:
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight rows the next bits of a word hold
        return bits_of(numbers.unflatten(0, (-1, 8))[:, order].flatten(0, 1), 4).T

    stored = {"qweight": interleaved(whole), "qzeros": interleaved(zeros), "scales": scales.T}
    found = only(read(stored, quant_method="awq", bits=4, version="gemm", zero_point=True))
    groups = torch.arange(COLUMNS) // 128
    assert torch.equal(found, (whole - zeros[:, groups]) * scales[:, groups])
    with pytest.raises(PackedWeightsError, match="'gemv'.*only 'gemm'"):
        read(stored, quant_method="awq", bits=4, version="gemv")


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "count"), [(4, 2), (8, 1), (3, 1)])
def test_packed_integers_of_compressed_tensors(bits: int, count: int, symmetric: bool) -> None:
    half = 2 ** (bits - 1)
    whole, zeros = torch.randint(-half, half, (ROWS, COLUMNS)), torch.randint(-half, half, (ROWS, count))
    scales = torch.rand(ROWS, count)
    stored = {
        "weight_packed": bits_of((whole + half).T, bits).T,
        "weight_scale": scales,
        "weight_shape": torch.tensor([ROWS, COLUMNS]),
    }
    if not symmetric:
        stored["weight_zero_point"] = bits_of(zeros + half, bits)
    group = {"weights": {"num_bits": bits, "type": "int"}, "targets": ["Linear"]}
    found = only(
        read(
            stored,
            quant_method="compressed-tensors",
            format="pack-quantized",
            config_groups={"group_0": group},
        )
    )
    levels = whole - (0 if symmetric else zeros.repeat_interleave(COLUMNS // count, 1))
    assert torch.equal(found, levels * scales.repeat_interleave(COLUMNS // count, 1))


def test_what_compressed_tensors_packs_otherwise_is_refused() -> None:
    stored = {
        "weight_packed": torch.zeros(ROWS, COLUMNS // 2, dtype=torch.uint8),
        "weight_scale": torch.ones(1),
    }
    group = {"weights": {"num_bits": 4, "type": "float"}}
    with pytest.raises(PackedWeightsError, match=r"'nvfp4-pack-quantized'.*only packed integers"):
        read(
            stored,
            quant_method="compressed-tensors",
            format="nvfp4-pack-quantized",
            config_groups={"group_0": group},
        )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("shape", [(1,), (ROWS, 1), (ROWS, 4)])
def test_numbers_of_8_bits_with_scales(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    whole = torch.randint(-50, 50, (ROWS, COLUMNS)).to(dtype)
    scales = torch.rand(shape)
    stored = {"weight": whole, "weight_scale": scales}
    found = only(read(stored, quant_method="compressed-tensors", config_groups={}))
    spread = scales if len(shape) == 1 else scales.repeat_interleave(COLUMNS // shape[1], 1)
    assert torch.equal(found, whole.float() * spread)


def test_blocks_of_fp8_that_do_not_divide_the_matrix() -> None:
    whole = torch.randn(200, 300).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3).bfloat16()
    stored = {"weight": whole, "weight_scale_inv": scales}
    found = only(read(stored, quant_method="fp8", weight_block_size=[128, 128]))
    spread = scales.float().repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(found, whole.float() * spread)
    rows = torch.rand(200, 1)
    found = only(read({"weight": whole, "weight_scale": rows}, quant_method="fbgemm_fp8"))
    assert torch.equal(found, whole.float() * rows)


@pytest.mark.parametrize("nested", [True, False])
def test_four_bits_of_bitsandbytes(nested: bool) -> None:
    numbers, table = torch.randint(0, 16, (ROWS * COLUMNS,)), torch.randn(16)
    scales = torch.rand(ROWS * COLUMNS // 64)
    state: dict[str, Any] = {
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": [ROWS, COLUMNS],
        "quant_type": "nf4",
    }
    stored = {
        "weight": (numbers[0::2] * 16 + numbers[1::2]).to(torch.uint8)[:, None],
        "weight.quant_map": table,
        "weight.absmax": scales,
    }
    if nested:
        second, coarse = torch.randn(256), torch.rand(1)
        rounded = torch.randint(0, 256, scales.shape, dtype=torch.uint8)
        state |= {"nested_blocksize": 256, "nested_offset": 0.25}
        stored |= {
            "weight.absmax": rounded,
            "weight.nested_absmax": coarse,
            "weight.nested_quant_map": second,
        }
        scales = second[rounded.long()] * coarse + 0.25
    text = json.dumps(state).encode()
    stored["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    found = only(read(stored, quant_method="bitsandbytes", load_in_4bit=True))
    wanted = table[numbers] * scales.repeat_interleave(64)
    assert torch.equal(found, wanted.view(ROWS, COLUMNS).bfloat16())


def test_eight_bits_of_bitsandbytes() -> None:
    whole, largest = torch.randint(-127, 128, (ROWS, COLUMNS), dtype=torch.int8), torch.rand(ROWS)
    stored = {"weight": whole, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    found = only(read(stored, quant_method="bitsandbytes", load_in_8bit=True))
    torch.testing.assert_close(found, whole * (largest / 127)[:, None])


def test_what_was_not_packed_stays() -> None:
    found = read({"weight": torch.ones(2, 2).half(), "bias": torch.ones(2)}, quant_method="fp8")
    assert found["block.layer.weight"].dtype is torch.float16
    assert set(found) == {"block.layer.weight", "block.layer.bias"}


def test_what_cannot_be_read_is_told() -> None:
    assert can_unpack({"quant_method": "awq"})
    assert not can_unpack({"quant_method": "aqlm"})
    assert not can_unpack(None)
    with pytest.raises(PackedWeightsError, match="weights of .aqlm. are not supported, only gptq, awq"):
        read({}, quant_method="aqlm")
    with pytest.raises(PackedWeightsError, match=r"block\.layer: there is no scales, only qweight, qzeros"):
        read(
            {
                "qweight": bits_of(torch.zeros(8, 4, dtype=torch.int32), 4),
                "qzeros": bits_of(torch.zeros(8, 4, dtype=torch.int32), 4),
            },
            quant_method="gptq",
            bits=4,
        )


def test_groups_of_columns() -> None:
    found = GroupedIntegers.of(
        torch.ones(2, 6, dtype=torch.int16), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 0, size=None
    )
    assert found.dequantized().tolist() == [[1, 1, 1, 2, 2, 2], [3, 3, 3, 4, 4, 4]]
    found = GroupedIntegers.of(found.levels, found.scales, 0, size=4)  # the last group is shorter
    assert found.dequantized().tolist() == [[1, 1, 1, 1, 2, 2], [3, 3, 3, 3, 4, 4]]


def test_layers_of_gptq_with_other_bits() -> None:
    """GPTQModel's ``dynamic`` gives some layers more bits than the config says."""
    codes, scales = torch.randint(0, 256, (ROWS, COLUMNS)), torch.rand(ROWS, 2).half()
    stored = {
        "qweight": bits_of(codes.T, 8),
        "qzeros": bits_of(torch.full((ROWS, 2), 127), 8).T,
        "scales": scales.T,
        "g_idx": torch.arange(COLUMNS).int() // 128,
    }
    found = only(read(stored, quant_method="gptq", bits=4, group_size=128))
    assert torch.equal(found, (codes - 128) * scales.repeat_interleave(128, 1))
    with pytest.raises(PackedWeightsError, match="checkpoint_format 'marlin' is not supported"):
        read(stored, quant_method="gptq", bits=4, checkpoint_format="marlin")
