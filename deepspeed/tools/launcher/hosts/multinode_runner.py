"""External multi-node launchers, and their command lines.

pdsh starts one `deepspeed.tools.launcher.launch` per machine, which starts the ranks there. The MPI launchers and
Slurm start the ranks themselves, each as `deepspeed.tools.launcher.launcher_helper`, which reads its rank from the
launcher's environment variables.
Values of environment variables are kept off command lines, which other users of a machine can read; pdsh offers no
other way.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from deepspeed.tools.launcher import constants
from deepspeed.tools.launcher.devices import THIS_MACHINE
from deepspeed.tools.launcher.errors import LaunchError
from deepspeed.tools.launcher.hostfile import checked_host
from deepspeed.tools.launcher.launch import node_options
from deepspeed.tools.launcher.supervision import RUNNER_PID

Resources = Mapping[str, Sequence[int] | int]


def slots_of(resources: Resources) -> dict[str, list[int]]:
    """Return host -> slots, from lists or counts of slots; validates host names."""
    return {
        checked_host(host): list(range(slots)) if isinstance(slots, int) else list(slots)
        for host, slots in resources.items()
    }


class MultiNodeRunner(ABC):
    """An external launcher. ``args``: the parsed command line of `deepspeed`; ``world_info_base64``: host -> slots."""

    launcher = ""

    def __init__(self, args: argparse.Namespace, world_info_base64: str) -> None:
        self.args = args
        self.validate_args()
        self.user_arguments = self.parse_user_args()
        self.user_script = args.user_script
        self.world_info_base64 = world_info_base64
        self.exports: dict[str, str] = {}
        """Environment variables of the ranks, quoted for a shell."""
        self.variables: dict[str, str] = {}
        """The same, unquoted."""

    @abstractmethod
    def backend_exists(self) -> bool:
        """Tell whether the program is installed here."""

    @abstractmethod
    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Resources
    ) -> list[str] | tuple[list[str], list[str], MutableMapping[str, str]]:
        """Return the command line, and add the variables that it needs to ``environment``."""

    def add_export(self, key: str, var: str) -> None:
        """Set an environment variable of the ranks."""
        key, value = key.strip(), var.strip()
        self.variables[key] = value
        self.exports[key] = value if re.fullmatch(r"[\w@%+=:,./-]*", value) else _double_quoted(value)

    def parse_user_args(self) -> list[str]:
        return list(self.args.user_args)

    @property
    def name(self) -> str:
        """Name of the launcher, as `--launcher` accepts it."""
        return self.launcher or type(self).__name__

    def validate_args(self) -> None:  # noqa: B027 - most have no limits
        """Raise LaunchError (a ValueError) for options that the launcher does not support."""

    @classmethod  # noqa: B027 - most take any
    def validate_active_resources(cls, active_resources: Resources) -> None:
        """Raise LaunchError (a ValueError) for slots that the launcher does not support."""

    def launcher_arguments(self) -> list[str]:
        return shlex.split(self.args.launcher_args)


class PDSHRunner(MultiNodeRunner):
    """Parallel distributed shell, over ssh."""

    launcher = constants.PDSH_LAUNCHER

    def backend_exists(self) -> bool:
        return shutil.which("pdsh") is not None

    def parse_user_args(self) -> list[str]:
        return [_for_pdsh(argument) for argument in self.args.user_args]

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Resources
    ) -> tuple[list[str], list[str], MutableMapping[str, str]]:
        """Return (command, command that kills its remote processes, environment of both)."""
        environment["PDSH_RCMD_TYPE"] = "ssh"
        if self.args.ssh_port is not None:
            appended = environment.get("PDSH_SSH_ARGS_APPEND", "")
            environment["PDSH_SSH_ARGS_APPEND"] = f"{appended} -p {self.args.ssh_port}".strip()
        workers = ",".join(slots_of(active_resources))
        hosts = ["-f", str(constants.PDSH_MAX_FAN_OUT), "-w", workers, *self.launcher_arguments()]
        steps = [f"cd {_for_pdsh(os.path.abspath('.'))}"]
        if self.args.venv_script is not None:
            steps.append(f". {_for_pdsh(self.args.venv_script)}")
        steps += [f"export {name}={_for_pdsh(value)}" for name, value in self.variables.items()]
        steps.append(f"export {RUNNER_PID}=$PPID")  # ends with the connection, however that ends
        module = "deepspeed.tools.launcher.launch"
        launch = [sys.executable, "-u", "-m", module]
        job = f"--job={socket.gethostname()}-{os.getpid()}"  # the user may run two jobs on the same hosts
        launch += [f"--world_info={self.world_info_base64}", job, "--node_rank=%n"]
        launch += [f"--master_addr={self.args.master_addr}", f"--master_port={self.args.master_port}"]
        launch += node_options(self.args)
        words = [word if word == "--node_rank=%n" else _for_pdsh(word) for word in launch]
        steps.append(" ".join(["exec", *words, _for_pdsh(self.user_script), *self.user_arguments]))
        # The brackets keep the pattern from matching pkill's own command line.
        ours = _for_pdsh(f"[{module[0]}]{module[1:]} --world_info={self.world_info_base64} {job} ")
        end = ["pdsh", *hosts, f"pkill -TERM -f {ours}"]
        return ["pdsh", "-S", *hosts, " && ".join(steps)], end, environment


def _double_quoted(text: str) -> str:
    escaped = re.sub(r'([\\"$`])', r"\\\1", text)
    return f'"{escaped}"'


def _for_pdsh(text: str) -> str:
    """Quote a word for the remote shell; pdsh itself expands ``%h``, ``%n`` and ``%u``."""
    return shlex.quote(text).replace("%", "%%")


class _StartsRanks(MultiNodeRunner):
    """A launcher that starts the ranks itself. ``resource_pool``: host -> number of slots, for all hosts."""

    program = "mpirun"
    needs: tuple[str, ...] = ()
    """Other programs by which the launcher is recognised."""

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Resources) -> None:
        super().__init__(args, world_info_base64)
        self.resource_pool = resource_pool

    def backend_exists(self) -> bool:
        return all(shutil.which(program) is not None for program in (*self.needs, self.program))

    def validate_args(self) -> None:
        if self.args.no_ssh or self.args.enable_each_rank_log is not None:
            option = "--no_ssh" if self.args.no_ssh else "--enable_each_rank_log"
            raise LaunchError(
                f"{option} is only supported by this package's own launchers; with --launcher {self.name} "
                "use its options (--launcher_args)"
            )

    def helper(self) -> list[str]:
        """Return the command line of every rank."""
        command = [sys.executable, "-u", "-m", "deepspeed.tools.launcher.launcher_helper"]
        command += [f"--launcher={self.name}", f"--world_info={self.world_info_base64}"]
        command += [f"--master_addr={self.args.master_addr}", f"--master_port={self.args.master_port}"]
        flags = ("module", "no_python", "bind_cores_to_rank")
        command += [f"--{flag}" for flag in flags if getattr(self.args, flag)]
        if self.args.bind_cores_to_rank and self.args.bind_core_list:
            command.append(f"--bind_core_list={self.args.bind_core_list}")
        return [*command, self.user_script, *self.user_arguments]

    def own_binding_off(self, option: str, *values: str) -> list[str]:
        """Return ``option`` with its values if ranks bind themselves (``--bind_cores_to_rank``) and the launcher's own
        arguments set no binding; else an empty list. A rank must see all cores of its machine to take its share.
        """
        name = option.lstrip("-").partition("=")[0]
        given = {argument.lstrip("-").partition("=")[0] for argument in self.launcher_arguments()}
        return [option, *values] if self.args.bind_cores_to_rank and name not in given else []

    def exported(self, environment: MutableMapping[str, str]) -> list[str]:
        """Add the exports to the environment; return their names."""
        environment.update(self.variables)
        return list(self.variables)

    def slots_each(self, slots: Mapping[str, Sequence[int]]) -> int:
        """Return the number of ranks per machine. Raises LaunchError if machines differ."""
        counts = {len(each) for each in slots.values()}
        if len(counts) > 1:
            raise LaunchError(
                f"--launcher {self.name} starts the same number of ranks on each machine, but the hosts "
                f"have {_spelled(slots)}; choose with --include"
            )
        return counts.pop()


class OpenMPIRunner(_StartsRanks):
    """``mpirun`` of Open MPI."""

    launcher = constants.OPENMPI_LAUNCHER
    needs = ("ompi_info",)

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Resources) -> list[str]:
        slots = slots_of(active_resources)
        hosts = ",".join(f"{host}:{len(each)}" for host, each in slots.items())
        command = [self.program, "-n", str(sum(map(len, slots.values()))), "--host", hosts]
        command += ["--map-by", "slot", "--mca", "btl", "^openib"]
        given = self.launcher_arguments()
        # The documented default. Whether the interface exists is known for this machine only.
        here = {host.rpartition("@")[2] for host in slots} & {THIS_MACHINE, socket.gethostname()}
        if "btl_tcp_if_include" not in given and (not here or Path("/sys/class/net/eth0").exists()):
            command += ["--mca", "btl_tcp_if_include", "eth0"]
        command += self.own_binding_off("--bind-to", "none")
        for name in self.exported(environment):
            command += ["-x", name]
        return [*command, *given, *self.helper()]


class _Hydra(_StartsRanks):
    """``mpirun`` with the Hydra process manager."""

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Resources) -> list[str]:
        slots = slots_of(active_resources)
        each = self.slots_each(slots)
        command = [self.program, "-n", str(each * len(slots)), "-ppn", str(each), "-hosts", ",".join(slots)]
        names = self.exported(environment)
        if names:
            command += ["-genvlist", ",".join(names)]
        return [*command, *self.launcher_arguments(), *self.helper()]


class MPICHRunner(_Hydra):
    """``mpirun`` of MPICH."""

    launcher = constants.MPICH_LAUNCHER


class IMPIRunner(_Hydra):
    """``mpirun`` of Intel's MPI."""

    launcher = constants.IMPI_LAUNCHER

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Resources) -> None:
        super().__init__(args, world_info_base64, resource_pool)
        if args.bind_cores_to_rank:
            self.add_export("I_MPI_PIN", "0")


class MVAPICHRunner(_Hydra):
    """``mpirun`` of MVAPICH2."""

    launcher = constants.MVAPICH_LAUNCHER
    needs = ("mpiname",)

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Resources) -> None:
        super().__init__(args, world_info_base64, resource_pool)
        # For ranks that use CUDA, and threads besides the communicating one.
        for name, value in (
            ("SMP_USE_CMA", 0),
            ("DEBUG_SHOW_BACKTRACE", 1),
            ("SUPPORT_DL", 1),
            ("ENABLE_AFFINITY", 0),
        ):
            self.add_export(f"MV2_{name}", str(value))

    def backend_exists(self) -> bool:
        """Tell whether ``mpirun`` and MVAPICH2, recognised by the output of ``mpiname``, are installed."""
        if not super().backend_exists():
            return False
        answer = subprocess.run(
            ["mpiname"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
        )
        return "MVAPICH2" in answer.stdout


class SlurmRunner(_StartsRanks):
    """``srun``, inside an allocation or not."""

    launcher = constants.SLURM_LAUNCHER
    program = "srun"
    needs = ("sinfo",)

    @classmethod
    def validate_active_resources(cls, active_resources: Resources) -> None:
        slots = slots_of(active_resources)
        if len(set(map(len, slots.values()))) > 1:
            raise LaunchError(
                "--launcher slurm needs the same slot count on every host, as srun starts the same number "
                f"of ranks on each; here: {_spelled(slots)}. Choose with --include"
            )

    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Resources) -> list[str]:
        self.validate_active_resources(active_resources)
        slots = slots_of(active_resources)
        each = self.slots_each(slots)
        command = [self.program, "-n", str(each * len(slots)), "--nodes", str(len(slots))]
        # with a filter, the long option: scripts search the command line for it to find the remaining hosts
        hosts = "--nodelist" if self.args.include or self.args.exclude else "-w"
        command += ["--ntasks-per-node", str(each), hosts, ",".join(slots), "--kill-on-bad-exit=1"]
        if self.args.num_gpus > 0 and self._may_ask_for_gpus():
            command += ["--gpus-per-node", str(self.args.num_gpus)]
        command += self.own_binding_off("--cpu-bind=none")
        self.exported(environment)
        return [*command, "--export=ALL", *self.launcher_arguments(), *self.helper()]

    def _may_ask_for_gpus(self) -> bool:
        """Tell whether to pass ``--gpus-per-node``: Slurm refuses it in an allocation without GPUs. Also False if ranks
        compute on CPUs, or the user asks for GPUs."""
        if "SLURM_JOB_ID" in os.environ:
            return any(name in os.environ for name in ("SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE"))
        words = self.launcher_arguments()
        given = any(word.startswith(("--gpus", "--gres", "-G")) for word in words)
        return os.environ.get("DS_ACCELERATOR") != "cpu" and not given


def _spelled(slots: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{host}: {len(each)}" for host, each in slots.items())


RUNNERS: dict[str, type[MultiNodeRunner]] = {
    constants.PDSH_LAUNCHER: PDSHRunner,
    constants.OPENMPI_LAUNCHER: OpenMPIRunner,
    constants.MPICH_LAUNCHER: MPICHRunner,
    constants.IMPI_LAUNCHER: IMPIRunner,
    constants.SLURM_LAUNCHER: SlurmRunner,
    constants.MVAPICH_LAUNCHER: MVAPICHRunner,
}
