"""Formulas of wires of few bits: codes, layouts, what is owed; and cells whose limits only the formula keeps."""

from __future__ import annotations

import pytest
import torch

from deepspeed.ops.formats.codecs import BlockCodec
from tests.cells.cell import Cell, parse
from tests.cells.copies import expected_of
from tests.cells.oracle import Alone, tolerance
from tests.cells.run import run_cell
from tests.cells.wires import Wire, Wires, has_formula, rounded


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_of_two_implementations(bits: int) -> None:
    values = torch.randn(3, 600, generator=torch.Generator().manual_seed(bits))
    values[1, :256] = 0
    codec = BlockCodec(bits)
    assert torch.equal(rounded(values, bits), codec.decode(codec.encode(values), 600))
    assert (rounded(values, bits) - values).abs().max() > 1e-3


def test_gradients_lie_end_to_end() -> None:
    """A scale is that of a part of 256 elements, whatever tensors they belong to."""
    wire = Wire("parts", ("a", "b"), (0, 512), 1024, rows=2, bits=4)
    own = {"a": torch.full((256,), 0.4), "b": torch.tensor([7.0, 0.6])}
    total = Wires([wire]).total([[own, own]])
    torch.testing.assert_close(total["a"], torch.full((256,), 0.8))
    assert total["b"].tolist() == [14.0, 2.0]  # 0.6 of codes from -7 to 7


@pytest.mark.parametrize("kind", ["parts", "both ways"])
def test_what_is_owed_is_sent_later(kind: str) -> None:
    wires = Wires([Wire(kind, ("a",), (0,), 256, rows=1, bits=8, feedback=True)])
    own = [{"a": torch.randn(256, generator=torch.Generator().manual_seed(rank))} for rank in range(2)]
    sent = sum(wires.total([own])["a"] for _ in range(20))
    one = Wires([Wire(kind, ("a",), (0,), 256, rows=1, bits=8)]).total([own])["a"]
    wanted = own[0]["a"] + own[1]["a"]
    assert (sent / 20 - wanted).norm() < 0.2 * (one - wanted).norm()


def test_limits_are_those_of_the_formula() -> None:
    """Without it the oracle is further away than its limits allow."""
    cell = parse("ranks=2 stage=1 wire=qgz")
    named = Alone(cell).named
    starts, end = [], 0
    for param in named.values():
        starts.append(end)
        end += param.numel()
    end += -end % 2
    by_formula = expected_of([cell], wires=[[Wire("parts", tuple(named), tuple(starts), end, 2, bits=4)]])
    plain = expected_of([cell])
    name = "layers.1.feed.up.weight"
    away = (by_formula.weights[name] - plain.weights[name]).norm()
    assert away > 3 * tolerance(cell).moved * plain.moved(name)


def test_which_cells_have_a_formula() -> None:
    assert has_formula(parse("ranks=2 axes=sp stage=3 wire=qwz"))
    assert not has_formula(parse("ranks=2 stage=3 precision=bf16 wire=qwz"))
    assert has_formula(parse("ranks=2 optimizer=1-bit_Adam wire=int8"))
    assert not has_formula(parse("ranks=4 axes=tp stage=1 wire=qgz")) and not has_formula(Cell())


def test_codes_of_other_layouts() -> None:
    """Where the layout is not known, other ones show what the codes change; without codes that would be nothing."""
    coded, plain = (
        parse("ranks=4 axes=tp optimizer=1-bit_Adam wire=int8"),
        parse("ranks=4 axes=tp optimizer=1-bit_Adam"),
    )
    moved, name = {}, "layers.0.weight"
    for cell in (coded, plain):
        expected = expected_of([cell])
        expected.noised = [expected_of([cell], noise=seed) for seed in (1, 2)]
        moved[cell] = expected.spread(lambda each: each.weights[name]) / expected.moved(name)
    assert moved[plain] < 1e-4 and 0.1 < moved[coded] < 2


@pytest.mark.parametrize(
    "line",
    [
        "ranks=2 stage=2 wire=qgz accumulation=3",
        "ranks=2 stage=3 wire=qwz",
        "ranks=2 wire=int8 resume=same",
    ],
)
def test_a_cell_by_its_formula(line: str) -> None:
    result = run_cell(parse(line))
    assert result.outcome == "equal", f"{result.what}\n{result.details}"
