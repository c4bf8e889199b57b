from __future__ import annotations

import random

import pytest
import torch

from deepspeed.zero.layout import ALIGNMENT, CutPolicy, ParamSpec, cut


def specs(numels: list[int], units: list[int] | None = None, **options: object) -> list[ParamSpec]:
    return [
        ParamSpec(
            index=i,
            name=f"p{i}",
            numel=n,
            dtype=torch.float32,
            unit=units[i] if units else 0,
            wire_dtype=torch.float32,
            **options,  # type: ignore[arg-type]
        )
        for i, n in enumerate(numels)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_fragments_tile_every_parameter(seed: int) -> None:
    generator = random.Random(seed)
    numels = [generator.choice([0, 1, 7, 100, 1000]) for _ in range(generator.randint(1, 30))]
    units = sorted(generator.randint(0, 5) for _ in numels)
    shards = generator.choice([1, 2, 3, 4, 8])
    policy = CutPolicy(max_numel=generator.choice([1, 50, 10_000]), merge_numel=generator.choice([0, 300]))
    covered = [0] * len(numels)
    for bucket in cut(specs(numels, units), policy, shards):
        assert bucket.padded_numel == bucket.shard_numel * shards
        for slot in bucket.slots:
            assert slot.offset % ALIGNMENT == 0
        for rank in range(shards):
            low, high = bucket.shard_range(rank)
            for fragment in bucket.owned(rank):
                slot = next(s for s in bucket.slots if s.param == fragment.param)
                assert slot.offset + fragment.param_offset == low + fragment.shard_offset
                assert low + fragment.shard_offset + fragment.numel <= high
                covered[fragment.param] += fragment.numel
    assert covered == numels


def test_gaps_are_what_slots_leave() -> None:
    (bucket,) = cut(specs([3, 20, 16]), CutPolicy(max_numel=1000), 2)
    inside = {i for slot in bucket.slots for i in range(slot.offset, slot.end)}
    padding = {i for low, high in bucket.gaps() for i in range(low, high)}
    assert inside | padding == set(range(bucket.padded_numel))
    assert not inside & padding


def test_units_end_buckets_unless_they_are_small() -> None:
    params = specs([100] * 6, [0, 0, 1, 1, 2, 2])
    assert [len(b.slots) for b in cut(params, CutPolicy(max_numel=1000), 1)] == [2, 2, 2]
    assert [len(b.slots) for b in cut(params, CutPolicy(max_numel=1000, merge_numel=300), 1)] == [4, 2]


def test_a_parameter_larger_than_the_limit_stands_alone() -> None:
    buckets = cut(specs([10, 5000, 10]), CutPolicy(max_numel=100), 2)
    assert [[s.param for s in b.slots] for b in buckets] == [[0], [1], [2]]


def test_dtype_wire_and_replica_group_separate() -> None:
    mixed = [
        *specs([10, 10]),
        ParamSpec(index=2, name="b", numel=10, dtype=torch.bfloat16, unit=0, wire_dtype=torch.bfloat16),
        ParamSpec(
            index=3,
            name="e",
            numel=10,
            dtype=torch.float32,
            unit=0,
            wire_dtype=torch.float32,
            replica_group="ep_size_2",
        ),
    ]
    assert sorted(len(b.slots) for b in cut(mixed, CutPolicy(max_numel=1000), 2)) == [1, 1, 2]


def test_persistent_parameters_share_buckets_across_units() -> None:
    params = specs([4, 1000, 4, 1000], [0, 0, 1, 1])
    buckets = cut(params, CutPolicy(max_numel=10_000, persist_numel=10), 2)
    assert [[s.param for s in b.slots] for b in buckets] == [[0, 2], [1], [3]]


def test_no_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="num_shards"):
        cut(specs([1]), CutPolicy(max_numel=1), 0)
