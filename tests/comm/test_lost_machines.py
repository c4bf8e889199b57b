"""A pulled network cable and a machine that loses power: errors on the remaining rank.

Machines are network namespaces: nothing arrives from the lost one any more, not even the end of a connection.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import links
from tests.comm.test_hang_watch import PROLOGUE, SETUP_SECONDS
from tests.pool import ROOT

REASON = links.why_not()
pytestmark = [pytest.mark.skipif(bool(REASON), reason=f"no machines: {REASON}"), pytest.mark.slow]

BODY = """
wait_until_known()
print("trained", flush=True)
if rank == 0:
    sys.stdin.readline()
    step()
else:
    time.sleep(60)
"""


@pytest.fixture
def machines() -> Iterator[links.Links]:
    with links.Links(2) as made:
        yield made


def started(machines: links.Links, folder: Path, rank: int) -> subprocess.Popen[str]:
    entry, environment = machines.place(rank, 1)
    variables = {
        **os.environ,
        **environment,
        "DS_SHM": "0",
        "TEST_TIMEOUT": "60",
        "TEST_LEAVES": "0",
        "TEST_SECONDS": "2",
        "TEST_SETUP_SECONDS": str(SETUP_SECONDS),
        "TEST_STORE": f"tcp://{machines.address(0)}:{links.PORT}",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.Popen(
        [*entry, sys.executable, str(folder / "script.py")],
        env=variables,
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("what", ["link", "host"])
def test_a_lost_machine_is_named(machines: links.Links, tmp_path: Path, what: str) -> None:
    (tmp_path / "script.py").write_text(PROLOGUE + BODY)
    ranks = [started(machines, tmp_path, rank) for rank in range(2)]
    try:
        for each in ranks:
            output: Any = each.stdout
            assert any(line == "trained\n" for line in output)
        links._run([*machines._in_switch(), "ip", "link", "set", "port1", "down"], "")
        if what == "host":
            ranks[1].kill()
        said = ranks[0].communicate("\n", timeout=60)[0]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    print(said)
    assert said.count("no progress in communication") == 1
    assert "rank 1 does not answer" in said
    assert re.search(r"missing: rank 1 \(host1, process \d+\) does not answer: .*unreachable", said)
    assert re.search(r"waiting: rank 0 in reduce_scatter .* at script.py:\d+ in step", said)
    assert "a slow or blocked network between the hosts" in said
