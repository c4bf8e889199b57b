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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed.base.logging import logger
from deepspeed.tools.autotuning.arguments import ACCELERATE_CONFIG, LAUNCHER, arguments_for, start_command
from deepspeed.tools.autotuning.utils import get_val_by_key, search_error

METRICS = "metrics.json"
CONFIG = "ds_config.json"
GRACE_S = 60.0


class ResourceManager:
    """Runs experiments sequentially, so that none slows another down.

    Args:
        args: The parsed command line of the launcher, with ``user_script`` and ``user_args``.
        hosts: Machines.
        num_gpus_per_node: Slots per machine.
        results_dir: Accepted for the documented signature: each experiment names its own folder.
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
        self.hosts = list(hosts)
        self.num_gpus_per_node = num_gpus_per_node
        self.exps_dir = exps_dir
        self.arg_mappings = {key.strip(): name for key, name in (arg_mappings or {}).items()}
        self.overwrite = False
        self.pbar: Any = None

    def run(self, exp: dict[str, Any]) -> str | None:
        """Run an experiment, unless it has a result that is not to be overwritten. Returns its error."""
        description = Path(self.exps_dir) / f"{exp['name']}.json"
        description.parent.mkdir(parents=True, exist_ok=True)
        description.write_text(json.dumps(exp, indent=2), encoding="utf-8")
        if not self.overwrite and metrics_of(exp) is not None:
            return None
        if exp["num_nodes"] > len(self.hosts):
            return f"{exp['num_nodes']} machines with {exp['num_gpus']} slots each are not available"
        folder = Path(exp["result_dir"])
        (folder / METRICS).unlink(missing_ok=True)
        exp["launcher"] = start_command(self.args, self.devices())
        user_args = arguments_for(self.args.user_args, folder / CONFIG, exp["ds_config"], self.arg_mappings)
        code = run_experiment(exp, self.args.user_script, user_args)
        if self.pbar is not None:
            self.pbar.update(1)
        if metrics_of(exp) is not None:
            return None
        end = int(get_val_by_key(exp["ds_config"], "end_profile_step") or 0)
        reported = search_error(str(folder / "stderr.log"))
        return reported or f"it exited with code {code} before step {end}"

    def devices(self) -> str:
        """Return the launcher option that selects the machines' slots."""
        if len(self.hosts) == 1:
            return f"--num_gpus={self.num_gpus_per_node}"
        slots = ",".join(map(str, range(self.num_gpus_per_node)))
        return f"--include={'@'.join(f'{host}:{slots}' for host in self.hosts)}"


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


def run_experiment(exp: dict[str, Any], user_script: str, user_args: Sequence[str]) -> int:
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
