"""The batch arithmetic of elastic training, against brute force and against the documented results."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest

import deepspeed
from deepspeed.config.elastic_batch import (
    HIGHLY_COMPOSITE,
    get_best_candidates,
    get_candidate_batch_sizes,
    get_valid_gpus,
)
from deepspeed.config.sections.elasticity import (
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)
from deepspeed.tools.elastic import (
    compute_elastic_config,
    elasticity_enabled,
    ensure_immutable_elastic_config,
)
from deepspeed.tools.elastic.command import main as ds_elastic

DOCUMENTED: dict[str, Any] = {
    "elasticity": {
        "enabled": True,
        "max_train_batch_size": 10000,
        "micro_batch_sizes": [8, 12, 16, 17],
        "min_gpus": 32,
        "max_gpus": 1500,
        "min_time": 20,
        "version": 0.1,
    }
}


def changed(**values: Any) -> dict[str, Any]:
    config = copy.deepcopy(DOCUMENTED)
    for name, value in values.items():
        config["elasticity"][name] = value
        if value is ...:
            del config["elasticity"][name]
    return config


def test_the_documented_example() -> None:
    batch, ranks = compute_elastic_config(DOCUMENTED, target_deepspeed_version=deepspeed.__version__)
    assert batch == 9792
    assert len(ranks) == 23
    for count in ranks:
        assert batch % count == 0
        assert any(batch // count % size == 0 for size in (8, 12, 16, 17))


@pytest.mark.parametrize(("ranks", "micro"), [(64, 17), (32, 17), (36, 17), (34, 16)])
def test_the_largest_micro_batch_that_fits(ranks: int, micro: int) -> None:
    batch, valid, found = compute_elastic_config(DOCUMENTED, deepspeed.__version__, world_size=ranks)
    assert ranks in valid
    assert found == micro
    assert batch // ranks % micro == 0


def test_a_micro_batch_that_does_not_divide_the_share_is_passed_over() -> None:
    config = changed(max_train_batch_size=42, micro_batch_sizes=[6, 7], min_gpus=1)
    assert compute_elastic_config(config, deepspeed.__version__, world_size=7)[2] == 6


def brute_force(limit: int, micro: list[int], low: int, high: int, larger: bool) -> tuple[int, list[int]]:
    """Every candidate of the definition and every number of ranks, tried one by one."""
    best: tuple[int, int, list[int]] | None = None
    for base in (base for base in [*micro, math.lcm(*micro)] if base <= limit):
        factor = max(f for f in HIGHLY_COMPOSITE if f * base <= limit)
        size = base * factor
        ranks = [n for n in range(low, high + 1) if any(size % m == 0 and size // m % n == 0 for m in micro)]
        key = (len(ranks), size if larger else -size)
        if ranks and (best is None or key > (best[0], best[1] if larger else -best[1])):
            best = (len(ranks), size, ranks)
    assert best is not None
    return best[1], best[2]


@pytest.mark.parametrize("larger", [True, False])
@pytest.mark.parametrize("micro", [[1], [2, 4, 6], [3, 5], [8, 12, 16, 17], [7, 7], [13]])
@pytest.mark.parametrize("limit", [17, 60, 500, 2000])
def test_against_brute_force(limit: int, micro: list[int], larger: bool) -> None:
    values = {"max_train_batch_size": limit, "micro_batch_sizes": micro, "prefer_larger_batch": larger}
    config = changed(**values, min_gpus=1, max_gpus=300)
    assert compute_elastic_config(config, "1.0.0") == brute_force(limit, micro, 1, 300, larger)


@pytest.mark.parametrize("larger", [True, False])
@pytest.mark.parametrize("version", [0.1, 0.2])
@pytest.mark.parametrize(("limit", "micro"), [(50, [7, 11, 13]), (20, [3, 16]), (9, [4, 6]), (13, [13])])
def test_no_batch_is_above_its_maximum(limit: int, micro: list[int], version: float, larger: bool) -> None:
    values = {"max_train_batch_size": limit, "micro_batch_sizes": micro, "version": version}
    config = changed(**values, min_gpus=1, prefer_larger_batch=larger)
    batch, ranks, size = compute_elastic_config(config, "1.0.0", world_size=1)
    assert batch <= limit
    assert size in micro and batch % size == 0
    assert all(any(batch % (count * each) == 0 for each in micro) for count in ranks)


def test_numbers_that_are_highly_composite() -> None:
    def divisors(value: int) -> int:
        return sum(1 for divisor in range(1, value + 1) if value % divisor == 0)

    most, found = 0, []
    for value in range(1, 1300):
        if divisors(value) > most:
            most = divisors(value)
            found.append(value)
    assert tuple(found) == HIGHLY_COMPOSITE[: len(found)]


def test_the_parts() -> None:
    assert sorted(get_candidate_batch_sizes([2, 3, 6], 20)) == [12, 18]
    assert get_candidate_batch_sizes([50], 20) == [50]
    assert get_valid_gpus(12, [2, 4], 2, 4) == [2, 3]
    assert get_best_candidates([12, 18], [2, 3], 1, 100, True) == (18, [1, 2, 3, 6, 9])
    assert get_best_candidates([5], [2], 1, 100, True) == (2, [])


# ------------------------------------------------------------------------------------------------ version 0.2


def test_version_2_takes_the_same_batch_where_the_number_of_ranks_allows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "64")
    config = changed(version=0.2)
    expected = compute_elastic_config(DOCUMENTED, "1.0.0")
    assert compute_elastic_config(config, "1.0.0") == expected
    assert compute_elastic_config(config, "1.0.0", return_microbatch=True) == (*expected, 17)
    assert compute_elastic_config(config, "1.0.0", world_size=64) == (*expected, 17)


def test_version_2_takes_any_other_number_of_ranks_with_another_batch() -> None:
    batch, ranks, micro = compute_elastic_config(changed(version=0.2), "1.0.0", world_size=128)
    assert batch == max(10000 // (size * 128) * size * 128 for size in (8, 12, 16, 17))
    assert ranks == [128]
    assert batch // 128 % micro == 0
    smaller = compute_elastic_config(changed(version=0.2, prefer_larger_batch=False), "1.0.0", world_size=128)
    assert smaller[0] == min(10000 // (size * 128) * size * 128 for size in (8, 12, 16, 17))


def test_version_2_counts_in_nodes_and_copies_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config = changed(version=0.2, model_parallel_size=4, num_gpus_per_node=8)
    monkeypatch.setenv("WORLD_SIZE", "64")
    batch, ranks = compute_elastic_config(config, "1.0.0")
    assert all(count % 2 == 0 for count in ranks)  # two copies of the model per node
    assert all(32 <= 4 * count <= 1500 for count in ranks)
    assert 64 // 4 in ranks
    assert compute_elastic_config(config, "1.0.0", world_size=64)[:2] == (batch, ranks)


def test_a_node_that_is_too_large_for_the_maximum_is_no_batch_above_it() -> None:
    values = {"max_train_batch_size": 50, "micro_batch_sizes": [13], "version": 0.2, "num_gpus_per_node": 8}
    with pytest.raises(ElasticityConfigError, match="no batch of up to 6 samples for each of the 8 copies"):
        compute_elastic_config(changed(**values, min_gpus=1), "1.0.0", world_size=8)


def test_version_2_refuses_ranks_that_are_no_whole_copies_of_the_model() -> None:
    values = {"max_train_batch_size": 2000, "micro_batch_sizes": [2, 3], "version": 0.2}
    config = changed(**values, min_gpus=1, model_parallel_size=2, num_gpus_per_node=2)
    assert compute_elastic_config(config, "1.0.0", world_size=6)[2] == 2
    with pytest.raises(ElasticityIncompatibleWorldSize, match="7 ranks are not a multiple of .*size \\(2\\)"):
        compute_elastic_config(config, "1.0.0", world_size=7)


def test_version_2_needs_a_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ElasticityConfigError, match="WORLD_SIZE"):
        compute_elastic_config(changed(version=0.2), "1.0.0")


def test_version_2_refuses_more_ranks_than_samples() -> None:
    with pytest.raises(ElasticityIncompatibleWorldSize, match="max_train_batch_size"):
        compute_elastic_config(changed(version=0.2), "1.0.0", world_size=5000)


# ----------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_train_batch_size": ...}, "max_train_batch_size is missing"),
        ({"micro_batch_sizes": ...}, "micro_batch_sizes is missing"),
        ({"version": "0.3"}, "version 0.3 is unknown"),
        ({"micro_batch_sizes": [8, -1]}, "micro_batch_sizes"),
        ({"micro_batch_sizes": 8}, "micro_batch_sizes"),
        ({"micro_batch_sizes": []}, "micro_batch_sizes"),
        ({"micro_batch_sizes": [20000]}, "20000 is above max_train_batch_size"),
        ({"min_gpus": 0}, "min_gpus"),
        ({"max_gpus": -1}, "max_gpus"),
        ({"max_gpus": 1}, "1 is below min_gpus"),
        ({"min_time": -1}, "min_time"),
        ({"model_parallel_size": 2}, "needs version 0.2"),
        ({"version": 0.2, "model_parallel_size": 16, "num_gpus_per_node": 8}, "num_gpus_per_node"),
        ({"min_gpus": 1400, "max_gpus": 1400}, "no batch of up to 10000"),
    ],
)
def test_a_wrong_section_is_refused_by_its_key(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ElasticityConfigError, match=words) as refusal:
        compute_elastic_config(changed(**values), "1.0.0", world_size=0 if "version" not in values else 64)
    assert isinstance(refusal.value, (ElasticityError, ValueError))


def test_calls_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="dict"):
        compute_elastic_config("config.json", "1.0.0")  # type: ignore[arg-type]
    with pytest.raises(ElasticityError, match="no section"):
        compute_elastic_config({}, "1.0.0")
    with pytest.raises(ElasticityError, match="enabled"):
        compute_elastic_config(changed(enabled=False), "1.0.0")
    with pytest.raises(ElasticityError, match="missing"):
        compute_elastic_config({"elasticity": {"enabled": True}}, "1.0.0")
    with pytest.raises(ElasticityError, match=r"0\.2"):
        compute_elastic_config(DOCUMENTED, "0.2")
    with pytest.raises(ElasticityIncompatibleWorldSize, match="128 data-parallel ranks"):
        compute_elastic_config(DOCUMENTED, "1.0.0", world_size=128)


def test_enabled() -> None:
    assert elasticity_enabled(DOCUMENTED)
    assert not elasticity_enabled({})
    assert not elasticity_enabled({"elasticity": {}})


def test_the_schedulers_section_must_be_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    section = DOCUMENTED["elasticity"]
    monkeypatch.delenv("DEEPSPEED_ELASTICITY_CONFIG", raising=False)
    ensure_immutable_elastic_config(section)
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(section | {"min_time": 7}))
    ensure_immutable_elastic_config(section)
    for name, value in {"max_train_batch_size": 27, "micro_batch_sizes": [8, 12], "version": 0.2}.items():
        monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(section | {name: value}))
        with pytest.raises(ElasticityConfigError, match=f"{name}.*scheduler"):
            ensure_immutable_elastic_config(section)
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", "no json")
    with pytest.raises(ElasticityConfigError, match="JSON"):
        ensure_immutable_elastic_config(section)


def test_either_spelling_of_the_preference() -> None:
    assert not ElasticityConfig(prefer_large_batch=False).prefer_larger_batch
    assert ElasticityConfig().prefer_larger_batch


# ---------------------------------------------------------------------------------------------------- command


def test_the_command(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DOCUMENTED))
    assert ds_elastic(["-c", str(path)]) == 0
    assert "final_batch_size ... 9792" in capsys.readouterr().out
    assert ds_elastic(["-c", str(path), "-w", "64"]) == 0
    printed = capsys.readouterr().out
    assert "for world size 64" in printed
    assert "micro_batch_size ... 17" in printed
    assert ds_elastic(["-c", str(path), "-w", "128"]) == 2
    assert "128 data-parallel ranks cannot share" in capsys.readouterr().err
    assert ds_elastic(["-c", str(tmp_path / "none.json")]) == 2
