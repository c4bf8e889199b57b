"""Tiny models of Transformers on several ranks against the same classes in one process."""

from __future__ import annotations

import itertools

import pytest

from tests.cells import draw
from tests.cells.cell import FAMILIES, parse, why_not
from tests.cells.run import run_cell

pytest.importorskip("transformers")

CELLS = [
    "model=llama ranks=2 axes=tp lengths=curriculum resume=dp",
    "model=gpt2 ranks=2 stage=2 precision=bf16 accumulation=3",
    "model=bert ranks=2 stage=3 tier=cpu clip=true",
    "model=t5 ranks=2 axes=tp stage=1",
    "model=mixtral ranks=2 stage=3 buckets=tiny",
    "model=vit ranks=2 stage=1 optimizer=Muon",
    "model=unet ranks=2 stage=3 accumulation=3",
    "model=unet ranks=4 stage=2 shards=mics optimizer=Muon resume=dp",
    "model=qwen3 ranks=2 stage=3 lora=true",
    "model=gptj ranks=2 optimizer=Muon",
    "model=mixtral ranks=2 stage=3 optimizer=Muon",
    "model=gpt_oss ranks=2 optimizer=Muon",
]
"""One of each kind; with ``python -m tests.cells --families`` every tenth cell is one of all families."""


@pytest.mark.parametrize("line", CELLS)
def test_a_family(line: str) -> None:
    result = run_cell(parse(line))
    assert result.outcome == "equal", f"{result.what}\n{result.details}"


def test_the_families_are_the_architectures() -> None:
    """All that have logits."""
    from tests.clients.architectures import ARCHITECTURES

    assert set(FAMILIES) == {*ARCHITECTURES, "unet"} - {"clip"}


def test_every_family_has_its_turn() -> None:
    drawn = list(itertools.islice(draw.of_families(1), len(FAMILIES)))
    assert {cell.model for cell in drawn} == set(FAMILIES) and not any(map(why_not, drawn))
    mixed = itertools.islice(draw.cells(1, families=True), 10 * draw.EACH_FAMILY)
    assert [number for number, cell in enumerate(mixed, 1) if cell.model in FAMILIES] == list(
        range(10, 101, 10)
    )
