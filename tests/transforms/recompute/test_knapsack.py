"""The choice of results to keep and to recompute, compared with all possible choices."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch

from deepspeed.transforms.recompute.block_record import BlockRecord, RecordedOp
from deepspeed.transforms.recompute.knapsack import (
    Block,
    BudgetTooSmall,
    Footprint,
    choose,
    peak_of,
    recompute_options,
)

MM = torch.ops.aten.mm.default


def block(*ops: tuple[int, int], inputs: int = 10, extra: int = 3) -> BlockRecord:
    """Operations of (cost, bytes), all saved by autograd; ``extra``: of saved bytes that cannot be kept."""
    made = [
        RecordedOp(key=(MM, n), flops=cost, cost=cost, out=size, keepable=True, saved=True)
        for n, (cost, size) in enumerate(ops)
    ]
    saved = inputs + extra + sum(size for _, size in ops)
    return BlockRecord(ops=tuple(made), needed=len(made), inputs=inputs, saved=saved)


OPS = ((7, 3), (9, 4), (2, 2), (11, 6), (4, 4))


def test_ways_of_a_block_are_the_best_of_all_sets() -> None:
    record = block(*OPS)
    total = sum(cost for cost, _ in OPS)
    best: dict[int, int] = {}
    for count in range(len(OPS) + 1):
        for chosen in combinations(OPS, count):
            size, cost = 10 + sum(b for _, b in chosen), total - sum(c for c, _ in chosen)
            best[size] = min(best.get(size, cost), cost)
    options = recompute_options(record)
    assert options[0].chosen == frozenset() and options[0].kept == 10
    assert options[-1].chosen is None and options[-1].kept == record.saved
    for option in options[:-1]:
        assert option.cost == 1 + min(cost for size, cost in best.items() if size <= option.kept)
    for size, cost in best.items():
        assert min(option.cost for option in options if option.kept <= size) <= 1 + cost


@pytest.mark.parametrize("after", [0, 40])
def test_the_cheapest_choice_for_any_budget(after: int) -> None:
    kinds = [block(*OPS), block((5, 5), (6, 2), inputs=4)]
    blocks = [Block(0), Block(1), Block(0), Block(0)]
    counted = Footprint(kinds=kinds, blocks=blocks, outside=after + 5, before=5)
    by_kind = [recompute_options(kinds[each.kind]) for each in blocks]
    everything = list(product(*by_kind))
    for budget in range(counted.everything, 40, -7):
        fitting = [options for options in everything if peak_of(counted, options) <= budget]
        if not fitting:
            with pytest.raises(BudgetTooSmall) as problem:
                choose(counted, budget)
            assert problem.value.least == min(peak_of(counted, options) for options in everything)
            return
        found = choose(counted, budget)
        assert found.peak == peak_of(counted, found.options) <= budget
        least = min(sum(option.cost for option in options) for options in fitting)
        assert sum(option.cost for option in found.options) == least
    raise AssertionError("the budget never became too small")


def test_the_last_block_runs_again_only_if_more_follows() -> None:
    """Of 63 bytes a block keeps 10 at least; but while the last one runs again, it has 63."""
    blocks = [Block(0), Block(0)]
    alone = Footprint(kinds=[block((100, 50))], blocks=blocks)
    with pytest.raises(BudgetTooSmall, match="73"):
        choose(alone, 65)
    assert [option.kept for option in choose(alone, 73).options] == [10, 63]
    followed = Footprint(kinds=[block((100, 50))], blocks=blocks, outside=200)
    assert [option.kept for option in choose(followed, 265).options] == [10, 10]
