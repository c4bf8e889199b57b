"""Translation of `deepspeed` options into the command line of `deepspeed.tools.launcher.launch`."""

from __future__ import annotations

import argparse
import base64
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from deepspeed.tools.launcher import ports
from deepspeed.tools.launcher.errors import LaunchError
from deepspeed.tools.launcher.launch import node_options, port_in_use

logger = logging.getLogger("deepspeed.tools.launcher")

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
