"""Moments in 8 bits and bfloat16 weights rounded at random: codes, kernel against reference, cuts, averages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.config.optimizers import check_optimizer
from deepspeed.ops import native
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.adam.compact_adam import CompactAdam
from deepspeed.ops.formats import blockwise as state_codes
from deepspeed.ops.formats.blockwise import (
    BLOCK,
    CODE_DITHER,
    PARAM_DITHER,
    SIGNED,
    UNSIGNED,
    Code,
    DitherSequence,
)
from deepspeed.zero.optimizer_registry import build_optimizer
from tests.ops.cases import DTYPES, gradients, parameters, train

SHAPES = [(1031,), (64, 33), (3,), (0,), (256,), (5, 0, 2)]
SETTINGS: list[dict[str, Any]] = [
    {"weight_decay": 0.1, "stochastic_rounding": True},
    {"weight_decay": 0.1, "adam_w_mode": False},
    {"state_bits": 32, "stochastic_rounding": True},
    {"bias_correction": False, "betas": (0.8, 0.95), "eps": 1e-6},
]


def raw(tensor: Tensor) -> Tensor:
    """For comparisons of bits."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def everything(optimizer: CompactAdam, params: list[Any]) -> list[Tensor]:
    states = [optimizer.state[p][key] for p in params for key in sorted(optimizer.state[p])]
    return [raw(t) for t in [*params, *states]]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("code", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
@pytest.mark.parametrize("scale", [1.0, 3.7e-5, 1.1e9])
def test_decoded_values_get_their_codes_back(code: Code, scale: float) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(40)[torch.randperm(256 * 40)]
    codes[::BLOCK] = code.top  # every block has its largest number
    scales = torch.rand(state_codes.blocks(codes.numel())) * scale + scale / 100
    values = state_codes.decode(code, codes, scales)
    again, found = state_codes.encode(code, values)
    assert torch.equal(again, codes)
    assert torch.equal(found, scales)
    assert torch.equal(values[::BLOCK], scales)


@pytest.mark.parametrize("code", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_what_codes_stand_for(code: Code) -> None:
    """The format of checkpoints: positions on the scale of floating-point numbers with few bits of mantissa, from the
    first number, which is taken off, to the last, which is the largest magnitude of the block."""
    mantissa = 4 if code.signed else 5
    codes = torch.arange(256)
    magnitude = codes & code.top
    fraction = (magnitude & ((1 << mantissa) - 1)).double() / (1 << mantissa)
    position = torch.ldexp(1 + fraction, magnitude >> mantissa)
    expected = (position - 1) / (position.max() - 1)
    if code.signed:
        expected = torch.where(codes >= 128, -expected, expected)
    values = state_codes.decode(code, codes.to(torch.uint8), torch.tensor([0.37])).double() / 0.37
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(values.signbit(), expected.signbit())


@pytest.mark.parametrize("code", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_the_nearest_code_is_within_half_a_step(code: Code) -> None:
    values = torch.randn(8 * BLOCK) * 10.0 ** torch.empty(8 * BLOCK).uniform_(-6, 0)
    values = values if code.signed else values.abs()
    codes, scales = state_codes.encode(code, values)
    share = (values / scales.repeat_interleave(BLOCK)).abs()
    error = (state_codes.decode(code, codes, scales) / scales.repeat_interleave(BLOCK)).abs() - share
    mantissa = 4 if code.signed else 5
    half_step = (share + 2.0**-8).log2().floor().exp2() / 2**mantissa / 2
    # Of the unsigned code, what is not zero never becomes zero: an error of up to a whole first step.
    allowed = half_step * (1.05 if code.signed else 2.05)
    assert bool((error.abs() <= allowed).all())


def test_zeros_and_empty_tensors() -> None:
    for values in (torch.zeros(300), torch.zeros(0), torch.full((300,), 1e-36)):
        for code in (SIGNED, UNSIGNED):
            codes, scales = state_codes.encode(code, values)
            assert not codes.any() and not scales.any()
            assert not state_codes.decode(code, codes, scales).any()


def test_rounding_in_proportion_keeps_averages() -> None:
    """One value between two codes, or between two numbers of bfloat16, many times."""
    for value in (0.1003, 0.9871, 0.0042):
        values = torch.full((200 * BLOCK,), value)
        values[::BLOCK] = 1.0
        dither = CODE_DITHER.dither(3, 0, values)
        for code in (SIGNED, UNSIGNED):
            codes, scales = state_codes.encode(code, values, dither)
            found = state_codes.decode(code, codes, scales)[values != 1.0]
            assert found.unique().numel() == 2
            spread = float(found.max() - found.min())
            assert abs(float(found.double().mean()) - value) < 0.002 * spread
        rounded = state_codes.round_stochastically(values, PARAM_DITHER.dither(3, 0, values))[values != 1.0]
        assert rounded.unique().numel() == 2
        spread = float(rounded.max() - rounded.min())
        assert abs(float(rounded.double().mean()) - value) < 0.002 * spread


@pytest.mark.parametrize("sequence", [CODE_DITHER, PARAM_DITHER], ids=["codes", "params"])
def test_dither_fills_the_range_evenly(sequence: DitherSequence) -> None:
    """Of 256 updates of one element, of 256 neighbours in one update, and of 256 rows in a column of matrices as wide
    as models are: how often numbers are below a limit is never far from it. Independent ones: 0.05 on average."""
    index = torch.arange(512)
    for start in (0, 5_000, (1 << 33) + 7):
        steps = torch.stack([sequence.dither(t, start, index) for t in range(1, 257)])
        assert bool(((steps >= 0) & (steps < 1 << 32)).all())
        for numbers in (steps, steps[:, :256].T):
            assert float(_discrepancy(numbers).max()) < 0.02
    for width in (128, 768, 1024, 4096, 5120, 11008, 50257):
        column = torch.cat([sequence.dither(9, row * width, index[:1]) for row in range(256)])
        assert float(_discrepancy(column[:, None]).max()) < 0.1, width


def _discrepancy(numbers: Tensor) -> Tensor:
    """Return the Kolmogorov distance of each column of 32-bit numbers from a uniform distribution."""
    share, count = numbers.sort(0).values.double() / 2.0**32, len(numbers)
    place = torch.arange(count, dtype=torch.float64)[:, None] / count
    return torch.maximum((share - place).abs(), (share - place - 1 / count).abs()).amax(0)


def test_an_element_that_moves_little_arrives_where_it_should() -> None:
    """A hundred updates of a part of a bfloat16 step: the weight stays next to their sum, from which independent random
    numbers would have taken it 5 steps away."""
    step_of = 2.0**-8  # between numbers of bfloat16 from 0.5 to 1
    for part in (0.137, 0.5, 0.9):
        weights = torch.full((64,), 0.5, dtype=torch.bfloat16)
        for step in range(1, 101):
            moved = weights.float() + part * step_of
            weights = state_codes.round_stochastically(moved, PARAM_DITHER.dither(step, 0, weights))
            wanted = 0.5 + step * part * step_of
            assert float((weights.float() - wanted).abs().max()) < 3 * step_of, (part, step)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_and_reference_give_the_same_bits(
    settings: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib = native.library()
    if lib is None:
        pytest.skip("built without native kernels")
    results = []
    best, threads = lib.ds_isa(), torch.get_num_threads()
    shapes = [*SHAPES, (70_001,)]  # large enough to be shared by threads
    try:
        for isa, count in [*((isa, 1) for isa in range(best + 1)), (best, 2)]:
            assert lib.ds_set_isa(isa) == isa
            torch.set_num_threads(count)
            results.append(_trained(settings, dtype, shapes))
    finally:
        lib.ds_set_isa(best)
        torch.set_num_threads(threads)
    monkeypatch.setattr(native, "library", lambda: None)
    results.append(_trained(settings, dtype, shapes))
    for other in results[1:]:
        assert same(results[0], other)


def _trained(settings: dict[str, Any], dtype: torch.dtype, shapes: Any) -> list[Tensor]:
    params = parameters(dtype, shapes)
    optimizer = CompactAdam(params, lr=1e-2, **settings)
    train(optimizer, params, steps=3)
    return everything(optimizer, params)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_of_hard_numbers(
    dtype: torch.dtype, grad_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of zeros, of numbers without squares in fp32, and with one that is infinite or none, whole and short. What
    is not finite stays in its block."""
    lib = native.library()
    if lib is None:
        pytest.skip("built without native kernels")
    hard = [0.0, -0.0, 1e-42, -3e-39, 1e-25, 3e38, torch.inf, -torch.inf, torch.nan]
    best, results = lib.ds_isa(), []
    try:
        for isa in range(best + 1):
            assert lib.ds_set_isa(isa) == isa
            results.append(_trained_on(hard, dtype, grad_dtype))
    finally:
        lib.ds_set_isa(best)
    monkeypatch.setattr(native, "library", lambda: None)
    expected = _trained_on(hard, dtype, grad_dtype)
    for found in results:
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.isnan(), b.isnan())
            assert torch.equal(raw(a.nan_to_num(0.5)), raw(b.nan_to_num(0.5)))
    for number, value in enumerate(hard):
        param, *moments = expected[5 * number : 5 * number + 5]
        for found in (param, *(m for m in moments if m.is_floating_point())):
            assert bool(found[: len(found) // 3].isfinite().all()), value


def _trained_on(hard: list[float], dtype: torch.dtype, grad_dtype: torch.dtype) -> list[Tensor]:
    """Per number: a tensor of three blocks, the last short, of which the second and third get it; its states."""
    found = []
    for value in hard:
        torch.manual_seed(1)
        param = torch.randn(2 * BLOCK + 37).to(dtype)
        optimizer = CompactAdam([param], lr=1e-2, weight_decay=0.1, stochastic_rounding=True)
        for step in range(3):
            grad = torch.randn(len(param))
            if step:
                grad[BLOCK + 5] = value
                grad[2 * BLOCK :] = value
            optimizer.multi_tensor_step(optimizer.param_groups[0], [param], [grad.to(grad_dtype)])
        state = optimizer.state[param]
        found += [param, *(state[key] for key in sorted(state) if key != "step")]
    return found


@pytest.mark.parametrize("path", ["native", "torch"])
def test_bits_do_not_depend_on_cuts(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    whole = parameters(torch.bfloat16, [(5000,)])
    optimizer = CompactAdam(whole, lr=1e-2, stochastic_rounding=True)
    cuts = [0, 256, 1024, 1280, 4864, 5000]
    pieces = [whole[0].detach()[a:b].clone() for a, b in zip(cuts, cuts[1:], strict=False)]
    cut = CompactAdam(pieces, lr=1e-2, stochastic_rounding=True)
    for step in range(3):
        (whole[0].grad,) = gradients(whole, step)
        optimizer.step()
        grads = [whole[0].grad[a:b].clone() for a, b in zip(cuts, cuts[1:], strict=False)]
        with torch.no_grad():
            cut.multi_tensor_step(cut.param_groups[0], pieces, grads, starts=cuts[:-1], grad_scale=1.0)
    assert same([raw(torch.cat(pieces))], [raw(whole[0])])
    for key in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"):
        joined = torch.cat([cut.state[piece][key] for piece in pieces])
        assert torch.equal(joined, optimizer.state[whole[0]][key])


def test_follows_adam_in_fp32() -> None:
    """A noisy quadratic: where Adam goes, within a few percent of the way."""
    torch.manual_seed(0)
    goal = torch.randn(4096)
    runs: dict[str, Tensor] = {}
    for name, make in {
        "fp32": lambda p: FusedAdam(p, lr=1e-2),
        "8 bits": lambda p: CompactAdam(p, lr=1e-2),
        "8 bits, bf16": lambda p: CompactAdam(p, lr=1e-2, stochastic_rounding=True),
    }.items():
        param = torch.nn.Parameter(
            torch.zeros(4096, dtype=torch.bfloat16 if "bf16" in name else torch.float32)
        )
        optimizer, generator = make([param]), torch.Generator().manual_seed(1)
        for _ in range(200):
            noise = torch.randn(4096, generator=generator)
            param.grad = ((param.detach().float() - goal) * (1 + noise) + 0.1 * noise).to(param.dtype)
            optimizer.step()
        runs[name] = param.detach().float()
    loss = {name: float((value - goal).square().mean()) for name, value in runs.items()}
    start = float(goal.square().mean())
    for name in ("8 bits", "8 bits, bf16"):
        assert abs(loss[name] - loss["fp32"]) < 0.02 * start, loss
        assert float((runs[name] - runs["fp32"]).abs().mean()) < 0.05, name


def test_a_weight_in_bfloat16_learns_from_updates_below_its_last_digit() -> None:
    moved = {}
    for rounds in (False, True):
        param = torch.nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
        optimizer = CompactAdam([param], lr=1e-4, stochastic_rounding=rounds)
        for _ in range(20):
            param.grad = torch.ones_like(param)
            optimizer.step()
        moved[rounds] = 1.0 - float(param.detach().double().mean())
    assert moved[False] == 0.0
    assert moved[True] == pytest.approx(20e-4, rel=0.1)


def test_bytes_of_the_state() -> None:
    """6 bytes per parameter: weight, gradient and two codes; the scales add 1/32 of a byte."""
    param = torch.nn.Parameter(torch.zeros(1 << 16, dtype=torch.bfloat16))
    optimizer = CompactAdam([param], stochastic_rounding=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    tensors = [param, param.grad, *(t for k, t in optimizer.state[param].items() if k != "step")]
    assert sum(t.numel() * t.element_size() for t in tensors) / param.numel() == 6 + 8 / BLOCK


def test_state_dicts_continue_to_the_bit_and_take_over_from_adam() -> None:
    params, others = (parameters(torch.bfloat16, SHAPES) for _ in range(2))
    optimizer = CompactAdam(params, lr=1e-2, stochastic_rounding=True)
    train(optimizer, params, steps=2)
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
    again = CompactAdam(others, lr=1e-2, stochastic_rounding=True)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its in ((optimizer, params), (again, others)):
        for p, g in zip(its, gradients(its, 7), strict=True):
            p.grad = g
        one.step()
    assert same(everything(optimizer, params), everything(again, others))

    wide = parameters(shapes=[(300,)])
    adam = FusedAdam(wide, lr=1e-2)
    train(adam, wide, steps=2)
    coded = CompactAdam(wide, lr=1e-2)
    coded.load_state_dict(adam.state_dict())
    decoded = coded.decoded_state(coded.state[wide[0]])
    expected = adam.state[wide[0]]["exp_avg_sq"]
    assert float(decoded["step"]) == 2.0
    assert (decoded["exp_avg_sq"] - expected).abs().max() <= 0.07 * expected.max()
    assert decoded["exp_avg_sq"].shape == expected.shape


def test_chosen_by_the_optimizer_section() -> None:
    for params, bits in (({"state_bits": 8}, 8), ({"stochastic_rounding": True}, 32)):
        made = build_optimizer("AdamW", {"lr": 0.1, **params}, parameters())
        assert isinstance(made, CompactAdam)
        assert made.state_bits == bits
        assert made.param_groups[0]["adam_w_mode"]
    assert isinstance(build_optimizer("Adam", {"state_bits": 32}, parameters()), FusedAdam)
    assert not build_optimizer("Adam", {"state_bits": 8, "adam_w_mode": False}, parameters()).param_groups[0][
        "adam_w_mode"
    ]
    assert "8 or 32" in check_optimizer("Adam", {"state_bits": 4})[0]
    for other in ({"torch_adam": True}, {"fp32_optimizer_states": False}):
        (problem,) = check_optimizer("Adam", {"state_bits": 8, **other})
        assert "cannot be combined" in problem
    assert "state_bits" in check_optimizer("Lion", {"state_bits": 8})[0]
    with pytest.raises(ValueError, match="8 or 32"):
        CompactAdam(parameters(), state_bits=4)
