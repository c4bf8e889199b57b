"""`ds doctor`: check that this machine, and the machines of a hostfile, are ready for a job. One table, with remedies.

Each machine makes a *report* about itself (`report_this_machine`; over ssh for the others). Pure functions turn them
into *findings*: about a single machine, and from comparing machines. Nothing here imports torch, which may itself be
broken.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import ipaddress
import json
import os
import platform
import secrets
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from deepspeed.base.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.base.tables import padded
from deepspeed.base.tool_arguments import ArgumentParser, add_options, exit_quietly, takes
from deepspeed.tools.launcher.addresses import ask, master_address, resolved
from deepspeed.tools.launcher.devices import is_this_machine
from deepspeed.tools.launcher.errors import LaunchError
from deepspeed.tools.launcher.hostfile import checked_host, fetch_hostfile, parse_inclusion_exclusion
from deepspeed.tools.launcher.hosts.bandwidth import SLOW, Pair, measure, slow
from deepspeed.tools.launcher.ports import is_free
from deepspeed.tools.ssh_all import ssh_command
from deepspeed.version import __version__

MachineReport = dict[str, Any]

OK, WARNING, BAD = "ok", "warning", "bad"
PACKAGES = ("torch", "numpy", "pydantic")  # must match on all ranks, like Python and this package
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
GIB = 2**30
SHARED_MEMORY_BYTES = GIB // 2
OPEN_FILES = 4096
LOCKED_BYTES = GIB // 16
FREE_DISK_BYTES = 10 * GIB
CLOCK_S = 2.0
CONNECT_S = 5.0


class DoctorFinding(NamedTuple):
    """A line of the table."""

    state: str
    machine: str
    check: str
    found: str
    remedy: str = ""


# ---- reports


def report_this_machine(
    port: int, folder: str, token: str = "", back_to: Sequence[Any] = (), names: Sequence[str] = ()
) -> MachineReport:
    """Report on this machine. ``token``: name of a file in the folder, visible to machines that share it;
    ``back_to``: address and port at which the first machine listens; ``names``: host names of all machines."""
    return {
        "host": socket.gethostname(),
        "time": time.time(),
        "versions": _versions(),
        "port": port,
        "port_free": is_free("0.0.0.0", port),
        "shared_memory": _free("/dev/shm"),
        "open_files": _limit("RLIMIT_NOFILE"),
        "locked": _limit("RLIMIT_MEMLOCK"),
        "interfaces": [name for _, name in socket.if_nameindex()],
        "chosen": {name: os.environ[name] for name in INTERFACE_VARIABLES if name in os.environ},
        "left_over": [name for name in RANK_VARIABLES if name in os.environ],
        "folder": folder,
        "writable": os.access(folder, os.W_OK),
        "free_disk": _free(folder),
        "sees_token": bool(token) and os.path.exists(os.path.join(folder, token)),
        "reaches": _reaches(*back_to) if back_to else None,
        "unknown": [name for name in names if resolved(name) is None],
        "own_address": resolved(socket.gethostname()) if names else None,
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "deepspeed": __version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _limit(name: str) -> int | None:
    """Return the soft limit; None if unlimited, or unknown on this platform."""
    try:
        import resource

        soft = resource.getrlimit(getattr(resource, name))[0]
    except (ImportError, AttributeError, OSError):
        return None
    return None if soft == resource.RLIM_INFINITY else soft


def _free(folder: str) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _reaches(address: str, port: int) -> str:
    """Try to connect; return the reason of a failure, or an empty string."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_S).close()
    except OSError as error:
        return f"{address}:{port}: {error.strerror or error}"
    return ""


# ---- findings


def check_machine(report: MachineReport, machine: str) -> Iterator[DoctorFinding]:
    """Yield the findings about a single machine."""
    yield _installed(report, machine)
    yield _rendezvous_port(report, machine)
    yield _shared_memory(report, machine)
    yield _limit_finding(report["open_files"], OPEN_FILES, machine, "open files", "ulimit -n 65536")
    remedy = "for offload to storage and RDMA: ulimit -l unlimited"
    yield _limit_finding(report["locked"], LOCKED_BYTES, machine, "locked memory", remedy)
    yield _network_interface(report, machine)
    yield _environment(report, machine)
    yield _folder(report, machine)


def _installed(report: MachineReport, machine: str) -> DoctorFinding:
    versions = report["versions"]
    missing = [name for name, version in versions.items() if not version]
    found = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    return _finding(not missing, BAD, machine, "versions", found, f"pip install {' '.join(missing)}")


def _rendezvous_port(report: MachineReport, machine: str) -> DoctorFinding:
    free = report["port_free"]
    found = f"{report['port']} is {'free' if free else 'in use'}"
    remedy = "`deepspeed` picks another one automatically; with other launchers set MASTER_PORT, or stop the older job"
    return _finding(free, WARNING, machine, "rendezvous port", found, remedy)


def _shared_memory(report: MachineReport, machine: str) -> DoctorFinding:
    shared = report["shared_memory"]
    enough = shared is None or shared >= SHARED_MEMORY_BYTES
    found = "none" if shared is None else f"{shared / GIB:.2f} GiB free"
    remedy = (
        "data loader workers and NCCL need it: docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm"
    )
    return _finding(enough, WARNING, machine, "/dev/shm", found, remedy)


def _network_interface(report: MachineReport, machine: str) -> DoctorFinding:
    """Check that the network interfaces chosen in the environment exist."""
    interfaces, chosen = report["interfaces"], report["chosen"]
    wrong = [name for name, value in chosen.items() if not _names_one(value, interfaces)]
    written = ", ".join(f"{name}={value}" for name, value in chosen.items()) or "not chosen"
    found = f"{written}; there are {', '.join(interfaces)}"
    remedy = f"unset {' '.join(wrong)}, or set an existing one"
    return _finding(not wrong, BAD, machine, "network interface", found, remedy)


def _environment(report: MachineReport, machine: str) -> DoctorFinding:
    left = report["left_over"]
    found = f"{', '.join(left)} set" if left else "no rank variables of an earlier job"
    remedy = f"a plain `python train.py` would take itself for a rank: unset {' '.join(left)}"
    return _finding(not left, WARNING, machine, "environment", found, remedy)


def _folder(report: MachineReport, machine: str) -> DoctorFinding:
    disk, writable = report["free_disk"], report["writable"]
    enough = writable and disk is not None and disk >= FREE_DISK_BYTES
    found = (
        f"{report['folder']}: {'writable' if writable else 'not writable'}, {(disk or 0) / GIB:.0f} GiB free"
    )
    remedy = "checkpoints need space: pass another folder to save_checkpoint"
    return _finding(enough, WARNING, machine, "folder", found, remedy)


def check_names(report: MachineReport, machine: str) -> Iterator[DoctorFinding]:
    """Check how a machine resolves the names of all machines, and its own."""
    unknown = ", ".join(report["unknown"])
    found = f"{unknown} unknown there" if unknown else "all known"
    remedy = "mpirun and other tools look up machines by name: add them to DNS or to /etc/hosts"
    yield _finding(not unknown, WARNING, machine, "names", found, remedy)
    own = report["own_address"]
    reachable = own is not None and not ipaddress.ip_address(own).is_loopback
    chosen = "GLOO_SOCKET_IFNAME" in report["chosen"]
    found = f"{report['host']} is {own or 'unknown'}"
    remedy = (
        "gloo sends this address to other ranks: export GLOO_SOCKET_IFNAME=<interface>, or correct /etc/hosts"
    )
    yield _finding(chosen or reachable, WARNING, machine, "own name", found, remedy)


def compare_machines(
    first: MachineReport, other: MachineReport, machine: str, offset_s: float
) -> Iterator[DoctorFinding]:
    """Yield the findings from comparing a machine with the first one. ``offset_s``: seconds by which the other clock is
    ahead."""
    differing = [
        f"{name} {other['versions'].get(name) or 'missing'} (here {version or 'missing'})"
        for name, version in first["versions"].items()
        if other["versions"].get(name) != version
    ]
    found, remedy = ", ".join(differing) or "yes", "install the same on every machine"
    yield _finding(not differing, BAD, machine, "same versions", found, remedy)
    remedy = "the order of rank failures would be reported wrongly: run chrony or ntpd"
    yield _finding(abs(offset_s) <= CLOCK_S, WARNING, machine, "clock", f"{offset_s:+.1f} s", remedy)
    found = "yes" if other["sees_token"] else f"{other['folder']} is a different folder there"
    remedy = "all ranks save checkpoints into one folder: use a file system mounted on every machine"
    yield _finding(other["sees_token"], WARNING, machine, "shared folder", found, remedy)
    problem = other["reaches"]
    if problem is not None:
        remedy = (
            "open the ports between the machines in the firewall, or set --master_addr to a reachable address"
        )
        yield _finding(not problem, BAD, machine, "reaches rank 0", problem or "yes", remedy)


def check_bandwidths(found: Mapping[Pair, float | str]) -> Iterator[DoctorFinding]:
    """Check the bandwidth of each pair in both directions; slow means relative to the other pairs."""
    slow_ones = set(slow(found))
    for one, other in dict.fromkeys(tuple(sorted(pair)) for pair in found):
        both = [(one, other, found.get((one, other), "")), (other, one, found.get((other, one), ""))]
        failed = [rate for *_, rate in both if isinstance(rate, str) and rate]
        fine = not failed and slow_ones.isdisjoint([(one, other), (other, one)])
        rates = ", ".join(
            f"to {to} {rate / 1e6:.0f} MB/s" for _, to, rate in both if not isinstance(rate, str)
        )
        remedy = f"less than 1/{SLOW} of the others' median: check the cable, the switch port and the route"
        if failed:
            remedy = "open the ports between the machines in the firewall"
        text = "; ".join([*failed, *filter(None, [rates])])
        yield _finding(fine, BAD if failed else WARNING, f"{one} - {other}", "bandwidth", text, remedy)


def _finding(fine: bool, otherwise: str, machine: str, check: str, found: str, remedy: str) -> DoctorFinding:
    return DoctorFinding(OK if fine else otherwise, machine, check, found, "" if fine else remedy)


def _limit_finding(value: int | None, least: int, machine: str, check: str, remedy: str) -> DoctorFinding:
    found = "no limit" if value is None else str(value)
    return _finding(value is None or value >= least, WARNING, machine, check, found, remedy)


def _names_one(value: str, interfaces: Sequence[str]) -> bool:
    """Tell whether a list in the syntax of gloo and NCCL (prefixes; = exact; ^ excludes) matches any interface."""
    names = tuple(name for name in value.lstrip("^=").split(",") if name)
    exact = value.lstrip("^").startswith("=")
    named = [each for each in interfaces if (each in names if exact else each.startswith(names))]
    return len(named) < len(interfaces) if value.startswith("^") else bool(named)


# ---- the command


def parser() -> ArgumentParser:
    made = ArgumentParser(
        prog="ds doctor",
        description="Check that this machine and the machines of a hostfile are ready for a job.",
        epilog="example: ds doctor --hostfile hosts",
        allow_abbrev=False,
    )
    options = {
        "--port": takes("rendezvous port", TORCH_DISTRIBUTED_DEFAULT_PORT),
        "-f -H --hostfile FILE": takes("file of lines 'HOST slots=N': also check these machines, over ssh"),
        "-i --include SPEC": takes("only these hosts: HOST[@HOST...]", ""),
        "-e --exclude SPEC": takes("all hosts but these", ""),
        "--ssh_port PORT": takes("port of the ssh servers on the hosts", type=int),
        "--launcher_args TEXT": takes("options for ssh, as one argument", ""),
        "--report": takes(argparse.SUPPRESS),  # on remote machines: the arguments of `report_this_machine`
    }
    return add_options(made, options)


@exit_quietly("ds doctor")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 1 if any finding is bad, else 0."""
    options = parser().parse_args(argv)
    if options.report:
        print(json.dumps(report_this_machine(**json.loads(options.report))))
        return 0
    findings = list(run_checks(options))
    print("\n".join(table(findings)))
    return int(any(finding.state == BAD for finding in findings))


def run_checks(options: Any) -> Iterator[DoctorFinding]:
    folder = os.getcwd()
    names: list[str] = []
    if options.hostfile is not None:
        hosts = fetch_hostfile(options.hostfile)
        if hosts is None:
            raise LaunchError(f"--hostfile={options.hostfile}: no such file")
        chosen = parse_inclusion_exclusion(hosts, options.include, options.exclude)
        names = [checked_host(host) for host in chosen]
    own = report_this_machine(options.port, folder, names=[_name(host) for host in names])
    yield from check_machine(own, own["host"])
    others = [host for host in names if not is_this_machine(_name(host))]
    if others:
        yield from check_names(own, own["host"])
        yield from _check_others(own, others, names, options, folder)


def _name(host: str) -> str:
    return host.rpartition("@")[2]


def _check_others(
    own: MachineReport, others: Sequence[str], names: Sequence[str], options: Any, folder: str
) -> Iterator[DoctorFinding]:
    ssh = ssh_command(options)
    reached = [host for host in names if host not in others]
    # Nothing accepts their connections, so the backlog must hold all of them.
    with socket.create_server(("", 0), backlog=len(others)) as listener, _token(folder) as token:
        address = master_address(names, ssh) if names[0] not in others else ""
        asked = {"port": options.port, "folder": folder, "token": os.path.basename(token.name)}
        asked["names"] = [_name(host) for host in names]
        if address:
            asked["back_to"] = [address, listener.getsockname()[1]]

        def question(host: str) -> tuple[MachineReport | str, float]:
            return _report_of(host, ssh, asked, folder)

        with ThreadPoolExecutor(min(32, len(others))) as pool:
            for host, (report, offset_s) in zip(others, pool.map(question, others), strict=True):
                if isinstance(report, str):
                    remedy = f"`ssh {host} true` must work without a password, with the same Python and folder there"
                    yield DoctorFinding(BAD, host, "ssh", report, remedy)
                    continue
                reached.append(host)
                yield from check_machine(report, host)
                yield from check_names(report, host)
                yield from compare_machines(own, report, host, offset_s)
    yield from check_bandwidths(_bandwidths([host for host in names if host in reached], others, ssh))


def _bandwidths(hosts: Sequence[str], others: Sequence[str], ssh: Sequence[str]) -> dict[Pair, float | str]:
    def command_for(host: str, command: str) -> list[str]:
        return [*ssh, "--", host, command] if host in others else ["/bin/sh", "-c", command]

    def address_of(host: str) -> str | None:
        try:
            return master_address([host, *(other for other in hosts if other != host)], ssh)
        except LaunchError:
            return None

    return measure(hosts, command_for, address_of) if len(hosts) > 1 else {}


def _token(folder: str) -> Any:
    try:
        return tempfile.NamedTemporaryFile(prefix=".ds_doctor_", dir=folder)
    except OSError:  # not writable: no other machine will see it
        return tempfile.NamedTemporaryFile(prefix=f".ds_doctor_{secrets.token_hex(4)}")


def _report_of(
    host: str, ssh: Sequence[str], asked: Mapping[str, Any], folder: str
) -> tuple[MachineReport | str, float]:
    """Return a machine's report, or the reason why it cannot be had, and the seconds by which its clock is ahead of
    ours."""
    words = [sys.executable, "-m", "deepspeed.tools.doctor", "--report", json.dumps(asked)]
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    command = f"cd {shlex.quote(folder)} && PYTHONPATH={shlex.quote(path)} {shlex.join(words)}"
    begin = time.time()
    try:
        answer = ask(host, ssh, command)
        report: MachineReport = json.loads(answer.strip().splitlines()[-1])
    except LaunchError as error:
        return str(error), 0.0
    except (ValueError, IndexError):
        return "ssh works, but deepspeed does not run there", 0.0
    end = time.time()
    early, late = report["time"] - end, report["time"] - begin  # bounds: it read its clock in between
    return report, max(early, 0.0) if early > 0 else min(late, 0.0)


def table(findings: Sequence[DoctorFinding]) -> list[str]:
    """Return the lines to print."""
    texts = [("", "machine", "check", "found"), *(finding[:4] for finding in findings)]
    lines = []
    for cells, remedy in zip(padded(texts), ["", *(finding.remedy for finding in findings)], strict=True):
        lines.append("  ".join(cells).rstrip())
        if remedy:
            lines.append(" " * len(cells[0]) + f"  -> {remedy}")
    bad = sum(finding.state == BAD for finding in findings)
    warnings = sum(finding.state == WARNING for finding in findings)
    return [*lines, f"{len(findings)} checks: {bad} bad, {warnings} warnings"]


if __name__ == "__main__":
    raise SystemExit(main())
