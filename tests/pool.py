"""Distributed tests as plain functions.

    @distributed(world_size=2)
    def test_all_reduce(tmp_path, dtype):       # fixtures and parameters arrive on every rank, pickled
        rank = torch.distributed.get_rank()     # gloo is initialised, RANK and its friends are set
        ...

A persistent pool of ranks runs them: a test costs milliseconds, not a process start. Each test gets a new
process group and the same random seed, and is compared with a snapshot of the process-wide state from before
it, so that what it leaves behind fails that test and not a later one. Ranks that saw a failure are replaced.
A test that hangs is killed at its timeout and shows where each rank stood. `DS_TEST_FRESH=1` gives every
test fresh processes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any

import pytest

from tests.pool_rank import Job, Outcome

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_TIMEOUT_S = 120.0
# Once a rank has failed, how long the others may go on before they are shown and killed.
GRACE_S = 3.0
# How much longer its process group waits than a test: a hanging test is shown by its stacks, not by one rank's error.
GROUP_S = 10.0
# How long a rank gets to print its stack after SIGUSR1.
STACK_S = 0.5
OUTPUT_LIMIT = 64 * 1024
_THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class RankError(AssertionError):
    """A distributed test failed; the message holds every rank's traceback, the first to fail first."""


class RankSkip(Exception):
    """Every rank asked to skip."""


# ---------------------------------------------------------------------------------------------- for tests


def distributed(
    world_size: int | Sequence[int] | None = None,
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
    init_process_group: bool = True,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run the decorated test on `world_size` ranks.

    A sequence parametrizes the test over its sizes; None takes the size from the test's own parameter
    `world_size`, which the function has in both cases. `timeout` is in seconds. With
    `init_process_group=False` the test finds only the environment (RANK, WORLD_SIZE, MASTER_PORT, ...) and
    initialises what it likes.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        named = isinstance(world_size, int) or "world_size" in inspect.signature(function).parameters
        assert named, f"{function.__name__} needs a parameter world_size"

        @functools.wraps(function)
        def on_ranks(**kwargs: Any) -> None:
            __tracebackhide__ = True
            size = world_size if isinstance(world_size, int) else kwargs["world_size"]
            failure = ""
            try:
                _run(function, size, timeout, init_process_group, kwargs)
            except RankSkip as skip:
                pytest.skip(str(skip))
            except RankError as error:
                failure = str(error)
            if failure:  # outside the handler: the traceback that counts is in the text
                pytest.fail(failure, pytrace=False)

        on_ranks.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        test: Callable[..., None] = pytest.mark.distributed(on_ranks)
        if isinstance(world_size, Sequence):
            test = pytest.mark.parametrize("world_size", world_size)(test)
        return test

    return decorate


def run(
    function: Callable[..., Any],
    world_size: int,
    /,
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
    init_process_group: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Run a module-level function on `world_size` ranks: what it returned, by rank.

    Raises RankError, or RankSkip when every rank skipped.
    """
    return _run(function, world_size, timeout, init_process_group, kwargs)


def _run(
    function: Callable[..., Any],
    world_size: int,
    timeout: float,
    init_process_group: bool,
    kwargs: dict[str, Any],
) -> list[Any]:
    if not hasattr(os, "fork"):
        raise RankSkip("distributed tests need fork()")
    return live_pool().run(function, world_size, timeout, init_process_group, kwargs)


def live_pool() -> Pool:
    """The pool of this session."""
    if _pool().server.poll() is not None:  # killed from outside, and its ranks with it
        close_pool()
    return _pool()


def wants_fresh() -> bool:
    """Return whether every test gets new processes."""
    return os.environ.get("DS_TEST_FRESH", "0") not in ("", "0")


@functools.cache
def _pool() -> Pool:
    pool = Pool()
    atexit.register(pool.close)
    return pool


def close_pool() -> None:
    """End the ranks of this session, if there are any."""
    if _pool.cache_info().currsize:
        pool = _pool()
        _pool.cache_clear()
        atexit.unregister(pool.close)
        pool.close()


# ---------------------------------------------------------------------------------------------- the pool


@dataclass(slots=True)
class Rank:
    """One forked process, seen from here. It is idle, or runs one job."""

    connection: Connection
    pid: int
    log: IO[bytes]

    def take_output(self) -> str:
        """Return the rank's output since the last call."""
        self.log.seek(0)
        data = self.log.read()
        self.log.truncate(0)
        skipped = len(data) - OUTPUT_LIMIT
        text = data[-OUTPUT_LIMIT:].decode(errors="replace")
        return f"... {skipped} bytes not shown ...\n{text}" if skipped > 0 else text


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank failed, with what it had printed."""

    rank: int
    reason: str
    output: str = ""

    def __str__(self) -> str:
        printed = f"\n-- printed by rank {self.rank} --\n{self.output}" if self.output else ""
        body = self.reason.rstrip() + printed
        return "\n".join(f"[rank {self.rank}] {line}" for line in body.rstrip().splitlines())


class Pool:
    """The fork server and its idle ranks. Grows on demand; not thread-safe, as pytest is not."""

    def __init__(self) -> None:
        self.idle: list[Rank] = []
        self.jobs = 0
        self.folder = tempfile.TemporaryDirectory(prefix="ds_test_pool_")
        self.control, theirs = socket.socketpair()
        env = os.environ | dict.fromkeys(_THREAD_COUNTS, "1")
        env.pop("PYTHONUNBUFFERED", None)  # what forked scripts print stays in their buffers, as elsewhere
        with theirs:
            # Handed over by number: the server is started with exec, which closes everything else.
            self.server = subprocess.Popen(
                [sys.executable, "-m", "tests.pool_rank", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
            )
        threads = self._answer()
        assert threads == 1, f"the fork server runs {threads} threads: a fork of it may hang"

    def close(self) -> None:
        for rank in self.idle:
            rank.connection.close()
            rank.log.close()
        self.idle.clear()
        self.control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.server.wait(5)
        self.server.kill()
        self.server.wait()
        self.folder.cleanup()

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        timeout: float,
        init_process_group: bool,
        kwargs: dict[str, Any],
    ) -> list[Any]:
        payloads = self._jobs(function, world_size, timeout, init_process_group, kwargs)
        self._forget_dead()
        while len(self.idle) < world_size:
            self.idle.append(self._spawn())
        ranks = [self.idle.pop() for _ in range(world_size)]
        failures: list[Failure] = []
        try:
            outcomes = self._run_on(ranks, payloads, timeout, failures)
        except BaseException:  # Ctrl-C: the ranks are in the middle of something
            self._kill(ranks)
            raise
        if failures:
            raise RankError("\n\n".join(map(str, failures)))
        for number, rank in enumerate(ranks):
            if text := rank.take_output():
                print(f"-- printed by rank {number} --\n{text}", end="")
        if wants_fresh():
            self._kill(ranks)
        else:
            self.idle.extend(reversed(ranks))
        if outcomes[0].kind == "skipped":
            raise RankSkip(outcomes[0].text)
        return [outcome.value for outcome in outcomes]

    def _run_on(
        self, ranks: list[Rank], payloads: list[bytes], timeout: float, failures: list[Failure]
    ) -> list[Outcome]:
        """Both phases. Ranks of a failed test are killed; `failures` is filled in the order of failing."""
        for rank, payload in zip(ranks, payloads, strict=True):
            with contextlib.suppress(OSError):  # a rank that just died is noticed when its answer is read
                rank.connection.send_bytes(payload)
        outcomes = self._collect(ranks, timeout, failures)
        if not failures and len({outcome.kind for outcome in outcomes.values()}) > 1:
            said = ", ".join(f"rank {r} {outcomes[r].kind}" for r in sorted(outcomes))
            failures.append(Failure(0, f"the ranks disagree whether to skip: {said}"))
        if not failures:
            for rank in ranks:
                with contextlib.suppress(OSError):
                    rank.connection.send_bytes(b"tear down")
            self._collect(ranks, max(timeout, 10.0), failures)
        if failures:
            self._kill(ranks)
        return [outcomes[number] for number in sorted(outcomes)]

    def _collect(self, ranks: list[Rank], timeout: float, failures: list[Failure]) -> dict[int, Outcome]:
        """One outcome per rank. After the first failure the others get GRACE_S, then their stacks show."""
        deadline = time.monotonic() + timeout
        outcomes: dict[int, Outcome] = {}
        open_ranks = {rank.connection: number for number, rank in enumerate(ranks)}
        while open_ranks:
            ready = wait(list(open_ranks), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                number = open_ranks.pop(connection)
                outcome = self._receive(ranks[number])
                outcomes[number] = outcome
                if outcome.kind == "failed":
                    if not failures:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
                    failures.append(Failure(number, outcome.text, ranks[number].take_output()))
        if open_ranks:
            self._fail_hanging(ranks, sorted(open_ranks.values()), timeout, failures)
        return outcomes

    def _receive(self, rank: Rank) -> Outcome:
        try:
            return pickle.loads(rank.connection.recv_bytes())
        except (EOFError, OSError):
            code = self.reap(rank.pid)
            rank.pid = -1
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
            return Outcome(kind="failed", text=f"the process of this rank {how} during the test")
        except Exception as error:  # a value whose class cannot be imported here
            return Outcome(kind="failed", text=f"the test's return value cannot be read: {error!r}")

    def _fail_hanging(
        self, ranks: list[Rank], hanging: list[int], timeout: float, failures: list[Failure]
    ) -> None:
        if failures:
            reason = f"still running {GRACE_S:g} s after rank {failures[0].rank} failed; its stack:"
        else:
            reason = f"timeout: still running after {timeout:g} s; its stack:"
        for number in hanging:
            os.kill(ranks[number].pid, signal.SIGUSR1)  # faulthandler prints stacks even inside a collective
        time.sleep(STACK_S)
        failures.extend(Failure(number, reason, ranks[number].take_output()) for number in hanging)

    # ------------------------------------------------------------------------------------------ processes

    def _spawn(self) -> Rank:
        ours, theirs = Pipe()
        log = tempfile.TemporaryFile(dir=self.folder.name, mode="a+b")  # noqa: SIM115 (closed with the rank)
        pid = self.fork(b"rank", [theirs.fileno(), log.fileno()])
        theirs.close()
        return Rank(ours, pid, log)

    def fork(self, what: bytes, files: list[int]) -> int:
        """The process id of a new child of the server, which gets these files."""
        socket.send_fds(self.control, [what], files)
        return self._answer()

    def _answer(self) -> int:
        reply = self.control.recv(8, socket.MSG_WAITALL)
        if len(reply) != 8:
            raise RuntimeError(f"the fork server of the test pool ended with status {self.server.wait()}")
        return int(reply)

    def reap(self, pid: int) -> int:
        """The exit code of a child that has ended; -N if signal N killed it."""
        self.control.sendall(b"reap %d" % pid)
        return self._answer()

    def _forget_dead(self) -> None:
        """Drop idle ranks that were killed from outside: their connection is closed."""
        dead = [rank for rank in self.idle if rank.connection.poll()]
        self.idle = [rank for rank in self.idle if rank not in dead]
        self._kill(dead)

    def _kill(self, ranks: list[Rank]) -> None:
        for rank in ranks:
            rank.connection.close()
            rank.log.close()
            if rank.pid > 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
                self.reap(rank.pid)

    def _jobs(
        self,
        function: Callable[..., Any],
        world_size: int,
        timeout: float,
        init_process_group: bool,
        kwargs: dict[str, Any],
    ) -> list[bytes]:
        self.jobs += 1
        store_file = str(Path(self.folder.name, f"store_{self.jobs}"))
        port = free_port()
        try:
            return [
                pickle.dumps(
                    Job(
                        module=function.__module__,
                        file=inspect.getfile(function),
                        qualname=function.__qualname__,
                        kwargs=kwargs,
                        rank=rank,
                        world_size=world_size,
                        store_file=store_file,
                        port=port,
                        timeout_s=timeout + GROUP_S,
                        init_process_group=init_process_group,
                        sys_path=sys.path,
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                    )
                )
                for rank in range(world_size)
            ]
        except Exception as error:
            named = ", ".join(f"{name} ({type(value).__name__})" for name, value in kwargs.items())
            raise RankError(f"the arguments of a distributed test must pickle: {named}: {error}") from error


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
