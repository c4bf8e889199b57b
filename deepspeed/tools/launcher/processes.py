"""Process monitoring and clean-up, so that no process is left behind. Linux-only functions do nothing elsewhere."""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import shutil
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from deepspeed.base.constants import ELASTIC_PROGRESS, ELASTIC_STATE, STOP_GRACE_FILE
from deepspeed.tools.launcher.shim import FIRST_FAILURE, LINUX, SIGKILL, die_with_parent

PR_SET_CHILD_SUBREAPER = 36
DEFAULT_GRACE_S = 2.5
COLLECT_EVERY_S = 5.0
LOOK_EVERY_S = 0.25
ERROR_REPORT = "error.json"  # of a rank, in its folder
FOLDER_PREFIX = "deepspeed_launch_"
NO_STEP = 0
_STEPS = struct.Struct("<q")
OWNER = "owner"  # lock file in such a folder: locked as long as its launcher lives


def grace_seconds(launcher_pid: int | None = None) -> float:
    """Return the seconds that ranks (of this launcher) have between the request to stop and SIGKILL.

    ``DEEPSPEED_STOP_GRACE`` (seconds) sets it, for scripts that save at SIGTERM; ranks whose config asks for that have
    written their grace time to the launcher's folder.
    """
    given = os.environ.get("DEEPSPEED_STOP_GRACE")
    if given is not None or launcher_pid is None:
        return float(given or DEFAULT_GRACE_S)
    asked = [DEFAULT_GRACE_S]
    for folder in folders_of(launcher_pid):
        with contextlib.suppress(OSError, ValueError):
            asked.append(float((folder / STOP_GRACE_FILE).read_text()))
    return max(asked)


def run_dir_prefix(launcher_pid: int) -> str:
    """Return the name prefix of the temporary folders of a launcher."""
    return f"{FOLDER_PREFIX}{launcher_pid}_"


def memory_folder() -> Path:
    """Return the folder in which ranks of an elastic job keep their state: DEEPSPEED_ELASTIC_MEMORY if set, else shared
    memory, or the temporary folder where there is none."""
    own = os.environ.get("DEEPSPEED_ELASTIC_MEMORY")
    shared = Path("/dev/shm")
    return Path(own) if own else shared if shared.is_dir() else Path(tempfile.gettempdir())


def folders_of(launcher_pid: int) -> list[Path]:
    """Return all temporary folders of a launcher."""
    places = {Path(tempfile.gettempdir()), memory_folder()}
    return [path for place in places for path in place.glob(run_dir_prefix(launcher_pid) + "*")]


@contextmanager
def own_folder(place: Path | None = None) -> Iterator[Path]:
    """Create a temporary folder of this launcher, removed at the end of the context, also after a signal; after
    SIGKILL, the next launcher removes it."""
    place = Path(tempfile.gettempdir()) if place is None else place
    _remove_stale(place)
    folder = lock = None
    try:
        with holding_signals():
            folder = Path(tempfile.mkdtemp(prefix=run_dir_prefix(os.getpid()), dir=place))
            lock = _own(folder)
        yield folder
    finally:
        if folder is not None:
            remove(folder)
        if lock is not None:
            os.close(lock)


class ElasticMemory:
    """Shared-memory folder of an elastic job on one machine, where ranks keep their state: it outlives them, as does
    the count of finished steps in it."""

    def __init__(self, folder: Path) -> None:
        self._progress = folder / ELASTIC_PROGRESS
        self._progress.write_bytes(_STEPS.pack(NO_STEP))

    @property
    def step(self) -> int:
        """Number of steps that the ranks of this machine have finished."""
        return _STEPS.unpack(self._progress.read_bytes())[0]


@contextmanager
def elastic_memory() -> Iterator[ElasticMemory]:
    """Create this process's `ElasticMemory`, and remove it at the end of the context."""
    with own_folder(memory_folder()) as folder:
        os.environ[ELASTIC_STATE] = str(folder)
        yield ElasticMemory(folder)


def _own(folder: Path) -> int | None:
    """Return a descriptor that locks the folder until this process ends, however it ends; None where file locks are
    missing. Process ids do not tell which launchers live: containers may share the folder."""
    try:
        import fcntl

        new = folder / f"{OWNER}.new"
        lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        new.rename(folder / OWNER)  # it appears only once locked
    except (ImportError, OSError):
        return None
    return lock


def _remove_stale(place: Path) -> None:
    """Remove the folders of killed launchers: those whose lock is no longer held."""
    for folder in place.glob(FOLDER_PREFIX + "*"):
        try:
            import fcntl

            lock = os.open(folder / OWNER, os.O_RDWR)
        except (ImportError, OSError):  # another user's, or one that is being created
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # its launcher is alive
        finally:
            os.close(lock)


def remove(folder: Path) -> None:
    """Remove a folder, retrying for a second while ending processes still write there."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.05)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends, so that it can still be found."""
    if LINUX:
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_us() -> Callable[[], None] | None:
    """Return a ``preexec_fn`` that makes the kernel end the child when this process ends (Linux), or None."""
    return functools.partial(die_with_parent, os.getpid(), signal.SIGTERM) if LINUX else None


def own_children() -> frozenset[int]:
    """Return the process ids of this process's current children."""
    import psutil

    return frozenset(child.pid for child in psutil.Process().children())


def kill_descendants(spared: frozenset[int] = frozenset(), within_s: float = 1.0) -> None:
    """Send SIGKILL to all descendants except ``spared`` children and theirs, until none is left or ``within_s`` is
    over."""
    import psutil

    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        # A descendant may fork while it is being killed, and its children are reparented to us: look again.
        children = [child for child in psutil.Process().children() if child.pid not in spared]
        family = [process for child in children for process in (child, *_below(child)) if _is_alive(process)]
        if not family:
            _collect(child.pid for child in children)
            return
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(family, timeout=0.2)


def _collect(pids: Iterable[int]) -> None:
    """Reap dead children that this process adopted as orphans."""
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            pass


def _below(process) -> list:
    import psutil

    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _is_alive(process) -> bool:
    import psutil

    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Route termination signals to ``handler`` within the context; SIGHUP stays ignored under nohup."""
    before = {}
    if threading.current_thread() is threading.main_thread():  # Python delivers signals only to it
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
            signum = getattr(signal, name, None)  # Windows has only two of them
            if signum is None or (name == "SIGHUP" and signal.getsignal(signum) is signal.SIG_IGN):
                continue
            before[signum] = signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


@contextmanager
def holding_signals() -> Iterator[None]:
    """Defer termination signals that arrive within the context to its end.

    Their handlers raise; an exception inside ``Thread.start`` would leave a thread that Python has not registered,
    which prints a traceback when it ends.
    """
    held: list[int] = []
    with handled_by(lambda signum, _: held.append(signum)):
        yield
    for signum in held:
        signal.raise_signal(signum)


def end_failed_ranks(run_dir: Path, pids: Mapping[int, int], ended_at: Mapping[int, float]) -> None:
    """Start a thread that ends a rank which has reported a failure but does not exit within the grace time: a thread
    or an exit handler of its script keeps it alive, and the other ranks wait for it until it is gone.
    """

    def look() -> None:
        while not (run_dir / FIRST_FAILURE).exists():
            if len(ended_at) == len(pids) or not run_dir.exists():
                return
            time.sleep(LOOK_EVERY_S)
        for signum in (signal.SIGTERM, SIGKILL):
            time.sleep(grace_seconds())
            for local_rank, pid in pids.items():
                if local_rank not in ended_at and (run_dir / str(local_rank) / ERROR_REPORT).exists():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signum)

    if hasattr(os, "pidfd_open"):  # else ended_at stays empty, and a process id might be reused by then
        threading.Thread(target=look, name="failed-ranks", daemon=True).start()


class ExitWatch:
    """Records when each process ended, to the millisecond, without reaping it: the agent does that.

    The agent polls ten times a second; within that interval a killed rank often takes others down with it. The exit
    code of the first one becomes the command's.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        """Watch ``pids``: local rank -> process id of a child that has not been reaped yet."""
        self.ended_at: dict[int, float] = {}  # local rank -> seconds since the epoch
        self._pids = frozenset(pids.values())
        if not hasattr(os, "pidfd_open"):
            return
        self._selector = selectors.DefaultSelector()
        for local_rank, pid in pids.items():
            try:
                self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, local_rank)
            except OSError:  # an old kernel, or no descriptors left: fall back to the agent's timestamps
                return
        threading.Thread(target=self._watch, args=(len(pids),), name="exit-watch", daemon=True).start()

    def _watch(self, running: int) -> None:
        while running:
            for key, _ in self._selector.select(timeout=COLLECT_EVERY_S):
                self.ended_at[key.data] = time.time()
                self._selector.unregister(key.fileobj)
                os.close(key.fd)
                running -= 1
            self._collect_orphans()
        self._selector.close()

    def _collect_orphans(self) -> None:
        """Reap adopted processes that ranks left behind: over a long run, zombies would fill the process table."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                # A rank: the agent reaps it, and this loop continues the next time.
                if ended.si_pid in self._pids:
                    return
                os.waitpid(ended.si_pid, 0)
