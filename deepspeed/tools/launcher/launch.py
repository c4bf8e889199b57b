"""Starts the ranks of this machine: ``python -m deepspeed.tools.launcher.launch --world_info=... script.py``.

The `deepspeed` command runs it on every machine of a job. It sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_SIZE,
CROSS_RANK, CROSS_SIZE, MASTER_ADDR, MASTER_PORT and the accelerator's list of visible devices for each rank,
and monitors them. torch is imported only after all arguments have been validated.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from deepspeed.base.constants import JOB_STARTED, TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.base.tool_arguments import add_options, takes
from deepspeed.tools.launcher import cores, ports, shim
from deepspeed.tools.launcher.devices import VISIBLE_DEVICES
from deepspeed.tools.launcher.errors import LaunchError, logger
from deepspeed.tools.launcher.failures import LOST_PEER_PATTERN
from deepspeed.tools.launcher.processes import adopt_orphans, handled_by, holding_signals
from deepspeed.tools.launcher.shim import USAGE_ERROR
from deepspeed.tools.launcher.supervision import NODE_REPORT, RESTART_SIGNAL, RUNNER_PID

# Spins of a GNU OpenMP thread at a barrier before it sleeps. By default it spins for milliseconds; if anything else
# needs a core (communication threads, data loaders, another job), the threads of a rank then wait for each other: a GPT
# with two threads reached 440 tokens/s on busy cores, 5,900 with this; on idle ones 5,300 and 5,900.
SPIN_COUNT = "10000"

PASSED_ON = {
    "--module": "run the script as a module, like 'python -m'",
    "--no_python": "run the script as a program, without Python",
    "--no_local_rank": "do not add --local_rank=N to the script's arguments",
    "--enable_each_rank_log DIR": takes(
        "write the output of each rank to its own file in DIR instead of the screen"
    ),
    "--prefix_output": "prefix each line of output with its rank",
    "--bind_cores_to_rank": "bind each rank to its own CPU cores",
    "--bind_core_list CORES": takes(
        "with --bind_cores_to_rank: the cores to use, such as 0,2-5 (default: all)"
    ),
    "--log_level": takes(
        "verbosity of the launcher itself (default: info)",
        "info",
        choices=["debug", "info", "warning", "error", "critical"],
    ),
    "-q --quiet": "the same as --log_level error",
}
"""The options that `deepspeed` passes on unchanged."""


def node_options(args: argparse.Namespace) -> list[str]:
    """Return the options of the `deepspeed` command that every machine's launcher gets, as this module parses them."""
    flags = ("module", "no_python", "no_local_rank", "bind_cores_to_rank", "prefix_output", "quiet")
    options = [f"--{flag}" for flag in flags if getattr(args, flag)]
    values = ("enable_each_rank_log", "bind_core_list", "log_level")
    return options + [f"--{name}={getattr(args, name)}" for name in values if getattr(args, name) is not None]


LAUNCH = (sys.executable, "-u", "-m", "deepspeed.tools.launcher.launch")


def encode_world_info(world_info: Mapping[str, Sequence[int]]) -> str:
    """Encode host -> slots as one command-line word: base64 of the JSON."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def choose_port(args: argparse.Namespace, address: str) -> ports.PortReservation:
    """Reserve the requested port (LaunchError if it is invalid or in use); without a request, the default port if it is
    free, else any free one.

    While the reservation is open, other launchers on this host that are not given a port choose another one.
    """
    if not 1 <= args.master_port <= ports.MAX_PORT:
        raise LaunchError(f"--master_port={args.master_port}: must be a port from 1 to {ports.MAX_PORT}")
    if args.master_port_given:
        if not ports.is_free(address, args.master_port):
            raise LaunchError(port_in_use(address, args.master_port))
        return ports.PortReservation(args.master_port)
    reservation = ports.reserve(address, args.master_port)
    if reservation.port != args.master_port:
        logger.info("port %d is in use at %s, using %d", args.master_port, address, reservation.port)
    return reservation


def launch_arguments(
    args: argparse.Namespace, world: Mapping[str, Sequence[int]], address: str, port: int, node_rank: int = 0
) -> list[str]:
    """Return the arguments of `deepspeed.tools.launcher.launch` on one machine."""
    options = [
        f"--world_info={encode_world_info(world)}",
        f"--master_addr={address}",
        f"--master_port={port}",
        *([f"--node_rank={node_rank}"] if node_rank else []),
        *node_options(args),
    ]
    if args.elastic_training:
        options.append("--enable_elastic_training")
        limits = ("min_elastic_nodes", "max_elastic_nodes")
        options += [f"--{name}={getattr(args, name)}" for name in limits if getattr(args, name) > 0]
    if args.save_pid:
        options.append(f"--save_pid={os.getpid()}")
    return [*options, args.user_script, *args.user_args]


def parse_args(args: list[str] | None = None) -> argparse.Namespace:
    # Abbreviations off: argparse would also match them among the script's arguments.
    parser = argparse.ArgumentParser(
        prog="deepspeed.tools.launcher.launch",
        description="Start the ranks of one machine.",
        allow_abbrev=False,
    )
    options = {
        "--node_rank": takes("index of this machine (default: 0)", 0),
        "--master_addr": takes("address of rank 0 (default: 127.0.0.1)", "127.0.0.1"),
        "--master_port": takes("a free port there", TORCH_DISTRIBUTED_DEFAULT_PORT),
        "--world_info": takes("base64 of the JSON dictionary host -> list of slots", "None"),
        "--job": takes("a name to find the job's processes by", ""),
        "--enable_elastic_training": "continue after the loss of ranks or machines",
        "--min_elastic_nodes": takes("with at least this many machines (default: 1)", -1),
        "--max_elastic_nodes": takes("with at most this many (default: those of --world_info)", -1),
        "--save_pid PID": takes("write this pid to /tmp/PID.ds", 0),
        **PASSED_ON,
        "training_script": "script, module or program to start",
        "training_script_args": takes("its arguments", nargs=argparse.REMAINDER),
    }
    return add_options(parser, options).parse_args(args)


def configure_logging(args: argparse.Namespace) -> None:
    """Send the launcher's messages to standard error with a prefix, so that they do not mix with a script's
    output.
    """
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[deepspeed] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(logging.ERROR if args.quiet else args.log_level.upper())


def decode_world_info(encoded: str) -> dict[str, list[int]]:
    """Decode ``--world_info`` to host -> slots, in order of node rank. Raises LaunchError."""
    if encoded == "None":
        raise LaunchError(
            '--world_info is required: base64 of a JSON dictionary such as {"localhost": [0, 1]}'
        )
    try:
        world = json.loads(base64.urlsafe_b64decode(encoded))
        return {str(host): [int(slot) for slot in slots] for host, slots in world.items()}
    except (binascii.Error, ValueError, AttributeError, TypeError) as error:
        raise LaunchError(
            f"--world_info={encoded!r} is not base64 of a JSON dictionary host -> slots: {error}"
        ) from None


def pid_file(main_pid: int) -> Path:
    """Return the file to which ``--save_pid`` writes this launcher's process id. ``main_pid``: process id of the
    `deepspeed` command."""
    folder = "/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir()
    return Path(folder, f"{main_pid}.ds")


def shim_command(args: argparse.Namespace, bound: list[list[int]] | None, nodes: int) -> tuple[str, ...]:
    """Return the command line of every rank of this machine."""
    kind = "module" if args.module else "program" if args.no_python else "script"
    own_log = args.enable_each_rank_log is not None
    options = shim.ShimOptions(
        local_rank_argument=not args.no_local_rank,
        own_log=own_log,
        cores=bound,
        lost_peer_pattern=LOST_PEER_PATTERN if nodes > 1 else "",
    )
    start = (sys.executable, "-u", shim.__file__, str(os.getpid()), kind, json.dumps(options._asdict()))
    return (*start, args.training_script, *args.training_script_args)


def export_environment(local_slots: list[int], args: argparse.Namespace, nodes: int, threads: int) -> None:
    """Set the variables that all ranks of this machine share; the agent adds those that differ."""
    from deepspeed.base.accelerator import get_accelerator

    environment = dict(os.environ)
    environment.setdefault(JOB_STARTED, str(time.time()))
    environment |= {
        "LOCAL_SIZE": str(len(local_slots)),
        "CROSS_RANK": str(args.node_rank),
        "CROSS_SIZE": str(nodes),
    }
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu" and "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    if accelerator.device_name() != "cpu" or VISIBLE_DEVICES not in environment:  # empty: GPUs are hidden
        accelerator.set_visible_devices_envs(environment, local_slots)
    os.environ.update(environment)


def run(args: argparse.Namespace) -> int:
    """Start the ranks, wait for them, and return the command's exit code. Raises LaunchError."""
    if args.module and args.no_python:
        raise LaunchError("--module and --no_python exclude each other: a module is run by Python")
    world = decode_world_info(args.world_info)
    if not 0 <= args.node_rank < len(world):
        raise LaunchError(
            f"--node_rank={args.node_rank}: --world_info names {len(world)} nodes, counted from 0"
        )
    host, slots = list(world.items())[args.node_rank]
    if not slots:
        raise LaunchError(f"--world_info: host {host!r} has no slots")
    elastic_nodes = elastic_limits(args, len(world)) if args.enable_elastic_training else (0, 0)
    meets_elsewhere = args.enable_elastic_training and len(world) > 1  # the command's store holds the port
    if args.node_rank == 0 and not meets_elsewhere and not ports.is_free(args.master_addr, args.master_port):
        raise LaunchError(port_in_use(args.master_addr, args.master_port))
    report = os.environ.pop(NODE_REPORT, None)
    bound = cores.binding(args.bind_core_list, len(slots)) if args.bind_cores_to_rank else None
    threads = len(bound[0]) if bound else max(1, cores.core_budget() // len(slots))
    log_dir = make_log_dir(args.enable_each_rank_log)

    adopt_orphans()
    if args.enable_elastic_training:  # ignored until its handler is installed: the default is to die
        signal.signal(RESTART_SIGNAL, lambda *_: None)
    with holding_signals():  # imports torch: an interrupt during that might abort the process, or be lost
        from deepspeed.tools.launcher.agent import NodeJob, supervise
    if args.enable_elastic_training:
        from deepspeed.tools.launcher.elastic import supervise

    export_environment(slots, args, len(world), threads)
    where, per_rank = f"{args.master_addr}:{args.master_port}", os.environ["OMP_NUM_THREADS"]
    logger.info("ranks: %d, threads of each: %s, rendezvous: %s", len(slots), per_rank, where)
    job = NodeJob(
        command=shim_command(args, bound, len(world)),
        ranks=len(slots),
        node_rank=args.node_rank,
        nodes=len(world),
        master_addr=args.master_addr,
        master_port=args.master_port,
        log_dir=log_dir,
        prefix_output=args.prefix_output,
        adds_local_rank=not args.no_local_rank,
        script=args.training_script,
        report=Path(report) if report else None,
        min_nodes=elastic_nodes[0],
        max_nodes=elastic_nodes[1],
    )
    # Until the ranks run: then the agent's own handlers take over.
    with handled_by(_end):
        return supervise(job)


def elastic_limits(args: argparse.Namespace, nodes: int) -> tuple[int, int]:
    """Return the smallest and the largest number of machines of an elastic job. Raises LaunchError."""
    fewest = args.min_elastic_nodes if args.min_elastic_nodes > 0 else 1
    most = args.max_elastic_nodes if args.max_elastic_nodes > 0 else nodes
    if not fewest <= nodes <= most:
        raise LaunchError(
            f"--min_elastic_nodes={fewest} and --max_elastic_nodes={most}: the job starts with {nodes} "
            "machines, which must be within these limits"
        )
    return fewest, most


def make_log_dir(folder: str | None) -> Path | None:
    """Create the folder of ``--enable_each_rank_log`` if missing, and return it; None without that option."""
    if folder is None:
        return None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"--enable_each_rank_log={folder}: cannot make this folder: {error.strerror}"
        ) from None
    return Path(folder)


def port_in_use(address: str, port: int) -> str:
    return (
        f"--master_port={port} is in use at {address}, perhaps by another run. Choose another, such as "
        f"{ports.find_free(address)}, which is free now, or leave the option out to pick one automatically"
    )


def _end(signum: int, frame: FrameType | None) -> None:
    """Exit with an exception, so that temporary folders are removed: the signal alone would leave them."""
    sys.exit(128 + signum)


def main(args: list[str] | None = None) -> None:
    runner_pid = os.environ.pop(RUNNER_PID, None)
    if runner_pid is not None:
        shim.die_with_parent(int(runner_pid), signal.SIGTERM)
    parsed = parse_args(args)
    configure_logging(parsed)
    saved_pid = pid_file(parsed.save_pid) if parsed.save_pid else None
    if saved_pid is not None:
        saved_pid.write_text(str(os.getpid()))
    try:
        sys.exit(run(parsed))
    except LaunchError as error:
        logger.error("error: %s", "\n".join([str(error), *error.__notes__]))
        sys.exit(USAGE_ERROR)
    except KeyboardInterrupt:  # before the ranks run: then the agent turns it into its own exception
        sys.exit(shim.INTERRUPTED)
    finally:
        if saved_pid is not None:
            saved_pid.unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        # Nothing is left to do, and an orderly shutdown of torch takes a third of its import time.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 0)
