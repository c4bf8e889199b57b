"""Selection of a job's devices from command line, hostfile, CUDA_VISIBLE_DEVICES and hardware."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

from deepspeed.tools.launcher import cores
from deepspeed.tools.launcher.constants import SLURM_LAUNCHER
from deepspeed.tools.launcher.errors import LaunchError, logger
from deepspeed.tools.launcher.hostfile import (
    apply_num_nodes_and_gpus,
    checked_slots,
    fetch_hostfile,
    parse_inclusion_exclusion,
)

DLTS_HOSTFILE = "/job/hostfile"
THIS_MACHINE = "localhost"
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
# On Linux, torch can find an accelerator only if one of these exists; without any, skip the import of torch.
ACCELERATOR_FILES = (
    "nvidia[0-9]*", "kfd", "dxg", "dri/renderD*", "accel*", "davinci[0-9]*", "cambricon*", "hl[0-9]*",
)  # fmt: skip

MAX_NODES = 100_000
NO_HOSTFILE = ("", os.devnull)
"""Values of ``--hostfile`` that mean "no hostfile"."""


def choose_devices(args: argparse.Namespace) -> OrderedDict[str, list[int]]:
    """Return host -> slots to use, from the hostfile if there is one, else from this machine. Raises ValueError."""
    filtered = bool(args.include or args.exclude)
    if filtered and (args.num_gpus >= 0 or args.num_nodes >= 0):
        raise LaunchError(
            "--num_gpus and --num_nodes cannot be combined with --include or --exclude: use one or the other"
        )
    given = getattr(args, "num_gpus_given", args.num_gpus != -1)  # the default, -1, stands for "all"
    if args.num_gpus < 1 and given:
        raise LaunchError(f"--num_gpus={args.num_gpus}: must be at least 1")
    if given:
        checked_slots(args.num_gpus, f"--num_gpus={args.num_gpus}")
    hosts = fetch_hostfile(args.hostfile)
    if hosts is None and args.launcher == SLURM_LAUNCHER:
        hosts = slurm_hosts(args)
    if hosts is None and args.hostfile not in (DLTS_HOSTFILE, *NO_HOSTFILE):
        raise LaunchError(f"--hostfile={args.hostfile}: no such file")
    if hosts is None:
        active = _same_on_each(choose_local_devices(args), args)
    else:
        active = parse_inclusion_exclusion(hosts, args.include, args.exclude)
        active = apply_num_nodes_and_gpus(active, args.num_nodes, args.num_gpus)
    if not active:
        raise LaunchError("--include and --exclude leave no device")
    return active


def _same_on_each(here: OrderedDict[str, list[int]], args: argparse.Namespace) -> OrderedDict[str, list[int]]:
    """Return N machines like this one, for ``--no_ssh --num_nodes N`` without a hostfile."""
    if args.num_nodes <= 1:
        return here
    if not args.no_ssh:
        raise LaunchError(
            f"--num_nodes={args.num_nodes}: list the machines in a --hostfile, or start each with --no_ssh "
            "--node_rank N --master_addr ADDRESS"
        )
    if args.num_nodes > MAX_NODES:
        raise LaunchError(f"--num_nodes={args.num_nodes}: at most {MAX_NODES} machines")
    (slots,) = here.values()
    return OrderedDict((f"node-{node}", slots) for node in range(args.num_nodes))


def slurm_hosts(args: argparse.Namespace) -> OrderedDict[str, int] | None:
    """Return host -> number of slots of the current Slurm allocation, or None outside of one."""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if nodes is None:
        return None
    try:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], stdout=subprocess.PIPE, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        raise LaunchError(
            f"'scontrol show hostnames {nodes}' failed; list the machines in a --hostfile"
        ) from None
    given = os.environ.get("SLURM_GPUS_ON_NODE", "")
    slots = (
        args.num_gpus if args.num_gpus > 0 else int(given) if given.isdigit() else accelerator_count() or 1
    )
    return OrderedDict((host, slots) for host in listed.stdout.split())


def choose_local_devices(args: argparse.Namespace) -> OrderedDict[str, list[int]]:
    """Return the requested slots of this machine."""
    accelerators = accelerator_count()
    if accelerators is None:  # ranks share the cores, so any number of ranks is valid
        if args.num_gpus > 0:
            return OrderedDict({THIS_MACHINE: list(range(args.num_gpus))})
        count = max(cores.core_budget(), cores.numa_node_count()) if args.include else cores.numa_node_count()
        return parse_inclusion_exclusion({THIS_MACHINE: count}, args.include, args.exclude)
    if args.num_gpus > accelerators:
        raise LaunchError(f"--num_gpus={args.num_gpus}: this machine has {accelerators} devices")
    visible = os.environ.get(VISIBLE_DEVICES, "")
    chosen_here = bool(args.include or args.exclude or args.num_gpus > 0)
    if visible and not chosen_here:
        if not all(device.strip().isdigit() for device in visible.split(",")):
            raise LaunchError(
                f"{VISIBLE_DEVICES}={visible} is not a list of numbers; choose devices with --include"
            )
        return OrderedDict({THIS_MACHINE: [int(device) for device in visible.split(",")]})
    if visible:
        logger.warning("%s=%s is ignored: the command line selects the devices", VISIBLE_DEVICES, visible)
    count = args.num_gpus if args.num_gpus > 0 else accelerators
    return parse_inclusion_exclusion({THIS_MACHINE: count}, args.include, args.exclude)


def accelerator_count() -> int | None:
    """Count the accelerators of this machine, ignoring CUDA_VISIBLE_DEVICES; None if ranks compute on the CPU.

    Importing torch takes seconds and memory: it is imported only if a device file exists, in a separate process.
    """
    named = os.environ.get("DS_ACCELERATOR", "")
    found = any(next(Path("/dev").glob(pattern), None) for pattern in ACCELERATOR_FILES)
    hidden_by_user = os.environ.get(VISIBLE_DEVICES) == ""
    if named == "cpu" or hidden_by_user or (not named and not found and sys.platform.startswith("linux")):
        return None
    code = "from deepspeed.base.accelerator import get_accelerator as a; print(a().device_name(), a().device_count())"
    hidden = (VISIBLE_DEVICES, "LOCAL_SIZE", "LOCAL_WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    if answer.returncode != 0:
        raise LaunchError(
            "cannot query the accelerator of this machine (see above); DS_ACCELERATOR=cpu skips it"
        )
    device, count = answer.stdout.split()[-2:]
    return None if device == "cpu" else int(count)


def is_this_machine(host: str) -> bool:
    """Tell whether ``host`` is a name or address of this machine."""
    if host in (THIS_MACHINE, socket.gethostname(), socket.getfqdn()):
        return True
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)  # only one of our own addresses can be bound
        return True
    except OSError:
        return False
