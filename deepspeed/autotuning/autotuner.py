"""``deepspeed --autotuning``: which ZeRO stage and micro-batch size train fastest on this machine.

One short run asks the memory plan what every stage needs and measures what the activations of a sample take; what
cannot fit is never started. With the default tuner a second run of another size calibrates a model of the step's time,
which says which of the remaining configs are worth a run.
"""

from __future__ import annotations

import copy
import json
import shlex
import subprocess
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from deepspeed.autotuning.arguments import LAUNCHER, arguments_for, given_config, launcher_command, value_of
from deepspeed.autotuning.config import DeepSpeedAutotuningConfig
from deepspeed.autotuning.scheduler import ResourceManager, metrics_of
from deepspeed.autotuning.search import PLATEAU, Search
from deepspeed.autotuning.tuner.base_tuner import BaseTuner, better
from deepspeed.autotuning.tuner.index_based_tuner import GridSearchTuner, RandomTuner
from deepspeed.autotuning.tuner.model_based_tuner import ModelBasedTuner
from deepspeed.autotuning.utils import (
    canonical_name,
    get_list,
    memory_to_string,
    number_to_string,
    write_experiments,
)
from deepspeed.utils.logging import logger

MODEL_INFO = "profile_model_info"
OPTIMAL_CONFIG, OPTIMAL_COMMAND, SUMMARY = "ds_config_optimal.json", "cmd_optimal.txt", "summary.txt"
STAGES = (0, 1, 2, 3)
SPARE = 0.9
"""The share of free memory that a config may need: the rest is for what no plan knows."""


class AutotuningError(ValueError):
    """Nothing can be tuned as it was asked for; the message says why and what to do."""


class Autotuner:
    """Finds the config with the best ``autotuning.metric``.

    Args:
        args: The parsed command line of the launcher: ``user_script`` and ``user_args`` are the script and its
            arguments, which name the config (``--deepspeed_config FILE``, or ``--deepspeed FILE`` of the Trainer).
        active_resources: Host -> slots to use.

    Raises:
        ValueError: The script is given no config, or it cannot be read.
    """

    def __init__(self, args: Any, active_resources: dict[str, Sequence[int]]) -> None:
        self.args = args
        self.user_config = given_config(args.user_args)
        given = self.user_config.get("autotuning") or {}
        self.autotuning_config = DeepSpeedAutotuningConfig(**given)
        self.given = given
        section = self.autotuning_config
        self.exps_dir, self.results_dir = section.exps_dir, section.results_dir
        self.num_nodes = section.num_nodes or len(active_resources)
        self.num_gpus = section.num_gpus or min(map(len, active_resources.values()))
        self.exp_num_nodes, self.exp_num_gpus = self.num_nodes, self.num_gpus
        hosts = list(active_resources)[: self.num_nodes]
        self.rm = ResourceManager(
            args, hosts, self.num_gpus, self.results_dir, self.exps_dir, section.arg_mappings
        )
        self.rm.overwrite = bool(given.get("overwrite", False))
        self.model_info: dict[str, Any] = {}
        self.records: dict[str, list[tuple[dict[str, Any], float, int]]] = {}
        self.counts: dict[str, int] = {}
        """Experiments of each space, also those that measured nothing."""
        self.optimal_ds_config: dict[str, Any] | None = None
        self.optimal_cmd: list[str] | None = None
        self.reason = ""
        self.search = Search(self.metric())
        self._began = time.monotonic()

    # What the section says ------------------------------------------------------------------------------------

    def metric(self) -> str:
        return self.autotuning_config.metric

    def fast_enabled(self) -> bool:
        return self.autotuning_config.fast

    def max_train_batch_size(self) -> int | None:
        return self.autotuning_config.max_train_batch_size

    def mp_size(self) -> int:
        return self.autotuning_config.mp_size

    def max_train_micro_batch_size_per_gpu(self) -> int:
        most = self.autotuning_config.max_train_micro_batch_size_per_gpu
        whole = self.max_train_batch_size()
        if whole is not None:
            most = min(most, whole // (self.get_gas_from_user_config() * self._data_parallel()))
        return max(most, 1)

    def min_train_micro_batch_size_per_gpu(self) -> int:
        least, ranks = self.autotuning_config.min_train_batch_size, self._data_parallel()
        samples = -(-least // (self.get_gas_from_user_config() * ranks))
        return max(self.autotuning_config.min_train_micro_batch_size_per_gpu, samples)

    def num_tuning_micro_batch_sizes(self) -> int:
        return self.autotuning_config.num_tuning_micro_batch_sizes

    def fp16_enabled(self) -> bool:
        return bool((self.user_config.get("fp16") or {}).get("enabled", False))

    def _data_parallel(self) -> int:
        return max(1, self.num_gpus * self.num_nodes // self.mp_size())

    def get_val_from_user_args(self, ds_name: str) -> str | None:
        """The value that the script's arguments give to a key of the config, by ``arg_mappings``."""
        name = self.rm.arg_mappings.get(ds_name)
        return value_of(self.args.user_args, name) if name else None

    def get_gas_from_user_config(self) -> int:
        """Accumulation steps, from the config or the script's arguments; 1 by default."""
        given = self.user_config.get("gradient_accumulation_steps")
        if given in (None, "auto"):
            given = self.get_val_from_user_args("gradient_accumulation_steps")
        return int(given) if given not in (None, "auto") else 1

    # What one run finds out about the model -------------------------------------------------------------------

    def model_info_profile_run(self) -> dict[str, Any]:
        """Parameters, memory by stage, and activations of a sample; from an earlier run if its files are there. Raises
        AutotuningError: the script does not run."""
        path = Path(self.results_dir).absolute() / MODEL_INFO / "model_info.json"
        error = None
        for stage in self._stages():
            if not self._can_fit(stage):
                continue
            size = self.min_train_micro_batch_size_per_gpu()
            exp = self._experiment(stage, size, MODEL_INFO)
            exp["ds_config"]["autotuning"] |= {"model_info": {"profile": True}, "model_info_path": str(path)}
            error = self._run([exp])
            self.model_info = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            if error is None:
                self._learn(exp, stage, size)
                return self.model_info
        raise AutotuningError(
            f"the first run of {self.args.user_script} did not reach its end ({error or 'no stage fits the memory'}); "
            f"{Path(self.results_dir) / MODEL_INFO / 'stderr.log'} has what it said"
        )

    def get_model_num_params(self) -> int:
        """Parameters of the model, once it has been profiled, or as the section says; 0 if neither is known."""
        told = self.autotuning_config.model_info
        return int(self.model_info.get("num_params") or (told and told.num_params) or 0)

    def get_activation_memory_per_gpu(self) -> int:
        """Bytes that a forward keeps for its backward, for one sample."""
        known = self.model_info.get("activation_mem_per_gpu", 0)
        return int(known // max(1, self.model_info.get("micro_batch") or 1))

    def get_gpu_memory_info(self) -> int | None:
        """Free bytes where the model computes, for one rank; None if it is not known."""
        for plan in self.model_info.get("stages", {}).values():
            if "near" in plan and plan["free"][plan["near"]] is not None:
                sharing = self.model_info["ranks_per_node"] if plan["near"] == "host" else 1
                return plan["free"][plan["near"]] // sharing
        return None

    def get_instantiation_memory_required_per_gpu(self, zero_stage: int) -> int:
        """Bytes for weights, gradients and optimizer state of one rank at this stage, at the peak of a step."""
        plan = self.model_info.get("stages", {}).get(str(zero_stage), {})
        if "need" not in plan:
            return 0
        sharing = self.model_info["ranks_per_node"] if plan["near"] == "host" else 1
        return plan["need"][plan["near"]] // sharing

    def _can_fit(self, stage: int) -> bool:
        plan = self.model_info.get("stages", {}).get(str(stage))
        return plan is None or bool(plan.get("fits"))

    def _most_that_fits(self, stage: int) -> int:
        """Samples of a micro-batch that memory allows."""
        free, each = self.get_gpu_memory_info(), self.get_activation_memory_per_gpu()
        if free is None or not each:
            return self.max_train_micro_batch_size_per_gpu()
        left = int(free * SPARE) - self.get_instantiation_memory_required_per_gpu(stage)
        return max(0, left // each)

    # The space ------------------------------------------------------------------------------------------------

    def _stages(self) -> list[int]:
        """All, or those that the config names: one, or a list."""
        zero = self.user_config.get("zero_optimization") or {}
        given = zero.get("stage", "all") if isinstance(zero, dict) else "all"
        return list(STAGES) if given in ("all", "auto") else sorted(int(stage) for stage in get_list(given))

    def get_min_max_micro_batch_size(
        self, stage: int, min_micro_batch_size: int, calculated_max_micro_batch_size: int
    ) -> tuple[int, int]:
        """The smallest and largest micro-batch to try at this stage; (-1, 0) if none fits."""
        most = min(calculated_max_micro_batch_size, self._most_that_fits(stage))
        return (min_micro_batch_size, most) if most >= min_micro_batch_size else (-1, 0)

    def get_tuning_micro_batch_size_list(
        self, min_micro_batch_size: int, max_micro_batch_size: int, num_tuning_micro_batch_sizes: int
    ) -> list[int]:
        """So many sizes, the largest first halved and halved again, in ascending order."""
        if min_micro_batch_size <= 0 or max_micro_batch_size < min_micro_batch_size:
            return []
        given = self.user_config.get("train_micro_batch_size_per_gpu")
        if isinstance(given, list):
            return sorted(size for size in given if min_micro_batch_size <= size <= max_micro_batch_size)
        sizes: list[int] = []
        size = max_micro_batch_size
        if size > 2:  # sizes that divide well are faster
            size = 1 << (size.bit_length() - 1)
            size += size // 2 if size + size // 2 <= max_micro_batch_size else 0
        while len(sizes) < num_tuning_micro_batch_sizes and size >= min_micro_batch_size:
            sizes.append(size)
            size //= 2
        return sorted(sizes or [min_micro_batch_size])

    def _experiment(self, stage: int, size: int, name: str | None = None, **zero: Any) -> dict[str, Any]:
        config = copy.deepcopy(self.user_config)
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            config.pop(key, None)
        gas = self.get_gas_from_user_config()
        config |= {"train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": gas}
        section = dict(config.get("zero_optimization") or {})
        config["zero_optimization"] = {**section, "stage": stage, **zero}
        place = name or canonical_name(
            {"gradient_accumulation_steps": gas, "train_micro_batch_size_per_gpu": size, **zero},
            ["gradient_accumulation_steps", "train_micro_batch_size_per_gpu", *sorted(zero)],
            prefix=f"z{stage}",
        )
        folder = Path(self.results_dir).absolute() / place
        config["autotuning"] = {
            **self.given,
            "enabled": True,
            "start_profile_step": self.autotuning_config.start_profile_step,
            "end_profile_step": self.autotuning_config.end_profile_step,
            "metric": self.metric(),
            "metric_path": str(folder / "metrics.json"),
        }
        return {
            "name": place,
            "ds_config": config,
            "num_gpus": self.num_gpus,
            "num_nodes": self.num_nodes,
            "result_dir": str(folder),
        }

    # Running --------------------------------------------------------------------------------------------------

    def _run(self, exps: list[dict[str, Any]]) -> str | None:
        """Run experiments; returns the error of the last."""
        self.rm.schedule_experiments(write_experiments(exps, self.exps_dir))
        self.rm.run()
        error = None
        for exp, error in self.rm.finished_experiments.values():
            value = (metrics_of(exp) or {}).get(self.metric()) or 0.0
            shown = error or f"{value:.6g} {self._unit()}"
            logger.info("autotuning: %s: %s", exp["name"], shown)
        self.rm.clear()
        return error

    def _unit(self) -> str:
        return {"latency": "s per step", "throughput": "samples/s", "flops": "FLOPS"}[self.metric()]

    def _learn(self, exp: dict[str, Any], stage: int, size: int) -> float | None:
        """Remember what an experiment measured; returns its metric."""
        metrics = metrics_of(exp)
        if metrics is None:
            return None
        samples = metrics.get("samples")
        if samples and samples != size:
            self._sizes_are_fixed(samples, size)
        gas = exp["ds_config"]["gradient_accumulation_steps"]
        self.search.measured((stage, size), metrics["latency"] / gas)
        value = metrics.get(self.metric())
        space = f"z{stage}"
        self.update_records(space, exp, value, len(self.records.get(space, [])) + 1)
        return value

    def _sizes_are_fixed(self, samples: int, size: int) -> None:
        raise AutotuningError(
            f"train_micro_batch_size_per_gpu was {size}, but the script gave the model {samples} samples: name the "
            "argument that sets its batch size in the config, as "
            '"autotuning": {"arg_mappings": {"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"}}, '
            "or let the script read engine.train_micro_batch_size_per_gpu()"
        )

    def run_ds_config(self, ds_config: dict[str, Any], exp_name: str) -> float | None:
        """Run the script with a config of one's own; returns the metric, or None if it fails."""
        exp = self._experiment(0, 1, exp_name)
        exp["ds_config"] = {**copy.deepcopy(ds_config), "autotuning": exp["ds_config"]["autotuning"]}
        return None if self._run([exp]) else (metrics_of(exp) or {}).get(self.metric())

    # Tuning ---------------------------------------------------------------------------------------------------

    def tune(self) -> None:
        """Find the best config; what was found so far is kept if it is interrupted. AutotuningError: nothing ran."""
        try:
            self.model_info_profile_run()
            logger.info("autotuning: %s", self._about_the_model())
            if self.given.get("tuner_type", "model_based") == "model_based":
                self._tune_by_model()
            else:
                for stage in self._stages():
                    self.tune_space({"zero_optimization": {"stage": stage}})
        finally:
            self._choose()

    def _about_the_model(self) -> str:
        free = self.get_gpu_memory_info()
        return (
            f"{number_to_string(self.get_model_num_params())} parameters, "
            f"{memory_to_string(self.get_activation_memory_per_gpu(), 'B')} of activations per sample, "
            f"{memory_to_string(free, 'B') if free is not None else 'an unknown amount'} of memory per rank"
        )

    def _tune_by_model(self) -> None:
        """Measure where the model of the step's time expects most, until nothing promises to be better."""
        section = self.autotuning_config
        stages = [stage for stage in self._stages() if self._can_fit(stage)]
        self._calibrate(stages[0])
        since_best, best = 0, self._best()
        for _ in range(section.tuner_num_trials):
            chosen = self.search.next(stages, self._sizes)
            if chosen is None:
                self.reason = self.search.reason
                return
            self._measure(*chosen)
            now = self._best()
            since_best, best = (0, now) if better(self.metric(), now, best) else (since_best + 1, best)
            if since_best >= max(1, section.tuner_early_stopping):
                break
        self.reason = "the number of runs is limited"

    def _measure(self, stage: int, size: int) -> None:
        exp = self._experiment(stage, size)
        if self._run([exp]) is None:
            self._learn(exp, stage, size)
        else:
            self.search.measured((stage, size))

    def _calibrate(self, stage: int) -> None:
        """A second size beside the first: what of a micro-batch's time grows with it."""
        least = self.min_train_micro_batch_size_per_gpu()
        _, most = self.get_min_max_micro_batch_size(stage, least, self.max_train_micro_batch_size_per_gpu())
        size = min(4 * least, most)
        if size > least:
            self._measure(stage, size)

    def _best(self) -> float | None:
        values = [value for records in self.records.values() for _, value, _ in records]
        return (min if self.metric() == "latency" else max)(values, default=None)

    def _sizes(self, stage: int, limit: int | None = None) -> list[int]:
        """The micro-batches to try at a stage, none above ``limit``."""
        least, most = self.min_train_micro_batch_size_per_gpu(), self.max_train_micro_batch_size_per_gpu()
        if limit is not None:
            most = max(least, min(most, limit))
        least, most = self.get_min_max_micro_batch_size(stage, least, most)
        return self.get_tuning_micro_batch_size_list(least, most, self.num_tuning_micro_batch_sizes())

    def tune_space(
        self,
        tuning_space: dict[str, Any],
        prev_max_mbs: int = 0,
        prev_best_mbs: int = 0,
        prev_best_metric_val: float = 0,
    ) -> tuple[int, int, float | None]:
        """Explore one stage with the tuner of the section. Returns the largest micro-batch that fits, the best, and its
        metric; what was passed if nothing fits."""
        stage = int(tuning_space["zero_optimization"]["stage"])
        sizes = self._sizes(stage) if self._can_fit(stage) else []
        if not sizes:
            logger.info("autotuning: z%d does not fit the memory", stage)
            return prev_max_mbs, prev_best_mbs, prev_best_metric_val
        return self.run_tuning_micro_batch_sizes(
            sizes,
            self.max_train_batch_size(),
            sizes[0],
            stage,
            isinstance(self.user_config.get("train_micro_batch_size_per_gpu"), list),
        )

    def run_tuning_micro_batch_sizes(
        self,
        tuning_micro_batch_sizes: Sequence[int],
        max_train_batch_size_per_gpu: int | None,
        min_micro_batch_size: int,
        stage: int,
        tuning_micro_batch_sizes_overwritten: bool,
    ) -> tuple[int, int, float | None]:
        """Run these sizes at one stage, in the order of the tuner. Returns the largest, the best, and its metric."""
        section, space = self.autotuning_config, {"zero_optimization": {"stage": stage}}
        exps = [self._experiment(stage, size) for size in tuning_micro_batch_sizes]
        tuner: BaseTuner
        if section.tuner_type == "random":
            tuner = RandomTuner(exps, self.rm, self.metric())
        elif section.tuner_type == "model_based":
            tuner = ModelBasedTuner(exps, self.rm, self.metric(), space)
        else:
            tuner = GridSearchTuner(exps, self.rm, self.metric())
        tuner.tune(1, section.tuner_num_trials, section.tuner_early_stopping)
        best_size, best = 0, None
        for exp, size in zip(exps, tuning_micro_batch_sizes, strict=True):
            value = self._learn(exp, stage, size)
            if better(self.metric(), value, best):
                best_size, best = size, value
        return max(tuning_micro_batch_sizes), best_size, best

    def get_plateau_mbs(self, tuning_space_name: str) -> int:
        """The smallest measured micro-batch of a space within 3 % of its best metric; 0 if nothing was measured."""
        records = self.records.get(tuning_space_name, [])
        if not records:
            return 0
        top = self.get_best_space_record(tuning_space_name)[1]
        near = [exp for exp, value, _ in records if abs(value - top) <= PLATEAU * abs(top)]
        return min(exp["ds_config"]["train_micro_batch_size_per_gpu"] for exp in near)

    # Results --------------------------------------------------------------------------------------------------

    def update_records(
        self, space_name: str, exp: dict[str, Any], metric_val: float | None, num_exps: int
    ) -> None:
        """Remember that ``num_exps`` experiments of a space were run up to this one; None: it measured nothing."""
        self.counts[space_name] = self.counts.get(space_name, 0) + 1
        if metric_val is not None:
            self.records.setdefault(space_name, []).append((exp, metric_val, num_exps))

    def get_best_space_record(self, space_name: str) -> Any:
        """(experiment, metric, experiments) of the best in a space; None if there is none."""
        best = None
        for record in self.records.get(space_name, []):
            if best is None or better(self.metric(), record[1], best[1]):
                best = record
        if best is None:
            return None
        return (*best[:2], self.counts.get(space_name, len(self.records[space_name])))

    def get_best_space_records(self) -> dict[str, Any]:
        """The best of each space, and of all as "global"."""
        found = {space: self.get_best_space_record(space) for space in sorted(self.records)}
        best = None
        for record in found.values():
            if best is None or better(self.metric(), record[1], best[1]):
                best = record
        if best is not None:
            found["global"] = (*best[:2], sum(record[2] for record in found.values()))
        return found

    def _choose(self) -> None:
        best = self.get_best_space_records().get("global")
        if best is None:
            return
        exp = best[0]
        self.optimal_ds_config = {
            key: value for key, value in exp["ds_config"].items() if key != "autotuning"
        }
        self.write_optimal_config()

    def write_optimal_config(self) -> None:
        """Write ``ds_config_optimal.json`` and ``cmd_optimal.txt`` to the folder of the results."""
        if self.optimal_ds_config is None:
            return
        folder = Path(self.results_dir).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / OPTIMAL_CONFIG
        path.write_text(json.dumps(self.optimal_ds_config, indent=2), encoding="utf-8")
        arguments = arguments_for(self.args.user_args, path, self.optimal_ds_config, self.rm.arg_mappings)
        launcher = launcher_command(self.args, self.rm.devices({"num_gpus": self.num_gpus}))
        self.optimal_cmd = [*launcher, self.args.user_script, *arguments]
        readable = ["deepspeed", *self.optimal_cmd[len(LAUNCHER) :]]
        (folder / OPTIMAL_COMMAND).write_text(f"{shlex.join(readable)}\n", encoding="utf-8")

    def print_tuning_results(self) -> None:
        """Print the table of the results, and write it to ``summary.txt``."""
        records = self.get_best_space_records()
        if not records:
            return
        rows = [
            (space, str(number), f"{value:.6g}", exp["name"])
            for space, (exp, value, number) in records.items()
        ]
        lines = _table(("tuning_space", "num_experiments", "best_metric_val", "best_exp_name"), rows)
        total = timedelta(seconds=round(time.monotonic() - self._began))
        exp, value, number = records["global"]
        lines += [
            "",
            f"Tuning completed in {total}. Total number of experiments: {number}.",
            f"The best is {exp['name']} with {value:.6g} {self._unit()}"
            + (f": {self.reason}." if self.reason else "."),
        ]
        lines += [
            f"{Path(self.results_dir) / OPTIMAL_CONFIG} has its config, {OPTIMAL_COMMAND} beside it the command."
        ]
        Path(self.results_dir).mkdir(parents=True, exist_ok=True)
        (Path(self.results_dir) / SUMMARY).write_text("\n".join(lines) + "\n", encoding="utf-8")
        print("\n".join(lines))

    def run_after_tuning(self) -> int:
        """Run the script with the best config; returns its exit code. AutotuningError: there is none."""
        if self.optimal_cmd is None:
            raise AutotuningError("no config was found that the script runs with")
        logger.info("autotuning: running %s", shlex.join(self.optimal_cmd[len(LAUNCHER) :]))
        return subprocess.run(self.optimal_cmd, check=False).returncode


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head))]
    lines = [head, tuple("-" * width for width in widths), *rows]
    return [
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |"
        for line in lines
    ]
