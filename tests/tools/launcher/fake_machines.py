"""Stands in for ssh, pdsh, mpirun and srun, by the name it is called by: every "machine" is this one.

The remote side behaves as under sshd: a shell with a bare environment, in its own session, whose parent ends with the
connection. FAKE_HOST says which machine a process believes to be on. Calls are recorded in FAKE_LOG.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import threading
from pathlib import Path


def main() -> int:
    called, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
    with open(os.environ["FAKE_LOG"], "a", encoding="utf-8") as log:
        log.write(json.dumps([called, *arguments]) + "\n")
    return {"ssh": ssh, "pdsh": pdsh, "mpirun": mpirun, "srun": srun}[called](arguments)


def bare(host: str) -> dict[str, str]:
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": os.environ["HOME"],
        "FAKE_HOST": host,
        "FAKE_LOG": os.environ["FAKE_LOG"],
    }


def ssh(arguments: list[str]) -> int:
    host, *command = arguments[arguments.index("--") + 1 :]
    if host == "unreachable":
        print("ssh: connect to host unreachable port 22: No route to host", file=sys.stderr)
        return 255
    remote = subprocess.Popen(
        ["/bin/sh", "-c", " ".join(command)], stdin=subprocess.PIPE, env=bare(host), start_new_session=True
    )
    threading.Thread(target=carry, args=(remote.stdin,), daemon=True).start()
    return remote.wait()


def carry(stdin) -> None:
    try:
        while data := os.read(0, 65536):
            stdin.write(data)
            stdin.flush()
        stdin.close()
    except OSError:
        pass


def pdsh(arguments: list[str]) -> int:
    hosts = arguments[arguments.index("-w") + 1].split(",")
    command = arguments[-1]
    running = []
    for number, host in enumerate(hosts):
        told = command.replace("%%", "\0").replace("%n", str(number)).replace("%h", host).replace("\0", "%")
        running.append(subprocess.Popen(["/bin/sh", "-c", told], env=bare(host), stdin=subprocess.DEVNULL))
    return max(each.wait() for each in running)


def mpirun(arguments: list[str]) -> int:
    if "--host" in arguments:
        hosts = [part.split(":") for part in arguments[arguments.index("--host") + 1].split(",")]
        places = [(host, slot) for host, slots in hosts for slot in range(int(slots))]
        names = {"OMPI_COMM_WORLD_RANK": 0, "OMPI_COMM_WORLD_LOCAL_RANK": 1}
    else:
        each = int(arguments[arguments.index("-ppn") + 1])
        places = [
            (host, slot)
            for host in arguments[arguments.index("-hosts") + 1].split(",")
            for slot in range(each)
        ]
        names = {"PMI_RANK": 0, "MPI_LOCALRANKID": 1}
    return started(arguments, places, names, exported(arguments))


def srun(arguments: list[str]) -> int:
    each = int(arguments[arguments.index("--ntasks-per-node") + 1])
    hosts = arguments[arguments.index("--nodelist" if "--nodelist" in arguments else "-w") + 1].split(",")
    places = [(host, slot) for host in hosts for slot in range(each)]
    return started(arguments, places, {"SLURM_PROCID": 0, "SLURM_LOCALID": 1}, dict(os.environ))


def exported(arguments: list[str]) -> dict[str, str]:
    names = [value for flag, value in zip(arguments, arguments[1:], strict=False) if flag == "-x"]
    if "-genvlist" in arguments:
        names += arguments[arguments.index("-genvlist") + 1].split(",")
    return {name: os.environ[name] for name in names}


def started(
    arguments: list[str], places: list[tuple[str, int]], names: dict[str, int], environment: dict[str, str]
) -> int:
    program = arguments[arguments.index("-u") - 1 :]
    running = []
    for rank, (host, slot) in enumerate(places):
        told = {name: str((rank, slot)[which]) for name, which in names.items()}
        running.append(
            subprocess.Popen(program, env={**bare(host), **environment, **told, "FAKE_HOST": host})
        )
    return max(each.wait() for each in running)


def install(folder, names: tuple[str, ...] = ("ssh", "pdsh", "mpirun", "srun")) -> None:
    """Puts the programs into a folder for PATH, and what says which MPI it is."""
    folder.mkdir(exist_ok=True)
    for name in (*names, "ompi_info", "mpiname", "sinfo"):
        path = folder / name
        own = f'exec {shlex.quote(sys.executable)} -S {shlex.quote(str(folder / (name + ".py")))} "$@"'
        text = {"mpiname": "echo MVAPICH2 2.3", "ompi_info": "true", "sinfo": "true"}.get(name, own)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        if name in names:
            source = Path(__file__).read_text(encoding="utf-8")
            (folder / f"{name}.py").write_text(source.replace("os.path.basename(sys.argv[0])", repr(name)))


if __name__ == "__main__":
    sys.exit(main())
