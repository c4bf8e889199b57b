"""Counting by the other tests of this folder: everything that torch's allocator returns, without scratch of
products."""

from __future__ import annotations

from typing import Any

import torch

from tests.planning.memory.counting import Allocations, Change, without_scratch


def product(begin: float, end: float, thread: int = 1, name: str = "aten::mm") -> dict[str, Any]:
    return {"cat": "cpu_op", "name": name, "ts": begin, "dur": end - begin, "tid": thread}


def sizes(changes: list[Change], *events: dict[str, Any]) -> list[int]:
    return [change.size for change in without_scratch(changes, events)]


def test_what_a_product_takes_and_gives_back_is_left_out() -> None:
    changes = [Change(1, 1, 100, 8), Change(2, 1, 200, 64), Change(3, 1, 200, -64), Change(9, 1, 100, -8)]
    assert sizes(changes, product(0, 5)) == [8, -8]  # its result outlives it
    assert sizes(changes[::-1], product(0, 5)) == [8, -8]
    assert sizes(changes) == [8, 64, -64, -8]


def test_memory_of_others_is_never_left_out() -> None:
    taken_and_freed = [Change(2, 1, 100, 64), Change(3, 1, 100, -64)]
    assert sizes(taken_and_freed, product(0, 5, name="aten::sort")) == [64, -64]
    assert sizes(taken_and_freed, product(0, 5, thread=2)) == [64, -64]  # of another thread
    assert sizes(taken_and_freed, product(0, 2.5), product(2.6, 5)) == [64, -64]  # of two products
    assert sizes(taken_and_freed, product(2.5, 5)) == [64, -64]  # from before
    again = [*taken_and_freed, Change(6, 1, 100, 32)]  # the same address, for something that stays
    assert sizes(again, product(0, 5)) == [32]


def test_bf16_products_count_alike_on_every_cpu() -> None:
    x, weight = torch.ones(256, 256, dtype=torch.bfloat16), torch.ones(256, 256, dtype=torch.bfloat16)
    with Allocations() as allocations:
        with allocations.span("product"):
            y = x @ weight
        with allocations.span("own"):
            passing = torch.empty(1 << 20, dtype=torch.uint8)
            del passing
            y.sort()
    assert allocations.peak("product") == 256 * 256 * 2
    assert allocations.peak("own") >= 256 * 256 * 2 + (1 << 20)
