from __future__ import annotations

import collections
import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.compat import runtime_utils as ds
from tests.pool import distributed

Pair = collections.namedtuple("Pair", "a b")

# --- Partitions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "parts", "bounds"),
    [(10, 3, [0, 4, 7, 10]), (2, 4, [0, 1, 2, 2, 2]), (12, 4, [0, 3, 6, 9, 12]), (0, 2, [0, 0, 0])],
)
def test_partition_uniform(items: int, parts: int, bounds: list[int]) -> None:
    assert ds.partition_uniform(items, parts) == bounds


@pytest.mark.parametrize(
    ("weights", "parts", "bounds"),
    [
        ([1, 1, 1, 1, 10], 2, [0, 4, 5]),
        ([1, 2, 3, 4, 5, 6], 3, [0, 3, 5, 6]),
        ([5, 1, 1, 1, 1, 1], 3, [0, 1, 4, 6]),  # the rest is spread, not packed against the limit
        ([1] * 7, 3, [0, 3, 5, 7]),
        ([0, 0, 0], 2, [0, 2, 3]),
        ([1, 1, 1, 1, 0, 1], 4, [0, 2, 3, 4, 6]),  # what weighs nothing goes with what follows it
        ([1, 1], 4, [0, 1, 2, 2, 2]),
        ([], 2, [0, 0, 0]),
    ],
)
def test_partition_balanced(weights: list[float], parts: int, bounds: list[int]) -> None:
    assert ds.partition_balanced(weights, parts) == bounds


def test_partition_balanced_is_optimal() -> None:
    draw = random.Random(0)
    for _ in range(200):
        items, parts = draw.randint(1, 8), draw.randint(1, 4)
        weights = [draw.randint(0, 9) for _ in range(items)]
        bounds = ds.partition_balanced(weights, parts)
        assert (
            bounds[0] == 0 and bounds[-1] == items and len(bounds) == parts + 1 and bounds == sorted(bounds)
        )

        def heaviest(cut: Any, weights: list[int] = weights) -> int:
            return max(sum(weights[a:b]) for a, b in itertools.pairwise(cut))

        every_cut = itertools.combinations_with_replacement(range(items + 1), parts - 1)
        assert heaviest(bounds) == min(heaviest((0, *cut, items)) for cut in every_cut)


def test_prefix_sum() -> None:
    assert ds.prefix_sum_inc([1, 2, 3]) == [1, 3, 6]


# --- Norms ----------------------------------------------------------------------------------------


def parameters(scale: float = 1.0) -> list[Any]:
    torch.manual_seed(0)
    params: list[Any] = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), ())]
    for param in params:
        param.grad = torch.randn(param.shape) * scale
    params.append(nn.Parameter(torch.zeros(2)))  # without a gradient
    return params


@pytest.mark.parametrize("norm_type", [2, 1, 3.0, float("inf")])
@pytest.mark.parametrize("scale", [1e-3, 10.0])
def test_clipping_is_torchs(norm_type: float, scale: float) -> None:
    ours, theirs = parameters(scale), parameters(scale)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0, norm_type)
    assert torch.allclose(ds.clip_grad_norm_(ours, 1.0, norm_type), expected, rtol=1e-6)
    for mine, other in zip(ours[:3], theirs[:3], strict=True):
        assert torch.allclose(mine.grad, other.grad, rtol=1e-6)
    assert ds.clip_grad_norm_(ours[0], 1.0).shape == ()
    assert ds.clip_grad_norm_(iter([]), 1.0) == 0


def test_clipping_half_precision_counts_in_full() -> None:
    param = nn.Parameter(torch.zeros(4096, dtype=torch.float16))
    param.grad = torch.full_like(param, 300.0)  # its sum of squares is beyond fp16
    assert ds.clip_grad_norm_([param], 1.0) == pytest.approx(300 * 64)
    assert param.grad.norm(dtype=torch.float32) == pytest.approx(1.0, rel=2e-2)


class Mpu:
    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()


@distributed(world_size=2)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_over_model_parallel_ranks(norm_type: float) -> None:
    whole = torch.arange(1.0, 9.0)
    shared = nn.Parameter(torch.zeros(3))
    shared.grad = torch.full((3,), 4.0)
    piece = nn.Parameter(torch.zeros(4))
    piece.tensor_model_parallel = True  # type: ignore[attr-defined]
    piece.grad = whole.chunk(2)[dist.get_rank()].clone()
    everything = torch.cat([whole, torch.full((3,), 4.0)])
    expected = torch.linalg.vector_norm(everything, norm_type)
    norm = ds.clip_grad_norm_([shared, piece], 2.0, norm_type, mpu=Mpu())
    assert torch.allclose(norm, expected)
    assert torch.allclose(shared.grad, torch.full((3,), 4.0) * 2.0 / expected)
    tensors = [whole.chunk(2)[dist.get_rank()]]
    assert torch.allclose(ds.get_global_norm_of_tensors(tensors, norm_type, Mpu()), whole.norm(norm_type))


def test_norms_of_tensors() -> None:
    assert ds.get_global_norm([3.0, 4.0]) == 5.0
    assert all(ds.get_global_norm([3.0, bad]) == math.inf for bad in (-1.0, math.nan, math.inf))
    tensors = [torch.ones(4), torch.ones(5)]
    assert ds.get_global_norm_of_tensors(tensors) == 3.0
    assert ds.clip_tensors_by_global_norm(tensors, max_norm=1.5) == 3.0
    assert torch.allclose(torch.cat(tensors), torch.full((9,), 0.5))
    ds.clip_tensors_by_global_norm(tensors, max_norm=1.0, global_norm=2.0)
    assert torch.allclose(torch.cat(tensors), torch.full((9,), 0.25))
    with pytest.raises(ValueError, match="empty"):
        ds.get_global_norm_of_tensors([])


# --- Structures, seeds, small things --------------------------------------------------------------


def test_moving_structures() -> None:
    t = torch.ones(1)
    item = {"a": t, "b": [t, 3, "s", None], "c": (t,), "d": Pair(t, 2), "e": collections.OrderedDict(f=t)}
    moved = ds.move_to_device(item, "meta")
    assert all(x.is_meta for x in (moved["a"], moved["b"][0], moved["c"][0], moved["d"].a, moved["e"]["f"]))
    assert moved["b"][1:] == [3, "s", None] and type(moved["c"]) is tuple and type(moved["d"]) is Pair
    assert type(moved["e"]) is collections.OrderedDict and not item["a"].is_meta
    mixed = ds.move_to_device([t, torch.ones(1, dtype=torch.long)], "meta", torch.is_floating_point)
    assert mixed[0].is_meta and not mixed[1].is_meta


def test_seeds() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    ds.set_random_seed(2**40 + 7)  # beyond NumPy's range
    first = draw()
    ds.set_random_seed(2**40 + 7)
    assert draw() == first
    ds.set_random_seed(8)
    assert draw() != first
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def test_small_things() -> None:
    assert ds.call_to_str("f", 1, "a", x=2) == "f(1, 'a', x=2)"
    ds.empty_cache()
    assert not ds.is_model_parallel_parameter(nn.Parameter(torch.zeros(1)))


@distributed(world_size=2)
def test_norm_of_experts_that_ranks_spread() -> None:
    """The same on every rank: the mean, as documented."""
    rank = dist.get_rank()
    shared, expert = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    expert.allreduce = False  # type: ignore[attr-defined]
    shared.grad = torch.ones(1)
    expert.grad = torch.full((1,), 1.0 + rank) if rank else None
    norm = ds.clip_grad_norm_([shared, expert], 0.1)
    assert float(norm) == pytest.approx((1 + 5**0.5) / 2)
    assert float(shared.grad) == pytest.approx(0.1 / float(norm), rel=1e-4)
