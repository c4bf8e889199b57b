"""`ds_ssh`: run a command on every machine of a hostfile in parallel."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

from deepspeed.base.tool_arguments import ArgumentParser, add_options, exit_quietly, takes
from deepspeed.tools.launcher.devices import DLTS_HOSTFILE
from deepspeed.tools.launcher.errors import LaunchError
from deepspeed.tools.launcher.hostfile import checked_host, fetch_hostfile, parse_inclusion_exclusion
from deepspeed.tools.launcher.hosts.ssh import OPTIONS


def parser() -> ArgumentParser:
    made = ArgumentParser(
        prog="ds_ssh",
        description="Run a command on every machine of a hostfile in parallel.",
        allow_abbrev=False,
    )
    file = f"file of lines 'HOST slots=N' (default: {DLTS_HOSTFILE})"
    options = {
        "-f -H --hostfile FILE": takes(file, DLTS_HOSTFILE),
        "-i --include SPEC": takes("only these hosts: HOST[@HOST...]", ""),
        "-e --exclude SPEC": takes("all hosts but these", ""),
        "--ssh_port PORT": takes("port of the ssh servers on the hosts", type=int),
        "--launcher_args TEXT": takes("options for ssh, as one argument", ""),
        "command": takes("command for the shell of each host", nargs=argparse.REMAINDER),
    }
    return add_options(made, options)


@exit_quietly("ds_ssh")
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the largest exit code of all machines."""
    args = parser().parse_args(argv)
    hosts = fetch_hostfile(args.hostfile)
    if hosts is None:
        raise LaunchError(
            f"--hostfile={args.hostfile}: no such file; pass a file with lines 'HOST slots=N' (-f FILE)"
        )
    if not args.command:
        raise LaunchError("no command: ds_ssh [options] COMMAND [ARGUMENT ...]")
    names = [checked_host(host) for host in parse_inclusion_exclusion(hosts, args.include, args.exclude)]
    return run(names, " ".join(args.command), ssh_command(args))


def ssh_command(args: argparse.Namespace) -> list[str]:
    """Return the ssh command line with the given options."""
    port = ["-p", str(args.ssh_port)] if args.ssh_port is not None else []
    return ["ssh", *shlex.split(args.launcher_args), *OPTIONS, *port]


def run(hosts: Sequence[str], command: str, ssh: Sequence[str]) -> int:
    """Run a shell command on all hosts in parallel, with each output line prefixed by the host name; return the largest
    exit code."""
    running = []
    for host in hosts:
        try:
            process = subprocess.Popen(
                [*ssh, "--", host, command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except FileNotFoundError:
            raise LaunchError("no ssh on PATH") from None
        running.append(
            (process, _carry(process.stdout, sys.stdout, host), _carry(process.stderr, sys.stderr, host))
        )
    codes = []
    for process, *threads in running:
        for thread in threads:
            thread.join()
        codes.append(process.wait())
    return max(code if code >= 0 else 128 - code for code in codes)


def _carry(source: IO[bytes] | None, sink: Any, host: str) -> threading.Thread:
    def carry() -> None:
        assert source is not None
        for line in source:
            sink.write(f"{host}: {line.decode(errors='replace')}")
            sink.flush()

    thread = threading.Thread(target=carry, daemon=True)
    thread.start()
    return thread


if __name__ == "__main__":
    raise SystemExit(main())
