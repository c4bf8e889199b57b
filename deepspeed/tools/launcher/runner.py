"""The `deepspeed` command: chooses devices and starts `deepspeed.tools.launcher.launch` on them.

It stays small (no torch) and runs as long as the launcher that it starts. The two monitor each other: if this
process is killed, the kernel signals the launcher, which stops its ranks; if the launcher is killed, the kernel kills
the ranks, and their orphaned children are reparented to this process, which kills them.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence

from deepspeed.base.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.base.tool_arguments import ArgumentParser, add_options, takes
from deepspeed.tools.launcher import ports
from deepspeed.tools.launcher.constants import PDSH_LAUNCHER
from deepspeed.tools.launcher.devices import DLTS_HOSTFILE, choose_devices, is_this_machine
from deepspeed.tools.launcher.errors import LaunchError
from deepspeed.tools.launcher.hostfile import (
    _parse_hostfile,
    apply_num_nodes_and_gpus,
    fetch_hostfile,
    parse_inclusion_exclusion,
    parse_node_config,
    parse_node_config_list,
    parse_resource_filter,
)
from deepspeed.tools.launcher.hosts import multi_host
from deepspeed.tools.launcher.hosts.multi_host import ENVIRONMENT_NAME as DEEPSPEED_ENVIRONMENT_NAME
from deepspeed.tools.launcher.hosts.multi_host import EXPORT_ENVS
from deepspeed.tools.launcher.hosts.multinode_runner import RUNNERS
from deepspeed.tools.launcher.launch import (
    LAUNCH,
    PASSED_ON,
    choose_port,
    configure_logging,
    encode_world_info,
    launch_arguments,
    logger,
    pid_file,
)
from deepspeed.tools.launcher.shim import INTERRUPTED, USAGE_ERROR
from deepspeed.tools.launcher.supervision import supervise

__all__ = [
    "DEEPSPEED_ENVIRONMENT_NAME", "DLTS_HOSTFILE", "EXPORT_ENVS", "_parse_hostfile",
    "apply_num_nodes_and_gpus", "encode_world_info", "fetch_hostfile", "main", "parse_args",
    "parse_inclusion_exclusion", "parse_node_config", "parse_node_config_list", "parse_num_nodes",
    "parse_resource_filter",
]  # fmt: skip

EXAMPLES = """\
examples:
  deepspeed train.py --deepspeed_config ds.json      all devices of this machine
  deepspeed --num_gpus 2 train.py                    two ranks (on a CPU host they share the cores)
  deepspeed --include localhost:0,2 train.py         devices 0 and 2
  deepspeed --num_gpus 2 --module package.train      as 'python -m package.train'
  deepspeed --hostfile hosts train.py                all slots of all hosts, over ssh
  deepspeed --num_gpus 4 --bind_cores_to_rank --enable_each_rank_log logs train.py

Options of the launcher go before the script; everything after it is passed to the script. The exit code is that
of the first rank that failed (128 + N if signal N ended it).
"""

LAUNCHER_ARGS = "launcher_args"


class _MarkGiven(argparse.Action):
    """Stores the value, and records in ``NAME_given`` that the user set it."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, f"{self.dest}_given", True)


def _node_count(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text


_DEVICES = {
    "--num_gpus --num_accelerators N": takes(
        "use the first N devices, or start N ranks on a CPU host (default: all; one rank per NUMA node)",
        -1,
        action=_MarkGiven,
    ),
    "-i --include SPEC": takes(
        "use only these devices: HOST[:SLOT,...][@HOST...], such as localhost:0,2", ""
    ),
    "-e --exclude SPEC": takes("use all devices but these", ""),
    "-H --hostfile FILE": takes(
        f"file with a line 'HOST slots=N' per host (default: {DLTS_HOSTFILE}, if it exists)", DLTS_HOSTFILE
    ),
}
_RENDEZVOUS = {
    "--master_addr ADDRESS": takes("address of rank 0 (default: 127.0.0.1)", ""),
    "--master_port PORT": takes(
        f"port of rank 0 (default: {TORCH_DISTRIBUTED_DEFAULT_PORT}, or a free one if that is in use)",
        TORCH_DISTRIBUTED_DEFAULT_PORT,
        action=_MarkGiven,
    ),
}
_SEVERAL_MACHINES = {
    "--num_nodes N": takes("use the first N hosts of the hostfile", -1, type=_node_count),
    "--launcher NAME": takes(
        "pdsh, ssh, openmpi, mvapich, slurm, mpich or impi (default: pdsh, or ssh if pdsh is not installed)",
        PDSH_LAUNCHER,
        action=_MarkGiven,
    ),
    "--launcher_args --launcher_arg TEXT": takes(
        "options for the launcher, as one argument: '-F my_ssh_config'", ""
    ),
    "--ssh_port PORT": takes("port of the ssh servers on the hosts", type=int),
    "--venv_script FILE": takes("shell script that each host sources before Python starts"),
    "--no_ssh_check": "do not test the connection to the first host (pdsh)",
    "--no_ssh": "run this command on each machine yourself",
    "--node_rank N": takes("with --no_ssh: index of this machine", -1),
    "--force_multi": "use the launcher even for a single machine or for this one",
    "--elastic_training": "restart the ranks after the loss of ranks or machines",
    "--min_elastic_nodes N": takes("fewest machines to continue with (default: 1)", -1),
    "--max_elastic_nodes N": takes("most machines to use (default: all hosts)", -1),
    "--autotuning": takes(
        "find the fastest config for the script; with run, also train with it",
        "",
        choices=["tune", "run"],
    ),
}


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line of `deepspeed`; everything after the script belongs to the script."""
    # Abbreviations off: argparse would also match them among the script's arguments.
    parser = ArgumentParser(
        prog="deepspeed",
        usage="deepspeed [options] script [arguments of the script]",
        description="Start one process per device and run the same script in each of them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_options(parser.add_argument_group("devices"), _DEVICES)
    add_options(parser.add_argument_group("rendezvous"), _RENDEZVOUS)
    add_options(parser.add_argument_group("several machines and autotuning"), _SEVERAL_MACHINES)
    options = {
        **PASSED_ON,
        "--save_pid": "write the launcher's process id to /tmp/PID.ds",
        "user_script": takes("script to run in every rank", metavar="script"),
        "user_args": takes("arguments of the script", nargs=argparse.REMAINDER),
    }
    add_options(parser, options)
    parser.set_defaults(master_port_given=False, num_gpus_given=False, launcher_given=False)
    given = sys.argv[1:] if args is None else args
    if not given:
        parser.print_help(sys.stderr)
        parser.exit(USAGE_ERROR)
    return parser.parse_args(_with_joined_values(parser, given))


def _with_joined_values(parser: argparse.ArgumentParser, args: Sequence[str]) -> list[str]:
    """Join ``--launcher_args --x=y``, the documented form, into one word: argparse would take the second word for an
    option of its own. The script's arguments are left unchanged."""
    known, left, joined = parser._option_string_actions, list(args), []
    while left:
        word = left.pop(0)
        action = known.get(word)
        if action is None or action.nargs is not None or not left:  # not an option, or one without a value
            joined.append(word)
        elif action.dest == LAUNCHER_ARGS and left[0].startswith("-"):
            joined.append(f"{word}={left.pop(0)}")
        else:
            joined += [word, left.pop(0)]
        if not word.startswith("-"):
            return joined + left
    return joined


def parse_num_nodes(str_num_nodes: str, elastic_training: bool) -> tuple[int, int]:
    """Parse ``"2"`` to ``(2, -1)``; with elastic training also ``"2:4"`` to ``(2, 4)``. Else raises LaunchError."""
    low, colon, high = str_num_nodes.partition(":")
    try:
        numbers = int(low), int(high) if colon else -1
    except ValueError:
        raise LaunchError(f"--num_nodes={str_num_nodes}: expected a number, or MIN:MAX") from None
    if colon and not elastic_training:
        raise LaunchError(f"--num_nodes={str_num_nodes}: MIN:MAX needs --elastic_training")
    return numbers


def check_elastic(args: argparse.Namespace) -> None:
    """Translate ``--num_nodes MIN:MAX`` into the node limits of ``--elastic_training``. Raises LaunchError for
    contradictory limits."""
    low, high = parse_num_nodes(str(args.num_nodes), args.elastic_training)
    args.num_nodes = low
    if high > 0:
        args.min_elastic_nodes, args.max_elastic_nodes, args.num_nodes = low, high, -1
    for name in ("min_elastic_nodes", "max_elastic_nodes"):
        if getattr(args, name) > 0 and not args.elastic_training:
            raise LaunchError(f"--{name} needs --elastic_training: add that, or leave it out")
    if 0 < args.max_elastic_nodes < args.min_elastic_nodes:
        raise LaunchError(
            f"--min_elastic_nodes={args.min_elastic_nodes} is above --max_elastic_nodes={args.max_elastic_nodes}"
        )


def run_autotuning(args: argparse.Namespace, active_resources: Mapping[str, Sequence[int]]) -> int:
    """Find the fastest config (``--autotuning``), print the results, and with ``run`` run the script with it. Returns
    the exit code. Ctrl-C ends the tuning and keeps the best config so far. LaunchError: the script is given no config,
    it cannot be read, or nothing can be run after tuning."""
    from deepspeed.base.logging import logger as log
    from deepspeed.tools.autotuning.autotuner import Autotuner

    code = 0
    try:
        tuner = Autotuner(args, dict(active_resources))
        try:
            tuner.tune()
        except KeyboardInterrupt:
            tuner.reason = "interrupted; rerun the same command to resume"
            code = INTERRUPTED
        except ValueError as error:
            log.error("autotuning: %s", error)
            code = 1
        tuner.print_tuning_results()
        return tuner.run_after_tuning() if code == 0 and args.autotuning == "run" else code
    except ValueError as error:
        raise LaunchError(f"--autotuning: {error}") from error


def main(args: Sequence[str] | None = None) -> None:
    """Run the `deepspeed` command. Called with ``args``, it raises LaunchError where the command would exit with 2."""
    parsed = parse_args(args)
    configure_logging(parsed)
    try:
        if parsed.autotuning:
            sys.exit(run_autotuning(parsed, choose_devices(parsed)))
        start, reservation = prepare(parsed)
    except LaunchError as error:
        if args is not None:
            raise
        logger.error("error: %s", "\n".join([str(error), *error.__notes__]))
        sys.exit(USAGE_ERROR)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    try:
        with reservation:
            code = start()
    except KeyboardInterrupt:  # before signals are forwarded to the launcher: it ends with us
        code = INTERRUPTED
    finally:
        pid_file(os.getpid()).unlink(missing_ok=True)  # left behind if the launcher was killed
    if code != 0:
        sys.exit(code)


def prepare(args: argparse.Namespace) -> tuple[Callable[[], int], ports.PortReservation]:
    """Validate everything that can be checked before a process is started. Returns a function that runs the job and
    returns its exit code, and the port reservation to hold until the job ends.
    """
    check_elastic(args)
    active = choose_devices(args)
    if args.launcher_given and args.launcher in RUNNERS:
        # Also if a single host is left, for which the launcher is not used.
        RUNNERS[args.launcher].validate_active_resources(active)
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
    if args.no_ssh:
        return _this_machine_of_several(args, active)
    if args.node_rank >= 0:
        raise LaunchError(f"--node_rank={args.node_rank} is for machines started by hand: add --no_ssh")
    if args.force_multi or len(active) > 1 or not is_this_machine(next(iter(active)).rpartition("@")[2]):
        return multi_host.prepare(args, active)
    address = args.master_addr or "127.0.0.1"
    reservation = choose_port(args, address)
    command = [*LAUNCH, *launch_arguments(args, active, address, reservation.port)]
    return functools.partial(supervise, command), reservation


def _this_machine_of_several(
    args: argparse.Namespace, active: Mapping[str, Sequence[int]]
) -> tuple[Callable[[], int], ports.PortReservation]:
    """Prepare this machine's part of a ``--no_ssh`` job: the user runs the command on every machine, each with its own
    ``--node_rank``."""
    if not 0 <= args.node_rank < len(active):
        raise LaunchError(
            f"--no_ssh needs --node_rank, the index of this machine: 0 to {len(active) - 1} ({', '.join(active)})"
        )
    if len(active) > 1 and not args.master_addr:
        raise LaunchError("--no_ssh needs --master_addr, an address of the machine with --node_rank 0")
    address = args.master_addr or "127.0.0.1"
    args.master_port_given = True  # all machines must use the same port
    reservation = choose_port(args, address) if args.node_rank == 0 else ports.PortReservation(0)
    command = [*LAUNCH, *launch_arguments(args, active, address, args.master_port, args.node_rank)]
    return functools.partial(supervise, command), reservation


if __name__ == "__main__":
    main()
