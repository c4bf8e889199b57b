"""One plan of the axes, from everything that names a size."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed.config.analysis import analyse
from deepspeed.config.axes import MeshLayout, axes_of
from deepspeed.config.reader import ConfigSource
from deepspeed.tools.config.command import check_config


@pytest.mark.parametrize(
    ("data", "ranks", "expected"),
    [
        ({}, 8, MeshLayout(dp=8, node=8)),
        ({"sequence_parallel_size": 2}, 8, MeshLayout(dp=4, sp=2, node=8)),
        ({"sequence_parallel_size": 2, "data_parallel_size": 4}, 8, MeshLayout(dp=4, sp=2, node=8)),
        ({"tensor_parallel": {"autotp_size": 4}}, 8, MeshLayout(dp=2, tp=4, node=2)),
        (
            {"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2},
            8,
            MeshLayout(dp=2, sp=2, tp=2, node=4),
        ),
        (
            {"sequence_parallel_size": "auto", "tensor_parallel": {"autotp_size": 0}},
            3,
            MeshLayout(dp=3, node=3),
        ),
    ],
)
def test_sizes_become_a_layout(data: dict[str, Any], ranks: int, expected: MeshLayout) -> None:
    axes = axes_of(data, ranks)
    assert not axes.problems
    assert axes.layout == expected and axes.data_parallel == expected.dp


@pytest.mark.parametrize(
    ("data", "key", "said"),
    [
        (
            {"sequence_parallel_size": 3},
            "sequence_parallel_size",
            "does not divide the job's 8 ranks (as requested)",
        ),
        (
            {"sequence_parallel_size": 4, "tensor_parallel": {"autotp_size": 4}},
            "sequence_parallel_size",
            "sequence_parallel_size 4 x tensor_parallel.autotp_size 4 = 16 does not divide",
        ),
        ({"data_parallel_size": 4}, "data_parallel_size", "set data_parallel_size to 8"),
        (
            {"data_parallel_size": 8, "sequence_parallel_size": 2},
            "data_parallel_size",
            "data_parallel_size 8 x sequence_parallel_size 2 = 16 does not match the job's",
        ),
    ],
)
def test_what_does_not_fit(data: dict[str, Any], key: str, said: str) -> None:
    axes = axes_of(data, 8, "as requested")
    assert axes.layout is None
    (problem,) = axes.problems
    assert problem.key == key and said in problem.message
    report = check_config({"train_micro_batch_size_per_gpu": 1, **data}, 8)
    assert said in str(report)


def test_without_ranks_the_smallest_job_is_meant() -> None:
    """`ds_check` of a config on a machine without a launcher: it is not wrong there that one process is not two."""
    report = check_config({"train_batch_size": 6, "sequence_parallel_size": 2, "data_parallel_size": 3})
    assert not report.errors


def test_a_model_that_is_split_already_has_its_axis() -> None:
    made = axes_of({}, 8, split_over=2)
    assert made.data_parallel == 4 and made.layout is not None and made.layout.tp == 2
    same = axes_of({"tensor_parallel": {"autotp_size": 2}}, 8, split_over=2)
    assert not same.problems and same.layout == made.layout
    (problem,) = axes_of({"tensor_parallel": {"autotp_size": 4}}, 8, split_over=2).problems
    assert problem.key == "tensor_parallel.autotp_size" and "split over 2 ranks already" in problem.message
    (problem,) = axes_of({}, 3, split_over=2).problems
    assert "does not divide" in problem.message


@pytest.mark.parametrize("split_over", [2, None])
@pytest.mark.parametrize(("train", "found"), [(8, 8), (16, 8), (12, None)])
def test_batch_sizes_may_count_ranks_that_share_layers(
    train: int, found: int | None, split_over: int | None
) -> None:
    """As clients write them: every rank counts, whether the model was split before or the config asks for it."""
    given: dict[str, Any] = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
    }
    if split_over is None:
        given["tensor_parallel"] = {"autotp_size": 2}
    result = analyse(ConfigSource(given), axes_of(given, 8, split_over=split_over))
    assert (result.batch.train if result.batch is not None else None) == found
    assert bool(result.errors) == (found is None)
