"""After any kill, no process of the job stays alive, and the exit code tells why."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepspeed.tools.launcher import processes
from tests.tools.launcher.programs import COMMAND, environment

psutil = pytest.importorskip("psutil")
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the Linux kernel's help")

LIMIT_S = 60.0  # of a busy machine; what stays would sleep for twice that

# A rank with a child that ignores SIGTERM and SIGINT, one in a separate session, and an orphan.
FAMILY = """\
import os, pathlib, signal, subprocess, sys, time
deaf = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; print(flush=True); time.sleep(120)"
children = [
    subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE),
    subprocess.Popen(["sleep", "120"], start_new_session=True),
]
children[0].stdout.readline()  # an interrupt before it is deaf would make Python print a traceback
orphan = subprocess.check_output("sleep 120 >/dev/null & echo $!", shell=True, text=True)
if sys.argv[-1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
pids = [os.getpid(), *(child.pid for child in children), int(orphan)]
part = pathlib.Path("part" + os.environ["RANK"])
part.write_text(" ".join(map(str, pids)))
part.rename("pids" + os.environ["RANK"])
time.sleep(120)
"""


@pytest.fixture(autouse=True)
def default_signals():
    """A test run in the background (``nohup``, ``&``) ignores signals, and what it starts would inherit that."""
    wanted = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {signum: signal.signal(signum, handler) for signum, handler in wanted.items()}
    yield
    for signum, handler in before.items():
        signal.signal(signum, signal.SIG_DFL if handler is None else handler)


class Job:
    """A running command, its launcher, and the processes of each rank (the rank itself first)."""

    def __init__(self, folder, manner: str) -> None:
        (folder / "family.py").write_text(FAMILY)
        self.command = subprocess.Popen(
            [*COMMAND, "--num_gpus", "2", "--save_pid", "family.py", manner],
            cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        files = [folder / f"pids{rank}" for rank in range(2)]
        deadline = time.monotonic() + LIMIT_S
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline and self.command.poll() is None, "the ranks did not start"
            time.sleep(0.02)
        with open(f"/tmp/{self.command.pid}.ds") as file:
            self.launcher = int(file.read())
        self.ranks = [[int(pid) for pid in file.read_text().split()] for file in files]

    def alive(self) -> list[int]:
        everyone = [self.command.pid, self.launcher, *(pid for rank in self.ranks for pid in rank)]
        return [pid for pid in everyone if psutil.pid_exists(pid) and _status(pid) != psutil.STATUS_ZOMBIE]


def _status(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    "manner, victim, signum, code",
    [
        ("polite", "command", signal.SIGTERM, 143),
        pytest.param("polite", "command", signal.SIGINT, 130, marks=pytest.mark.slow),
        ("polite", "rank", signal.SIGKILL, 137),
        pytest.param("polite", "rank", signal.SIGTERM, 143, marks=pytest.mark.slow),
        ("polite", "rank", signal.SIGINT, 130),
        ("stubborn", "command", signal.SIGHUP, 129),
        ("stubborn", "command", signal.SIGKILL, -9),
        pytest.param("stubborn", "command", signal.SIGTERM, 143, marks=pytest.mark.slow),
        ("stubborn", "command", signal.SIGINT, 130),
        ("stubborn", "launcher", signal.SIGKILL, 137),
        pytest.param("stubborn", "launcher", signal.SIGTERM, 143, marks=pytest.mark.slow),
        ("stubborn", "rank", signal.SIGKILL, 137),
    ],
)
def test_nothing_outlives_a_kill(tmp_path, manner, victim, signum, code):
    job = Job(tmp_path, manner)
    pid = {"command": job.command.pid, "launcher": job.launcher, "rank": job.ranks[1][0]}[victim]
    start = time.monotonic()
    os.kill(pid, signum)
    _, said = job.command.communicate(timeout=LIMIT_S)
    while job.alive() and time.monotonic() - start < LIMIT_S:
        time.sleep(0.02)
    assert job.alive() == []
    assert job.command.returncode == code
    assert "Traceback" not in said
    assert not os.path.exists(f"/tmp/{job.command.pid}.ds")
    if victim == "rank":
        how = "exit code 130" if signum == signal.SIGINT else f"killed by {signum.name}"
        assert f"rank 1 of family.py failed first: {how}" in said


def test_five_seconds_are_enough_to_stop_ranks():
    """On a machine that is not busy: the time that ranks are given, and the time to kill what they have left."""
    to_kill = inspect.signature(processes.kill_descendants).parameters["within_s"].default
    assert processes.DEFAULT_GRACE_S + to_kill < 5


MARK = "DEEPSPEED_TEST_MARK"


def marked(value: str) -> list[int]:
    """Processes that were started, at whatever distance, with this value of MARK in their environment."""
    found, wanted = [], f"{MARK}={value}".encode()
    for process in psutil.process_iter():
        try:
            ours = wanted in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if ours and _status(process.pid) != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("after_s", [0.2, 1.0, 2.0])
def test_nothing_outlives_a_kill_at_the_start(tmp_path, signum, after_s):
    """The command is killed before it has started the launcher, before that has started the ranks, or soon after."""
    (tmp_path / "family.py").write_text(FAMILY)
    value = f"{os.getpid()}-{tmp_path.name}"
    job = subprocess.Popen(
        [*COMMAND, "--num_gpus", "2", "family.py", "stubborn"],
        cwd=tmp_path, env=environment(**{MARK: value}), stderr=subprocess.DEVNULL,
    )  # fmt: skip
    time.sleep(after_s)
    job.send_signal(signum)
    start = time.monotonic()
    codes = {-signum, 128 + signum}
    if signum == signal.SIGINT:
        codes.add(1)  # Python's own, if it is interrupted while it starts
        # An interrupt that arrives in a callback of the import system is printed by Python and lost: one presses again.
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(timeout=LIMIT_S / 3)
        job.send_signal(signum)
    assert job.wait(timeout=LIMIT_S) in codes
    while marked(value) and time.monotonic() - start < LIMIT_S:
        time.sleep(0.05)
    assert marked(value) == []


@pytest.mark.parametrize("ends", ["os.abort()", "os.kill(os.getpid(), 11)", "os._exit(130)"])
def test_the_code_tells_the_request_however_the_launcher_ends(ends: str) -> None:
    """Python can only abort where an interrupt arrives in a callback of a library."""
    launcher = (
        f"import os, resource, signal; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        f"signal.signal(2, lambda *_: {ends}); print(flush=True); signal.pause()"
    )
    command = (
        "import os, signal, sys, threading, time; from deepspeed.tools.launcher.supervision import supervise\n"
        "threading.Timer(1.0, os.kill, (os.getpid(), 2)).start()\n"
        "sys.exit(supervise([sys.executable, '-c', sys.argv[1]]))"
    )
    assert subprocess.run([sys.executable, "-c", command, launcher], env=environment()).returncode == 130


def test_the_folder_of_a_launcher_that_was_killed_is_removed_by_the_next(tmp_path: Path) -> None:
    """Not that of one that lives, whatever its process id says, nor one that is no launcher's."""
    hold = (
        "import pathlib, sys, time; from deepspeed.tools.launcher.processes import own_folder\n"
        "with own_folder(pathlib.Path(sys.argv[1])) as folder: print(folder, flush=True); time.sleep(60)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, env=environment(), text=True
    )
    assert other.stdout is not None
    held = Path(other.stdout.readline().strip())
    (held / "0").mkdir()
    foreign = tmp_path / "deepspeed_launch_1_x"
    foreign.mkdir()
    with processes.own_folder(tmp_path) as mine:
        assert held.exists() and mine.exists()
    other.kill()
    other.communicate()
    with processes.own_folder(tmp_path) as mine:
        assert set(tmp_path.iterdir()) == {mine, foreign}
    assert set(tmp_path.iterdir()) == {foreign}


def test_a_daemon_of_a_run_that_succeeds_is_left_alone(tmp_path):
    (tmp_path / "daemon.py").write_text(
        "import subprocess\n"
        "daemon = subprocess.Popen(['sleep', '30'], start_new_session=True, stdout=-3, stderr=-3)\n"
        "print(daemon.pid)\n"
    )
    result = subprocess.run(
        [*COMMAND, "--num_gpus", "1", "daemon.py"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    pid = int(result.stdout)
    assert result.returncode == 0 and psutil.pid_exists(pid)
    os.kill(pid, signal.SIGKILL)


ORPHANS = """\
import os, signal, subprocess, sys, time
from deepspeed.tools.launcher import processes

def until(true):
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, (processes.own_children(), rank.pid, orphans)
        time.sleep(0.01)

processes.COLLECT_EVERY_S = 0.05
processes.adopt_orphans()
shell = "(sleep 300 >/dev/null & echo $!; sleep 300 >/dev/null & echo $!); read -r line; exit 7"
rank = subprocess.Popen(["sh", "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
orphans = {int(rank.stdout.readline()) for _ in range(2)}
until(lambda: processes.own_children() == {rank.pid, *orphans})
watch = processes.ExitWatch({0: rank.pid})
for pid in orphans:
    os.kill(pid, signal.SIGKILL)
until(lambda: processes.own_children() == {rank.pid})
rank.stdin.close()
until(lambda: 0 in watch.ended_at)
print(rank.wait(), set(watch.ended_at))
"""


def test_adopted_orphans_are_collected_and_the_rank_is_left_to_its_agent():
    result = subprocess.run(
        [sys.executable, "-c", ORPHANS], env=environment(), capture_output=True, text=True
    )
    assert result.stdout.strip() == "7 {0}", result.stderr


def test_interrupt_handlers_of_the_script_run(tmp_path):
    (tmp_path / "save.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path('ready').touch()\n"
        "try: time.sleep(60)\n"
        "except KeyboardInterrupt: pathlib.Path('saved').touch(); raise\n"
    )
    job = subprocess.Popen(
        [*COMMAND, "--num_gpus", "1", "save.py"],
        cwd=tmp_path,
        env=environment(DEEPSPEED_STOP_GRACE="30"),
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + LIMIT_S
    while not (tmp_path / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    job.send_signal(signal.SIGINT)
    _, said = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 130 and (tmp_path / "saved").exists()
    assert said.splitlines()[-1] == "[deepspeed] stopped by SIGINT"
    assert all(line.startswith("[deepspeed]") for line in said.splitlines())


def test_a_signal_waits_until_threads_are_started() -> None:
    """A handler that raises inside Thread.start leaves a thread that ends with a KeyError."""

    class Stopped(Exception):
        pass

    def stop(signum: int, _: object) -> None:
        raise Stopped(signum)

    steps: list[str] = []

    def start() -> None:
        with processes.holding_signals():
            signal.raise_signal(signal.SIGTERM)
            steps.append("started")
        steps.append("not reached")

    with processes.handled_by(stop):
        with pytest.raises(Stopped):
            start()
        assert steps == ["started"]
        assert signal.getsignal(signal.SIGTERM) is stop


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_launcher_that_does_not_end_in_time_leaves_the_code_of_the_signal(tmp_path, signum):
    """As on a machine that is too busy: the command kills it in the end, but was stopped by the signal."""
    deaf = "import pathlib, signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; "
    deaf += "pathlib.Path('ready').touch(); time.sleep(120)"
    program = (
        "import sys; from deepspeed.tools.launcher import supervision; supervision.LAST_RESORT_S = 0.0; "
        f"sys.exit(supervision.supervise([sys.executable, '-c', {deaf!r}]))"
    )
    command = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + LIMIT_S
    while not (tmp_path / "ready").exists() and time.monotonic() < limit:
        time.sleep(0.05)
    command.send_signal(signum)
    assert command.wait(timeout=LIMIT_S) == 128 + signum
