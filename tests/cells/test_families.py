"""Tiny models of Transformers on several ranks against the same classes in one process."""

from __future__ import annotations

import pytest

from tests.cells.cell import FAMILIES, parse
from tests.cells.run import run_cell

pytest.importorskip("transformers")

CELLS = [
    "model=llama ranks=2 axes=tp lengths=curriculum resume=dp",
    "model=gpt2 ranks=2 stage=2 precision=bf16 accumulation=3",
    "model=bert ranks=2 stage=3 tier=cpu clip=true",
    "model=t5 ranks=2 axes=tp stage=1",
    "model=mixtral ranks=2 stage=3 buckets=tiny",
    "model=vit ranks=2 stage=1 optimizer=Muon",
]


@pytest.mark.parametrize("line", CELLS)
def test_a_family(line: str) -> None:
    result = run_cell(parse(line))
    assert result.outcome == "equal", f"{result.what}\n{result.details}"


def test_every_family_has_its_cell() -> None:
    assert {parse(line).model for line in CELLS} == set(FAMILIES)
