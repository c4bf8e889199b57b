"""Intersection of shards against tensors whose elements are their own flat positions."""

from __future__ import annotations

import itertools
import random
from math import prod

import numpy as np
import pytest

from deepspeed.checkpoint.shards import Box, ShardIndex, intersect, regions, slabs


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(prod(shape)).reshape(shape)


def local_tensor(whole: np.ndarray, shard: ShardIndex) -> np.ndarray:
    """The oracle: cut the boxes out with numpy and join them."""
    if not shard.boxes:
        return whole
    parts = [whole[tuple(slice(low, high) for low, high in box)] for box in shard.boxes]
    if len(parts) == 1:
        return parts[0]
    dim = next(d for d in range(whole.ndim) if len({box[d] for box in shard.boxes}) > 1)
    return np.concatenate(parts, axis=dim)


def fragment(whole: np.ndarray, shard: ShardIndex) -> np.ndarray:
    return local_tensor(whole, shard).reshape(-1)[shard.start : shard.stop].copy()


def apply(target: ShardIndex, sources: list[ShardIndex], whole: np.ndarray) -> tuple[np.ndarray, int, int]:
    """Fill the target by the planned copies; also the number of elements copied and missing."""
    pieces, missing = intersect(target, sources)
    result = np.full(target.numel, -1, dtype=whole.dtype)
    size = whole.itemsize
    for piece in pieces:
        source = fragment(whole, sources[piece.source])
        into = np.lib.stride_tricks.as_strided(
            result[piece.target_offset :], piece.shape, [s * size for s in piece.target_strides]
        )
        into[...] = np.lib.stride_tricks.as_strided(
            source[piece.source_offset :], piece.shape, [s * size for s in piece.source_strides]
        )
    return result, sum(p.numel for p in pieces), sum(prod(high - low for low, high in box) for box in missing)


def cuts(rng: random.Random, numel: int, parts: int) -> list[tuple[int, int]]:
    points = sorted(rng.randint(0, numel) for _ in range(parts - 1))
    return list(zip([0, *points], [*points, numel], strict=True))


def split_boxes(shape: tuple[int, ...], dim: int, fused: list[int], degree: int) -> list[tuple[Box, ...]]:
    """Tensor-parallel boxes of each rank: every one of the ``fused`` blocks along ``dim`` is cut ``degree``
    ways."""
    ranks: list[tuple[Box, ...]] = []
    for rank in range(degree):
        boxes: list[Box] = []
        position = 0
        for size in fused:
            share = size // degree
            box = [(0, extent) for extent in shape]
            box[dim] = (position + rank * share, position + (rank + 1) * share)
            boxes.append(tuple(box))
            position += size
        ranks.append(tuple(boxes))
    return ranks


def random_layout(rng: random.Random, shape: tuple[int, ...]) -> list[ShardIndex]:
    """Tensor-parallel degree, fused blocks and flat cuts at random; together they cover the tensor."""
    tp: list[tuple[Box, ...]] = [()]
    dims = [d for d, size in enumerate(shape) if size >= 2]
    if dims and rng.random() < 0.6:
        dim = rng.choice(dims)
        degree = rng.choice([n for n in (2, 3, 4) if n <= shape[dim]])
        blocks = rng.choice([1, 2, 3])
        unit = shape[dim] // (degree * blocks)
        if unit and unit * degree * blocks == shape[dim]:
            weights = [unit * degree] * blocks
            if blocks == 3 and unit > 1:  # grouped-query attention: q is larger than k and v
                weights = [weights[0] + 2 * degree * (unit - 1), degree, degree]
            tp = split_boxes(shape, dim, weights, degree)
    layout: list[ShardIndex] = []
    for boxes in tp:
        whole = ShardIndex("w", shape, boxes, 0, 0)
        layout += [
            ShardIndex("w", shape, boxes, a, b) for a, b in cuts(rng, whole.local_numel, rng.randint(1, 5))
        ]
    return layout


@pytest.mark.parametrize("seed", range(40))
def test_any_layout_is_assembled_from_any_other(seed):
    rng = random.Random(seed)
    for _ in range(12):
        shape = tuple(rng.choice([1, 2, 3, 4, 6, 8, 12]) for _ in range(rng.randint(0, 4)))
        whole = numbered(shape)
        saved, wanted = random_layout(rng, shape), random_layout(rng, shape)
        rng.shuffle(saved)
        for target in wanted:
            result, copied, missing = apply(target, saved, whole)
            np.testing.assert_array_equal(result, fragment(whole, target))
            assert (copied, missing) == (target.numel, 0), "each element once, none missing"


@pytest.mark.parametrize("seed", range(10))
def test_what_no_source_holds_is_reported(seed):
    rng = random.Random(1000 + seed)
    for _ in range(20):
        shape = tuple(rng.choice([2, 3, 4, 6]) for _ in range(rng.randint(1, 3)))
        whole = numbered(shape)
        saved = random_layout(rng, shape)
        lost = saved.pop(rng.randrange(len(saved)))
        gone = set(fragment(whole, lost).tolist())
        for target in random_layout(rng, shape):
            result, _, missing = apply(target, saved, whole)
            expected = fragment(whole, target)
            holes = np.isin(expected, list(gone))
            assert missing == holes.sum()
            np.testing.assert_array_equal(result, np.where(holes, -1, expected))


def test_replicas_are_read_once():
    shape = (6, 4)
    whole = numbered(shape)
    saved = [ShardIndex("w", shape, (), 0, 24)] * 3
    result, copied, missing = apply(ShardIndex("w", shape, (), 5, 17), saved, whole)
    np.testing.assert_array_equal(result, np.arange(5, 17))
    assert (copied, missing) == (12, 0)


def test_same_boxes_give_one_contiguous_copy_per_source():
    shape = (7, 5)
    saved = [ShardIndex("w", shape, (), a, b) for a, b in ((0, 11), (11, 30), (30, 35))]
    pieces, _ = intersect(ShardIndex("w", shape, (), 9, 32), saved)
    assert [p.contiguous for p in pieces] == [True] * 3
    assert [(p.source, p.source_offset, p.target_offset, p.numel) for p in pieces] == [
        (0, 9, 0, 2),
        (1, 0, 2, 19),
        (2, 0, 21, 2),
    ]


def test_fused_qkv_moves_between_parallel_degrees():
    shape = (12, 5)  # q, k and v of 4 rows each
    whole = numbered(shape)
    two = [ShardIndex("qkv", shape, boxes, 0, 30) for boxes in split_boxes(shape, 0, [4, 4, 4], 2)]
    assert two[1].local_shape == (6, 5)
    np.testing.assert_array_equal(fragment(whole, two[1])[:10], whole[2:4].reshape(-1))
    for boxes in split_boxes(shape, 0, [4, 4, 4], 4):
        target = ShardIndex("qkv", shape, boxes, 0, 15)
        np.testing.assert_array_equal(apply(target, two, whole)[0], fragment(whole, target))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 4, 2)])
def test_scalars_and_empty_tensors(shape):
    shard = ShardIndex("w", shape, (), 0, prod(shape))
    result, copied, missing = apply(shard, [shard], numbered(shape))
    assert (len(result), copied, missing) == (prod(shape), prod(shape), 0)
    assert apply(shard, [], numbered(shape))[2] == prod(shape)


def test_slabs_follow_each_other_and_are_few():
    for shape in itertools.product([1, 2, 3], repeat=3):
        whole = numbered(shape)
        for start, stop in itertools.combinations_with_replacement(range(prod(shape) + 1), 2):
            boxes = slabs(shape, start, stop)
            flat = [whole[tuple(slice(low, high) for low, high in box)].reshape(-1) for box in boxes]
            np.testing.assert_array_equal(np.concatenate([*flat, np.empty(0, int)]), np.arange(start, stop))
            assert len(boxes) <= 2 * len(shape) - 1


def test_regions_of_a_fragment_inside_one_fused_block():
    shape = (8, 3)
    shard = ShardIndex("w", shape, split_boxes(shape, 0, [4, 4], 2)[0], 0, 6)
    assert [r.box for r in regions(shard)] == [((0, 2), (0, 3))]


def test_contradictions_are_refused():
    with pytest.raises(ValueError, match=r"saved with shape \(4,\)"):
        intersect(ShardIndex("w", (5,), (), 0, 5), [ShardIndex("w", (4,), (), 0, 4)])
    with pytest.raises(ValueError, match="is not inside a tensor"):
        ShardIndex("w", (4,), (((0, 5),),), 0, 1)
    with pytest.raises(ValueError, match=r"\[0, 9\)"):
        ShardIndex("w", (4,), (), 0, 9)
    with pytest.raises(ValueError, match="exactly one dim"):
        ShardIndex("w", (4, 4), (((0, 2), (0, 2)), ((2, 4), (2, 4))), 0, 1)
