"""Hosts that are none: network namespaces on this machine, joined by links of a given rate.

    python benchmarks/links.py --mbits 100 -- python train.py          # two hosts with one rank each
    python benchmarks/links.py --mbits 100 --ranks 2 -- python train.py --zero-stage 3

Each host has its own network, its own process ids and its own /proc, so that ranks of one host share memory and
ranks of two do not. A switch in a namespace of its own joins them; what a host sends and what it receives is limited
separately. Nothing of it exists outside of processes that end with this one, however it ends, and the kernel removes
what they held.

Linux with iproute2 and util-linux; as root, or where user namespaces are allowed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
NETWORK = "10.77.0"
INTERFACE = "eth0"
BURST, LATENCY = "256kb", "200ms"  # of the token bucket: what may pass at once, how long a packet may wait
PORT = 29500  # free in a network that nobody else uses
# A namespace lives as long as a process that reads from us: it ends when we close the pipe, or end ourselves.
HOLD = "echo ready; exec cat > /dev/null"
# Names that no server can be asked for from there; the file is seen on that host only, and removed at once.
NAMES = """
hostname host{host} || echo host{host} > /proc/sys/kernel/hostname
names=$(mktemp) && echo '{names}' > $names && mount --bind $names /etc/hosts
rm -f $names
"""


class LinksError(RuntimeError):
    """The hosts could not be made; says what was tried and what the system answered."""


class Links:
    """A context with ``hosts`` hosts, each behind a link of ``mbits`` Mbit/s each way (None: no limit).

    Raises ``LinksError`` where namespaces are not allowed or a tool is missing.
    """

    def __init__(self, hosts: int = 2, mbits: float | None = None) -> None:
        if hosts < 1:
            raise ValueError(f"hosts={hosts}: at least one is needed")
        missing = sorted({TOOLS[tool] for tool in TOOLS if not shutil.which(tool, path=_search_path())})
        if missing:
            raise LinksError(f"missing: install {' and '.join(missing)}")
        self.count = hosts
        self._stack = contextlib.ExitStack()
        try:
            self._make()
            if mbits is not None:
                self.limit(mbits)
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        """As root of this machine if that is allowed, else as root of a user namespace."""
        self._user: list[str] = []
        try:
            self._switch = self._hold([], ["--net"])
        except LinksError:
            self._user = ["--user", "--preserve-credentials"]
            self._switch = self._hold([], ["--user", "--map-root-user", "--net"])
        enter = ["nsenter", f"--target={self._switch.pid}", *self._user] if self._user else []
        own = ["--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        names = "\n".join(["127.0.0.1 localhost", *(f"{self.address(i)} host{i}" for i in range(self.count))])
        self._hosts = [self._hold(enter, own, NAMES.format(host=i, names=names)) for i in range(self.count)]
        ports = [
            f"link add port{i} type veth peer name {INTERFACE} netns {host.pid}\nlink set port{i} master bridge up"
            for i, host in enumerate(self._hosts)
        ]
        _run([*self._in_switch(), "ip", "-batch", "-"], "\n".join(["link add bridge up type bridge", *ports]))
        for i in range(self.count):
            settings = (
                f"link set lo up\naddress add {self.address(i)}/24 dev {INTERFACE}\nlink set {INTERFACE} up"
            )
            _run([*self.entry(i), "ip", "-batch", "-"], settings)

    def _hold(self, enter: list[str], namespaces: list[str], first: str = "") -> subprocess.Popen[str]:
        command = [*enter, "unshare", *namespaces, "--", "sh", "-c", first + HOLD]
        holder = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for us: we close it
            env=_environment(),
        )
        self._stack.callback(_end, holder)
        assert holder.stdout is not None and holder.stderr is not None
        if holder.stdout.readline().strip() != "ready":
            raise LinksError(f"{shlex.join(command)}: {holder.stderr.read().strip()}")
        return holder

    def _in_switch(self) -> list[str]:
        return ["nsenter", f"--target={self._switch.pid}", *self._user, "--net"]

    def entry(self, host: int) -> list[str]:
        """What to write before a command to run it on that host. The command ends when this process is killed."""
        pid = self._hosts[host].pid
        spaces = ["--net", "--uts", "--mount", f"--pid=/proc/{pid}/ns/pid_for_children"]
        return [
            "nsenter",
            f"--target={pid}",
            "--wd=.",  # entering a mount namespace leads to its root
            *self._user,
            *spaces,
            "--",
            "setpriv",
            "--pdeathsig",
            "KILL",
            "--",
        ]

    @staticmethod
    def address(host: int) -> str:
        return f"{NETWORK}.{host + 1}"

    def limit(self, mbits: float) -> None:
        """Limit every link, each way, from now on."""
        if mbits <= 0:
            raise ValueError(f"mbits={mbits}: a rate is above 0 (None: no limit)")
        bucket = f"root tbf rate {round(mbits * 1000)}kbit burst {BURST} latency {LATENCY}"
        for i in range(self.count):
            _run([*self.entry(i), "tc", "-batch", "-"], f"qdisc replace dev {INTERFACE} {bucket}")
        ports = "\n".join(f"qdisc replace dev port{i} {bucket}" for i in range(self.count))
        _run([*self._in_switch(), "tc", "-batch", "-"], ports)

    def sent_bytes(self) -> int:
        """What all hosts have sent to others so far, headers included, by the counters of their interfaces."""
        total = 0
        for holder in self._hosts:
            lines = Path(f"/proc/{holder.pid}/net/dev").read_text().splitlines()
            own = next(line for line in lines if line.strip().startswith(f"{INTERFACE}:"))
            total += int(own.split(":")[1].split()[8])
        return total

    def place(self, rank: int, per_host: int) -> tuple[list[str], dict[str, str]]:
        """For that rank, of ``per_host`` on each host: what to write before its command, and what its environment has
        besides MASTER_PORT."""
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % per_host),
            "WORLD_SIZE": str(per_host * self.count),
            "LOCAL_SIZE": str(per_host),
            "LOCAL_WORLD_SIZE": str(per_host),
            "MASTER_ADDR": self.address(0),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        return self.entry(rank // per_host), environment

    def run(self, command: Sequence[str], per_host: int = 1, **options: Any) -> int:
        """The command once per rank, to its end; the first exit status that is not 0. One that fails ends the others.
        ``options`` are those of ``subprocess.Popen``."""
        given = options.pop("env", os.environ)
        ranks: list[subprocess.Popen[Any]] = []
        try:
            for rank in range(per_host * self.count):
                entry, environment = self.place(rank, per_host)
                variables = {
                    **given,
                    **environment,
                    "MASTER_PORT": str(PORT),
                    "PATH": _search_path(given.get("PATH", os.defpath)),
                }
                ranks.append(subprocess.Popen([*entry, *command], env=variables, **options))
            return _first_failure(ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()

    def close(self) -> None:
        """End everything that runs on the hosts, and the hosts."""
        self._stack.close()

    def __enter__(self) -> Links:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def links_or_exit(hosts: int) -> Links:
    """Ends the benchmark, with the reason, where hosts cannot be made."""
    try:
        return Links(hosts)
    except LinksError as error:
        sys.exit(f"No network namespaces here: {error}")


def why_not() -> str | None:
    """Why there can be no such hosts on this machine; None if there can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    try:
        with Links(2, mbits=100):
            return None
    except LinksError as error:
        return str(error)


def _search_path(path: str | None = None) -> str:
    """Where users have no /sbin in their PATH, ip and tc are there all the same."""
    return os.pathsep.join([path or os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": _search_path(), "LC_ALL": "C"}


def _run(command: list[str], given: str) -> None:
    done = subprocess.run(command, input=given + "\n", capture_output=True, text=True, env=_environment())
    if done.returncode:
        raise LinksError(f"{shlex.join(command)} < {given!r}: {done.stderr.strip()}")


def _end(holder: subprocess.Popen[str]) -> None:
    """First by closing its pipe; a process of the namespace that is killed with it may take a moment."""
    assert holder.stdin is not None and holder.stdout is not None and holder.stderr is not None
    holder.stdin.close()
    try:
        holder.wait(5)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait()
    holder.stdout.close()
    holder.stderr.close()


def _first_failure(ranks: Sequence[subprocess.Popen[Any]]) -> int:
    while True:
        states = [rank.poll() for rank in ranks]
        failed = [state for state in states if state]
        if failed or None not in states:
            return failed[0] if failed else 0
        time.sleep(0.02)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbits", type=float, help="rate of each link, each way; default: no limit")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="ranks per host")
    parser.add_argument("command", nargs="+", help="what each rank runs, after --")
    arguments = parser.parse_args(argv)
    try:
        with Links(arguments.hosts, arguments.mbits) as links:
            return links.run(arguments.command, arguments.ranks)
    except LinksError as error:
        print(f"No hosts can be made here: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
