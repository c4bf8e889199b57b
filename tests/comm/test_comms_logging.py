"""The communication log: what is recorded, and the numbers made of it."""

from __future__ import annotations

import time

import pytest
import torch

from deepspeed import comm as dist
from deepspeed.comm.collectives import communicator
from deepspeed.comm.record import CommsLogger, calc_bw_log, convert_size
from tests.pool import distributed


@pytest.mark.parametrize(
    ("operation", "algorithm", "bus"),
    [
        ("all_reduce", 8.0, 6.0),
        ("inference_all_reduce", 8.0, 6.0),
        ("all_gather_into_tensor", 16.0, 12.0),
        ("reduce_scatter_tensor", 16.0, 12.0),
        ("all_to_all_single", 4.0, 3.0),
        ("broadcast", 4.0, 4.0),
        ("send", 4.0, 4.0),
        ("all_gather_object", 16.0, 12.0),
        ("monitored_barrier", 4.0, 4.0),
    ],
)
def test_bandwidth(operation, algorithm, bus):
    """1 MB in 2 ms among four ranks."""
    assert calc_bw_log(operation, 10**6, 2.0, 4) == pytest.approx((algorithm, bus))
    assert calc_bw_log(operation, 10**6, 0.0, 4) == (0.0, 0.0)


def test_sizes():
    sizes = {0: "0B", 1: "1.0 B", 1536: "1.5 KB", 10**6: "976.56 KB", 1 << 40: "1.0 TB"}
    assert {size: convert_size(size) for size in sizes} == sizes


def filled() -> CommsLogger:
    log = CommsLogger()
    for latency in (1.0, 3.0):
        log.append("all_reduce", "all_reduce", latency, 1000, 2)
    log.append("all_reduce", "all_reduce", 4.0, 10, 2)
    log.append("broadcast", "weights", 2.0, 1000, 2)
    return log


def test_summary_numbers(capsys):
    log = filled()
    assert log.has_data() and log.get_operation_names() == ["all_reduce", "weights"]
    assert log.get_total_operations() == 4
    summary = log.get_operation_summary("all_reduce")
    assert list(summary) == [10, 1000]
    assert summary[1000] == {
        "count": 2,
        "total_latency_ms": 4.0,
        "avg_latency_ms": 2.0,
        "tput_avg_gbps": pytest.approx((0.016 + 0.016 / 3) / 2),
        "busbw_avg_gbps": pytest.approx((0.008 + 0.008 / 3) / 2),
        "msg_size_bytes": 1000,
        "msg_size_str": "1000.0 B",
    }
    assert log.get_operation_summary("never") == {}
    data = log.log_all(return_dict=True)
    assert data is not None and data["summary"]["weights"][1000]["count"] == 1
    assert data["straggler_analysis"] is None and data["metadata"]["world_size"] == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "Comm. Op" and "busbw_avg (Gbps)" in lines[0]
    assert lines[1] == "all_reduce" and lines[3].split() == [
        "1000.0",
        "B",
        "2",
        "4.00",
        "2.00",
        "0.01",
        "0.01",
    ]
    log.reset_data()
    assert not log.has_data() and log.get_total_operations() == 0


def test_what_is_recorded():
    log = CommsLogger()
    assert not log.wants("send")
    log.enabled = True
    assert log.wants("send")
    log.stop_profiling_comms()
    assert not log.wants("send")
    log.start_profiling_op(["send", "recv"])
    log.stop_profiling_op(["recv"])
    assert log.wants("send") and not log.wants("recv")
    log.start_profiling_comms()
    assert log.wants("recv")


def restore() -> None:
    dist.reset_log()
    dist.configure(enabled=False, prof_all=True, prof_ops=[], verbose=False, debug=False)


@distributed(world_size=2)
def test_calls_and_communicators_are_recorded():
    rank = dist.get_rank()
    try:
        dist.all_reduce(torch.ones(4))
        assert not dist.has_comm_data()
        dist.configure(enabled=True)
        for _ in range(3):
            dist.all_reduce(torch.ones(1000))
        dist.all_gather_into_tensor(torch.empty(20), torch.ones(10))
        dist.reduce_scatter_tensor(torch.empty(10), torch.ones(20))
        handle = dist.broadcast(torch.ones(5, dtype=torch.bfloat16), 0, async_op=True)
        assert "broadcast" not in dist.get_logged_comm_ops()
        handle.wait()
        handle.wait()
        dist.barrier()
        dist.all_reduce(torch.ones(2), log_name="norm")
        dist.send(torch.ones(8), 1) if rank == 0 else dist.recv(torch.ones(8), 0)
        dist.all_gather_object([None, None], {"any": "object"})
        communicator().all_reduce(torch.ones(500)).wait()
        communicator().reduce_scatter(torch.empty(5), torch.ones(10)).wait()
        data = dist.log_summary(return_dict=True)["summary"]
        counts = {
            name: {size: entry["count"] for size, entry in sizes.items()} for name, sizes in data.items()
        }
        assert counts == {
            "all_reduce": {2000: 1, 4000: 3},
            "all_gather_into_tensor": {40: 1},
            "reduce_scatter_tensor": {20: 1, 40: 1},
            "broadcast": {10: 1},
            "barrier": {0: 1},
            "norm": {8: 1},
            ("send" if rank == 0 else "recv"): {32: 1},
            "all_gather_object": {0: 1},
        }
        assert dist.get_comm_operation_count() == 12
    finally:
        restore()


@distributed(world_size=2)
def test_single_operations_single_calls_and_callers():
    try:
        dist.configure(enabled=True, prof_all=False, prof_ops=["broadcast"], debug=True)
        dist.all_reduce(torch.ones(4))
        dist.broadcast(torch.ones(5), 0)
        caller = "test_single_operations_single_calls_and_callers"
        assert dist.get_logged_comm_ops() == [f"broadcast | [Caller Func: {caller}]"]
        restore()
        dist.all_reduce(torch.ones(4), prof=True)
        assert dist.get_logged_comm_ops() == ["all_reduce"]
        restore()
        dist.configure(enabled=True, debug=True)
        communicator().all_reduce(torch.ones(4)).wait()
        assert dist.get_logged_comm_ops() == [f"all_reduce | [Caller Func: {caller}]"]
    finally:
        restore()


@distributed(world_size=2)
def test_the_straggler_is_named():
    rank = dist.get_rank()
    try:
        dist.configure(enabled=True)
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        dist.reset_log()
        for _ in range(3):
            if rank == 1:
                time.sleep(0.2)
            dist.all_reduce(tensor)
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        found = dist.log_summary(show_straggler=True, return_dict=True)["straggler_analysis"]
        entry = found["all_reduce"][40]
        assert entry["count"] == 3 and entry["slowest_rank"] == 1
        assert entry["total_straggler_ms"] > 300 and entry["avg_straggler_ms"] > 100
        assert entry["total_comm_lat_ms"] < entry["total_straggler_ms"]
        assert set(found) == {"all_reduce", "send" if rank == 0 else "recv"}
    finally:
        restore()


@distributed(world_size=2)
def test_configuration_from_a_section():
    from types import SimpleNamespace

    section = SimpleNamespace(enabled=True, prof_all=False, prof_ops=["send"], verbose=False, debug=True)
    try:
        dist.configure(SimpleNamespace(comms_config=SimpleNamespace(comms_logger=section)), debug=False)
        log = dist.comms_logger
        assert (log.enabled, log.prof_all, log.prof_ops, log.debug) == (True, False, ["send"], False)
    finally:
        restore()
