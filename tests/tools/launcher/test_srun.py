"""srun's messages about its ranks, and the resulting exit code of the command."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from deepspeed.tools.launcher.hosts import multi_host
from tests.tools.launcher.programs import TIMEOUT_S, environment


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("srun: error: host1: task 1: Exited with exit code 7", 7),
        ("srun: error: node-[3-4]: tasks 2-3,5: Exited with exit code 1", 1),
        ("srun: error: host0: task 0: Terminated", 143),
        ("srun: error: host0: task 0: Segmentation fault (core dumped)", 139),
        ("srun: error: host0: task 0: Killed", 137),
        ("srun: error: Unable to allocate resources: Requested node configuration is not available", None),
        ("srun: Terminating StepId=3.0", None),
        ("error: task 0: Exited with exit code 7", None),
    ],
)
def test_lines(line: str, code: int | None) -> None:
    assert multi_host.code_of(line) == code


@pytest.mark.parametrize(("ends", "code"), [("1: Exited with exit code 7", 7), ("nothing", 143), ("", 0)])
def test_the_code_is_that_of_the_first_line(ends: str, code: int) -> None:
    """A program that replaces srun, whose lines arrive in pieces."""
    program = f"""
        import sys
        for piece in ("loss 3.5\\rsrun: err", "or: host1: task {ends}\\nsrun: error: host0: task 0: ", "Terminated\\n"):
            sys.stderr.write(piece)
            sys.stderr.flush()
        sys.exit({143 if ends else 0})
    """
    if ends == "nothing":
        program = "import sys; sys.exit(143)"
    outside = f"""
        import os, sys
        from deepspeed.tools.launcher.hosts import multi_host
        sys.exit(multi_host.run_srun([sys.executable, "-c", {textwrap.dedent(program)!r}], dict(os.environ)))
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(outside)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == code, result.stderr
    if ends != "nothing":
        assert result.stderr.startswith("loss 3.5\nsrun: error: host1: task")  # text mode: \\r is a new line
