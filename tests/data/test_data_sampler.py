"""Sampling by difficulty: what each batch may contain, and that a resumed run continues exactly."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.sections.data import get_data_efficiency_config
from deepspeed.data.data_sampling.data_analyzer import DataAnalyzer
from deepspeed.data.data_sampling.data_sampler import DeepSpeedDataSampler
from deepspeed.data.data_sampling.shuffling import Shuffle
from deepspeed.data.loader import DeepSpeedDataLoader
from tests.pool import distributed

SIZE, GLOBAL = 203, 12
VALUES = {
    "length": np.array([1 + (i * 37) % 50 for i in range(SIZE)]),
    "rarity": np.array([(i * 11) % 23 for i in range(SIZE)]),
}


def analysed(folder: Path) -> None:
    DataAnalyzer(
        list(range(SIZE)),
        batch_size=50,
        metric_names=list(VALUES),
        metric_functions=[
            lambda batch, v=values: torch.from_numpy(v[batch.numpy()]) for values in VALUES.values()
        ],
        metric_types=["single_value_per_sample"] * len(VALUES),
        metric_dtypes=[torch.int64] * len(VALUES),
        save_path=str(folder),
    ).run_map_reduce()


def metric(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    by_percentile = changes.get("difficulty_type") == "percentile"
    return {
        "index_to_sample_path": f"{folder}/{name}/{name}_index_to_sample{'_percentile_merged' * by_percentile}",
        "index_to_metric_path": f"{folder}/{name}/{name}_index_to_metric",
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": 5,
        "max_difficulty": 50,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 1},
        **changes,
    }


def section(folder: Path, metrics: dict[str, Any], **sampling: Any) -> dict[str, Any]:
    curriculum = {"enabled": True, "data_cluster_path": f"{folder}/clusters", "curriculum_metrics": metrics}
    return {
        "enabled": True,
        "seed": 7,
        "data_sampling": {"enabled": True, "curriculum_learning": curriculum, **sampling},
    }


def make(config: dict[str, Any], rank: int = 0, ranks: int = 1, steps: int = 1, **more: Any) -> Any:
    return DeepSpeedDataSampler(
        get_data_efficiency_config({"data_efficiency": config}),
        SIZE,
        GLOBAL // ranks // steps,
        rank,
        ranks,
        None,
        steps,
        rank,
        **more,
    )


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("index")
    analysed(folder)
    return folder


def taken(sampler: Any, batches: int) -> list[list[int]]:
    stream = iter(sampler)
    return [next(stream) for _ in range(batches)]


# Orders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1000, 1025])
def test_a_shuffle_is_a_permutation(size: int) -> None:
    order = Shuffle(size, 1, 2)(np.arange(size))
    assert sorted(order.tolist()) == list(range(size))
    assert Shuffle(size, 1, 2)(np.arange(size))[size // 2] == Shuffle(size, 1, 2)(np.array([size // 2]))[0]
    if size >= 64:
        assert order.tolist() != Shuffle(size, 1, 3)(np.arange(size)).tolist()
        drift = np.abs(np.corrcoef(order, np.arange(size))[0, 1])
        assert drift < 0.4 if size == 64 else drift < 0.12


# What is drawn ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["value", "percentile", "percentile of single values"])
def test_batches_follow_the_difficulty(index: Path, tmp_path: Path, kind: str) -> None:
    changes: dict[str, Any] = {"difficulty_type": kind.split()[0]}
    if kind != "value":
        changes |= {"min_difficulty": 10, "max_difficulty": 100}
    described = metric(index, "length", **changes)
    if "single" in kind:
        described["index_to_sample_path"] = f"{index}/length/length_index_to_sample"
    sampler = make(section(tmp_path, {"length": described}))
    easiest = np.argsort(VALUES["length"], kind="stable")
    for step, batch in zip(range(1, 13), sampler, strict=False):
        difficulty = sampler.state_dict()["current_difficulties"]["length"]
        assert difficulty == (min(5 + int(4.5 * step), 50) if kind == "value" else min(10 + 9 * step, 100))
        accepted = set(np.flatnonzero(VALUES["length"] <= difficulty).tolist())
        if kind != "value":
            accepted = set(easiest[: SIZE * difficulty // 100].tolist())
        assert set(batch) <= accepted and len(batch) == GLOBAL
    assert not (tmp_path / "clusters").exists()  # one metric needs no files


def test_a_cluster_is_gone_through_before_a_sample_comes_again(index: Path, tmp_path: Path) -> None:
    flat = {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [10, 50], "max_step": [8]}}
    sampler = make(section(tmp_path, {"length": metric(index, "length", **flat)}))
    easy = np.flatnonzero(VALUES["length"] <= 10)
    drawn = sum(taken(sampler, 8), [])
    passes, rest = divmod(len(drawn), len(easy))
    counts = np.bincount(drawn, minlength=SIZE)
    assert set(counts[easy]) <= {passes, passes + 1} and counts.sum() == counts[easy].sum()
    assert (counts == passes + 1).sum() == rest
    later = sum(taken(sampler, 400), [])
    counts = np.bincount(later, minlength=SIZE)
    assert counts.min() > 0.8 * len(later) / SIZE and counts.max() < 1.25 * len(later) / SIZE


def test_several_metrics_all_accept_a_sample(index: Path, tmp_path: Path) -> None:
    metrics = {
        "length": metric(index, "length"),
        "rarity": metric(index, "rarity", min_difficulty=10, max_difficulty=22),
        "other": metric(Path("nowhere"), "other", clustering_type="single_cluster", max_difficulty=8),
    }
    samplers = [make(section(tmp_path, metrics), rank, 2) for rank in range(2)]
    seen: set[int] = set()
    for _ in range(14):
        batch = taken(samplers[0], 1)[0] + taken(samplers[1], 1)[0]
        now = samplers[0].current_difficulties
        assert (VALUES["length"][batch] <= now["length"]).all() and (
            VALUES["rarity"][batch] <= now["rarity"]
        ).all()
        seen |= set(batch)
    assert now["other"] == 8 and samplers[1].current_difficulties == now
    accepted = [set(cluster._order.tolist()) for cluster in samplers[0]._samples]
    assert set.union(*accepted) == set(range(SIZE)) and sum(map(len, accepted)) == SIZE
    assert not list((tmp_path / "clusters").glob("*.votes"))
    assert all(Path(path).exists() for path in samplers[1].state_dict()["data_cluster_paths"])


def test_positions_and_length(index: Path, tmp_path: Path) -> None:
    sampler = make(section(tmp_path, {"length": metric(index, "length")}))
    assert sampler.get_start_end_idx() == (0, GLOBAL) and len(sampler) == 1000 * SIZE


def test_a_custom_schedule(index: Path, tmp_path: Path) -> None:
    described = metric(index, "length", schedule_type="custom")
    sampler = make(
        section(
            tmp_path, {"length": described, "b": metric(index, "rarity", clustering_type="single_cluster")}
        )
    )
    with pytest.raises(KeyError, match="'c' is not a curriculum metric: length, b"):
        sampler.set_custom_curriculum_learning_schedule({"c": int})
    with pytest.raises(ValueError, match="'b' has schedule_type='fixed_linear'"):
        sampler.set_custom_curriculum_learning_schedule({"b": int})
    steps = [10, 30, 20, 40, 40]
    sampler.set_custom_curriculum_learning_schedule({"length": lambda step: steps[step - 1]})
    batches = taken(sampler, 5)
    assert [
        VALUES["length"][batch].max() <= limit
        for batch, limit in zip(batches, [10, 30, 30, 40, 40], strict=True)
    ]
    sizes = [len(samples) for samples in sampler._samples]
    assert len(sizes) == 3 and sum(sizes) == (VALUES["length"] <= 40).sum()


def test_the_last_batch(tmp_path: Path) -> None:
    one = {"m": metric(tmp_path, "m", clustering_type="single_cluster")}
    dropped = list(make(section(tmp_path, one, num_epochs=1)))
    assert len(dropped) == SIZE // GLOBAL and len(set(sum(dropped, []))) == SIZE // GLOBAL * GLOBAL
    parts = [list(make(section(tmp_path, one, num_epochs=1), rank, 2, drop_last=False)) for rank in range(2)]
    whole = sum(parts[0] + parts[1], [])
    assert sorted(whole) == list(range(SIZE))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"index_to_sample_path": "missing"}, "index_to_sample_path='missing' is not an index file"),
        (
            {"min_difficulty": 0, "schedule_config": {"total_curriculum_step": 900, "difficulty_step": 1}},
            "no sample",
        ),
    ],
)
def test_mistakes_are_named(index: Path, tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=told):
        taken(make(section(tmp_path, {"length": metric(index, "length", **changes)})), 1)


def test_a_merged_file_with_values_is_refused(index: Path, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    DataAnalyzer(
        list(range(SIZE)),
        batch_size=SIZE,
        metric_names=["m"],
        metric_functions=[lambda batch: batch],
        metric_types=["single_value_per_sample"],
        metric_dtypes=[torch.int64],
        save_path=str(folder),
    ).run_map_reduce()
    described = metric(folder, "m")
    described["index_to_sample_path"] += "_percentile_merged"
    with pytest.raises(DeepSpeedConfigError, match="is the file without '_percentile_merged'"):
        make(section(tmp_path, {"m": described}))


# Resuming ---------------------------------------------------------------------------------------------------


def merged(samplers: list[Any], samples: int) -> list[int]:
    """The next samples of all ranks, in their common order."""
    streams = [iter(sampler) for sampler in samplers]
    found: list[int] = []
    while len(found) < samples:
        found += sum((next(stream) for stream in streams), [])
    return found


def test_any_ranks_and_accumulation_continue_at_any_point(index: Path, tmp_path: Path) -> None:
    """100 points, 1 to 4 ranks: the same samples in the same order, none twice, none lost."""
    metrics = {"length": metric(index, "length"), "rarity": metric(index, "rarity", max_difficulty=30)}
    config = section(tmp_path, metrics)
    reference = merged([make(config)], 40 * GLOBAL)
    source = random.Random(0)
    for _ in range(100):
        before, after = source.choice([1, 2, 3, 4]), source.choice([1, 2, 3, 4])
        first = [make(config, rank, before, 1 if before == 3 else 3) for rank in range(before)]
        micro = first[0].micro_batch_times_data_parallel_size
        count = source.randrange(0, 20 * GLOBAL // micro) * micro
        assert merged(first, count) == reference[:count]
        state = first[-1].state_dict()
        assert len(str(state)) < 4000
        second = [make(config, rank, after) for rank in range(after)]
        for sampler in second:
            sampler.load_state_dict(state)
        wanted = GLOBAL * source.randrange(1, 15)
        assert merged(second, wanted)[:wanted] == reference[count : count + wanted]


def test_earlier_positions_are_known(index: Path, tmp_path: Path) -> None:
    config = section(tmp_path, {"length": metric(index, "length")})
    sampler = make(config, steps=3)
    batches = taken(sampler, 30)
    for done in (0, 1, 3, 7, 29, 30):
        again = make(config, steps=3)
        again.load_state_dict(sampler.state_at(4 * done))
        assert taken(again, 30 - done) == batches[done:]
    with pytest.raises(LookupError):
        sampler.state_at(10**6)


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, place: int) -> int:
        return place


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_continues(index: Path, tmp_path: Path, workers: int) -> None:
    config = section(tmp_path, {"length": metric(index, "length")})

    def loader() -> DeepSpeedDataLoader:
        return DeepSpeedDataLoader(
            Numbers(), 4, False, -1, None, data_sampler=make(config, steps=3), num_local_io_workers=workers
        )

    first = loader()
    stream = iter(first)
    seen = [next(stream).tolist() for _ in range(7)]
    state = first.state_dict()
    told: list[Any] = []
    first.post_process_func = lambda batch, state: told.append(state["current_difficulties"]) or batch
    rest = [next(stream).tolist() for _ in range(8)]
    assert [each["length"] for each in told] == [18, 18, 23, 23, 23, 27, 27, 27]
    assert len(first) == 1000 * SIZE // 4
    resumed = loader()
    resumed.load_state_dict(state)
    stream = iter(resumed)
    assert [next(stream).tolist() for _ in range(4)] == rest[:4]
    stream = iter(resumed)  # another pass continues
    assert [next(stream).tolist() for _ in range(4)] == rest[4:]
    assert taken(make(config, steps=3), 15) == seen + rest


def test_switching_a_curriculum_on_and_off(index: Path, tmp_path: Path) -> None:
    config = section(tmp_path, {"length": metric(index, "length")})
    curriculum = DeepSpeedDataLoader(Numbers(), 4, False, -1, None, data_sampler=make(config, steps=3))
    plain = DeepSpeedDataLoader(Numbers(), 4, False, -1, None)
    stream = iter(curriculum)
    for _ in range(60):
        next(stream)
    plain.load_state_dict(curriculum.state_dict())
    assert plain.epoch == 240 // SIZE and plain.position.samples == 240 % SIZE
    next(iter(plain))
    curriculum.load_state_dict(plain.state_dict())
    assert curriculum.position.samples == 0
    next(iter(curriculum))


# The engine -------------------------------------------------------------------------------------------------


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return torch.full((3,), float(place)), place


class Line(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x).pow(2).mean()


def start(config: dict[str, Any], **more: Any) -> Any:
    torch.manual_seed(0)
    return deepspeed.initialize(
        model=Line(3, 1),
        config={
            "train_batch_size": GLOBAL,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-6}},
            "data_efficiency": config,
            **more,
        },
        training_data=Rows(),
    )


def train(engine: Any, stream: Any, batches: int) -> list[int]:
    places: list[int] = []
    for _ in range(batches):
        rows, numbers = next(stream)
        engine.backward(engine(rows))
        engine.step()
        every: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(every, numbers.tolist())
        places += sum(every, [])
    return places


@distributed(world_size=2)
def test_training_and_its_checkpoint(tmp_path: Path) -> None:
    if torch.distributed.get_rank() == 0:
        analysed(tmp_path)
    torch.distributed.barrier()
    metrics = {"length": metric(tmp_path, "length"), "rarity": metric(tmp_path, "rarity", max_difficulty=30)}
    config = section(tmp_path, metrics)
    engine, _, loader, _ = start(config)
    assert engine.curriculum_learning_enabled()
    stream = iter(loader)
    places = train(engine, stream, 7)
    assert (VALUES["length"][places] <= 23).all()
    engine.save_checkpoint(tmp_path / "saved")
    rest = train(engine, stream, 9)
    again, _, loader, _ = start(config)
    again.load_checkpoint(tmp_path / "saved")
    assert train(again, iter(loader), 9) == rest
    saved = torch.load(tmp_path / "saved" / "global_step3" / "mp_rank_00_model_states.pt", weights_only=False)
    assert saved["data_sampler"]["current_difficulties"] == {"length": 23, "rarity": 15}


@distributed(world_size=1)
def test_functions_of_the_engine(tmp_path: Path) -> None:
    """A client cuts the samples itself, as the state says."""
    custom = metric(tmp_path, "none", clustering_type="single_cluster", schedule_type="custom")
    engine, _, loader, _ = start(section(tmp_path, {"seqlen": custom}))
    engine.set_custom_curriculum_learning_schedule({"seqlen": lambda step: 1 + step // 2})

    def shorter(batch: Any, state: dict[str, Any]) -> Any:
        return batch[0][:, : state["current_difficulties"]["seqlen"]]

    engine.set_data_post_process_func(shorter)
    stream = iter(loader)
    assert [next(stream).shape[1] for _ in range(8)] == [1, 1, 2, 2, 2, 2, 3, 3]
    plain, *_ = start({"enabled": False})
    with pytest.raises(RuntimeError, match="needs training_data"):
        plain.set_custom_curriculum_learning_schedule({})
