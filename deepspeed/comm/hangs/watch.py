"""Watch for hangs and explain them: one thread per process, as long as an engine wants it.

Every few seconds it checks whether this rank has made progress in communication. When a rank has waited for
`comm.hang_report_seconds`, it raises an alarm in the process group's store; the threads of all ranks see it and post
their rank's state (thread_states.py), and rank 0 compares and prints (report.py). Otherwise one query is sent per
check. The main thread is only inspected: it may be stuck in native code.

The thread also answers `ds stacks` (``StackServer``).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from deepspeed.base.constants import RANK_SOCKET
from deepspeed.base.logging import logger
from deepspeed.comm.groups import default_timeout
from deepspeed.comm.hangs.history import OperationHistory, watch_callbacks
from deepspeed.comm.hangs.report import ABSENT, GONE, STOPPED, explain
from deepspeed.comm.hangs.stragglers import clone, quietly, store_of_default_group
from deepspeed.comm.hangs.thread_states import (
    HangReport,
    Names,
    code_position,
    describe,
    is_communicating,
    main_frames,
    runs_users_code,
    stack_of,
    threads,
)
from deepspeed.comm.pending import explanation

_CREDENTIALS = struct.Struct("3i")  # process, user, group
_ANSWER_S = 2.0


class StackServer:
    """Server of `ds stacks` (`deepspeed/tools/stacks.py`): answers with the stack of every thread of this rank, and
    the last collectives of its groups. `serve` waits for requests in the calling thread.

    It listens at an abstract Unix socket with user and process in its name: in no file system, gone with the process
    however that ends, and the kernel identifies the client. Only the same user and root get an answer. Outside Linux
    there are no requests.
    """

    def __init__(self, own_report: Callable[[], HangReport]) -> None:
        self._own_report = own_report
        self._wake, self._woken = socket.socketpair()
        self._listener: socket.socket | None = None

    def __enter__(self) -> StackServer:
        if sys.platform.startswith("linux"):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind("\0" + RANK_SOCKET.format(user=os.getuid(), process=os.getpid()))
                listener.listen(4)
                self._listener = listener
            except OSError:  # a sandbox without abstract sockets
                listener.close()
        return self

    def __exit__(self, *exception: object) -> None:
        for each in (self._listener, self._wake, self._woken):
            if each is not None:
                each.close()

    def wake(self) -> None:
        """End `serve`, from another thread."""
        with contextlib.suppress(OSError):
            self._wake.send(b"!")

    def serve(self, for_s: float) -> None:
        """Answer requests for this many seconds, or until `wake`."""
        end = time.monotonic() + for_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            if self._listener is not None:
                selector.register(self._listener, selectors.EVENT_READ)
            while (left := end - time.monotonic()) > 0:
                ready = [key.fileobj for key, _ in selector.select(left)]
                if self._woken in ready:
                    return
                if ready and self._listener is not None:
                    with contextlib.suppress(OSError):  # the client is gone
                        self._answer(self._listener.accept()[0])

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(_ANSWER_S)
            size = _CREDENTIALS.size
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            if _CREDENTIALS.unpack(peer)[1] not in (os.getuid(), 0):
                return
            connection.sendall(json.dumps(self._record()).encode())

    def _record(self) -> dict[str, object]:
        stacks = [
            {"name": name, "stack": stack_of(frames), "of_user": number == 0 or runs_users_code(frames)}
            for number, (name, frames) in enumerate(threads())  # the first is the main one
        ]
        return {**asdict(self._own_report()), "threads": stacks}


CHECKS = 6  # per interval
MAX_PAUSE_S = 5.0
START_DELAY_S = 0.5  # shorter jobs are not watched
EARLY_S = 10.0  # during which it looks every START_DELAY_S for rank 0's address; its store may stop answering
REPEAT_FACTOR = 4  # a hang is reported again after this many times as long
JOIN_S = 2.0
FAILURES = 3  # consecutive failures that end the watch
KEY = "deepspeed/hang"


class Address(NamedTuple):
    """Host and process of a rank. ``watched``: whether its watch, which lives as long as an engine, answers there."""

    host: str
    pid: int
    watched: bool


class Watched(Protocol):
    """Interface of a network to its watch."""

    names: Names | None
    hang_report_seconds: float


class Watch:
    """The watch thread and its state. It communicates only through the store, over a separate connection."""

    def __init__(self, histories: Callable[[], list[OperationHistory]]) -> None:
        self.pid = os.getpid()
        self.group = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.host = socket.gethostname()
        self.networks: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._histories = histories
        self._limit_s = default_timeout().total_seconds() / 2  # so that a report precedes the timeout
        self._group_store = store_of_default_group()  # keeps the store's server alive as long as this object
        self._store: Any = None
        self._query_thread: threading.Thread | None = None
        self._round = 0
        self._open_round: tuple[int, float] | None = None  # number and start of the round to be reported
        self._last_progress: Any = None
        self._progress_at = self._began = time.monotonic()
        self._reported_s = 0.0
        self._addresses: dict[int, Address] = {}
        self._end = threading.Event()
        self._server = StackServer(self._own_report)
        self._thread = threading.Thread(target=self._run, name="deepspeed hang watch", daemon=True)

    def start(self) -> None:
        """Publish this rank's address before it can be stopped or killed in its first step, and start the thread."""
        with contextlib.suppress(Exception):  # the thread tries again, and logs the error
            self._query(self._announce)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a no-op in a forked child."""
        if self.pid != os.getpid():
            return
        self._end.set()
        self._server.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)  # the interpreter must not end while a thread is inside the store
        explanation.text = ""

    @property
    def is_usable(self) -> bool:
        alive = self.pid == os.getpid() and self._thread.is_alive() and not self._end.is_set()
        return alive and self.group is dist.group.WORLD

    @property
    def seconds(self) -> float:
        wanted = min((each.hang_report_seconds for each in list(self.networks)), default=0.0)
        return min(wanted, self._limit_s)

    @property
    def pause_s(self) -> float:
        pause_s = min(MAX_PAUSE_S, max(0.05, self.seconds / CHECKS))
        if self._open_round is not None:
            return min(pause_s, 0.25)
        if not self._addresses and time.monotonic() - self._began < EARLY_S:
            return min(pause_s, START_DELAY_S)
        return pause_s

    # ---- the thread

    def _run(self) -> None:
        failures = 0
        with self._server:
            self._server.serve(min(START_DELAY_S, self.pause_s / 2))
            while self.networks and not self._end.is_set() and self.group is dist.group.WORLD:
                try:
                    self._check()
                    failures = 0
                except Exception as error:  # the store's process is gone, or the group was destroyed
                    logger.debug(f"hang watch: {error!r}")
                    failures += 1
                    if failures == FAILURES:
                        break
                self._server.serve(self.pause_s)
            self._end.set()
            if self._store is not None:
                with contextlib.suppress(Exception):  # the store may be gone
                    self._query(lambda: _publish_address(self._store, self.rank, watched=False))

    def _check(self) -> None:
        waited_s = self._waited_s()
        if waited_s < self.pause_s:
            self._reported_s, explanation.text = 0.0, ""
        answered = self._query(self._exchange, waited_s)
        if not answered and waited_s > self.seconds and self._reported_s == 0.0:
            self._report_alone(waited_s)

    def _waited_s(self) -> float:
        """Return the seconds that this rank has been communicating without progress."""
        state = self._progress()
        now = time.monotonic()
        if state is None or state != self._last_progress:  # not communicating, or progress
            self._last_progress, self._progress_at = state, now
        return now - self._progress_at

    def _progress(self) -> Any:
        """Return a value that changes with communication progress; None while this rank does something else."""
        frames = main_frames()
        counts = [(each.name, each.count) for each in self._histories()]
        # The host runs ahead of a device, and may wait for it anywhere.
        if is_communicating(frames) or (counts and _uses_devices()):
            return counts, _torch_counts(), code_position(frames), self._positions()
        return None

    def _positions(self) -> list[str]:
        """Return the positions in the step: they show the progress of messages between stages, which no history
        records."""
        return [each.names.position() for each in list(self.networks) if each.names is not None]

    def _own_report(self) -> HangReport:
        frames = main_frames()
        return HangReport(
            rank=self.rank,
            host=self.host,
            pid=self.pid,
            stalled_s=time.monotonic() - self._progress_at,
            groups=[each.as_record() for each in self._histories()],
            **describe(frames, [each.names for each in list(self.networks) if each.names is not None]),
        )

    # ---- through the store

    def _announce(self) -> None:
        self._store = self._join()

    def _query(self, query: Callable[..., None], *arguments: Any) -> bool:
        """Run ``query`` in another thread, as a store whose process is stopped does not answer. Return whether it
        answered."""
        if self._query_thread is not None and self._query_thread.is_alive():
            return False
        failed: list[Exception] = []

        def run() -> None:
            try:
                query(*arguments)
            except Exception as error:
                failed.append(error)

        self._query_thread = threading.Thread(target=run, name="deepspeed hang watch, store", daemon=True)
        self._query_thread.start()
        self._query_thread.join(max(1.0, 2 * self.pause_s))
        if failed:
            raise failed[0]
        return not self._query_thread.is_alive()

    def _exchange(self, waited_s: float) -> None:
        if self._store is None:
            self._store = self._join()
        if not self._addresses:
            self._addresses.update(self._read_addresses([0]))
        round_ = int(self._store.add(f"{KEY}/round", 0))
        due_s = max(self.seconds, REPEAT_FACTOR * self._reported_s)
        if round_ == self._round and self._open_round is None and waited_s >= due_s:
            self._store.compare_set(f"{KEY}/round", str(round_), str(round_ + 1))
            round_ = int(self._store.add(f"{KEY}/round", 0))
        if round_ > self._round:
            self._round, self._open_round = round_, (round_, time.monotonic())
            own_report = json.dumps(asdict(self._own_report()))
            self._store.set(f"{KEY}/{round_}/{self.rank}", own_report)
            self._reported_s = max(waited_s, self.seconds / REPEAT_FACTOR)
        if self._open_round is not None:
            self._follow_round(*self._open_round)

    def _join(self) -> Any:
        """Publish this rank's address; return the store."""
        store = clone(self._group_store)
        _publish_address(store, self.rank, watched=True)
        self._round = int(store.add(f"{KEY}/round", 0))
        if self._round and not store.check([f"{KEY}/{self._round}/text"]):
            self._round -= 1  # take part in the round in progress
        return store

    def _follow_round(self, round_: int, since: float) -> None:
        """Report, or wait for the report of rank 0, or of the first answering rank if rank 0 does not answer."""
        lasted_s = time.monotonic() - since
        patience_s = 2 * min(MAX_PAUSE_S, self.seconds / CHECKS) + 1.0
        if self._store.check([f"{KEY}/{round_}/text"]):
            explanation.text = self._store.get(f"{KEY}/{round_}/text").decode()
            self._open_round = None
            quietly(lambda: self._store.delete_key(f"{KEY}/{round_}/{self.rank}"))
            return
        keys = [f"{KEY}/{round_}/{rank}" for rank in range(self.size)]
        complete = self._store.check(keys)
        if not complete and lasted_s < patience_s:
            return
        present = [rank for rank in range(self.size) if complete or self._store.check([keys[rank]])]
        mine = self.rank == 0 or (self.rank == present[0] and lasted_s > patience_s)
        if not mine or int(self._store.add(f"{KEY}/{round_}/said", 1)) > 1:
            return
        reports = {rank: HangReport(**json.loads(self._store.get(keys[rank]))) for rank in present}
        self._addresses.update(self._read_addresses(set(range(self.size)) - set(present)))
        silent = {rank: self._describe_silent(rank) for rank in range(self.size) if rank not in present}
        text = self._text(reports, silent)
        self._store.set(f"{KEY}/{round_}/text", text)
        explanation.text = text

    def _read_addresses(self, ranks: Any) -> dict[int, Address]:
        known = {}
        for rank in ranks:
            if self._store.check([f"{KEY}/who/{rank}"]) and (address := self._store.get(f"{KEY}/who/{rank}")):
                known[rank] = Address(*json.loads(address))
        return known

    # ---- the report

    def _report_alone(self, waited_s: float) -> None:
        """Report a store that does not answer, in the process of rank 0 or of a launcher."""
        self._reported_s = waited_s
        in_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self.rank != 1 and not in_launcher:
            return
        unknown = "does not answer, and its host is not known yet"
        silent = {} if in_launcher else {0: self._describe_silent(0) if 0 in self._addresses else unknown}
        explanation.text = self._text({self.rank: self._own_report()}, silent, "its store does not answer; ")

    def _text(self, reports: dict[int, HangReport], silent: dict[int, str], note: str = "") -> str:
        waited_s = max((each.stalled_s for each in reports.values() if each.call), default=self.seconds)
        text = explain(reports, silent, waited_s)
        if text and (silent or waited_s >= self.seconds / 2):  # otherwise it has resumed meanwhile
            logger.warning(note + text)
            return text
        return ""

    def _describe_silent(self, rank: int) -> str:
        """Describe the known state of a rank that does not answer."""
        absent = f"{ABSENT} yet, or no longer: it is before deepspeed.initialize, or after engine.destroy"
        if rank not in self._addresses:
            return absent
        host, pid, watched = self._addresses[rank]
        where = f"({host}, process {pid})"
        state = _state_of(pid) if host == self.host else ""
        if state in ("T", "t"):
            return f"{where} {STOPPED} (SIGSTOP or a debugger): kill -CONT {pid} resumes it"
        if state in ("gone", "Z", "X"):
            return f"{where} {GONE}"
        if state == "D":
            return f"{where} is blocked in the kernel, on storage or a driver"
        if not watched:
            return f"{where} {absent}"
        if state:
            return f"{where} runs, but Python does not: native code holds the GIL"
        return f"{where} does not answer: stopped, exited, or unreachable"


def _state_of(pid: int) -> str:
    """Return the kernel's state letter of a process of this host; `gone` if it has ended; empty without /proc."""
    if not os.path.isdir("/proc/self"):
        return ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0]
    return "gone"


def _torch_counts() -> list[int]:
    """Return the number of collectives that torch has issued in each group."""
    counts = []
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    for group in groups:
        with contextlib.suppress(Exception):  # a backend that does not count
            counts.append(group._get_sequence_number_for_group())
    return counts


def _uses_devices() -> bool:
    with contextlib.suppress(Exception):
        return "nccl" in dist.get_backend()
    return False


# ---- one per process


def announce() -> None:
    """Publish this rank's address, as it may be stopped or end before it has an engine."""
    store = store_of_default_group()
    if store is not None:
        quietly(lambda: _publish_address(store, dist.get_rank(), watched=False))


def _publish_address(store: Any, rank: int, *, watched: bool) -> None:
    store.set(f"{KEY}/who/{rank}", json.dumps(Address(socket.gethostname(), os.getpid(), watched)))


_watch: Watch | None = None
_lock = threading.Lock()


def begin(network: Watched, histories: Callable[[], list[OperationHistory]]) -> None:
    """Watch this network too. Not collective: each rank decides for itself."""
    global _watch
    if network.hang_report_seconds <= 0 or store_of_default_group() is None:
        return
    with _lock:
        if _watch is None or not _watch.is_usable:
            if _watch is not None:
                _watch.stop()
            _watch = Watch(histories)
            _watch.networks.add(network)
            _watch.start()
        else:
            _watch.networks.add(network)


def leave(network: Watched) -> None:
    """Stop watching this network; the thread ends with the last one."""
    with _lock:
        if _watch is not None:
            _watch.networks.discard(network)
            left = bool(_watch.networks)
    if _watch is not None and not left:
        end()


def end() -> None:
    """End the watch, before the process groups are destroyed."""
    global _watch
    with _lock:
        ending, _watch = _watch, None
    if ending is not None:
        ending.stop()


watch_callbacks.leave, watch_callbacks.end = leave, end
