"""Runs experiments: each is a job of the launcher, with a folder for its inputs and results.

Files of an experiment in ``results_dir/NAME``: ``exp.json`` (the experiment), ``ds_config.json``, ``cmd.txt``,
``stdout.log``, ``stderr.log``, and ``metrics.json``, which the run writes at its end.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed.base.logging import logger
from deepspeed.tools.autotuning.arguments import ACCELERATE_CONFIG, LAUNCHER, arguments_for, start_command
from deepspeed.tools.autotuning.tuner.base_tuner import better
from deepspeed.tools.autotuning.utils import get_val_by_key, search_error

METRICS = "metrics.json"
CONFIG = "ds_config.json"
GRACE_S = 60.0


class Node:
    """A machine with free and reserved slots."""

    def __init__(self, host: str, max_slots: int) -> None:
        self.host = host
        self.max_slots = max_slots
        self.idle_slots = list(range(max_slots))

    def reserve_slots(self, slot_request: int) -> list[int]:
        """Reserve the requested number of slots; return an empty list if there are too few."""
        if len(self.idle_slots) < slot_request:
            return []
        taken, self.idle_slots = self.idle_slots[:slot_request], self.idle_slots[slot_request:]
        return taken

    def restore_slots(self, slots: list[int]) -> None:
        self.idle_slots = sorted({*self.idle_slots, *slots})


class Reservation:
    """Slots of one machine for one experiment."""

    def __init__(self, node: Node, slots: list[int]) -> None:
        self.node = node
        self.slots = slots

    def restore_slots(self) -> None:
        self.node.restore_slots(self.slots)

    def desc(self) -> str:
        """Return the slots in the syntax of ``--include``, with a trailing "@": ``host:0,1@``."""
        return f"{self.node.host}:{','.join(map(str, self.slots))}@"


class ResourceManager:
    """Runs experiments sequentially, so that none slows another down.

    Args:
        args: The parsed command line of the launcher, with ``user_script`` and ``user_args``.
        hosts: Machines.
        num_gpus_per_node: Slots per machine.
        results_dir: Folder of the results.
        exps_dir: Folder of the experiments' descriptions.
        arg_mappings: Key of the config -> argument of the script that must have the same value.
    """

    def __init__(
        self,
        args: Any,
        hosts: Sequence[str],
        num_gpus_per_node: int,
        results_dir: str,
        exps_dir: str,
        arg_mappings: Mapping[str, str] | None,
    ) -> None:
        self.args = args
        self.nodes = [Node(host, num_gpus_per_node) for host in hosts]
        self.num_gpus_per_node = num_gpus_per_node
        self.results_dir = results_dir
        self.exps_dir = exps_dir
        self.arg_mappings = {key.strip(): name for key, name in (arg_mappings or {}).items()}
        self.overwrite = False
        self.pbar: Any = None
        self.experiment_count = 0
        self.experiment_queue: deque[dict[str, Any]] = deque()
        self.running_experiments: dict[int, tuple[dict[str, Any], list[Reservation], int]] = {}
        self.finished_experiments: dict[int, tuple[dict[str, Any], str | None]] = {}

    def schedule_experiments(self, exp_paths: Sequence[str]) -> None:
        """Queue experiments; those with a result count as finished, unless results are overwritten."""
        for exp_path in exp_paths:
            exp = json.loads(Path(exp_path).read_text(encoding="utf-8"))
            exp["exp_id"] = self.experiment_count
            exp["result_dir"] = str(
                Path(exp.get("result_dir") or Path(self.results_dir) / exp["name"]).absolute()
            )
            self.experiment_count += 1
            if not self.overwrite and metrics_of(exp) is not None:
                self.finished_experiments[exp["exp_id"]] = (exp, None)
            else:
                self.experiment_queue.append(exp)

    def run(self) -> None:
        """Run all queued experiments to their end."""
        while self.experiment_queue:
            exp = self.experiment_queue.popleft()
            reservations = self.resource_request(exp)
            if not reservations:
                error = f"{exp['num_nodes']} machines with {exp['num_gpus']} slots each are not there"
                self.finished_experiments[exp["exp_id"]] = (exp, error)
                continue
            self.run_job(exp, reservations)
            self.experiment_check(self.pbar)

    def run_job(self, exp: dict[str, Any], reservations: list[Reservation]) -> None:
        """Run one experiment on the reserved slots."""
        (Path(exp["result_dir"]) / METRICS).unlink(missing_ok=True)
        exp["launcher"] = start_command(self.args, self.devices(exp, reservations))
        config = Path(exp["result_dir"]) / CONFIG
        user_args = arguments_for(self.args.user_args, config, exp["ds_config"], self.arg_mappings)
        try:
            code = run_experiment(exp, reservations, self.args.user_script, user_args)
        finally:
            clean_up(exp, reservations)
        self.running_experiments[exp["exp_id"]] = (exp, reservations, code)

    def devices(self, exp: Mapping[str, Any], reservations: Sequence[Reservation] = ()) -> str:
        """Return the launcher option that selects the experiment's slots."""
        if len(self.nodes) == 1:
            return f"--num_gpus={exp['num_gpus']}"
        chosen = reservations or [Reservation(node, list(range(exp["num_gpus"]))) for node in self.nodes]
        return f"--include={'@'.join(reservation.desc().rstrip('@') for reservation in chosen)}"

    def experiment_check(self, pbar: Any) -> None:
        """Move ended experiments to the finished ones, with their errors; ``pbar``: a progress bar, or None."""
        for number, (exp, _, code) in list(self.running_experiments.items()):
            error = None
            if metrics_of(exp) is None:
                reported = search_error(str(Path(exp["result_dir"]) / "stderr.log"))
                end = int(get_val_by_key(exp["ds_config"], "end_profile_step") or 0)
                error = reported or f"it ended with code {code} before step {end}"
            self.finished_experiments[number] = (exp, error)
            del self.running_experiments[number]
            if pbar is not None:
                pbar.update(1)

    def resource_request(self, exp: dict[str, Any]) -> list[Reservation]:
        """Reserve slots on as many machines as the experiment asks for; return an empty list if there are too few."""
        reservations = []
        for node in self.nodes:
            if len(reservations) < exp["num_nodes"] and (slots := node.reserve_slots(exp["num_gpus"])):
                reservations.append(Reservation(node, slots))
        if len(reservations) == exp["num_nodes"]:
            return reservations
        for reservation in reservations:
            reservation.restore_slots()
        return []

    def status(self) -> str:
        """Return the number of free slots of each machine."""
        return ", ".join(f"{node.host} ({len(node.idle_slots)}/{node.max_slots} free)" for node in self.nodes)

    def save_exp_results_to_database(
        self, message: str, ranks: Sequence[int] | None = None, path: str | None = None
    ) -> None:
        """Append ``{"message": ...}`` to a JSON Lines file, on the given ranks only."""
        rank = int(os.environ.get("RANK", "0"))
        if path is not None and (not ranks or -1 in ranks or rank in ranks):
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"message": message}) + "\n")

    @property
    def results(self) -> list[tuple[dict[str, Any], float | None]]:
        """Finished experiments with their metrics; None for failed ones."""
        found = []
        for exp, _ in self.finished_experiments.values():
            metrics = metrics_of(exp) or {}
            found.append((exp, metrics.get(exp["ds_config"]["autotuning"].get("metric", "throughput"))))
        return found

    def parse_results(self, metric: str) -> tuple[dict[str, Any] | None, float | None]:
        """Return the best finished experiment and its value; (None, None) if all have failed."""
        best: tuple[dict[str, Any] | None, float | None] = (None, None)
        for exp, error in self.finished_experiments.values():
            value = (metrics_of(exp) or {}).get(metric)
            if error is not None:
                logger.info("autotuning: %s failed: %s", exp["name"], error)
            elif better(metric, value, best[1]):
                best = (exp, value)
        return best

    def clear(self) -> None:
        """Forget queued and finished experiments; their files remain."""
        self.experiment_queue.clear()
        self.finished_experiments.clear()


def metrics_of(exp: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read the metrics of a run; None if it has not succeeded."""
    try:
        return json.loads((Path(exp["result_dir"]) / METRICS).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None


def get_job_id() -> str:
    """Return the job id of the cluster's scheduler, or "unknown-job-id"."""
    for name in ("SLURM_JOB_ID", "DLWS_JOB_ID", "DLTS_JOB_ID", "PBS_JOBID"):
        if name in os.environ:
            return os.environ[name]
    return "unknown-job-id"


def get_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown-user"


# One run ---------------------------------------------------------------------------------------------------------


def run_experiment(
    exp: dict[str, Any], reservations: Sequence[Reservation], user_script: str, user_args: Sequence[str]
) -> int:
    """Run the script with the experiment's config, and write the experiment's files. Returns the exit code. Ctrl-C
    stops the run before it propagates."""
    folder = Path(exp["result_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    exp["job_id"], exp["user"] = get_job_id(), get_user()
    (folder / CONFIG).write_text(json.dumps(exp["ds_config"], indent=2), encoding="utf-8")
    command = [*(exp.get("launcher") or [*LAUNCHER, user_script]), *user_args]
    (folder / "exp.json").write_text(json.dumps(exp, indent=2), encoding="utf-8")
    (folder / "cmd.txt").write_text(f"{shlex.join(command)}\n", encoding="utf-8")
    environment = environment_for(folder / CONFIG, exp.get("environment") or {})
    began = time.monotonic()
    with open(folder / "stdout.log", "wb") as out, open(folder / "stderr.log", "wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True)
        try:
            code = process.wait()
        except BaseException:
            _end(process)
            raise
    logger.debug("autotuning: %s took %.1f s", exp["name"], time.monotonic() - began)
    return code


def environment_for(config: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a run; it points Accelerate scripts at the experiment's config."""
    environment = {**os.environ, **more}
    if ACCELERATE_CONFIG in environment:
        environment[ACCELERATE_CONFIG] = str(config)
    return environment


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the launcher, which ends its ranks; kill its process group after ``GRACE_S``."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def clean_up(exp: dict[str, Any], reservations: Sequence[Reservation]) -> None:
    """Release the slots. The launcher has already ended all processes of the run."""
    for reservation in reservations:
        reservation.restore_slots()
