"""The pool itself: what passes, fails, hangs, dies and leaks, and that the next test never notices."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests import pool
from tests.pool import RankError, RankSkip, distributed, run


def _sum_of_ranks(offset: int) -> float:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return total.item()


def _fails_on(rank: int) -> None:
    assert dist.get_rank() != rank, "told to fail"
    dist.barrier()


def _hangs_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)
    dist.barrier()


def _dies_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _leaks(what: str) -> None:
    if what == "dtype":
        torch.set_default_dtype(torch.float64)
    elif what == "constructor":
        torch.empty = torch.zeros
    elif what == "nn.Module.__init__":
        torch.nn.Module.__init__ = lambda self: None
    elif what == "environment":
        os.environ["LEFT_BEHIND"] = "1"
    elif what == "threads":
        torch.set_num_threads(2)
    elif what == "communication log":
        deepspeed.comm.configure(enabled=True)


def _skips_on(ranks: list[int]) -> None:
    if dist.get_rank() in ranks:
        pytest.skip("not here")


def _future_warning() -> None:
    warnings.warn_explicit("old", FutureWarning, "somewhere.py", 1, module="deepspeed.base")


def _prints() -> None:
    print(f"hello from {dist.get_rank()}")


def _random_numbers() -> list[float]:
    return torch.rand(3).tolist()


def _environment() -> dict[str, str]:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")  # env://
    dist.barrier()
    return {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}


def _pid() -> int:
    return os.getpid()


@distributed(world_size=[1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fixtures_and_parameters_reach_every_rank(
    world_size: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    assert dist.get_world_size() == world_size == int(os.environ["WORLD_SIZE"])
    assert torch.get_num_threads() == 1
    total = torch.ones(4, dtype=dtype)
    dist.all_reduce(total)
    assert total.tolist() == [float(world_size)] * 4
    (tmp_path / str(dist.get_rank())).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == world_size


def test_results_come_back_by_rank() -> None:
    assert run(_sum_of_ranks, 3, offset=2) == [9.0] * 3


def test_every_test_starts_from_the_same_seed() -> None:
    assert run(_random_numbers, 2) == run(_random_numbers, 2)


def test_ranks_persist_between_tests_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(_pid, 2)
    assert run(_pid, 2) == first
    monkeypatch.setenv("DS_TEST_FRESH", "1")
    run(_pid, 2)
    assert not set(run(_pid, 2)) & set(first)


def test_without_a_process_group_the_environment_is_enough() -> None:
    assert run(_environment, 2, init_process_group=False)[1] == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
    }


def test_a_failing_rank_is_shown_first_and_the_others_do_not_wait() -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run(_fails_on, 3, rank=1, timeout=60)
    assert time.monotonic() - start < 55  # the others would sleep for 60 s
    text = str(caught.value)
    assert text.startswith("[rank 1]") and "told to fail" in text
    assert "[rank 0]" in text and "[rank 2]" in text
    assert run(_sum_of_ranks, 3, offset=0) == [3.0] * 3


def test_a_hanging_rank_is_killed_with_its_stack() -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        run(_hangs_on, 2, rank=1, timeout=3.0)
    assert time.monotonic() - start < 55  # it would sleep for 60 s
    assert "timeout" in str(caught.value) and "_hangs_on" in str(caught.value)
    assert run(_sum_of_ranks, 2, offset=0) == [1.0] * 2


def test_a_dying_rank_is_named_with_its_signal() -> None:
    with pytest.raises(RankError, match=r"\[rank 1\] the process of this rank was killed by SIGKILL"):
        run(_dies_on, 2, rank=1)
    assert run(_sum_of_ranks, 2, offset=0) == [1.0] * 2


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_idle_ranks_that_were_killed_are_replaced() -> None:
    for pid in run(_pid, 2):
        os.kill(pid, signal.SIGKILL)
        while _runs(pid):
            time.sleep(0.01)
    assert run(_sum_of_ranks, 2, offset=0) == [1.0] * 2


@pytest.mark.parametrize(
    "what", ["dtype", "constructor", "nn.Module.__init__", "environment", "threads", "communication log"]
)
def test_a_leak_fails_the_test_that_leaked(what: str) -> None:
    with pytest.raises(RankError, match="left process-wide state behind"):
        run(_leaks, 2, what=what)
    run(_leaks, 2, what="nothing")


def test_a_killed_fork_server_is_replaced() -> None:
    run(_pid, 2)
    server = pool._pool().server
    server.kill()
    server.wait()
    assert run(_sum_of_ranks, 2, offset=0) == [1.0] * 2


def test_skips() -> None:
    with pytest.raises(RankSkip, match="not here"):
        run(_skips_on, 2, ranks=[0, 1])
    with pytest.raises(RankError, match="disagree"):
        run(_skips_on, 2, ranks=[1])


def test_a_future_warning_of_ours_is_an_error() -> None:
    with pytest.raises(RankError, match="FutureWarning"):
        run(_future_warning, 1)


def test_printed_output_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    run(_prints, 2)
    assert "hello from 0" in (out := capsys.readouterr().out) and "hello from 1" in out


def test_arguments_that_do_not_pickle_are_named() -> None:
    with pytest.raises(RankError, match="offset"):
        run(_sum_of_ranks, 1, offset=lambda: 0)
