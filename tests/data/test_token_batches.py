"""Batches by tokens: what is packed together, the learning rates, and that a loader continues at any point."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader

from deepspeed.data.data_sampling import sequence_lengths as lengths_module
from deepspeed.data.data_sampling.indexed_dataset import MMapIndexedDataset
from deepspeed.data.data_sampling.sequence_lengths import length_of, sequence_lengths
from deepspeed.data.data_sampling.token_batches import pack
from deepspeed.data.data_sampling.variable_batch_size_and_lr import (
    VariableBatchSizeLR,
    batch_by_seqlens,
    get_dataloader_and_lr_scheduler_for_variable_batch_size,
    lr_scheduler_for_variable_batch_size,
    scale_lr,
)
from deepspeed.optim.lr_schedules import WarmupLR

LENGTHS = [1 + (i * 37) % 19 for i in range(200)]


def greedy(lengths: list[int], max_tokens: int, columns: int, largest: int) -> list[list[int]]:
    """The packs one sequence (or one row of ``columns`` sequences) at a time."""
    packs: list[list[int]] = []
    rows = [list(range(i, i + columns)) for i in range(0, len(lengths) - columns + 1, columns)]
    current: list[list[int]] = [[] for _ in range(columns)]
    for row in rows:
        grown = [[*pack, number] for pack, number in zip(current, row, strict=True)]
        if any(sum(lengths[n] for n in pack) > max_tokens or len(pack) > largest for pack in grown):
            packs += current
            grown = [[number] for number in row]
        current = grown
    return packs + [each for each in current if each]


# Packs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(
    ("max_tokens", "per_batch", "largest"), [(40, 1, None), (40, 4, None), (19, 3, None), (200, 4, 3)]
)
def test_packs_are_as_full_as_they_can_be(
    equal: bool, max_tokens: int, per_batch: int, largest: int | None
) -> None:
    packs, sizes, longest = batch_by_seqlens(
        LENGTHS,
        max_tokens,
        max_batch_size=largest,
        effective_batch_size=per_batch,
        required_microbatches_of_same_size=equal,
    )
    wanted = greedy(LENGTHS, max_tokens, per_batch if equal else 1, largest or len(LENGTHS))
    wanted = wanted[: len(wanted) - len(wanted) % per_batch]
    assert [numbers for _, numbers in packs] == wanted
    assert [batch for batch, _ in packs] == [place // per_batch for place in range(len(wanted))]
    batches = [sum(wanted[i : i + per_batch], []) for i in range(0, len(wanted), per_batch)]
    assert sizes == [len(batch) for batch in batches]
    assert longest == [max(LENGTHS[number] for number in batch) for batch in batches]
    if equal:
        assert all(len(numbers) * per_batch == sizes[batch] for batch, numbers in packs)


@pytest.mark.parametrize(
    ("per_batch", "equal", "samples", "max_tokens", "left_out"),
    [
        (1, False, 5, 100, 0),
        (1, True, 9, 20, 0),
        (2, True, 8, 30, 0),
        (2, True, 10, 10, 0),
        (4, True, 9, 10, 1),
        (4, False, 9, 10, 1),
        (4, False, 12, 10, 4),
    ],
)
def test_only_the_end_is_left_out(
    per_batch: int, equal: bool, samples: int, max_tokens: int, left_out: int
) -> None:
    packs, *_ = batch_by_seqlens(
        [5] * samples, max_tokens, effective_batch_size=per_batch, required_microbatches_of_same_size=equal
    )
    assert sorted(n for _, numbers in packs for n in numbers) == list(range(samples - left_out))
    assert len(packs) % per_batch == 0


def test_orders_names_and_sizes() -> None:
    def order(**options: Any) -> list[int]:
        return [n for _, numbers in batch_by_seqlens(LENGTHS, 60, **options)[0] for n in numbers]

    assert order() == list(range(200))
    assert order(sequence_picking_order="seqlen") == sorted(range(200), key=lambda n: LENGTHS[n])
    mixed = order(sequence_picking_order="random", seed=3)
    assert sorted(mixed) == list(range(200)) and mixed != list(range(200))
    assert mixed == order(sequence_picking_order="random", seed=3)
    assert mixed != order(sequence_picking_order="random", seed=4)
    assert order(sequence_ids_per_mb=list(range(1000, 1200))) == list(range(1000, 1200))
    packs, *_ = batch_by_seqlens([9, 9, 1, 1, 9, 30], 10, min_batch_size=2)
    assert packs == [(0, [1, 2]), (1, [3, 4])]  # 0 is full alone, 5 is too long
    packs, *_ = batch_by_seqlens([9, 9, 1, 1, 9], 10, min_batch_size=1)
    assert packs == [(0, [0]), (1, [1, 2]), (2, [3, 4])]


def test_packs_are_a_sequence() -> None:
    packs = pack(LENGTHS, 40, per_batch=2)
    assert list(packs) == packs[:] and packs[-1] == packs[len(packs) - 1]
    with pytest.raises(IndexError):
        packs[len(packs)]
    tokens = [sum(LENGTHS[n] for n in numbers) for _, numbers in packs]
    assert packs.units("tokens").tolist() == tokens
    assert packs.units("predictions").tolist() == [
        t - len(n) for t, (_, n) in zip(tokens, packs, strict=True)
    ]
    assert packs.units("samples").tolist() == [len(numbers) for _, numbers in packs]
    empty = pack([5], 3)
    assert len(empty) == 0 and empty.batch_sizes == empty.longest == list(empty) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"effective_batch_size": 0}, "effective_batch_size=0"),
        ({"min_batch_size": 3, "max_batch_size": 2}, "max_batch_size=2"),
        ({"sequence_picking_order": "longest"}, "'longest' is not one of dataloader"),
        ({"sequence_ids_per_mb": [1]}, "200 lengths for 1"),
        ({"seqlens": [3, -1]}, "length -1"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        batch_by_seqlens(**{"seqlens": LENGTHS, "max_tokens": 40, **arguments})


# Learning rates --------------------------------------------------------------------------------------------------


def optimizer(lr: float = 0.1) -> torch.optim.SGD:
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    return torch.optim.SGD([{"params": params[:1]}, {"params": params[1:], "lr": 2 * lr}], lr=lr)


SCHEDULES = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "StepLR": lambda optimizer: StepLR(optimizer, 3, 0.5),
    "WarmupLR": lambda optimizer: WarmupLR(optimizer, 0.0, [0.1, 0.2], 6, "linear"),
    "constant": lambda optimizer: optimizer,
}


def trained(schedule: Any, steps: int) -> list[list[float]]:
    rates = []
    for _ in range(steps):
        rates.append([group["lr"] for group in schedule.optimizer.param_groups])
        schedule.optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("method", ["linear", "sqrt", None])
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_those_of_the_schedule_scaled(name: str, method: str | None, tmp_path: Path) -> None:
    sizes = [4, 8, 2, 16, 12]

    def build() -> VariableBatchSizeLR:
        base = SCHEDULES[name](optimizer())
        return lr_scheduler_for_variable_batch_size(8, sizes, None, base, method)

    plain = SCHEDULES[name](optimizer())
    unscaled = [[0.1, 0.2]] * 12 if name == "constant" else trained(plain, 12)
    factor = {"linear": lambda x: x, "sqrt": np.sqrt, None: lambda x: 1}[method]
    wanted = [[lr * factor(sizes[i % 5] / 8) for lr in rates] for i, rates in enumerate(unscaled)]
    schedule = build()
    assert schedule.get_lr() == pytest.approx(wanted[0])
    np.testing.assert_allclose(trained(schedule, 7), wanted[:7])
    torch.save(schedule.state_dict(), tmp_path / "state")
    resumed = build()
    resumed.load_state_dict(torch.load(tmp_path / "state"))
    np.testing.assert_allclose(trained(resumed, 5), wanted[7:])
    if name in ("LambdaLR", "constant"):
        schedule.step(0)
        np.testing.assert_allclose(trained(schedule, 7), wanted[:7])


def test_a_skipped_update_reads_the_next_batch_at_the_same_rate() -> None:
    schedule = VariableBatchSizeLR(SCHEDULES["LambdaLR"](optimizer()), 8, [4, 8, 16], None)
    schedule.skip()
    assert schedule.get_last_lr() == pytest.approx([0.1, 0.2])
    schedule.optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx([0.1, 0.2])  # halved by the schedule, doubled by the size


def test_scaling() -> None:
    assert scale_lr(8, 32) == 4 and scale_lr(8, 32, 0.5, "SQRT") == 1
    assert scale_lr(8, 32, 0.5, None) == scale_lr(8, 32, 0.5, "None") == 0.5
    with pytest.raises(ValueError, match="'cubic' is not one of"):
        scale_lr(8, 32, method="cubic")
    with pytest.raises(TypeError, match="neither a learning-rate schedule nor an optimizer"):
        lr_scheduler_for_variable_batch_size(8, [8], None, object())
    with pytest.raises(ValueError, match="no batch can be filled"):
        VariableBatchSizeLR(SCHEDULES["StepLR"](optimizer()), 8, [], None)


# The loader ------------------------------------------------------------------------------------------------------


class Sentences(torch.utils.data.Dataset[Any]):
    """Sample i is i, as often as it is long."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((LENGTHS[index],), index)


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)


def loader(rank: int = 0, ranks: int = 1, workers: int = 0, **more: Any) -> Any:
    made, _, arguments = get_dataloader_and_lr_scheduler_for_variable_batch_size(
        Sentences(),
        LENGTHS,
        max_tokens=30,
        effective_batch_size=12,
        dataloader_batch_size=2,
        dataloader_rank=rank,
        dataloader_num_replicas=ranks,
        dataloader_num_workers=workers,
        dataloader_collate_fn=padded,
        **more,
    )
    assert set(arguments) == {
        "dataset", "batch_size", "pin_memory", "data_sampler", "collate_fn", "num_local_io_workers",
    }  # fmt: skip
    return made


def numbers(batches: Iterable[torch.Tensor]) -> list[list[int]]:
    return [batch[:, 0].tolist() for batch in batches]


def of_all_ranks(loaders: list[Any]) -> list[list[int]]:
    """The samples of each step of all ranks."""
    return [sorted(sum(step, [])) for step in zip(*(numbers(each) for each in loaders), strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_ranks_share_the_same_batches(ranks: int) -> None:
    packs, sizes, _ = batch_by_seqlens(LENGTHS, 30, effective_batch_size=12)
    steps = of_all_ranks([loader(rank, ranks) for rank in range(ranks)])
    each = 12 // (2 * ranks)
    assert len(steps) == len(loader(0, ranks)) == len(sizes) * each
    batches = [sorted(sum(steps[i : i + each], [])) for i in range(0, len(steps), each)]
    assert batches == [
        sorted(n for b, pack in packs if b == batch for n in pack) for batch in range(len(sizes))
    ]


@pytest.mark.parametrize(
    ("before", "after", "workers"), [(1, 1, 0), (2, 2, 0), (3, 1, 0), (1, 6, 0), (2, 1, 2)]
)
def test_a_run_continues_at_any_batch(before: int, after: int, workers: int) -> None:
    whole = of_all_ranks([loader(rank, before) for rank in range(before)])
    per_batch = 6 // before
    step = 1 if before == after and not workers else per_batch  # on other ranks between batches
    for taken in range(0, len(whole), 5 * step if workers else step):
        first = loader(0, before, workers)
        stream = iter(first)
        for _ in range(taken):
            next(stream)
        rest = []
        for rank in range(after):
            other = loader(rank, after, workers)
            other.load_state_dict(first.state_dict())
            rest.append(other)
        found = sum(of_all_ranks(rest), [])
        assert sorted(found) == sorted(sum(whole[taken:], []))
        assert numbers(loader(0, before)) == numbers(first) or taken == 0  # the next epoch is whole


def test_weights_make_every_unit_count_the_same() -> None:
    loaders = [loader(rank, 2) for rank in range(2)]
    for _ in range(4):  # batches
        found = [(len(next(stream)), stream.loss_weight) for _ in range(3) for stream in loaders]
        samples = sum(size for size, _ in found)
        assert [weight for _, weight in found] == pytest.approx([6 * size / samples for size, _ in found])


def test_padding_and_plain_arguments() -> None:
    def pad(sample: torch.Tensor, length: int) -> torch.Tensor:
        return torch.nn.functional.pad(sample, (0, length - len(sample)), value=-1)

    packs, _, longest = batch_by_seqlens(LENGTHS, 30, effective_batch_size=4)
    make = functools.partial(
        get_dataloader_and_lr_scheduler_for_variable_batch_size, Sentences(), LENGTHS, 30, 4
    )
    made, _, arguments = make(
        dataloader_collate_fn=torch.stack,
        required_microbatches_of_same_seqlen=True,
        sample_padding_fn=pad,
    )
    batches = list(made)
    assert [batch.shape[1] for batch in batches] == [longest[i // 4] for i in range(len(packs))]
    assert numbers(batches) == [ids for _, ids in packs]
    torchs = DataLoader(
        arguments["dataset"], collate_fn=arguments["collate_fn"], sampler=arguments["data_sampler"]
    )
    assert numbers(torchs) == numbers(batches)
    bare, *_ = make()
    assert [len(sample) for sample in next(iter(bare))] == [LENGTHS[n] for n in packs[0][1]]
    with pytest.raises(ValueError, match="needs sample_padding_fn"):
        make(required_microbatches_of_same_seqlen=True)


def test_a_part_of_the_samples() -> None:
    chosen = [n for n in range(200) if 5 < LENGTHS[n] < 12]
    random.Random(1).shuffle(chosen)
    whole = numbers(loader(dataset_filter_ids=chosen))
    found = sum(whole, [])
    assert found == chosen[: len(found)] and len(found) > 30
    own, *_ = get_dataloader_and_lr_scheduler_for_variable_batch_size(
        Sentences(),
        [LENGTHS[n] for n in chosen],
        30,
        12,
        chosen,
        dataloader_batch_size=2,
        dataloader_collate_fn=padded,
    )
    assert numbers(own) == whole
    with pytest.raises(ValueError, match="do not fill one batch of 12 packs of at most 30"):
        loader(dataset_filter_ids=chosen[:3])


# Lengths ---------------------------------------------------------------------------------------------------------


def test_lengths_are_found_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sequence_lengths(Sentences()).tolist() == LENGTHS
    assert sequence_lengths(Sentences(), str(tmp_path)).tolist() == LENGTHS
    kept = MMapIndexedDataset(tmp_path / "seqlen" / "seqlen_sample_to_metric")
    assert [int(entry[0]) for entry in kept] == LENGTHS
    monkeypatch.setattr(lengths_module, "DataAnalyzer", None)  # read, not counted again
    assert sequence_lengths(Sentences(), str(tmp_path)).tolist() == LENGTHS
    with pytest.raises(ValueError, match="200 lengths for a data set of 3 samples"):
        sequence_lengths([torch.ones(2)] * 3, str(tmp_path))


@pytest.mark.parametrize("kept", [False, True])
def test_lengths_of_a_clients_batches(kept: bool, tmp_path: Path) -> None:
    def lengths(batch: torch.Tensor) -> torch.Tensor:
        return (batch >= 0).sum(1, dtype=torch.int32)

    found = sequence_lengths(Sentences(), str(tmp_path) if kept else None, lengths, padded)
    assert found.tolist() == LENGTHS


def test_the_length_of_a_sample() -> None:
    ids = torch.arange(5)
    assert length_of({"labels": 1, "input_ids": [3, 4, 5]}) == 3
    assert length_of({"input_ids": ids, "attention_mask": [1, 1, 1, 0, 0]}) == 3
    assert length_of((ids, 1)) == length_of(ids) == length_of({"x": ids.numpy()}) == length_of([1] * 5) == 5
    with pytest.raises(ValueError, match="cannot determine the number of tokens"):
        length_of("words")
