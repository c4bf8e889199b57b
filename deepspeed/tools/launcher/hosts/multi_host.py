"""Starting the ranks of several machines, with the chosen launcher."""

from __future__ import annotations

import argparse
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from deepspeed.tools.launcher import ports
from deepspeed.tools.launcher.addresses import ask, master_address
from deepspeed.tools.launcher.constants import PDSH_LAUNCHER, SSH_LAUNCHER
from deepspeed.tools.launcher.devices import is_this_machine
from deepspeed.tools.launcher.errors import LaunchError, logger
from deepspeed.tools.launcher.hostfile import checked_host
from deepspeed.tools.launcher.hosts import ssh
from deepspeed.tools.launcher.hosts.multinode_runner import RUNNERS, MultiNodeRunner, PDSHRunner, SlurmRunner
from deepspeed.tools.launcher.launch import choose_port, encode_world_info, launch_arguments
from deepspeed.tools.launcher.supervision import RUNNER_PID, supervise

END_TIMEOUT_S = 10.0
ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")
# Variables that configure communication, Python and this package. Nothing else leaves this machine: an environment
# holds secrets and machine-specific paths.
EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX"]
"""Name prefixes. A program that calls ``deepspeed.tools.launcher.runner.main`` may add some."""
PREFIXES = ("NCCL", "GLOO_", "TORCH_", "OMP_", "DS_", "DEEPSPEED_")
NAMES = ("LD_LIBRARY_PATH", "PATH")
LOCAL = (RUNNER_PID, "DS_ENV_FILE")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Start = tuple[Callable[[], int], ports.PortReservation]


def prepare(args: argparse.Namespace, active: Mapping[str, Sequence[int]]) -> Start:
    """Return a function that runs the job on these hosts, and its port reservation; see
    `deepspeed.tools.launcher.runner.prepare`."""
    hosts = [checked_host(host) for host in active]
    name = _launcher_of(args)
    connect = _ssh_command(args, name)
    args.master_addr = args.master_addr or master_address(hosts, connect)
    reservation = choose_port(args, args.master_addr)
    args.master_port = reservation.port
    try:
        if name == SSH_LAUNCHER:
            start = functools.partial(ssh.run, *_over_ssh(args, active))
            if args.elastic_training and is_this_machine(hosts[0].rpartition("@")[2]):
                start = functools.partial(_beside_store, start, args.master_port)
            return start, reservation
        if name == PDSH_LAUNCHER and not args.no_ssh_check:
            ask(hosts[0], connect, "hostname")
        return _by_program(args, active, name), reservation
    except LaunchError:
        reservation.close()
        raise


def _launcher_of(args: argparse.Namespace) -> str:
    """Return the requested launcher; by default pdsh, or ssh if pdsh is not installed."""
    name = args.launcher.lower()
    if args.elastic_training:
        if args.launcher_given and name != SSH_LAUNCHER:
            raise LaunchError(
                f"--launcher={args.launcher} with --elastic_training: it aborts the job when a machine is "
                f"lost; use --launcher {SSH_LAUNCHER}"
            )
        return SSH_LAUNCHER
    if name == PDSH_LAUNCHER and not args.launcher_given and shutil.which("pdsh") is None:
        return SSH_LAUNCHER
    if name != SSH_LAUNCHER and name not in RUNNERS:
        raise LaunchError(f"--launcher={args.launcher}: must be one of {', '.join([SSH_LAUNCHER, *RUNNERS])}")
    return name


def _ssh_command(args: argparse.Namespace, name: str) -> list[str]:
    port = ["-p", str(args.ssh_port)] if args.ssh_port is not None else []
    own = shlex.split(args.launcher_args) if name == SSH_LAUNCHER else []
    return ["ssh", *own, *ssh.OPTIONS, *port]


def _over_ssh(
    args: argparse.Namespace, active: Mapping[str, Sequence[int]]
) -> tuple[ssh.RemoteJob, list[ssh.SshNode]]:
    nodes = [
        ssh.SshNode(
            host=host,
            arguments=launch_arguments(args, active, args.master_addr, args.master_port, number),
            local=not args.force_multi and is_this_machine(host.rpartition("@")[2]),
        )
        for number, host in enumerate(active)
    ]
    if shutil.which("ssh") is None and not all(node.local for node in nodes):
        raise LaunchError("no ssh on PATH; start each machine with --no_ssh --node_rank N")
    job = ssh.RemoteJob(
        script=args.user_script,
        environment=exports(),
        ssh_options=shlex.split(args.launcher_args),
        port=args.ssh_port,
        venv_script=args.venv_script,
        adds_local_rank=not args.no_local_rank,
        log_dir=args.enable_each_rank_log,
        min_nodes=max(1, args.min_elastic_nodes) if args.elastic_training else 0,
    )
    logger.info("machines: %d, by ssh; rendezvous: %s:%d", len(nodes), args.master_addr, args.master_port)
    return job, nodes


def _beside_store(start: Callable[[], int], port: int) -> int:
    """Run ``start`` with the rendezvous store of an elastic job in a separate process, which survives the loss of any
    machine."""
    command = [sys.executable, "-m", "deepspeed.tools.launcher.rendezvous", str(port), str(os.getpid())]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    ) as store:
        try:
            assert store.stdout is not None
            store.stdout.readline()  # wait until it is ready
            return start()
        finally:
            store.kill()


def _by_program(
    args: argparse.Namespace, active: Mapping[str, Sequence[int]], name: str
) -> Callable[[], int]:
    world_info = encode_world_info(active)
    if name == PDSH_LAUNCHER:
        runner: MultiNodeRunner = PDSHRunner(args, world_info)
    else:
        made = cast("Callable[..., MultiNodeRunner]", RUNNERS[name])
        runner = made(args, world_info, {host: len(slots) for host, slots in active.items()})
    if not runner.backend_exists():
        raise LaunchError(f"--launcher={name}: not installed here; --launcher ssh only needs ssh")
    for variable, value in exports().items():
        runner.add_export(variable, value)
    environment = dict(os.environ)
    if isinstance(runner, PDSHRunner):
        command, end, _ = runner.get_cmd(environment, active)
        return functools.partial(_run_pdsh, command, end, environment)
    command = cast("list[str]", runner.get_cmd(environment, active))
    logger.debug("%s", shlex.join(command))
    if isinstance(runner, SlurmRunner):
        return functools.partial(run_srun, command, environment)
    return functools.partial(supervise, command, environment, what=command[0])


def _run_pdsh(command: Sequence[str], end: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run pdsh. If it fails, run the ``end`` command: pdsh leaves its remote processes running when it exits early."""
    code = supervise(command, environment, what="pdsh", ends_by=signal.SIGTERM)
    if code != 0:
        try:
            subprocess.run(
                end,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=END_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            logger.warning(
                "pdsh does not answer: ranks may still be running on %s", command[command.index("-w") + 1]
            )
    return code


# --- environment variables that the other machines receive: a selection of this process's own, plus .deepspeed_env


def exports(
    environment: Mapping[str, str] | None = None, folders: tuple[str, ...] | None = None
) -> dict[str, str]:
    """Return name -> value. ``NAME=VALUE`` lines of ``.deepspeed_env`` (``DS_ENV_FILE``: another name or path) override
    the environment: first the home folder's file, then the current folder's. The value is all after the first ``=``.

    Raises:
        LaunchError: a line of such a file is malformed.
    """
    environment = os.environ if environment is None else environment
    prefixes = (*PREFIXES, *EXPORT_ENVS)
    found = {
        name: value
        for name, value in environment.items()
        if (name.startswith(prefixes) or name in NAMES) and name not in LOCAL and _NAME.fullmatch(name)
    }
    for folder in folders or (os.path.expanduser("~"), "."):
        path = Path(folder, ENVIRONMENT_NAME)
        if path.is_file():
            found |= read_environment_file(path)
    return found


def read_environment_file(path: Path) -> dict[str, str]:
    """Return the variables of one file, skipping empty lines and ``#`` comments."""
    variables = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        name = name.strip().removeprefix("export ").strip()
        if not equals or not _NAME.fullmatch(name):
            # Do not quote the line: it may hold a secret.
            raise LaunchError(f"{path}, line {number}: each line must read NAME=VALUE")
        variables[name] = value.rstrip("\r")
    return variables


# --- srun, with the exit code of the rank that failed first
#
# srun itself returns the largest exit code of all ranks, often that of a rank which Slurm stopped because of the first
# failure. But its messages report each rank's end, in the order in which the ranks ended.

_ENDED = re.compile(r"^srun: error: \S+: tasks? [\d,\-]+: (.+?)\s*$")
_CODE = re.compile(r"Exited with exit code (\d+)")


def code_of(line: str) -> int | None:
    """Parse the exit code, as a shell reports it, from srun's message about ended ranks; None for any other line."""
    found = _ENDED.match(line)
    if found is None:
        return None
    code = _CODE.fullmatch(found[1])
    if code is not None:
        return int(code[1])
    description = found[1].removesuffix(" (core dumped)")
    for each in signal.Signals:
        if signal.strsignal(each) == description:
            return 128 + each
    return None


class FirstFailure:
    """Forwards srun's standard error, and records the first exit code in it."""

    def __init__(self) -> None:
        self.code: int | None = None
        self._rest = b""

    def __call__(self, chunk: bytes) -> None:
        sys.stderr.buffer.write(chunk)
        sys.stderr.buffer.flush()
        *lines, self._rest = re.split(rb"[\r\n]", self._rest + chunk)
        for line in lines:
            self.code = self.code if self.code is not None else code_of(line.decode(errors="replace"))


def run_srun(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run srun until no process of the job is left; return the exit code of the first rank that failed, or 0."""
    first = FirstFailure()
    code = supervise(command, environment, what="srun", errors_to=first)
    return code if code == 0 or first.code is None else first.code
