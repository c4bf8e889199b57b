"""`ds_bench`: what the ranks measure, what is printed, and the start through the launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from deepspeed.comm.transports import shared_memory
from deepspeed.tools import bench as ds_bench
from deepspeed.tools.bench_ranks import Row, measure, table
from tests.pool import ROOT, distributed

OURS = ["shared_memory", "gloo"] if shared_memory.is_available() else ["gloo"]


def options_of(*arguments: str) -> Namespace:
    options = ds_bench.parser().parse_args(list(arguments))
    options.operations = options.operations or list(ds_bench.OPERATIONS)
    return options


@distributed(world_size=2)
def test_each_collective_size_and_transport_is_measured_once() -> None:
    options = options_of("--trials", "2", "--warmups", "1", "--minsize", "4", "--maxsize", "9")
    rows = list(measure(options))
    cases = [(row.operation, row.size_bytes, row.transport) for row in rows]
    sizes = [4 * 2**power for power in (4, 8, 9)]  # every fourth power of two, and the largest
    expected = [
        (operation, size, transport)
        for operation in ds_bench.OPERATIONS
        for size in sizes
        for transport in (["torch"] if operation == "pt2pt" else [*dict.fromkeys(OURS), "torch"])
    ]
    assert cases == expected
    for row in rows:
        factor = {"all_reduce": 1.0, "broadcast": 1.0, "pt2pt": 1.0}.get(row.operation, 0.5)
        assert row.throughput == pytest.approx(row.size_bytes / row.seconds)
        assert row.bus_bandwidth == pytest.approx(row.throughput * factor)


@pytest.mark.parametrize(
    ("arguments", "transports", "sizes"),
    [
        (("--dist", "torch"), {"torch"}, 1),
        (("--transport", "gloo"), {"gloo"}, 1),
        (("--dtype", "bfloat16", "--async-op"), {*OURS, "torch"}, 1),
        (("--scan", "--minsize", "5"), {*OURS, "torch"}, 4),
        (("--mem-factor", "1e-12"), {*OURS, "torch"}, 1),
    ],
)
@distributed(world_size=2)
def test_options(arguments: Any, transports: set[str], sizes: int) -> None:
    options = options_of("--all-reduce", "--trials", "1", "--minsize", "8", "--maxsize", "8", *arguments)
    if options.transport is None and options.dist is not None:
        options.transport = ["torch"]
    rows = list(measure(options))
    assert {row.transport for row in rows} == transports and {row.operation for row in rows} == {"all_reduce"}
    assert len({row.size_bytes for row in rows}) == sizes


ROW = Row(
    operation="all_reduce",
    transport="gloo",
    size_bytes=2**20,
    seconds=0.002,
    throughput=2**20 / 0.002,
    bus_bandwidth=2**20 / 0.002,
)


def test_the_table() -> None:
    header, line = table([ROW], options_of())
    assert header.split() == ["operation", "size", "transport", "time", "throughput", "bus", "bandwidth"]
    assert line.split() == ["all_reduce", "1", "MiB", "gloo", "2.000", "ms", "4.194", "Gbps", "4.194", "Gbps"]
    _, line = table([ROW], options_of("--raw", "--bw-unit", "GBps"))
    assert line.split() == ["all_reduce", "1048576", "gloo", "2000.00", "0.524", "0.524"]


@pytest.mark.parametrize(
    "wrong",
    [["--trials", "0"], ["--maxsize", "41"], ["--minsize", "9", "--maxsize", "8"], ["--mem-factor", "0"]],
)
def test_values_that_make_no_sense(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        ds_bench.main(wrong)
    assert end.value.code == 2 and wrong[0] in capsys.readouterr().err


def test_the_command_starts_the_ranks(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    call = [
        "bench",
        "--num_gpus",
        "2",
        "--all-gather",
        "--maxsize",
        "10",
        "--trials",
        "1",
        "--json",
        str(file),
        *(["--plot", str(tmp_path / "speed.png")] if find_spec("matplotlib") else []),
    ]
    env = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.tools.ds", *call],
        env={**env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "all_gather" in done.stdout and "bus bandwidth" in done.stdout
    assert {row["size_bytes"] for row in json.loads(file.read_text())} == {4096}
