"""Per-rank entry point under MPI launchers and Slurm: sets the rank's environment, then becomes the user's program.

python -m deepspeed.tools.launcher.launcher_helper --launcher=mpich --world_info=... script.py [ARGUMENT ...]
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, MutableMapping, Sequence

from deepspeed.base.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.base.tool_arguments import add_options, takes
from deepspeed.tools.launcher import constants, cores, shim
from deepspeed.tools.launcher.devices import VISIBLE_DEVICES
from deepspeed.tools.launcher.errors import LaunchError
from deepspeed.tools.launcher.launch import decode_world_info

# Environment variables in which each launcher passes the rank and the local rank.
RANK_NAMES = {
    constants.OPENMPI_LAUNCHER: ["OMPI_COMM_WORLD_RANK", "PMIX_RANK"],
    constants.MPICH_LAUNCHER: ["PMI_RANK", "PMIX_RANK"],
    constants.IMPI_LAUNCHER: ["PMI_RANK"],
    constants.MVAPICH_LAUNCHER: ["MV2_COMM_WORLD_RANK", "PMI_RANK"],
    constants.SLURM_LAUNCHER: ["SLURM_PROCID"],
}
LOCAL_RANK_NAMES = {
    constants.OPENMPI_LAUNCHER: ["OMPI_COMM_WORLD_LOCAL_RANK"],
    constants.MPICH_LAUNCHER: ["MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "MPI_LOCAL_RANK"],
    constants.IMPI_LAUNCHER: ["MPI_LOCALRANKID"],
    constants.MVAPICH_LAUNCHER: ["MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"],
    constants.SLURM_LAUNCHER: ["SLURM_LOCALID"],
}


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="deepspeed.tools.launcher.launcher_helper",
        description="Start one rank under another launcher.",
        allow_abbrev=False,
    )
    options = {
        "--launcher": takes(
            "launcher that starts the ranks", constants.MPICH_LAUNCHER, choices=sorted(RANK_NAMES)
        ),
        "--world_info": takes("base64 of the JSON dictionary host -> list of slots", "None"),
        "--master_addr": takes("address of rank 0", "127.0.0.1"),
        "--master_port": takes("its port", TORCH_DISTRIBUTED_DEFAULT_PORT),
        "--module": "run the script as a module, as 'python -m' would",
        "--no_python": "run the script as a program, without Python",
        "--bind_cores_to_rank": "bind the rank to its own CPU cores",
        "--bind_core_list": takes("the cores to bind to, such as 0,2-5"),
        "user_script": "script, module or program to start",
        "user_args": takes("its arguments", nargs=argparse.REMAINDER),
    }
    return add_options(parser, options).parse_args(args)


def env_mapping(
    env: MutableMapping[str, str],
    rank_name_list: Sequence[str] | None = None,
    local_rank_name_list: Sequence[str] | None = None,
) -> MutableMapping[str, str]:
    """Set RANK and LOCAL_RANK in ``env`` from the variables of these names; unset variables are skipped.

    Raises:
        EnvironmentError: two of them are set to different values.
    """
    for target, names in (("RANK", rank_name_list), ("LOCAL_RANK", local_rank_name_list)):
        values = {name: env[name] for name in names or () if name in env}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{name}={value}" for name, value in values.items())
            raise OSError(f"{target} is ambiguous: {listed}")
        if values:
            env[target] = next(iter(values.values()))
    return env


def environment_of(
    env: MutableMapping[str, str], args: argparse.Namespace, world: Mapping[str, Sequence[int]]
) -> MutableMapping[str, str]:
    """Add to ``env`` every variable that `deepspeed.tools.launcher.launch` gives a rank, and return it.

    Raises:
        OSError: the launcher has not set the rank.
    """
    env_mapping(env, RANK_NAMES[args.launcher], LOCAL_RANK_NAMES[args.launcher])
    if "RANK" not in env:
        names = " or ".join(RANK_NAMES[args.launcher])
        raise OSError(f"{names} is not set: --launcher={args.launcher} did not start this process")
    places = [(host, slot) for host, slots in enumerate(world.values()) for slot in range(len(slots))]
    host, place = places[int(env["RANK"])]
    slots = list(world.values())[host]
    env.setdefault("LOCAL_RANK", str(place))
    env.update(
        {
            "WORLD_SIZE": str(len(places)),
            "LOCAL_SIZE": str(len(slots)),
            "CROSS_RANK": str(host),
            "CROSS_SIZE": str(len(world)),
            "MASTER_ADDR": args.master_addr,
            "MASTER_PORT": str(args.master_port),
        }
    )
    if env.get(VISIBLE_DEVICES) != "":  # set but empty: the user hides all GPUs
        env[VISIBLE_DEVICES] = ",".join(map(str, slots))
    return env


def bind(env: MutableMapping[str, str], core_list: str | None) -> None:
    """Bind this process to its share of the machine's cores, one OpenMP thread per core, as
    `deepspeed.tools.launcher.launch` does. ``env`` comes from `environment_of`.
    """
    own = cores.binding(core_list, int(env["LOCAL_SIZE"]))[int(env["LOCAL_RANK"])]
    os.sched_setaffinity(0, own)
    env.setdefault("OMP_NUM_THREADS", str(len(own)))


def main(args: Sequence[str] | None = None) -> None:
    parsed = parse_args(args)
    shim.die_with_parent(os.getppid(), signal.SIGTERM)
    environment_of(os.environ, parsed, decode_world_info(parsed.world_info))
    if parsed.bind_cores_to_rank:
        try:
            bind(os.environ, parsed.bind_core_list)
        except LaunchError as error:
            print(f"[deepspeed] error: {error}", *error.__notes__, sep="\n", file=sys.stderr)
            sys.exit(shim.USAGE_ERROR)
    if parsed.no_python:
        shim.run_program(parsed.user_script, parsed.user_args)
    sys.argv = [parsed.user_script, *parsed.user_args]
    (shim.run_module if parsed.module else shim.run_script)(parsed.user_script)


if __name__ == "__main__":
    main()
