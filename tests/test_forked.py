"""A forked script is like one that was started: what it is given, how it ends, what is seen of it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import forked

ENDS = {
    "returns": "print('out'); print('err', file=sys.stderr)",
    "raises": "def f(): raise ValueError('boom')\nf()",
    "exits": "sys.exit(3)",
    "exits with a text": "sys.exit('no')",
    "is killed": "os.kill(os.getpid(), 9)",
    "has exit handlers": "import atexit; atexit.register(lambda: print('last', hasattr(sys, 'last_value'))); 1 / 0",
    "leaves at once": "print('lost', end=''); os._exit(4)",
    "leaves at once, unbuffered": "print('kept', end=''); os._exit(4)",
    "waits for threads": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    "sees what it was given": "print(sys.argv[1:], __name__, os.environ['GIVEN'], 'HOME' in os.environ, os.getcwd())\n"
    "import of_mine; print(of_mine.__file__, sys.stdin.read(), sys.path[0])",
}


@pytest.mark.parametrize("as_file", [False, True])
def test_a_forked_script_is_like_one_that_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_file: bool
) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "of_mine.py").touch()
    env = {"GIVEN": "yes", "PYTHONPATH": str(tmp_path / "given")}

    def run(body: str) -> list[object]:
        code = "import os, sys\n" + body
        if as_file:
            (tmp_path / "script.py").write_text(code)
        where = [str(tmp_path / "script.py")] if as_file else ["-c", code]
        unbuffered = {"PYTHONUNBUFFERED": "1"} if "kept" in body else {}
        done = forked.run([*where, "a", "b"], env=env | unbuffered, cwd=tmp_path, timeout=60)
        trace = [line for line in done.stderr.splitlines() if line.strip("~^ ")]
        return [done.returncode, done.stdout, trace if as_file else trace[-1:]]

    seen = {name: run(body) for name, body in ENDS.items()}
    monkeypatch.setenv("DS_TEST_FRESH", "1")
    assert seen == {name: run(body) for name, body in ENDS.items()}


def test_torch_is_there_at_once_and_only_in_the_child() -> None:
    done = forked.run(["-c", "import sys; print('torch' in sys.modules)"], env=dict(os.environ))
    assert done.stdout == "True\n", done.stderr


def test_a_script_that_goes_on_can_be_waited_for_and_killed() -> None:
    process = forked.start(
        ["-c", "import time; print('here', flush=True); time.sleep(60)"], env=dict(os.environ)
    )
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=0.05)
    begin = time.monotonic()
    process.kill()
    assert process.returncode == -signal.SIGKILL and time.monotonic() - begin < 30
    process.kill()
