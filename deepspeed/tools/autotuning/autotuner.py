"""``deepspeed --autotuning``: search for the config that trains fastest on this machine.

One short run asks the memory plan for the needs of every stage, and of every choice that saves memory, and measures the
activation memory of a sample; configs that cannot fit are never started. With the default tuner, a second run with
another micro-batch size calibrates a model of the step time, which predicts which other configs are worth a run.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from deepspeed.base.exceptions import ExplainedError
from deepspeed.base.logging import logger
from deepspeed.observe.flops.report import params_to_string
from deepspeed.planning.report import size as size_text
from deepspeed.planning.variants import changed
from deepspeed.tools.autotuning.arguments import given_config, section_of, value_of
from deepspeed.tools.autotuning.memory import MemoryNeeds
from deepspeed.tools.autotuning.results import OPTIMAL_CONFIG, TuningResults, better
from deepspeed.tools.autotuning.scheduler import ResourceManager, environment_for, metrics_of
from deepspeed.tools.autotuning.search import Search
from deepspeed.tools.autotuning.space import (
    BUDGET,
    OFFLOAD,
    Point,
    SpaceChoice,
    choices_of,
    threads_to_try,
    without_ineffective_sizes,
    without_memory_choices,
)

MODEL_INFO = "profile_model_info"
STAGES = (0, 1, 2, 3)
DEFAULT_RUNS = 3
"""Runs after the two that calibrate, unless `tuner_num_trials` is set."""


class AutotuningError(ExplainedError, ValueError):
    """Tuning as requested is impossible; the message says why, and the remedy."""


class Autotuner(TuningResults):
    """Finds the config with the best ``autotuning.metric``.

    Args:
        args: The launcher's parsed command line. ``user_script`` and ``user_args``: the script and its arguments, which
            name the config (``--deepspeed_config FILE``, or ``--deepspeed FILE`` of the Trainer).
        active_resources: Host -> slots to use.

    Raises:
        ValueError: The script is given no config, or the config cannot be read.
    """

    def __init__(self, args: Any, active_resources: dict[str, Sequence[int]]) -> None:
        super().__init__()
        self.args = args
        self.user_config = given_config(args.user_args)
        given = self.user_config.get("autotuning") or {}
        section = self.autotuning_config = section_of(self.user_config)
        self.given, self.metric_name = given, section.metric
        self.exps_dir, self.results_dir = section.exps_dir, section.results_dir
        self.exp_num_nodes = section.num_nodes or len(active_resources)
        self.exp_num_gpus = section.num_gpus or min(map(len, active_resources.values()))
        hosts = list(active_resources)[: self.exp_num_nodes]
        self.rm = ResourceManager(
            args, hosts, self.exp_num_gpus, self.results_dir, self.exps_dir, section.arg_mappings
        )
        self.rm.overwrite = section.overwrite
        self.choices = self._space = choices_of(self.user_config, section.tuning_space, fast=section.fast)
        self.memory = MemoryNeeds(
            requested=self.choices.to_plan(self._stages()), limit=section.memory_per_rank
        )
        self._peaks: dict[Point, int] = {}
        self._samples_per_rank: int | None = None  # of the data set, if a run has exhausted it
        self._sizes_used: set[int] = set()  # micro-batch sizes that the script has used as configured
        self.search = Search(section.metric, lambda point: self.memory.plan_of(point), self._data_parallel())

    @property
    def model_info(self) -> dict[str, Any]:
        """Return the facts about the model that the first run wrote."""
        return self.memory.info

    # Settings of the section ----------------------------------------------------------------------------------

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
        samples = self._samples_per_rank or self.model_info.get("samples_per_rank")
        if samples is not None:  # a larger micro-batch would never be full
            most = min(most, samples)
        return max(most, 1)

    def min_train_micro_batch_size_per_gpu(self) -> int:
        least, ranks = self.autotuning_config.min_train_batch_size, self._data_parallel()
        samples = -(-least // (self.get_gas_from_user_config() * ranks))
        return max(self.autotuning_config.min_train_micro_batch_size_per_gpu, samples)

    def num_tuning_micro_batch_sizes(self) -> int:
        return self.autotuning_config.num_tuning_micro_batch_sizes

    def _data_parallel(self) -> int:
        return max(1, self.exp_num_gpus * self.exp_num_nodes // self.mp_size())

    def get_val_from_user_args(self, ds_name: str) -> str | None:
        """Return the value of a config key in the script's arguments, by ``arg_mappings``."""
        name = self.rm.arg_mappings.get(ds_name)
        return value_of(self.args.user_args, name) if name else None

    def get_gas_from_user_config(self) -> int:
        """Return the accumulation steps of the config or the script's arguments; 1 by default."""
        given = self.user_config.get("gradient_accumulation_steps")
        if given in (None, "auto"):
            given = self.get_val_from_user_args("gradient_accumulation_steps")
        if isinstance(given, list):
            return min(map(int, given))
        return int(given) if given not in (None, "auto") else 1

    def _accumulation_steps(self, point: Point) -> list[int]:
        """Return the accumulation steps to try at a micro-batch size: those listed; those that keep the train batch if
        only that is given and not only the essentials are tuned; else those of the config."""
        ranks = max(1, self._data_parallel() // point.model_ranks())
        given = self.user_config.get("gradient_accumulation_steps")
        if isinstance(given, list):
            most = self.max_train_batch_size()
            return [int(gas) for gas in given if most is None or int(gas) * point.size * ranks <= most]
        whole = self._fixed_train_batch()
        if whole is not None:
            return [whole // (point.size * ranks)] if whole % (point.size * ranks) == 0 else []
        return [self.get_gas_from_user_config()]

    def _fixed_train_batch(self) -> int | None:
        """Return the train batch to keep while micro-batch size and accumulation steps are tuned; None: it may
        change."""
        given, whole = (
            self.user_config.get(key) for key in ("gradient_accumulation_steps", "train_batch_size")
        )
        free = not self.fast_enabled() and given in (None, "auto")
        return whole if free and isinstance(whole, int) else None

    # Facts about the model from one run -----------------------------------------------------------------------

    def model_info_profile_run(self) -> dict[str, Any]:
        """Return parameters, memory by stage, and activation memory per sample; from an earlier run if its files exist.
        AutotuningError: the script does not run."""
        path = Path(self.results_dir).absolute() / MODEL_INFO / "model_info.json"
        error = None
        for point in self._first_points():
            exp = self._experiment(point, MODEL_INFO)
            exp["ds_config"]["autotuning"] |= {
                "model_info": {"profile": True},
                "model_info_path": str(path),
                "variants": self.memory.requested,
            }
            error = self._run(exp)
            if path.exists():
                self._narrow_choices(json.loads(path.read_text(encoding="utf-8")))
            if error is None:
                self._record(exp, point)
                return self.model_info
        raise AutotuningError(
            f"the first run of {self.args.user_script} did not finish ({error or 'no stage fits the memory'}); "
            f"{Path(self.results_dir) / MODEL_INFO / 'stderr.log'} has its output"
        )

    def _first_points(self) -> Iterator[Point]:
        """Yield configs to try first: as given, lowest stage first, then with choices that save memory. Excludes those
        known not to fit."""
        size = self.min_train_micro_batch_size_per_gpu()
        tried: set[Point] = set()
        for plain in (True, False):
            for stage in self._stages():
                for combination in self.choices.memory_combinations(stage):
                    point = Point(
                        stage,
                        size,
                        (self._accumulation_steps(Point(stage, size, 1, combination)) or [1])[0],
                        combination,
                    )
                    if bool(combination) is not plain and point not in tried and self.memory.can_fit(point):
                        tried.add(point)
                        yield point

    def _narrow_choices(self, info: dict[str, Any]) -> None:
        """Exclude choices that make no difference on this machine, or for this model."""
        self.memory = MemoryNeeds(info, self.memory.requested, self.memory.limit)
        self.search.has_device_memory = info.get("device_type", "cpu") != "cpu"
        space = self.autotuning_config.tuning_space
        useless = [] if self.search.has_device_memory else [OFFLOAD]
        useless += [BUDGET] if info.get("blocks", 0) == 0 else []
        self.choices = without_memory_choices(
            self._space, [key for key in useless if not any(given.startswith(key) for given in space)]
        )
        self.choices = without_ineffective_sizes(self.choices, self.get_model_num_params(), space)
        if not self.fast_enabled() and not self.search.has_device_memory and self.exp_num_nodes == 1:
            threads = threads_to_try(os.cpu_count() or 1, self.exp_num_gpus)
            self.choices = replace(self.choices, speed=(*self.choices.speed, threads))

    def get_model_num_params(self) -> int:
        """Return the number of parameters, as profiled or as in the section; 0 if neither is known."""
        profiled = self.autotuning_config.model_info
        return int(self.model_info.get("num_params") or (profiled and profiled.num_params) or 0)

    def get_activation_memory_per_gpu(self) -> int:
        """Return the activation memory of a sample in bytes, from forward to backward."""
        return int(self.memory.per_sample())

    def get_gpu_memory_info(self) -> int | None:
        """Return the free memory of the compute device per rank, in bytes; None if unknown."""
        return self.memory.free()

    # The space ------------------------------------------------------------------------------------------------

    def _stages(self) -> list[int]:
        """Return the stages to try: those in the config (one, or a list), or all."""
        zero = self.user_config.get("zero_optimization") or {}
        given = zero.get("stage", "all") if isinstance(zero, dict) else "all"
        if given in ("all", "auto"):
            return list(STAGES)
        return sorted(map(int, given)) if isinstance(given, list) else [int(given)]

    def get_min_max_micro_batch_size(
        self,
        stage: int,
        min_micro_batch_size: int,
        calculated_max_micro_batch_size: int,
        combination: tuple[SpaceChoice, ...] = (),
    ) -> tuple[int, int]:
        """Return the smallest and largest micro-batch size to try at this stage; (-1, 0) if none fits."""
        most = self.memory.most_that_fits(Point(stage, 1, 1, combination), calculated_max_micro_batch_size)
        return (min_micro_batch_size, most) if most >= min_micro_batch_size else (-1, 0)

    def get_tuning_micro_batch_size_list(
        self, min_micro_batch_size: int, max_micro_batch_size: int, num_tuning_micro_batch_sizes: int
    ) -> list[int]:
        """Return that many sizes in ascending order: the largest, its half, a quarter, and so on."""
        if min_micro_batch_size <= 0 or max_micro_batch_size < min_micro_batch_size:
            return []
        given = self.user_config.get("train_micro_batch_size_per_gpu")
        if isinstance(given, list):
            return sorted(size for size in given if min_micro_batch_size <= size <= max_micro_batch_size)
        sizes: list[int] = []
        size = max_micro_batch_size
        if size > 2:  # sizes with many factors of 2 are faster
            size = 1 << (size.bit_length() - 1)
            size += size // 2 if size + size // 2 <= max_micro_batch_size else 0
        while len(sizes) < num_tuning_micro_batch_sizes and size >= min_micro_batch_size:
            sizes.append(size)
            size //= 2
        return sorted(sizes or [min_micro_batch_size])

    def _points(self, limit: int | None = None) -> Iterator[Point]:
        """Yield all configs that can run, with micro-batch sizes up to ``limit``; collects the others in
        ``refused``."""
        self.refused = []
        for stage in self._stages():
            for combination in self.choices.memory_combinations(stage):
                base = Point(stage, self.min_train_micro_batch_size_per_gpu(), 1, combination)
                if not self.memory.can_fit(base):
                    self.refused.append(self._shortage(base))
                    continue
                for size in self._sizes(stage, limit, combination):
                    for gas in self._accumulation_steps(Point(stage, size, 1, combination)):
                        yield Point(stage, size, gas, combination)

    def _shortage(self, point: Point) -> str:
        planned, free = self.memory.planned(point) or {}, self.memory.free()
        text = ", ".join([f"stage {point.stage}", *(choice.text() for choice in point.choices)])
        if "error" in planned:
            return f"{text}: {planned['error']}"
        return (
            f"{text} does not fit: with {point.size} samples it needs {size_text(round(self.memory.need(point)))} "
            f"of {size_text(free or 0)} for each rank"
        )

    def _speed_choices(self, stage: int) -> list[SpaceChoice]:
        """Return choices to try one at a time from the best point, and that fit into memory."""
        best = self.search.best()
        return [c for c in self.choices.speed_choices(stage) if self.memory.can_fit(best.with_choice(c))]

    def _experiment(self, point: Point, name: str | None = None) -> dict[str, Any]:
        config = changed(self.user_config, point.changes)
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            config.pop(key, None)
        config |= {"train_micro_batch_size_per_gpu": point.size, "gradient_accumulation_steps": point.gas}
        section = config.get("zero_optimization")
        config["zero_optimization"] = {**(section if isinstance(section, dict) else {}), "stage": point.stage}
        config["wall_clock_breakdown"] = True
        place = name or point.name()
        folder = Path(self.results_dir).absolute() / place
        config["autotuning"] = {
            **{key: value for key, value in self.given.items() if key != "tuning_space"},
            "enabled": True,
            "start_profile_step": self.autotuning_config.start_profile_step,
            "end_profile_step": self.autotuning_config.end_profile_step,
            "metric": self.metric(),
            "metric_path": str(folder / "metrics.json"),
        }
        self.points[place] = point
        return {
            "name": place,
            "ds_config": config,
            "num_gpus": self.exp_num_gpus,
            "num_nodes": self.exp_num_nodes,
            "result_dir": str(folder),
            "environment": {key: str(value) for key, value in point.changes.items() if key.isupper()},
        }

    # Running --------------------------------------------------------------------------------------------------

    def _run(self, exp: dict[str, Any]) -> str | None:
        """Run an experiment; returns its error."""
        error = self.rm.run(exp)
        value = (metrics_of(exp) or {}).get(self.metric()) or 0.0
        logger.info("autotuning: %s: %s", exp["name"], error or f"{value:.6g} {self._unit()}")
        return error

    def _record(self, exp: dict[str, Any], point: Point) -> float | None:
        """Record the measurements of an experiment. Returns its metric."""
        metrics = metrics_of(exp)
        if metrics is None:
            return None
        samples = metrics.get("samples")
        if samples and samples != point.size:
            if not self._exhausts_data(samples, point.size):
                self._refuse_fixed_size(samples, point.size)
            self._samples_per_rank = samples
            logger.info("autotuning: %s: the data set has only %d samples per rank", exp["name"], samples)
            self.search.record(point)
            return None
        self._sizes_used.add(point.size)
        self.search.record(point, metrics["latency"], metrics.get("breakdown"))
        self._peaks[point] = int(metrics.get("peak_memory") or 0)
        value = metrics.get(self.metric())
        space = f"z{point.stage}"
        self.update_records(space, exp, value, len(self.records.get(space, [])) + 1)
        return value

    def _exhausts_data(self, samples: int, size: int) -> bool:
        """Tell whether a smaller micro-batch means that the data set is exhausted, rather than that the script has a
        fixed size: the script has followed the config before, and with other sizes."""
        return samples < size and bool(self._sizes_used) and self._sizes_used != {samples}

    def _refuse_fixed_size(self, samples: int, size: int) -> None:
        raise AutotuningError(
            f"train_micro_batch_size_per_gpu was {size}, but the script passed {samples} samples to the model: set "
            "the argument for its batch size in the config, as "
            '"autotuning": {"arg_mappings": {"train_micro_batch_size_per_gpu": "--per_device_train_batch_size"}}, '
            "or let the script read engine.train_micro_batch_size_per_gpu()"
        )

    # Tuning ---------------------------------------------------------------------------------------------------

    def tune(self) -> None:
        """Find the best config; an interruption keeps the results so far. AutotuningError: no experiment ran."""
        by_model = self.autotuning_config.tuner_type == "model_based"
        runs = 2 + self._most_runs() if by_model else None
        with tqdm(total=runs, desc="autotuning", unit="run", disable=None) as self.rm.pbar:
            try:
                self.model_info_profile_run()
                logger.info("autotuning: %s", self._model_summary())
                if by_model:
                    self._tune_by_model()
                else:
                    for stage in self._stages():
                        self._tune_stage(stage)
            finally:
                self._choose()

    def _model_summary(self) -> str:
        free = self.get_gpu_memory_info()
        return (
            f"{params_to_string(self.get_model_num_params())} parameters, "
            f"{size_text(self.get_activation_memory_per_gpu())} of activations per sample, "
            f"{size_text(free) if free is not None else 'an unknown amount'} of memory per rank"
        )

    def _most_runs(self) -> int:
        """Return the number of runs after those that calibrate."""
        return self.autotuning_config.tuner_num_trials if "tuner_num_trials" in self.given else DEFAULT_RUNS

    def _tune_by_model(self) -> None:
        """Measure the config with the best predicted step time, until no prediction beats the best measurement."""
        section = self.autotuning_config
        self._calibrate()
        since_best, best = 0, self._best()
        for _ in range(self._most_runs()):
            chosen = self.search.next(self._points, self._speed_choices)
            if chosen is None:
                break
            self._measure(chosen)
            now = self._best()
            since_best, best = (0, now) if better(self.metric(), now, best) else (since_best + 1, best)
            if since_best >= max(1, section.tuner_early_stopping):
                break
        else:
            if self.search.next(self._points, self._speed_choices) is not None:
                self.search.reason = "the number of runs is limited"
        self.reason = self.search.reason or "the number of runs is limited"

    def _measure(self, point: Point) -> float | None:
        """Run the config of a point; returns its metric."""
        exp = self._experiment(point)
        if self._run(exp) is None:
            return self._record(exp, point)
        self.search.record(point)
        return None

    def _calibrate(self) -> None:
        """Run a second micro-batch size, to learn how time and memory of a micro-batch depend on it."""
        first = self.search.best()
        self.memory.fit(self._peaks)  # corrects the plan before a larger run starts
        _, most = self.get_min_max_micro_batch_size(
            first.stage, first.size, self.max_train_micro_batch_size_per_gpu(), first.choices
        )
        for size in range(min(4 * first.size, most), first.size, -1):
            gases = self._accumulation_steps(replace(first, size=size))
            if gases:
                self._measure(replace(first, size=size, gas=gases[0]))
                break
        self.memory.fit(self._peaks)

    def _best(self) -> float | None:
        values = [value for records in self.records.values() for _, value, _ in records]
        return (min if self.metric() == "latency" else max)(values, default=None)

    def _sizes(
        self, stage: int, limit: int | None = None, combination: tuple[SpaceChoice, ...] = ()
    ) -> list[int]:
        """Return the micro-batch sizes to try at a stage, at most ``limit``."""
        least, most = self.min_train_micro_batch_size_per_gpu(), self.max_train_micro_batch_size_per_gpu()
        if limit is not None:
            most = max(least, min(most, limit))
        least, most = self.get_min_max_micro_batch_size(stage, least, most, combination)
        whole = self._fixed_train_batch()
        if whole is not None:
            own = whole * Point(stage, 1, 1, combination).model_ranks() // self._data_parallel()
            sizes = [size for size in range(max(1, least), most + 1) if own % size == 0]
            return sizes[-self.num_tuning_micro_batch_sizes() :]
        return self.get_tuning_micro_batch_size_list(least, most, self.num_tuning_micro_batch_sizes())

    def _tune_stage(self, stage: int) -> None:
        """Run what fits of one stage, in the order of ``tuner_type``: that of the space, or a random one, the same in
        every run; until ``tuner_early_stopping`` runs have brought nothing better."""
        section = self.autotuning_config
        sizes = self._sizes(stage) if self.memory.can_fit(Point(stage, 1)) else []
        if not sizes:
            logger.info("autotuning: z%d does not fit the memory", stage)
        points = [
            Point(stage, size, gas, choices)
            for choices in self.choices.all_combinations(stage)
            for size in sizes
            for gas in self._accumulation_steps(Point(stage, size, 1, choices))
            if self.memory.can_fit(Point(stage, size, gas, choices))
        ]
        if section.tuner_type == "random":
            random.Random(len(points)).shuffle(points)
        since_best, best = 0, None
        for point in points[: section.tuner_num_trials]:
            value = self._measure(point)
            since_best, best = (0, value) if better(self.metric(), value, best) else (since_best + 1, best)
            if since_best == section.tuner_early_stopping > 0:
                logger.info("autotuning: no better experiment among the last %d", since_best)
                break

    def run_after_tuning(self) -> int:
        """Run the script with the best config. Returns its exit code. AutotuningError: there is no best config."""
        if self.optimal_cmd is None:
            raise AutotuningError("found no config that the script runs with")
        logger.info("autotuning: running %s", shlex.join(self.optimal_cmd))
        environment = environment_for(
            Path(self.results_dir).absolute() / OPTIMAL_CONFIG, self.optimal_environment
        )
        return subprocess.run(self.optimal_cmd, check=False, env=environment).returncode
