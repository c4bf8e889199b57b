"""The `deepspeed` command: decides which devices to use and starts `deepspeed.launcher.launch` on them.

It stays small (no torch) and runs as long as the launcher that it starts. The two monitor each other: if this
process is killed, the kernel notifies the launcher, which stops its ranks; if the launcher is killed, the kernel kills
the ranks, and the processes that they had started are reparented to this one, which ends them.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.launcher import ports
from deepspeed.launcher.devices import DLTS_HOSTFILE, choose_devices
from deepspeed.launcher.errors import LaunchError
from deepspeed.launcher.hostfile import (
    _parse_hostfile,
    fetch_hostfile,
    parse_inclusion_exclusion,
    parse_node_config,
    parse_node_config_list,
    parse_resource_filter,
)
from deepspeed.launcher.launch import (
    RUNNER_PID,
    add_common_arguments,
    configure_logging,
    logger,
    pid_file,
    port_in_use,
)
from deepspeed.launcher.processes import (
    adopt_orphans,
    grace_seconds,
    handled_by,
    kill_descendants,
    own_children,
    run_dir_prefix,
)
from deepspeed.launcher.shim import INTERRUPTED, USAGE_ERROR
from deepspeed.tool_arguments import ArgumentParser

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME",
    "DLTS_HOSTFILE",
    "_parse_hostfile",
    "encode_world_info",
    "fetch_hostfile",
    "main",
    "parse_args",
    "parse_inclusion_exclusion",
    "parse_node_config",
    "parse_node_config_list",
    "parse_resource_filter",
]

DEEPSPEED_ENVIRONMENT_NAME = os.getenv("DS_ENV_FILE", ".deepspeed_env")  # exported to the nodes of a job
LAST_RESORT_S = 1.75  # for the launcher to exit after it has killed its ranks
EXAMPLES = """\
examples:
  deepspeed train.py --deepspeed_config ds.json      all devices of this machine
  deepspeed --num_gpus 2 train.py                    two ranks (on a CPU host they share the cores)
  deepspeed --include localhost:0,2 train.py         devices 0 and 2
  deepspeed --num_gpus 2 --module package.train      as 'python -m package.train'
  deepspeed --num_gpus 4 --bind_cores_to_rank --enable_each_rank_log logs train.py

Options for the launcher come before the script; all that follows it goes to the script. The exit code is that
of the first rank that failed (128 + N if signal N ended it).
"""


class _MarkGiven(argparse.Action):
    """Stores the value and records that the user chose it: ``NAME_given``."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, f"{self.dest}_given", True)


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of `deepspeed`; everything after the script is the script's."""
    # Abbreviations off: argparse would also look for them among the arguments of the user's script.
    parser = ArgumentParser(
        prog="deepspeed",
        usage="deepspeed [options] script [arguments of the script]",
        description="Start one process per device and run the same script in each of them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_device_arguments(parser.add_argument_group("which devices"))
    _add_rendezvous_arguments(parser.add_argument_group("how ranks find each other"))
    add_common_arguments(parser)
    parser.add_argument(
        "--save_pid", action="store_true", help="write the launcher's process id to /tmp/PID.ds"
    )
    _add_several_machine_arguments(parser.add_argument_group("several machines, and tools of later releases"))
    parser.add_argument("user_script", help="script to run in every rank")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(master_port_given=False, num_gpus_given=False)
    return parser.parse_args(args)


def _add_device_arguments(group: argparse._ArgumentGroup) -> None:
    first = "use the first N devices, or start N ranks on a CPU host (default: all; one rank per NUMA node)"
    group.add_argument(
        "--num_gpus", "--num_accelerators", type=int, default=-1, action=_MarkGiven, metavar="N", help=first
    )
    only = "use only these: HOST[:SLOT,...][@HOST...], such as localhost:0,2"
    group.add_argument("-i", "--include", default="", metavar="SPEC", help=only)
    group.add_argument("-e", "--exclude", default="", metavar="SPEC", help="use all but these")
    lines = f"a file of lines 'HOST slots=N' (default: {DLTS_HOSTFILE}, if it is there)"
    group.add_argument("-H", "--hostfile", default=DLTS_HOSTFILE, metavar="FILE", help=lines)


def _add_rendezvous_arguments(group: argparse._ArgumentGroup) -> None:
    usual = TORCH_DISTRIBUTED_DEFAULT_PORT
    address = "address of rank 0 (default: 127.0.0.1)"
    port = f"its port (default: {usual}, or a free one if that is in use)"
    group.add_argument("--master_addr", default="", metavar="ADDRESS", help=address)
    group.add_argument("--master_port", type=int, default=usual, action=_MarkGiven, metavar="PORT", help=port)


def _add_several_machine_arguments(group: argparse._ArgumentGroup) -> None:
    later, remote = "not in this release", "for starting remote machines: no effect on one"
    names = f"pdsh, openmpi, mvapich, slurm, mpich or impi; {remote}"
    group.add_argument(
        "--num_nodes", type=int, default=-1, metavar="N", help="first N hosts of the hostfile; 1 for now"
    )
    group.add_argument("--launcher", default="pdsh", metavar="NAME", help=names)
    group.add_argument("--launcher_args", default="", metavar="TEXT", help=remote)
    group.add_argument("--ssh_port", type=int, metavar="PORT", help=remote)
    group.add_argument("--venv_script", metavar="FILE", help=remote)
    group.add_argument("--no_ssh_check", action="store_true", help=remote)
    group.add_argument("--no_ssh", action="store_true", help=f"start each machine by hand: {later}")
    group.add_argument("--node_rank", type=int, default=-1, metavar="N", help=f"with --no_ssh: {later}")
    group.add_argument(
        "--force_multi", action="store_true", help=f"start one machine as a remote one: {later}"
    )
    group.add_argument("--min_elastic_nodes", type=int, default=-1, metavar="N", help=later)
    group.add_argument("--max_elastic_nodes", type=int, default=-1, metavar="N", help=later)
    group.add_argument("--elastic_training", action="store_true", help=later)
    group.add_argument(
        "--autotuning",
        choices=["tune", "run"],
        default="",
        help="find the fastest config for the script; run: and then run it",
    )


def encode_world_info(world_info: Mapping[str, Sequence[int]]) -> str:
    """Host -> slots as one word for a command line: base64 of the JSON."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def refuse_what_is_not_there(args: argparse.Namespace) -> None:
    """Raises LaunchError naming the first given option that this release parses but does not implement."""
    wanted = {
        "--elastic_training": args.elastic_training,
        "--min_elastic_nodes": args.min_elastic_nodes > 0,
        "--max_elastic_nodes": args.max_elastic_nodes > 0,
        "--force_multi": args.force_multi,
        "--no_ssh": args.no_ssh,
        "--num_nodes": args.num_nodes > 1,
    }
    option = next((name for name, is_wanted in wanted.items() if is_wanted), None)
    if option is not None:
        raise LaunchError(
            f"{option} is not in this release, which starts the ranks of one machine; leave it out, or start "
            "'python -m deepspeed.launcher.launch' or 'torchrun' on each machine"
        )


def choose_port(args: argparse.Namespace, address: str) -> ports.Reservation:
    """The requested port (LaunchError if it is invalid or in use); if none was requested, the usual one or else a free
    one.

    As long as the result is open, other launchers on this host that are not given a port choose another one.
    """
    if not 1 <= args.master_port <= ports.HIGHEST:
        raise LaunchError(f"--master_port={args.master_port}: a port is a number from 1 to {ports.HIGHEST}")
    if args.master_port_given:
        if not ports.is_free(address, args.master_port):
            raise LaunchError(port_in_use(address, args.master_port))
        return ports.Reservation(args.master_port)
    reservation = ports.reserve(address, args.master_port)
    if reservation.port != args.master_port:
        logger.info("port %d is in use at %s: using %d", args.master_port, address, reservation.port)
    return reservation


def launch_command(
    args: argparse.Namespace, active: Mapping[str, Sequence[int]], address: str, port: int
) -> list[str]:
    """The command line of `deepspeed.launcher.launch` on this machine."""
    command = [sys.executable, "-u", "-m", "deepspeed.launcher.launch"]
    command += [
        f"--world_info={encode_world_info(active)}",
        f"--master_addr={address}",
        f"--master_port={port}",
    ]
    flags = ("module", "no_python", "no_local_rank", "bind_cores_to_rank", "quiet")
    command += [f"--{flag}" for flag in flags if getattr(args, flag)]
    values = ("enable_each_rank_log", "bind_core_list", "log_level")
    command += [f"--{name}={getattr(args, name)}" for name in values if getattr(args, name) is not None]
    if args.save_pid:
        command.append(f"--save_pid={os.getpid()}")
    return [*command, args.user_script, *args.user_args]


def supervise(command: Sequence[str]) -> int:
    """Runs the launcher and forwards signals to it; returns the exit code when no process of the job is left."""
    adopt_orphans()
    not_ours = own_children()
    # In its own session the launcher gets a Ctrl-C only from us, and not from the terminal as well.
    environment = {**os.environ, RUNNER_PID: str(os.getpid())}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    asked: list[int] = []

    def hand_on(signum: int, frame: FrameType | None) -> None:
        asked.append(signum)
        process.send_signal(signum)
        last_resort = threading.Timer(grace_seconds() + LAST_RESORT_S, process.kill)
        last_resort.daemon = True
        last_resort.start()

    with handled_by(hand_on):
        code = process.wait()
        if code < 0:
            logger.error(
                "the launcher was terminated by %s; its ranks are stopped", signal.Signals(-code).name
            )
            for left_behind in Path(tempfile.gettempdir()).glob(run_dir_prefix(process.pid) + "*"):
                shutil.rmtree(left_behind, ignore_errors=True)
        if code != 0:
            kill_descendants(not_ours)
    if (
        code == -signal.SIGKILL and asked
    ):  # a busy machine: it did not end in time, but this is not why it ended
        return 128 + asked[0]
    return code if code >= 0 else 128 - code


def run_autotuning(args: argparse.Namespace, active_resources: Mapping[str, Sequence[int]]) -> int:
    """``--autotuning``: finds the fastest config, and with ``run`` runs the script with it. Returns the exit code."""
    from deepspeed.autotuning.command import run_autotuning as tune

    try:
        return tune(args, active_resources)
    except ValueError as error:
        raise LaunchError(f"--autotuning: {error}") from error


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of `deepspeed`. Given ``args``, it raises LaunchError where the command exits with 2."""
    parsed = parse_args(args)
    configure_logging(parsed)
    try:
        if parsed.autotuning:
            sys.exit(run_autotuning(parsed, choose_devices(parsed)))
        command, reservation = prepare(parsed)
    except LaunchError as error:
        if args is not None:
            raise
        logger.error("error: %s", error)
        sys.exit(USAGE_ERROR)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    try:
        with reservation:
            code = supervise(command)
    except KeyboardInterrupt:  # before signals are forwarded to the launcher: it ends with us
        code = INTERRUPTED
    finally:
        pid_file(os.getpid()).unlink(missing_ok=True)  # left behind if the launcher was killed
    if code != 0:
        sys.exit(code)


def prepare(args: argparse.Namespace) -> tuple[list[str], ports.Reservation]:
    """Checks everything that can be checked before a process is started; returns the launcher's command line, and its
    port to hold until the job ends.
    """
    refuse_what_is_not_there(args)
    if args.module and args.no_python:
        raise LaunchError("--module and --no_python exclude each other: a module is run by Python")
    if args.no_python and shutil.which(args.user_script) is None:
        raise LaunchError(f"{args.user_script!r} is not a program on PATH")
    if not (args.module or args.no_python) and not os.path.exists(args.user_script):
        raise LaunchError(
            f"there is no script {args.user_script!r} in {os.getcwd()} (a module? then add --module)"
        )
    if args.bind_core_list and not args.bind_cores_to_rank:
        logger.warning("--bind_core_list=%s has no effect without --bind_cores_to_rank", args.bind_core_list)
    active = choose_devices(args)
    address = args.master_addr or "127.0.0.1"
    reservation = choose_port(args, address)
    return launch_command(args, active, address, reservation.port), reservation


if __name__ == "__main__":
    main()
