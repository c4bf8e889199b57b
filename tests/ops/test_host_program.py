"""Kernels between products, and programs of them, against plain torch; the same bits from every instruction set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from deepspeed.ops import native
from deepspeed.ops.host_graph import Activation, GraphMatrix, GraphStep, HostGraph, Weights, bind, largest_of
from deepspeed.ops.paged_attention import PagedPieces
from deepspeed.ops.small_product import QuantizedMatrix

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native library")

TYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, exact: Tensor) -> None:
    error = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), exact.double(), rtol=error, atol=error)


def on_every_set(work: Callable[[], Tensor]) -> Tensor:
    """Return the result of ``work``, which is the same for every instruction set and number of threads."""
    lib: Any = native.library()
    best, found = lib.ds_isa(), []
    try:
        for isa in range(best + 1):
            lib.ds_set_isa(isa)
            found.append(work())
    finally:
        lib.ds_set_isa(best)
    assert all(torch.equal(each, found[-1]) for each in found)
    return found[-1]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("centered", "delta", "size"), [(False, True, 96), (True, False, 77), (True, True, 33)]
)
def test_norm_with_residual(dtype: torch.dtype, centered: bool, delta: bool, size: int) -> None:
    given, added = draw(5, size, dtype=dtype), draw(5, size, seed=1, dtype=dtype)
    weight, bias = draw(size, seed=2, dtype=dtype), draw(size, seed=3, dtype=dtype) if centered else None

    def work() -> Tensor:
        stream, output, program = given.clone(), torch.empty_like(given), HostGraph()
        program.norm(
            stream, output, weight, bias, delta=added if delta else None, eps=1e-5, centered=centered
        )
        program.run(GraphStep(5), threads=2)
        assert torch.equal(stream, given + added if delta else given)
        return output

    wide = (given + added if delta else given).double()
    if centered:
        assert bias is not None
        exact = functional.layer_norm(wide, (size,), weight.double(), bias.double(), 1e-5)
    else:
        exact = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    close(on_every_set(work), exact)


def test_norm_of_chosen_rows_with_an_offset_of_the_weight() -> None:
    stream, output, weight, program = draw(6, 32), torch.zeros(2, 32), draw(32, seed=1), HostGraph()
    program.norm(stream, output, weight, eps=0.0, offset=1.0, on_last=True)
    program.run(GraphStep(6, last=[4, 1]), threads=2)
    rows = stream[[4, 1]].double()
    close(output, rows * rows.square().mean(-1, keepdim=True).rsqrt() * (1 + weight.double()))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("activation", list(Activation))
def test_gated_activation(dtype: torch.dtype, activation: Activation) -> None:
    both = 4 * draw(3, 2 * 75, dtype=dtype)
    gate, up = both[:, :75], both[:, 75:]
    plain = {
        Activation.SILU: functional.silu,
        Activation.GELU: functional.gelu,
        Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
        Activation.RELU: functional.relu,
    }[activation]

    def work(up: Tensor | None) -> Tensor:
        output, program = torch.empty(3, 75, dtype=dtype), HostGraph()
        program.gate(gate, up, output, activation)
        program.run(GraphStep(3), threads=2)
        return output

    close(on_every_set(lambda: work(up)), plain(gate.double()) * up.double())
    close(work(None), plain(gate.double()))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_and_store(dtype: torch.dtype, interleaved: bool) -> None:
    """Queries and keys of two sequences are normalised, rotated in part, and keys and values are in their slots."""
    heads, kv_heads, key_size, value_size, pairs, size = 4, 2, 24, 10, 8, 3
    given = draw(3, (heads + kv_heads) * key_size + kv_heads * value_size, dtype=dtype)
    cosines, sines = draw(20, pairs, seed=1).cos(), draw(20, pairs, seed=1).sin()
    weight = draw(key_size, seed=2, dtype=dtype)
    positions, slots = [7, 8, 0], [(5, 1), (5, 2), (0, 0)]  # of block tables (2, 1, 5) and (0,)
    keys, values = torch.zeros(6, kv_heads, key_size, size), torch.zeros(6, kv_heads, size, value_size)

    def work() -> Tensor:
        projected, program = given.clone(), HostGraph()
        made = program.rotary(
            *(projected, cosines, sines),
            heads=heads,
            kv_heads=kv_heads,
            key_size=key_size,
            value_size=value_size,
            interleaved=interleaved,
            query_weight=weight,
            key_weight=weight,
            eps=1e-5,
        )
        bind(made, (keys, values))
        pieces = PagedPieces([((2, 1, 5), 7, 2), ((0,), 0, 1)], [True, True])
        program.run(GraphStep(3, positions=positions, last=[1, 2], pieces=pieces.array), threads=2)
        return projected

    found = on_every_set(work)
    parts = given.double().split([heads * key_size, kv_heads * key_size, kv_heads * value_size], dim=1)
    cos, sin = cosines[positions].double()[:, None], sines[positions].double()[:, None]
    expected = []
    for part in parts[:2]:
        x = part.view(3, -1, key_size)
        x = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        if interleaved:
            a, b = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        else:
            a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        expected.append(torch.cat([turned, x[..., 2 * pairs :]], -1))
    close(found, torch.cat([*(each.flatten(1) for each in expected), parts[2]], 1))
    for row, (block, offset) in enumerate(slots):
        wide = 4 * TOLERANCE[dtype]
        torch.testing.assert_close(keys[block, :, :, offset].double(), expected[1][row], rtol=wide, atol=wide)
        assert torch.equal(values[block, :, offset], parts[2][row].view(kv_heads, -1).float())
    assert int((keys != 0).any(2).sum()) == 3 * kv_heads


def test_embedding() -> None:
    table, output, program = draw(9, 40).bfloat16(), torch.empty(3, 40), HostGraph()
    program.embedding(table, output)
    program.run(GraphStep(3, tokens=[4, 0, 8]), threads=2)
    assert torch.equal(output, table[[4, 0, 8]].float())


@pytest.mark.parametrize("dtype", TYPES)
def test_largest(dtype: torch.dtype) -> None:
    rows = draw(4, 2500, dtype=dtype)
    rows[1] = -torch.inf
    rows[2, [30, 1500]] = 9
    rows[3, 2499] = 9
    wanted = [int(rows[0].argmax()), 0, 30, 2499]
    assert on_every_set(lambda: torch.tensor(largest_of(rows))).tolist() == wanted
    assert largest_of(rows[:, 1:2499])[2] == 29


def matrices(kind: Weights, columns: int) -> tuple[list[GraphMatrix], Tensor]:
    """Two with one input, and their values below each other."""
    made, values = [], []
    for seed, outputs in enumerate((37, 130)):
        weight, bias = draw(outputs, columns, seed=seed), draw(outputs, seed=9) if seed else None
        if kind in (Weights.INT8, Weights.INT4):
            matrix = QuantizedMatrix.of(
                weight, 8 if kind is Weights.INT8 else 4, 128 if columns % 128 == 0 else None
            )
            made.append(matrix.described(bias))
            values.append(matrix.values(torch.float64))
        else:
            weight = weight if kind is Weights.FLOAT32 else weight.bfloat16()
            made.append(GraphMatrix(kind, weight, columns, bias))
            values.append(weight.double())
    return made, torch.cat(values)


@pytest.mark.parametrize("kind", list(Weights))
@pytest.mark.parametrize("columns", [256, 69])
def test_products(kind: Weights, columns: int) -> None:
    """The same bits from every set, whatever the other rows and the number of threads."""
    made, values = matrices(kind, columns)
    bias = torch.cat([torch.zeros(37), draw(130, seed=9)])
    given = draw(13, columns, seed=5)

    def work(input: Tensor, threads: int) -> Tensor:
        output, program = torch.empty(input.shape[0], 167), HostGraph()
        program.product(input, output, made)
        program.run(GraphStep(input.shape[0]), threads=threads)
        return output

    found = on_every_set(lambda: work(given, 2))
    exact = given.double() @ values.T + bias
    error = {Weights.FLOAT32: 1e-6, Weights.BFLOAT16: 2**-8}.get(kind, 2**-13)
    torch.testing.assert_close(
        found.double(), exact, rtol=error, atol=error * float(given.abs().max() * values.norm(dim=1).max())
    )
    assert torch.equal(work(given, 1), found)
    for rows in (1, 2, 3, 6):
        assert torch.equal(on_every_set(lambda rows=rows: work(given[4 : 4 + rows], 2)), found[4 : 4 + rows])
    narrow = given.bfloat16()
    output, program = torch.empty(13, 167, dtype=torch.bfloat16), HostGraph()
    program.product(narrow, output, made)
    program.run(GraphStep(13))
    assert torch.equal(output, work(narrow.float(), 2).bfloat16())


@pytest.mark.parametrize("kind", list(Weights))
@pytest.mark.parametrize(
    ("columns", "group"), [(768, None), (2048, None), (768, 384), (2048, 128), (2048, 1024)]
)
def test_products_of_panels_of_rows(kind: Weights, columns: int, group: int | None) -> None:
    """Of a part of a panel, a whole one, and more; of one or several chunks of columns: the bits of a row alone."""
    values, bias = draw(71, columns, seed=1), draw(71, seed=2)
    if kind in (Weights.INT8, Weights.INT4):
        quantized = QuantizedMatrix.of(values, 8 if kind is Weights.INT8 else 4, group)
        made, values = quantized.described(bias), quantized.values(torch.float64)
    else:
        made = GraphMatrix(kind, values if kind is Weights.FLOAT32 else values.bfloat16(), columns, bias)
    given = draw(35, columns, seed=3)

    def work(input: Tensor) -> Tensor:
        output, program = torch.empty(input.shape[0], 71), HostGraph()
        program.product(input, output, [made])
        program.run(GraphStep(input.shape[0]), threads=2)
        return output

    alone = torch.cat([work(row[None]) for row in given])
    exact = functional.linear(given[:1].double(), values.double(), bias.double())
    assert float((alone[:1] - exact).norm() / exact.norm()) < 0.01
    for rows in (5, 7, 16, 35):
        assert torch.equal(on_every_set(lambda rows=rows: work(given[:rows])), alone[:rows])


@pytest.mark.parametrize("kind", list(Weights))
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_steps_between_which_threads_do_not_meet(kind: Weights, rows: int) -> None:
    """Norms and gates fused with products give the same bits as alone; the sum is written where requested."""
    size, hidden = 256, 384
    stream, delta, weight = draw(rows, size), draw(rows, size, seed=1), draw(size, seed=2)

    def matrix(outputs: int, columns: int, seed: int) -> GraphMatrix:
        values = draw(outputs, columns, seed=seed)
        if kind in (Weights.INT8, Weights.INT4):
            return QuantizedMatrix.of(values, 8 if kind is Weights.INT8 else 4, 128).described()
        return GraphMatrix(kind, values if kind is Weights.FLOAT32 else values.bfloat16(), columns)

    gate, up, down = matrix(hidden, size, 3), matrix(hidden, size, 4), matrix(size, hidden, 5)
    step = GraphStep(rows, last=[rows - 1])

    def run(threads: int, together: bool) -> tuple[Tensor, ...]:
        sum, normed, both, gated, added = (
            torch.zeros(rows, width) for width in (size, size, 2 * hidden, hidden, size)
        )
        last, chosen, end = torch.zeros(rows, size), torch.zeros(1, size), torch.zeros(1, hidden)
        program = HostGraph()
        parts: list[Callable[[HostGraph], object]] = [
            lambda p: p.norm(stream, normed, weight, delta=delta, sum=sum),
            lambda p: p.product(normed, both, [gate, up]),
            lambda p: p.gate(both[:, :hidden], both[:, hidden:], gated, Activation.SILU),
            lambda p: p.product(gated, added, [down]),
            lambda p: p.norm(sum, chosen, weight, delta=added, sum=last, on_last=True),
            lambda p: p.product(chosen, end, [up], on_last=True),
        ]
        for part in parts:
            part(program)
            if not together:
                program.run(step, threads)
                program = HostGraph()
        if together:
            program.run(step, threads)
        return sum, gated, added, last[rows - 1], end

    alone = run(1, together=False)
    assert torch.equal(alone[0], stream + delta) and torch.equal(alone[3], (alone[0] + alone[2])[-1])
    for threads in (1, 2, 3):
        for _ in range(5):
            assert all(map(torch.equal, run(threads, together=True), alone))


def test_integer_inputs_beside_one_that_is_much_larger() -> None:
    """Rounded to 15 bits of the largest, they lose no more than bfloat16 loses of that one."""
    made, values = matrices(Weights.INT8, 256)
    given = draw(1, 256)
    given[0, 17] = 1000
    output, program = torch.empty(1, 167), HostGraph()
    program.product(given, output, made)
    program.run(GraphStep(1))
    exact = given.double() @ values.T
    exact[:, 37:] += draw(130, seed=9)
    of_bfloat16 = (given.bfloat16().double() - given.double()).abs() @ values.abs().T + 2**-9 * 1000
    assert bool(((output - exact).abs() <= of_bfloat16).all())


def test_long_integer_sums_do_not_overflow() -> None:
    columns = 40_000
    matrix = QuantizedMatrix.of(torch.ones(3, columns), 8)
    output, program = torch.empty(2, 3), HostGraph()
    program.product(torch.ones(2, columns), output, [matrix.described()])
    program.run(GraphStep(2))
    torch.testing.assert_close(output, torch.full((2, 3), float(columns)), rtol=1e-5, atol=0.0)
