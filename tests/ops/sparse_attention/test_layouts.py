"""Layouts, element by element against the sentences of the documents."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepspeed.ops.sparse_attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

HEADS, BLOCK = 4, 16


def expected(blocks: int, sees: Callable[[int, int, int], bool]) -> Tensor:
    """``sees(head, row, column)`` for every element."""
    return torch.tensor(
        [[[int(sees(h, r, c)) for c in range(blocks)] for r in range(blocks)] for h in range(HEADS)]
    )


def test_dense() -> None:
    assert DenseSparsityConfig(HEADS).make_layout(8 * BLOCK).all()


@pytest.mark.parametrize("attention", ["bidirectional", "unidirectional"])
@pytest.mark.parametrize("blocks", [16, 18, 3])
def test_fixed(attention: str, blocks: int) -> None:
    config = FixedSparsityConfig(
        HEADS,
        BLOCK,
        different_layout_per_head=True,
        num_local_blocks=4,
        num_global_blocks=1,
        attention=attention,
        num_different_global_patterns=4,
    )

    def sees(head: int, row: int, column: int) -> bool:
        if attention == "unidirectional" and column > row:
            return False
        # The last block of a window for the first head, the one before for the next.
        representative = 3 - head % 4
        window = column // 4
        short = (window + 1) * 4 > blocks  # of the last window only what exists can represent it
        place = min(window * 4 + representative, blocks - 1) if short else window * 4 + representative
        return row // 4 == window or column == place

    assert torch.equal(config.make_layout(blocks * BLOCK), expected(blocks, sees))


def test_fixed_with_horizontal_global_blocks() -> None:
    config = FixedSparsityConfig(
        HEADS, BLOCK, num_local_blocks=4, num_global_blocks=2, horizontal_global_attention=True
    )
    layout = config.make_layout(12 * BLOCK)
    assert torch.equal(
        layout, expected(12, lambda _, r, c: r // 4 == c // 4 or c % 4 in (2, 3) or r % 4 in (2, 3))
    )


@pytest.mark.parametrize("attention", ["bidirectional", "unidirectional"])
def test_variable(attention: str) -> None:
    config = VariableSparsityConfig(
        HEADS,
        BLOCK,
        local_window_blocks=[2, 4, 3],
        global_block_indices=[1, 7, 40],
        global_block_end_indices=[2, 9, 41],
        attention=attention,
        horizontal_global_attention=attention == "bidirectional",
    )
    starts = [0, 2, 6, 9, 12]  # 2, 4, and then 3 again and again

    def window(block: int) -> int:
        return sum(block >= start for start in starts)

    def is_global(block: int) -> bool:
        return block in (1, 7, 8)

    def sees(_: int, row: int, column: int) -> bool:
        if attention == "unidirectional":
            first = {1: 1, 7: 7, 8: 7}
            return (window(row) == window(column) and column <= row) or row >= first.get(column, 99)
        return window(row) == window(column) or is_global(row) or is_global(column)

    assert torch.equal(config.make_layout(14 * BLOCK), expected(14, sees))


@pytest.mark.parametrize("attention", ["bidirectional", "unidirectional"])
def test_bigbird_and_longformer(attention: str) -> None:
    def sees(_: int, row: int, column: int) -> bool:
        allowed = attention == "bidirectional" or column <= row
        return allowed and (abs(row - column) <= 2 or row < 2 or column < 2)

    bigbird = BigBirdSparsityConfig(
        HEADS,
        BLOCK,
        num_random_blocks=0,
        num_sliding_window_blocks=5,
        num_global_blocks=2,
        attention=attention,
    )
    longformer = BSLongformerSparsityConfig(
        HEADS,
        BLOCK,
        num_sliding_window_blocks=5,
        global_block_indices=[0],
        global_block_end_indices=[2],
        attention=attention,
    )
    for config in (bigbird, longformer):
        assert torch.equal(config.make_layout(12 * BLOCK), expected(12, sees))


@pytest.mark.parametrize("attention", ["bidirectional", "unidirectional"])
def test_local_sliding_window(attention: str) -> None:
    config = LocalSlidingWindowSparsityConfig(HEADS, BLOCK, num_sliding_window_blocks=3, attention=attention)
    after = 1 if attention == "bidirectional" else 0
    assert torch.equal(config.make_layout(9 * BLOCK), expected(9, lambda _, r, c: r - 1 <= c <= r + after))


def test_random_blocks_are_as_many_as_asked_for_and_reproducible() -> None:
    config = VariableSparsityConfig(
        HEADS,
        BLOCK,
        different_layout_per_head=True,
        num_random_blocks=3,
        local_window_blocks=[1],
        global_block_indices=[],
    )
    random.seed(3)
    layout = config.make_layout(20 * BLOCK)
    off_diagonal = layout.sum(-1) - 1
    assert ((off_diagonal == 3) | (off_diagonal == 2)).all()  # one of the three may be the window's own
    assert not torch.equal(layout[0], layout[1])
    random.seed(3)
    assert torch.equal(layout, config.make_layout(20 * BLOCK))
    later = BigBirdSparsityConfig(HEADS, BLOCK, num_random_blocks=3, attention="unidirectional")
    assert not later.make_layout(20 * BLOCK).triu(1).any()


def test_one_layout_serves_all_heads_unless_each_has_its_own() -> None:
    shared = BigBirdSparsityConfig(HEADS, BLOCK).make_layout(20 * BLOCK)
    assert (shared == shared[0]).all()
    assert shared.dtype == torch.int64 and shared.shape == (HEADS, 20, 20)


def test_a_pattern_of_ones_own() -> None:
    class EverySecond(SparsityConfig):
        def make_layout(self, seq_len: int) -> Tensor:
            layout = self.setup_layout(seq_len)
            for head in range(self.num_layout_heads):
                layout[head, :, ::2] = 1
            return self.check_and_propagate_first_head_layout(layout)

    assert torch.equal(EverySecond(HEADS).make_layout(96), expected(6, lambda _, __, c: c % 2 == 0))


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda: FixedSparsityConfig(4, num_local_blocks=4, num_global_blocks=3), ValueError, "multiple of"),
        (lambda: FixedSparsityConfig(4, attention="both"), NotImplementedError, "attention='both'"),
        (
            lambda: FixedSparsityConfig(4, attention="unidirectional", horizontal_global_attention=True),
            ValueError,
            "horizontal",
        ),
        (
            lambda: FixedSparsityConfig(4, num_different_global_patterns=2),
            ValueError,
            "different_layout_per_head",
        ),
        (
            lambda: FixedSparsityConfig(4, 16, True, num_different_global_patterns=5),
            ValueError,
            "4 choices",
        ),
        (
            lambda: VariableSparsityConfig(4, global_block_indices=[0], global_block_end_indices=[1, 2]),
            ValueError,
            "the same length",
        ),
        (
            lambda: BSLongformerSparsityConfig(4, global_block_indices=[3], global_block_end_indices=[3]),
            ValueError,
            "is empty",
        ),
        (lambda: DenseSparsityConfig(4).make_layout(20), ValueError, "not a multiple of block=16"),
        (
            lambda: BigBirdSparsityConfig(4, num_sliding_window_blocks=5).make_layout(64),
            ValueError,
            "only 4 blocks",
        ),
        (lambda: SparsityConfig(4).make_layout(64), NotImplementedError, "make_layout"),
    ],
)
def test_what_cannot_be_made_is_refused(
    make: Callable[[], object], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        make()
