"""Hangs explain themselves: ranks that lose step in every way that there is, and the report names what happened.

All jobs of this file run at once, each on two processes: a report takes a second or two, in which nothing computes.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.comm.collectives import Network, communicator, histories
from deepspeed.comm.hangs import thread_states as summarize_rows
from deepspeed.comm.hangs import watch as hang_watch
from deepspeed.comm.hangs.history import LENGTH, OperationHistory
from deepspeed.comm.hangs.report import call_text, explain
from deepspeed.comm.hangs.thread_states import HangReport
from deepspeed.comm.pending import Pending
from deepspeed.comm.transports import shared_memory
from deepspeed.tools import stacks
from tests import forked
from tests.engine.test_step_cost import calls_of
from tests.pool import ROOT, distributed, free_port

SECONDS = 1.0
SETUP_SECONDS = (
    15.0  # forty processes start at once, and one may compile what it imports while the other waits for it
)

# An engine of two ranks; `step` trains.
PROLOGUE = """
import os, signal, sys, threading, time
from datetime import timedelta
import numpy.random  # here, as a save imports it otherwise, and the report after a second would find it there
import torch
import deepspeed
from deepspeed import comm as dist
from deepspeed.comm.hangs import watch as hang_watch
from deepspeed.comm.pending import explanation
rank = int(os.environ["RANK"])
dist.init_distributed("gloo", init_method=os.environ["TEST_STORE"], rank=rank, world_size=2, verbose=False,
                      timeout=timedelta(seconds=float(os.environ["TEST_TIMEOUT"])))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
          "zero_optimization": {"stage": 1},
          "comm": {"hang_report_seconds": float(os.environ["TEST_SETUP_SECONDS"]),
                   "shared_memory": os.environ["DS_SHM"] == "1"}}
engine = deepspeed.initialize(model=model, config=config)[0]
wire = engine.mesh.communicator("dp")
def step():
    engine.backward(engine(torch.ones(2, 8)).mean())
    engine.step()
def report_after(seconds):
    for each in hang_watch._watch.networks:
        each.hang_report_seconds = float(seconds)
def wait_until_known():
    # both ranks have said where they run, and read where rank 0 does
    while not hang_watch._watch._addresses:
        time.sleep(0.02)
    step()
def wait_for_the_report():
    time.sleep(60)
def leave_after_the_report():
    while not explanation.text:
        time.sleep(0.02)
    sys.stdout.flush()
    os._exit(0)
step()
report_after(os.environ["TEST_SECONDS"])
if str(rank) == os.environ["TEST_LEAVES"]:
    threading.Thread(target=leave_after_the_report, daemon=True).start()
"""

# what the ranks do; what the report says
SCENARIOS: dict[str, tuple[str, str, str]] = {
    "missing rank": (
        "shared_memory",
        """
        if rank == 1:
            wait_for_the_report()
        step()
        """,
        r"rank 0 waiting for rank 1.*missing: rank 1 \(.*\) has not issued reduce_scatter of \d+ float32.*"
        r"it is running other code, at script.py:\d+ in wait_for_the_report: time.sleep.*waiting: rank 0 "
        r".*step 1, backward"
        r".*parameters 0.weight, 0.bias, 2.weight, 2.bias; at script.py:\d+ in step: .*stack of rank 1.*only "
        r"some ranks run",
    ),
    "missing rank, gloo": (
        "gloo",
        """
        if rank == 1:
            wait_for_the_report()
        dist.all_reduce(torch.ones(5))
        """,
        r"rank 0 waiting for rank 1.*has not issued all_reduce of 5 float32",
    ),
    "other operation": (
        "gloo",
        """
        if rank == 0:
            wire.all_reduce(torch.ones(10)).wait()
        else:
            wire.reduce(torch.ones(10), 0).wait()
            wire.all_gather(torch.ones(20), torch.ones(10)).wait()
        """,
        r"another operation in collective #\d+ of ranks 0, 1: rank 0 issued all_reduce of 10 float32, rank 1 "
        r"issued reduce "
        r"of 10 float32 with root 0",
    ),
    "other shape": (
        "gloo",
        "wire.all_reduce(torch.ones(10 + rank)).wait()",
        r"another size in collective #\d+ .*rank 0 issued all_reduce of 10 float32, rank 1 issued all_reduce "
        r"of 11 float32",
    ),
    "other dtype": (
        "gloo",
        "wire.all_reduce(torch.ones(10, dtype=[torch.float32, torch.int32][rank])).wait()",
        r"another dtype in collective #\d+ .*rank 0 issued all_reduce of 10 float32, rank 1 issued all_reduce "
        r"of 10 int32",
    ),
    "other order": (
        "gloo",
        """
        first, second = torch.ones(10), torch.ones(3000)
        for tensor in (first, second) if rank == 0 else (second, first):
            wire.all_reduce(tensor).wait()
        """,
        r"another size in collective #\d+ .*rank 0 issued all_reduce of 10 float32, rank 1 issued all_reduce "
        r"of 3000 float32",
    ),
    "other order, issued ahead": (
        "gloo",
        """
        first, second = torch.ones(10), torch.ones(20)
        order = (first, second) if rank == 0 else (second, first)
        for pending in [wire.all_gather(torch.ones(2 * len(one)), one) for one in order]:
            pending.wait()
        """,
        r"another order in collective #\d+ .*rank 0 issued all_gather of 10 float32, rank 1 issued all_gather "
        r"of 20 float32",
    ),
    "other group": (
        "gloo",
        """
        groups = [torch.distributed.new_group([0, 1]) for _ in range(2)]
        for group in [*groups, *(groups if rank == 0 else groups[::-1])]:
            dist.all_reduce(torch.ones(4), group=group)
        """,
        r"ranks 0, 1 wait for each other in different calls.*waiting: rank 0 in all_reduce.* at script.py:\d+: "
        r"dist.all_reduce.*has not issued all_reduce of 4 float32 \(#2 of group \S+, ranks 0, 1.*waiting: rank 1 in "
        r"all_reduce.*has not issued .*usual causes: process groups used in different orders",
    ),
    "data loader": (
        "shared_memory",
        """
        class Slow(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                if rank == 1:
                    wait_for_the_report()
                return torch.ones(8)
        for batch in torch.utils.data.DataLoader(Slow(), batch_size=2):
            step()
        """,
        r"rank 0 waiting for rank 1.*it is in its data loader, at script.py:\d+ in "
        r"wait_for_the_report.*the same number of batches",
    ),
    "slow save": (
        "shared_memory",
        """
        class Stuck:
            def write(self, data):
                wait_for_the_report()
            def flush(self):
                pass
        if rank == 1:
            torch.save({"a": 1}, Stuck())
        step()
        """,
        r"rank 0 waiting for rank 1.*it is saving a checkpoint, at script.py:\d+ in wait_for_the_report.*slow "
        r"or full",
    ),
    "save on one rank": (
        "gloo",
        """
        if rank == 0:
            engine.save_checkpoint("saved")
        step()
        """,
        r"rank 0 issued all_reduce_max of \d int64, rank 1 issued reduce_scatter of \d+ float32 in backward.*"
        r"rank 0 in all_reduce.*saving a checkpoint.*at script.py:\d+: "
        r"engine.save_checkpoint.*save_checkpoint called on some ranks only",
    ),
    "stopped": (
        "shared_memory",
        """
        wait_until_known()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        step()
        """,
        r"rank 1 does not answer.*missing: rank 1 \(.*, process PID1\) is stopped .*kill -CONT PID1",
    ),
    "stopped, with the store": (
        "shared_memory",
        """
        wait_until_known()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        step()
        """,
        r"its store does not answer; .*rank 0 does not answer.*rank 0 \(.*, process PID0\) is stopped"
        r".*waiting: rank 1 in reduce_scatter",
    ),
    "infinite loop": (
        "shared_memory",
        """
        if rank == 1:
            class Loops(torch.nn.Module):
                def forward(self, x):
                    number = 0
                    while True:
                        number += 1
            model[1] = Loops()
        step()
        """,
        r"rank 0 waiting for rank 1.*it is running other code, in module 1, at script.py:\d+ in forward: .*"
        r"stack of rank 1.*in forward",
    ),
    "stage of a pipeline": (
        "shared_memory",
        """
        from deepspeed.parallel.pipeline import LayerSpec, PipelineModule
        class Block(torch.nn.Linear):
            calls = 0
            def forward(self, x):
                Block.calls += 1
                if rank == 1 and Block.calls == 4:
                    wait_for_the_report()
                return super().forward(x)
        stages = PipelineModule([LayerSpec(Block, 8, 8) for _ in range(4)], num_stages=2,
                                loss_fn=lambda x, y: x.mean())
        config["gradient_accumulation_steps"] = 4
        report_after(os.environ["TEST_SETUP_SECONDS"])
        pipeline = deepspeed.initialize(model=stages, config=config)[0]
        report_after(os.environ["TEST_SECONDS"])
        pipeline.train_batch(iter(lambda: (torch.ones(2, 8), torch.ones(2)), None))
        """,
        r"rank 0 waiting for rank 1.*missing: rank 1 \(.*\) is not in receiving from a neighbour; it is running "
        r"other code, in module 3, at script.py:\d+ in wait_for_the_report.*stage 1, micro-batch 1, forward"
        r".*waiting: rank 0 in receiving from a neighbour among ranks 0, 1; .*stage 0, micro-batch 1, backward",
    ),
    "torch's own collective": (
        "shared_memory",
        """
        other = torch.distributed.new_group([0, 1])  # in one group, gloo would take one message for the other
        if rank == 0:
            torch.distributed.all_gather_object([None, None], "mine")
        else:
            torch.distributed.broadcast(torch.ones(3), src=0, group=other)
        """,
        r"rank 0 in all_gather_object of .* among ranks 0, 1.*rank 1 in broadcast of",
    ),
    "the timeout": (
        "gloo",
        """
        if rank == 1:
            wait_for_the_report()
        step()
        """,
        r"CommunicationError: reduce_scatter among ranks \[0, 1\] failed while waiting for rank 1"
        r".*no progress in communication for .*missing: rank 1 .*in wait_for_the_report",
    ),
}


class Job:
    """Two ranks. The one that reports ends as soon as it has. Rank 1 does so if the store is that of rank 0."""

    def __init__(
        self, folder: Path, transport: str, body: str, *, reporter: int = 0, timeout_s: float = 60.0
    ) -> None:
        folder.mkdir()
        self.reporter = reporter
        (folder / "script.py").write_text(PROLOGUE + textwrap.dedent(body))
        common = {
            **os.environ,
            "DS_SHM": "1" if transport == "shared_memory" else "0",
            "TEST_TIMEOUT": str(timeout_s),
            "TEST_LEAVES": str(reporter) if timeout_s == 60.0 else "none",
            "TEST_SECONDS": str(SECONDS),
            "TEST_SETUP_SECONDS": str(SETUP_SECONDS),
            "TEST_STORE": f"file://{folder}/store" if reporter == 0 else f"tcp://127.0.0.1:{free_port()}",
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": str(ROOT),
        }
        self.ranks = [
            forked.start(
                [str(folder / "script.py")],
                cwd=folder,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                merged=True,
            )
            for rank in range(2)
        ]

    def finish(self) -> str:
        """Return the output of the reporting rank, up to its report."""
        try:
            return self.ranks[self.reporter].communicate(timeout=60)[0]
        finally:
            for each in self.ranks:
                each.kill()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Job]]:
    folder = tmp_path_factory.mktemp("jobs")
    started = {
        name: Job(
            folder / str(number),
            transport,
            body,
            reporter=int("with the store" in name),
            timeout_s=12.0 if name == "the timeout" else 60.0,  # half of it is the longest to a report
        )
        for number, (name, (transport, body, _)) in enumerate(SCENARIOS.items())
        if transport == "gloo" or shared_memory.is_available()
    }
    yield started
    for job in started.values():
        for each in job.ranks:
            each.kill()


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_report_names_what_happened(name: str, jobs: dict[str, Job]) -> None:
    if name not in jobs:
        pytest.skip("no native library")
    expected = SCENARIOS[name][2]
    for rank in range(2):
        expected = expected.replace(f"PID{rank}", str(jobs[name].ranks[rank].pid))
    output = jobs[name].finish()
    reports = output.count("no progress in communication")
    # The timeout's error repeats the last of them.
    assert reports >= 2 if name == "the timeout" else reports == 1, output
    assert re.search(expected, output, re.DOTALL), output


# ---- the report, without processes


@pytest.mark.parametrize(
    ("file", "function", "expected"),
    [
        ("checkpoint/save.py", "save", summarize_rows.SAVING),
        ("engine/loading.py", "load_checkpoint", summarize_rows.RESTORING),
        ("engine/initialize.py", "initialize", summarize_rows.STARTING),
        ("data/loader.py", "__next__", summarize_rows.LOADING),
        ("engine/engine.py", "step", summarize_rows.ELSEWHERE),
    ],
)
def test_what_a_rank_does_is_told_by_the_file_that_runs(file: str, function: str, expected: str) -> None:
    """Below it a module is imported for the first time, by functions of Python's with "load" in their names."""
    path = Path(deepspeed.__file__).parent / file
    assert path.exists()

    def frame(name: str, of: str) -> Any:
        return SimpleNamespace(f_code=SimpleNamespace(co_name=name, co_filename=of))

    importing = frame("_find_and_load", "<frozen importlib._bootstrap>")
    assert (
        summarize_rows._doing([importing, frame(function, str(path)), frame("<module>", "train.py")])
        == expected
    )


def rank_report(
    rank: int, *calls: Any, call: str = "", members: Any = (0, 1), name: str = "0", **facts: Any
) -> HangReport:
    group = {"name": name, "ranks": list(members), "count": len(calls), "calls": list(calls)}
    among = list(members) if call else []
    return HangReport(rank=rank, host="h", pid=100 + rank, call=call, members=among, groups=[group], **facts)


SUM: list[Any] = ["all_reduce", 10, "float32", None, "backward"]
COPY: list[Any] = ["broadcast", 8, "uint8", 0, ""]


def explained(*ranks: HangReport, silent: Any = None) -> str:
    return explain({each.rank: each for each in ranks}, silent or {}, 30.0)


def test_nothing_is_reported_of_ranks_that_work() -> None:
    assert explained(rank_report(0, SUM), rank_report(1, SUM)) == ""


def test_a_rank_that_waits_itself_is_not_the_cause() -> None:
    """Rank 0 waits for rank 1, rank 1 in another group for rank 2, which loads data."""
    first = rank_report(0, SUM, SUM, call="all_reduce")
    second = rank_report(1, SUM, call="broadcast", members=(1, 2), name="1")
    second.groups.append({"name": "0", "ranks": [0, 1], "count": 1, "calls": [SUM]})
    third = rank_report(2, members=(1, 2), name="1", doing="in its data loader")
    text = explained(first, second, third)
    assert (
        "ranks 0, 1 waiting for rank 2" in text
        and "rank 2 (h, process 102) has not issued all_reduce" in text
    )
    assert "rank 1 (h" not in text.split("stack of")[0] and "the same number of batches" in text


def test_ranks_that_wait_in_different_groups() -> None:
    text = explained(
        rank_report(0, call="all_reduce", members=(0, 1), name="0"),
        rank_report(1, call="all_reduce", members=(1, 2), name="1"),
        rank_report(2, call="all_reduce", members=(0, 2), name="2"),
    )
    assert "ranks 0-2 wait for each other in different calls" in text


def test_when_no_rank_is_missing_the_network_is() -> None:
    text = explained(*(rank_report(rank, SUM, call="all_reduce") for rank in (0, 1)))
    assert "ranks 0, 1 wait, and no rank is missing" in text and "a slow or blocked network" in text


def test_many_ranks_are_summed_up() -> None:
    ranks = tuple(range(1000))
    waiting = [rank_report(rank, SUM, call="all_reduce", members=ranks) for rank in ranks[:900]]
    text = explained(*waiting, *(rank_report(rank, members=ranks) for rank in ranks[900:]))
    assert "ranks 0-899 waiting for ranks 900-999" in text and len(text.splitlines()) < 40


def test_a_silent_rank_is_told_with_what_is_known() -> None:
    text = explained(rank_report(0, SUM, call="all_reduce"), silent={1: "(h, process 7) has ended"})
    assert (
        "rank 1 does not answer" in text
        and "rank 1 (h, process 7) has ended" in text
        and "its output says why" in text
    )


@pytest.mark.parametrize(
    ("second", "what"),
    [
        (COPY, "another operation"),
        ([*SUM[:1], 11, *SUM[2:]], "another size"),
        ([*SUM[:2], "int64", *SUM[3:]], "another dtype"),
        ([*SUM[:3], 1, SUM[4]], "another root"),
    ],
)
def test_the_first_difference_is_named(second: list[Any], what: str) -> None:
    wait = {"call": "all_reduce"}
    text = explained(rank_report(0, COPY, SUM, **wait), rank_report(1, COPY, second, **wait))
    assert f"{what} in collective #2 of ranks 0, 1" in text
    assert f"rank 0 issued {call_text(SUM)} in backward, rank 1 issued {call_text(second)}" in text


def test_only_the_last_collectives_are_kept() -> None:
    history = OperationHistory("0", (0, 1))
    for number in range(2 * LENGTH):
        history.count += 1
        history.calls.append(("all_reduce", number, torch.bfloat16, None, "step"))
    record = history.as_record()
    assert record["count"] == 2 * LENGTH and len(record["calls"]) == LENGTH
    assert record["calls"][-1] == ["all_reduce", 2 * LENGTH - 1, "bfloat16", None, "step"]


# ---- reading the frames of a thread that runs

BUSY = """
import gc, os, sys, threading, time
from deepspeed.comm.hangs.thread_states import describe, main_frames, code_position, threads
class Noisy:
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(2e-4)  # lets the other thread go on
def look():
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        [Noisy() for _ in range(3)]
        code_position(main_frames())
        describe(main_frames(), [])
        list(threads())
        assert gc.isenabled()
    os._exit(7)
def deep(depth):
    if depth:
        deep(depth - 1)
        return list(range(20))
sys.setswitchinterval(1e-5)
gc.set_threshold(4)
threading.Thread(target=look, daemon=True).start()
while True:
    deep(40)
"""


def test_garbage_is_not_collected_while_frames_are_read() -> None:
    """Else Python 3.11 dies of SIGSEGV in the first tenth of a second."""
    assert subprocess.run([sys.executable, "-c", BUSY], cwd=ROOT, timeout=60).returncode == 7


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        assert summarize_rows.main_frames() and not gc.isenabled()
    finally:
        gc.enable()


# ---- what is recorded, and the thread


@distributed(world_size=2)
def test_each_collective_is_recorded_once_whoever_issues_it() -> None:
    def engine() -> Any:
        config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        return deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)[0]

    one, two = engine(), engine()
    (history,) = histories()
    before = history.count
    one.mesh.communicator("dp").all_reduce(torch.ones(3)).wait()
    two.mesh.communicator("dp").broadcast(torch.ones(4), 1).wait()
    deepspeed.comm.all_reduce(torch.ones(5))
    found = [call[:4] for call in history.calls][-3:]
    assert history.count == before + 3 and history.ranks == (0, 1)
    assert found == [
        ("all_reduce", 3, torch.float32, None),
        ("broadcast", 4, torch.float32, 1),
        ("all_reduce", 5, torch.float32, None),
    ]
    two.backward(two(torch.ones(1, 2)).mean())
    assert history.calls[-1][4] == "backward"
    one.destroy()
    two.destroy()


@distributed(world_size=2)
def test_recording_costs_one_call() -> None:
    """Calls of our functions per collective, which every rank pays."""
    wire, tensor = communicator(), torch.ones(4)
    wire.all_reduce(tensor).wait()
    recorded = calls_of(lambda: wire.all_reduce(tensor).wait())
    wire._record = lambda *_: None  # type: ignore[method-assign]
    assert recorded - calls_of(lambda: wire.all_reduce(tensor).wait()) <= 1
    del wire._record


def watching() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "deepspeed hang watch"]


@distributed(world_size=2)
def test_one_thread_lives_as_long_as_an_engine() -> None:
    def engine(**comm: Any) -> Any:
        config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "comm": comm}
        return deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)[0]

    off = engine(hang_report_seconds=0)
    assert not watching()
    one = engine()
    watch = hang_watch._watch  # a rank that is stopped from here on is known by name
    assert watch is not None and watch._read_addresses([watch.rank]) == {
        watch.rank: (watch.host, os.getpid(), True)
    }
    two = engine(hang_report_seconds=7)
    assert len(watching()) == 1 and hang_watch._watch is not None and hang_watch._watch.seconds == 7
    one.destroy()
    assert len(watching()) == 1
    two.destroy()
    assert not watching() and hang_watch._watch is None
    again = engine()
    assert len(watching()) == 1
    deepspeed.comm.barrier()
    again.destroy()
    off.destroy()
    dropped = Network()
    dropped.hang_report_seconds = 0.3
    hang_watch.begin(dropped, histories)
    thread = next(thread for thread in threading.enumerate() if thread.name == "deepspeed hang watch")
    del dropped
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@distributed(world_size=2)
def test_a_forked_child_has_no_watch_and_may_get_its_own() -> None:
    network = Network()
    network.hang_report_seconds = 60.0
    hang_watch.begin(network, histories)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert hang_watch._watch is not None and not hang_watch._watch.is_usable
            hang_watch.leave(network)
            hang_watch.begin(network, histories)
            assert len(watching()) == 1
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(watching()) == 1
    hang_watch.leave(network)


@distributed(world_size=2)
def test_ranks_that_go_on_are_not_reported() -> None:
    """Waits of half the interval, again and again."""
    network = Network()
    network.hang_report_seconds = 0.6
    hang_watch.begin(network, histories)
    wire, rank = communicator(), torch.distributed.get_rank()
    for number in range(4):
        if rank == number % 2:
            threading.Event().wait(0.3)
        wire.all_reduce(torch.ones(2)).wait()
    assert hang_watch._watch is not None and hang_watch._watch._round == 0
    hang_watch.leave(network)


@distributed(world_size=2)
def test_ds_stacks_asks_every_rank() -> None:
    network = Network()
    network.hang_report_seconds = 60.0
    hang_watch.begin(network, histories)
    communicator().all_reduce(torch.ones(6)).wait()
    ended = threading.Event()
    threading.Thread(target=ended.wait, name="parked", daemon=True).start()  # as those of libraries
    pids: list[Any] = [None, None]
    torch.distributed.all_gather_object(pids, os.getpid())
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        answers = [stacks.ask(pid) for pid in pids]
        assert set(pids) <= set(stacks.ranks_of_user())
        for rank, (pid, answer) in enumerate(zip(pids, answers, strict=True)):
            assert answer is not None and answer["rank"] == rank
            text = "\n".join(stacks.rank_lines(pid, answer))
            assert (
                f"== rank {rank} (" in text
                and "all_reduce of 6 float32" in text
                and "thread MainThread" in text
            )
            assert "test_ds_stacks_asks_every_rank" in text
            names = [thread["name"] for thread in answer["threads"]]
            assert names[-1] in text and "parked" in text.rpartition("(--all prints them): ")[2]
            assert "thread parked, innermost last" not in text
            assert "thread parked, innermost last" in "\n".join(stacks.rank_lines(pid, answer, every=True))
        parent = os.getppid()
        assert set(pids) <= set(stacks.descendants(parent))
    torch.distributed.barrier()
    ended.set()
    hang_watch.leave(network)
    assert stacks.ask(os.getpid()) is None


def test_ds_stacks_without_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    idle = subprocess.Popen(["sleep", "60"])  # the scenarios' jobs may still be children of this process
    try:
        assert stacks.main([str(idle.pid)]) == 1
    finally:
        idle.kill()
        idle.wait()
    assert "no ranks of a running job" in capsys.readouterr().err


def test_what_a_stopped_process_is_told_to_be() -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
    os.kill(child, signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    assert stacks.state_of(child) == "stopped" and stacks.rank_lines(child, None)[0].endswith(
        "does not answer: stopped"
    )
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert stacks.state_of(child) == "ended"


def test_the_call_that_waits_is_described_not_what_issued_it() -> None:
    """Else a report would say "all_reduce" of a wait for something else inside of it, without shape and dtype."""
    frames: list[types.FrameType | None] = []

    def issue() -> Pending:
        frames.append(sys._getframe(1))
        return Pending(lambda: None)

    communicator(None)._issue("all_reduce", 0, torch.zeros(3), issue)
    (frame,) = frames
    assert frame is not None and frame.f_code.co_name == "_issue"
    assert summarize_rows._own_call(frame) is None
