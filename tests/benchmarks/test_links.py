"""Hosts made of network namespaces (``benchmarks/links.py``): links have their rate, and nothing is left of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    import links
finally:
    sys.path.remove(str(BENCHMARKS))

REASON = links.why_not()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=f"no network namespaces here: {REASON}")
MBITS = 100
RECEIVE = f"""
import socket, time
with socket.create_server(("{links.Links.address(1)}", 4000)) as server:
    print("listening", flush=True)
    with server.accept()[0] as stream:
        count, begin = 0, time.perf_counter()
        while data := stream.recv(1 << 16):
            count += len(data)
        print(count, time.perf_counter() - begin)
"""
SEND = f"""
import socket
with socket.create_connection(("{links.Links.address(1)}", 4000)) as stream:
    stream.sendall(bytes(4_000_000))
"""
MEET = """
import os, torch, deepspeed.comm as dist
dist.init_distributed("gloo")
from deepspeed.comm.transports.gloo import GlooChannel
from deepspeed.comm.transports.hosts import connect_hosts
blocks, channel = connect_hosts(GlooChannel(torch.distributed.group.WORLD, (0, 1, 2, 3)), True)
value = torch.ones(1)
dist.all_reduce(value)
line = f"{blocks} {channel is not None} {value.item()}\\n"
os.write(1, line.encode())  # at once: four ranks write to one file
"""


def left() -> set[str]:
    """Namespaces of all processes, and interfaces of this one."""
    spaces = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            spaces |= {os.readlink(process / "ns" / kind) for kind in ("net", "pid")}
        except OSError:
            continue
    return spaces | {str(path) for path in Path("/sys/class/net").iterdir()}


def wait_until_gone(spaces: set[str]) -> None:
    end = time.monotonic() + 5
    while left() & spaces and time.monotonic() < end:
        time.sleep(0.05)
    assert not left() & spaces


def spaces_of(hosts: links.Links) -> set[str]:
    ask = ["sh", "-c", "readlink /proc/self/ns/net /proc/self/ns/pid"]
    found = [
        subprocess.run([*hosts.entry(i), *ask], capture_output=True, text=True, check=True).stdout.split()
        for i in range(hosts.count)
    ]
    assert len({name for one in found for name in one}) == 2 * hosts.count
    return {name for one in found for name in one}


@needs_hosts
def test_a_link_has_its_rate_and_is_removed() -> None:
    with links.Links(2, MBITS) as hosts:
        spaces = spaces_of(hosts)
        before = hosts.sent_bytes()
        receive = [*hosts.entry(1), sys.executable, "-S", "-c", RECEIVE]
        with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiver:
            assert receiver.stdout is not None and receiver.stdout.readline().strip() == "listening"
            subprocess.run([*hosts.entry(0), sys.executable, "-S", "-c", SEND], check=True, timeout=30)
            count, seconds = receiver.stdout.read().split()
        assert int(count) == 4_000_000
        after_burst = 4_000_000 - 262_144  # what the bucket held has passed at once
        assert after_burst * 8 / 1e6 / float(seconds) < 1.1 * MBITS
        assert float(seconds) < 10 * 4_000_000 * 8 / 1e6 / MBITS  # slower only if this machine is busy
        assert 4_000_000 < hosts.sent_bytes() - before < 4_400_000  # headers and acknowledgements
    wait_until_gone(spaces)


@needs_hosts
def test_the_command(tmp_path: Path) -> None:
    """Each rank of each host runs what stands after the two dashes."""
    show = "import os; open(os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])"
    options = ["--mbits", "20", "--hosts", "4", "--ranks", "2", "--", sys.executable, "-S", "-c", show]
    subprocess.run([sys.executable, "-S", str(BENCHMARKS / "links.py"), *options], check=True, cwd=tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {str(i): "8" for i in range(8)}


@needs_hosts
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(how: signal.Signals, tmp_path: Path) -> None:
    note = tmp_path / "spaces"
    ask = f"readlink /proc/self/ns/net /proc/self/ns/pid >> {note}; exec sleep 60"
    command = [sys.executable, "-S", str(BENCHMARKS / "links.py"), "--", "sh", "-c", ask]
    # As in a terminal: what a script starts in its background ignores Ctrl-C, and so do the children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command) as driver:
        while not note.exists() or len(note.read_text().split()) < 4:
            assert driver.poll() is None
            time.sleep(0.02)
        spaces = set(note.read_text().split())
        assert spaces <= left()
        driver.send_signal(how)
        driver.wait(10)
    wait_until_gone(spaces)


@needs_hosts
def test_a_rank_that_fails_ends_the_others() -> None:
    begin = time.monotonic()
    with links.Links(2) as hosts:
        assert hosts.run(["sh", "-c", "[ $RANK = 1 ] && exit 3; sleep 60"]) == 3
    assert time.monotonic() - begin < 30


@needs_hosts
@pytest.mark.slow
def test_ranks_of_a_host_share_memory(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent), "DS_ACCELERATOR": "cpu"}
    with links.Links(2, MBITS) as hosts, open(tmp_path / "printed", "w") as printed:
        assert hosts.run([sys.executable, "-c", MEET], 2, env=environment, stdout=printed) == 0
    lines = [line for line in (tmp_path / "printed").read_text().splitlines() if line.startswith("((")]
    assert lines == ["((0, 1), (2, 3)) True 4.0"] * 4


@needs_hosts
@pytest.mark.slow
def test_the_quick_form_of_slow_links() -> None:
    """Bytes per parameter that a host of two sends in 16 bits: gradients, and signs of momenta both ways."""
    command = [sys.executable, str(BENCHMARKS / "slow_links.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split("  ") for line in done.stdout.splitlines()]
    parted = [(row[0], [cell.strip() for cell in row[1:] if cell.strip()]) for row in rows]
    [column] = [found.index("bytes/parameter") for _, found in parted if "bytes/parameter" in found]
    sent = {
        name: float(found[column]) for name, found in parted if found and re.search("Adam|LAMB|ZeRO", name)
    }
    assert sent["Adam"] == pytest.approx(2, rel=0.05) and sent["LAMB"] == pytest.approx(2, rel=0.05)
    assert sent["1-bit Adam"] < 0.14 and sent["1-bit LAMB"] < 0.14
    assert sent["0/1 Adam, every 4 steps"] < 0.04
    assert sent["ZeRO-3 with ZeRO++"] < 0.5 * sent["ZeRO-3"]


def test_why_not_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(links, "_search_path", lambda path=None: str(tmp_path))
    said = links.why_not()
    assert said is not None and ("iproute2" in said or "Linux" in said)


def test_a_rate_is_positive() -> None:
    if REASON is None:
        with links.Links(1) as hosts, pytest.raises(ValueError, match="mbits=0"):
            hosts.limit(0)
    with pytest.raises(ValueError, match="hosts=0"):
        links.Links(0)
