"""Fingerprints: parts add up, one bit is seen, distances are those of the tensors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepspeed.observe.audit.compare import distance, how_far
from deepspeed.observe.audit.fingerprints import Fingerprints, batch_entry, entry
from deepspeed.observe.audit.records import FullTensor, _joined

N = 150_001  # more than two runs of the tables


@pytest.fixture(scope="module")
def take() -> Fingerprints:
    return Fingerprints(torch.device("cpu"))


def whole(take: Fingerprints, tensor: Tensor, *cuts: int) -> FullTensor:
    edges = [0, *cuts, tensor.numel()]
    flat = tensor.reshape(-1)
    parts = [
        (rank, entry(low, high - low, take.part(flat[low:high], low)))
        for rank, (low, high) in enumerate(zip(edges, edges[1:], strict=False))
    ]
    return _joined(parts)


def test_parts_add_up(take: Fingerprints) -> None:
    tensor = torch.randn(N)
    one, three = whole(take, tensor), whole(take, tensor, 70_001, 131_072)
    assert one.hash == three.hash and one.numel == three.numel == N
    assert one.squares == pytest.approx(tensor.double().square().sum().item())
    assert three.sketch == pytest.approx(one.sketch)


@pytest.mark.parametrize("place", [0, 65_535, 65_536, N - 1])
def test_one_ulp_changes_the_hash_and_is_measured(take: Fingerprints, place: int) -> None:
    tensor = torch.randn(N)
    other = tensor.clone()
    other[place] = torch.nextafter(other[place], torch.tensor(torch.inf))
    x, y = whole(take, tensor), whole(take, other)
    assert x.hash != y.hash
    far = (other.double() - tensor.double()).abs().max().item()
    assert distance(x, y) == pytest.approx(far, rel=1e-2)


def test_every_bit_of_16_bit_values_counts_and_both_zeros_are_one(take: Fingerprints) -> None:
    tensor = torch.randn(1000).bfloat16()
    assert whole(take, tensor).hash == whole(take, tensor.float()).hash
    seen = {whole(take, tensor).hash}
    for bit in range(15):
        other = tensor.clone()
        other.view(torch.int16)[500] ^= 1 << bit
        seen.add(whole(take, other).hash)
    assert len(seen) == 16
    assert whole(take, torch.tensor([0.0, 1.0])).hash == whole(take, torch.tensor([-0.0, 1.0])).hash


def test_the_distance_is_that_of_the_tensors(take: Fingerprints) -> None:
    x, y = torch.randn(N), torch.randn(N)
    for size in (1e-6, 1e-2, 1.0):
        found = distance(whole(take, x), whole(take, x + size * y))
        assert found == pytest.approx(size * math.sqrt(N), rel=0.7)


def test_order_counts(take: Fingerprints) -> None:
    tensor = torch.randn(N)
    assert whole(take, tensor).hash != whole(take, tensor.flip(0)).hash


def test_differences_are_described(take: Fingerprints) -> None:
    tensor = torch.randn(N)
    x = whole(take, tensor)
    assert how_far(x, whole(take, tensor * 0)) == f"zero in B, norm {x.norm:.4g} in the other"
    assert "B is 0.5 times A" in how_far(x, whole(take, tensor * 0.5))
    other = tensor.clone()
    other[7] += 0.25
    assert "a single element that differs by 0.25" in how_far(x, whole(take, other))
    other[7] = torch.nan
    assert how_far(x, whole(take, other)) == "not finite in B"


def test_copies_must_be_equal(take: Fingerprints) -> None:
    tensor = torch.randn(10)
    parts = [(rank, entry(0, 10, take.part(tensor + (rank == 2)))) for rank in range(3)]
    found = _joined(parts)
    assert found.numel == 10 and list(found.copies) == [2]


def test_samples_count_in_any_order_but_as_they_stand_together(take: Fingerprints) -> None:
    x, y = torch.randint(0, 99, (6, 5)), torch.randn(6, 2)

    def total(*batches: dict[str, str]) -> dict[str, int]:
        return {name: sum(int(each[name], 16) for each in batches) % 2**64 for name in batches[0]}

    def of(rows: list[int], others: list[int] | None = None) -> dict[str, str]:
        return batch_entry(take, {"x": x[rows], "y": y[others or rows]})

    everything = total(of([0, 1, 2, 3, 4, 5]))
    assert everything == total(of([4, 1]), of([5, 0]), of([3, 2]))
    swapped = total(of([0, 1, 2, 3, 4, 5], [1, 0, 2, 3, 4, 5]))
    assert (
        swapped["x"] == everything["x"] and swapped["y"] == everything["y"] and swapped[""] != everything[""]
    )
    assert total(of([0, 1, 2, 3, 4, 4]))["x"] != everything["x"]
