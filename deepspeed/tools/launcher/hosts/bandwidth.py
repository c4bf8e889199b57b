"""Bandwidth between the machines of a job, pair by pair; pairs without a machine in common are measured concurrently.

Each machine runs this module (over ssh), which listens at its own address until its input ends, and sends to the
receivers named there. A connection must begin with the secret of this measurement; the bytes after it are only
counted. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shlex
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

SECONDS = 0.3
CHUNK = 1 << 20
ANSWER_S = 10.0
SLOW = 3
SECRET_BYTES = 32
ALL_PAIRS_OF = 16
"""With more machines, each is measured with its next neighbour only."""

Pair = tuple[str, str]


# ---- on each machine


def serve(source: IO[str], sink: IO[str]) -> None:
    """Read the secret and this machine's address, and print the listening port; then answer each line
    ``[address, port]`` with the rate in bytes per second, or the reason of the failure."""
    secret, own = json.loads(source.readline())
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    with socket.create_server((own, 0), family=family) as listener:
        threading.Thread(target=_receive_all, args=(listener, secret), daemon=True).start()
        print(listener.getsockname()[1], file=sink, flush=True)
        for line in source:
            address, port = json.loads(line)
            print(json.dumps(send(address, port, secret)), file=sink, flush=True)


def send(address: str, port: int, secret: str) -> float | str:
    try:
        with socket.create_connection((address, port), timeout=ANSWER_S / 2) as connection:
            connection.sendall(secret.encode())
            chunk, began, sent = bytes(CHUNK), time.perf_counter(), 0
            while time.perf_counter() < began + SECONDS:
                sent += connection.send(chunk)
            connection.shutdown(socket.SHUT_WR)
            counted = int.from_bytes(_read(connection, 8), "little")  # sent once all has arrived
            seconds = time.perf_counter() - began
    except OSError as error:
        return f"{address}:{port}: {error.strerror or error}"
    return counted / seconds if counted == sent else f"{address}:{port}: {counted} of {sent} bytes arrived"


def _receive_all(listener: socket.socket, secret: str) -> None:
    with contextlib.suppress(OSError):  # the listener is closed at the end
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_receive, args=(connection, secret), daemon=True).start()


def _receive(connection: socket.socket, secret: str) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(ANSWER_S)
        if _read(connection, SECRET_BYTES) != secret.encode():
            return
        memory, counted = memoryview(bytearray(CHUNK)), 0
        while number := connection.recv_into(memory):
            counted += number
        connection.sendall(counted.to_bytes(8, "little"))


def _read(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count and (part := connection.recv(count - len(found))):
        found += part
    return found


# ---- from the first machine


def rounds(names: Sequence[str]) -> Iterator[list[Pair]]:
    """Yield every pair once, in rounds in which each machine has at most one partner (the circle method); for more than
    ``ALL_PAIRS_OF`` machines, only neighbours."""
    if len(names) > ALL_PAIRS_OF:
        ring = list(zip(names, [*names[1:], names[0]], strict=True))
        last = [ring.pop()] if len(ring) % 2 else []
        yield from filter(None, (ring[::2], ring[1::2], last))
        return
    circle: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(one, other) for one, other in pairs if one is not None and other is not None]
        circle = [circle[0], circle[-1], *circle[1:-1]]


def measure(
    names: Sequence[str],
    command_for: Callable[[str, str], Sequence[str]],
    address_of: Callable[[str], str | None],
) -> dict[Pair, float | str]:
    """Return (sender, receiver) -> bytes per second, or the reason of the failure; machines that do not answer are left
    out. ``command_for(machine, command)``: the command line that runs a shell command on a machine."""
    secret = secrets.token_hex(SECRET_BYTES // 2)
    addresses = {name: address for name in names if (address := address_of(name)) is not None}
    with contextlib.ExitStack() as stack:
        machines = {name: stack.enter_context(_Machine(command_for(name, _command()))) for name in addresses}
        for name, machine in machines.items():
            machine.ask([secret, addresses[name]])
        ports = {name: machine.answer() for name, machine in machines.items()}
        ready = [name for name in addresses if isinstance(ports[name], int)]

        def sent(directed: Sequence[Pair]) -> dict[Pair, float | str]:
            for sender, receiver in directed:
                machines[sender].ask([addresses[receiver], ports[receiver]])
            return {(sender, receiver): machines[sender].answer() for sender, receiver in directed}

        found: dict[Pair, float | str] = {}
        for pairs in rounds(ready):
            found |= sent(pairs)
            found |= sent([(other, one) for one, other in pairs])
        for pair in slow(found):  # measure again: a machine may have been busy for a moment
            found[pair] = max(
                found[pair], *sent([pair]).values(), key=lambda rate: isinstance(rate, float) and rate
            )
        return found


def slow(found: Mapping[Pair, float | str]) -> list[Pair]:
    """Return the pairs that are more than ``SLOW`` times slower than the median."""
    rates = [rate for rate in found.values() if not isinstance(rate, str)]
    least = statistics.median(rates) / SLOW if rates else 0.0
    return [pair for pair, rate in found.items() if not isinstance(rate, str) and rate < least]


def _command() -> str:
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[4]), os.environ.get("PYTHONPATH"))))
    words = [sys.executable, "-m", "deepspeed.tools.launcher.hosts.bandwidth"]
    return f"PYTHONPATH={shlex.quote(path)} exec {shlex.join(words)}"


class _Machine:
    """A machine of the measurement: the process that runs `serve` there."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> _Machine:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()  # type: ignore[union-attr]

    def ask(self, what: Sequence[Any]) -> None:
        with contextlib.suppress(OSError):  # the process has ended: there will be no answer
            self._process.stdin.write(json.dumps(what) + "\n")  # type: ignore[union-attr]

    def answer(self) -> Any:
        output: Any = self._process.stdout
        if not select.select([output], [], [], ANSWER_S)[0]:
            self._process.kill()  # a late answer would be taken for that of the next pair
        line = output.readline()
        return json.loads(line) if line.strip() else "no answer"


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)
