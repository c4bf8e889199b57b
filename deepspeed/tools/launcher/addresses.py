"""The address at which a job's machines reach rank 0."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
from collections.abc import Sequence

from deepspeed.tools.launcher.devices import is_this_machine
from deepspeed.tools.launcher.errors import LaunchError

SSH_TIMEOUT_S = 30.0


def master_address(hosts: Sequence[str], ssh: Sequence[str]) -> str:
    """Find an address of the first host that the others can reach; ``ssh`` is a command line to which a host and a
    command are appended.

    The address that the name resolves to, unless it is loopback; else this machine's source address towards the first
    other host that resolves or, for a name that only ssh knows, the first address that the host itself reports.

    Raises:
        LaunchError: the host reports no address, or ssh fails.
    """
    first, *others = hosts
    name = first.rpartition("@")[2]
    address = resolved(name)
    if address is not None and not ipaddress.ip_address(address).is_loopback:
        return address
    if is_this_machine(name):
        towards = [found for other in others if (found := _own_address_towards(other.rpartition("@")[2]))]
        return towards[0] if towards else "127.0.0.1"
    return _reported_by(first, ssh)


def resolved(name: str) -> str | None:
    try:
        return str(socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0]).partition("%")[0]
    except OSError:
        return None


def _own_address_towards(name: str) -> str | None:
    """Return the source address of packets to ``name``; nothing is sent."""
    target = resolved(name)
    if target is None:
        return None
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _reported_by(host: str, ssh: Sequence[str]) -> str:
    for word in ask(host, ssh, "hostname -I").split():
        try:
            ipaddress.ip_address(word)
        except ValueError:
            continue
        return word
    raise LaunchError(f"{host} reports no address; set the address of rank 0 with --master_addr")


def ask(host: str, ssh: Sequence[str], command: str) -> str:
    """Return the output of a command on ``host``. LaunchError: ssh needs a password or fails, or the command fails."""
    try:
        answer = subprocess.run(
            [*ssh, "--", host, command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SSH_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise LaunchError("no ssh on PATH; start each machine with --no_ssh --node_rank N") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"{host} does not answer ssh within {SSH_TIMEOUT_S:.0f} s") from None
    if answer.returncode != 0:
        reason = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
        raise LaunchError(
            f"ssh to {host} failed: {reason}. 'ssh {host} true' must work without a password; or start each "
            "machine with --no_ssh --node_rank N"
        )
    return answer.stdout
