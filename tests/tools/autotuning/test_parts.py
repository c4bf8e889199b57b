"""The documented pieces of the autotuner, and its search on a machine that is made up."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed.tools.autotuning import Autotuner, scheduler, utils
from deepspeed.tools.autotuning.arguments import arguments_for, given_config, launcher_command, section_of
from deepspeed.tools.autotuning.step_model import StepTimeModel
from deepspeed.tools.launcher.runner import run_autotuning
from tests.tools.autotuning.made_up import tuner


def test_changing_configs() -> None:
    config: dict[str, Any] = {"a": 1, "b": {"c": 2, "d": "$x y"}}
    assert utils.get_val_by_key(config, "c") == 2 and utils.get_val_by_key(config, "z") is None
    utils.set_val_by_key(config, "c", 3)
    assert config == {"a": 1, "b": {"c": 3, "d": "$x y"}}


def test_a_section_as_the_documents_write_it() -> None:
    """One of their pages has null for both folders, and FLOPS."""
    given = {"enabled": True, "results_dir": None, "exps_dir": None, "metric": "FLOPS"}
    section = section_of({"autotuning": given, "zero_optimization": {"stage": [0, 1]}})
    assert (section.results_dir, section.exps_dir) == ("autotuning_results", "autotuning_exps")
    assert section.metric == "flops"
    with pytest.raises(
        ValueError, match=r"autotuning.metric: 'speed' is not allowed; expected one of"
    ) as found:
        section_of({"autotuning": {"metric": "speed", "tuner_num_trials": 0}})
    assert "tuner_num_trials: 0 is not allowed" in str(found.value) and "pydantic" not in str(found.value)
    with pytest.raises(ValueError, match="autotuning: 3 is not allowed"):
        section_of({"autotuning": 3})


def test_logs(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    assert "does not exist" in str(utils.search_error(str(log)))
    log.write_text("fine\nTraceback\nValueError: no\n")
    log.write_text("usage: train.py [--mb MB]\ntrain.py: error: unrecognized arguments: --gas\n")
    assert utils.search_error(str(log)) == "train.py: error: unrecognized arguments: --gas"
    log.write_text("fine\nTraceback\nValueError: no\n")
    assert utils.search_error(str(log)) == "ValueError: no"


def test_the_cost_model() -> None:
    time = StepTimeModel()
    time.fit([(0, 1, 0.3), (0, 4, 0.6), (2, 4, 1.2)])
    assert time.seconds(0, 8) == pytest.approx(1.0) and time.seconds(2, 8) == pytest.approx(2.0)
    assert time.seconds(1, 8) == pytest.approx(1.0) and time.seconds(3, 8) == pytest.approx(2.0)


def test_command_lines(tmp_path: Path) -> None:
    args = argparse.Namespace(
        module=True, log_level="info", hostfile="", master_port=1, master_port_given=False
    )
    assert launcher_command(args, "--num_gpus=2")[2:] == [
        "deepspeed.tools.launcher.runner", "--module", "--log_level=info", "--num_gpus=2",
    ]  # fmt: skip
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    given = ["--deepspeed", "a.json", "--bs=1", "--x"]
    mapped = {"train_micro_batch_size_per_gpu": "--bs", "gradient_accumulation_steps": "--gas"}
    assert arguments_for(given, tmp_path, config, mapped) == [
        "--deepspeed", str(tmp_path), "--bs=4", "--x", "--gas", "2",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="--deepspeed_config FILE"):
        given_config(["--deepspeed", "--lr", "1"])


class Machine:
    """Stands in for ``run_experiment``: a job that takes ``fixed + each * samples`` seconds a step, and more with a
    higher stage."""

    def __init__(
        self, fits: tuple[int, ...] = (0, 1, 2, 3), free: int = 1 << 30, slower: float = 0.05
    ) -> None:
        self.fits, self.free, self.slower = fits, free, slower
        self.runs: list[str] = []
        self.fixed, self.each, self.activations = 0.04, 0.01, 1 << 20

    def __call__(self, exp: dict[str, Any], user_script: str, user_args: list[str]) -> int:
        config, folder = exp["ds_config"], Path(exp["result_dir"])
        self.runs.append(exp["name"])
        folder.mkdir(parents=True, exist_ok=True)
        section, stage = config["autotuning"], config["zero_optimization"]["stage"]
        if "model_info_path" in section:
            plan = {"near": "device", "free": {"device": self.free}}
            stages = {
                str(s): {**plan, "need": {"device": 1 << (24 - s)}, "fits": s in self.fits} for s in range(4)
            }
            info = {"num_params": 1000, "ranks_per_node": 2, "stages": stages}
            info |= {"activation_mem_per_gpu": self.activations, "micro_batch": 1}
            Path(section["model_info_path"]).write_text(json.dumps(info))
        size = config["train_micro_batch_size_per_gpu"]
        assert size * self.activations < self.free, "it would have run out of memory"
        if stage not in self.fits:
            (folder / "stderr.log").write_text("MemoryPlanError: the model states do not fit\n")
            return 1
        seconds = (self.fixed + self.each * size) * (1 + self.slower * stage)
        metrics = {"latency": seconds, "throughput": 2 * size / seconds, "flops": 0, "samples": size}
        (folder / "metrics.json").write_text(json.dumps(metrics))
        return 0


def test_few_runs_find_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    machine = Machine()
    found = tuner(tmp_path, monkeypatch, machine)
    found.tune()
    assert machine.runs[0] == "profile_model_info" and len(machine.runs) <= 4  # two of them calibrate
    assert found.optimal_ds_config is not None
    assert found.optimal_ds_config["zero_optimization"]["stage"] == 0
    size = found.optimal_ds_config["train_micro_batch_size_per_gpu"]
    best = 1 / machine.each
    assert size / (machine.fixed + machine.each * size) > 0.95 * best
    assert "train_batch_size" not in found.optimal_ds_config and "autotuning" not in found.optimal_ds_config
    found.print_tuning_results()
    out = capsys.readouterr().out
    assert "| tuning_space | num_experiments | best_metric_val | best_exp_name" in out and "| global" in out
    folder = tmp_path / "autotuning_results"
    assert json.loads((folder / "ds_config_optimal.json").read_text()) == found.optimal_ds_config
    assert (
        (folder / "cmd_optimal.txt")
        .read_text()
        .startswith("deepspeed --log_level=info --num_gpus=2 train.py")
    )
    assert (folder / "summary.txt").read_text() == out
    assert (tmp_path / "autotuning_exps" / f"z0_gas1_tmbspg{size}.json").exists()
    assert found.get_model_num_params() == 1000
    again = Machine()
    tuner(tmp_path, monkeypatch, again).tune()  # resumes: all results are there
    assert again.runs == []
    tuner(tmp_path, monkeypatch, again, overwrite=True).tune()
    assert len(again.runs) == len(machine.runs)


def test_what_cannot_fit_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(fits=(2, 3), free=40 << 20)
    found = tuner(tmp_path, monkeypatch, machine)
    found.tune()
    assert not any(name.startswith(("z0", "z1")) for name in machine.runs)
    assert found.optimal_ds_config is not None
    assert found.optimal_ds_config["train_micro_batch_size_per_gpu"] >= 24
    assert found.get_min_max_micro_batch_size(3, 1, 1000) == (1, 34)


def test_nothing_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(fits=())
    found = tuner(tmp_path, monkeypatch, machine)
    assert run_autotuning(found.args, {"localhost": [0, 1]}) == 1
    assert machine.runs == ["profile_model_info"]


@pytest.mark.parametrize("kind", ["gridsearch", "random", "model_based"])
@pytest.mark.parametrize("metric", ["throughput", "latency"])
def test_documented_tuners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, metric: str) -> None:
    machine = Machine()
    section = {"max_train_batch_size": 16, "tuner_type": kind, "metric": metric}
    found = tuner(tmp_path, monkeypatch, machine, **section)
    found.tune()
    size = found.optimal_ds_config["train_micro_batch_size_per_gpu"]  # type: ignore[index]
    if kind == "model_based":
        assert size == (8 if metric == "throughput" else 1)
        return
    assert len(machine.runs) == 1 + 4 * 3
    assert size == (8 if metric == "throughput" else 1)
    assert found.get_tuning_micro_batch_size_list(1, 48, 3) == [12, 24, 48]
    few = Machine()
    limits = {"tuner_num_trials": 2, "tuner_early_stopping": 1, "overwrite": True}
    tuner(tmp_path, monkeypatch, few, **section, **limits).tune()
    assert len(few.runs) == 1 + 4 * 2


def test_an_interruption_keeps_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    machine = Machine()
    found = tuner(tmp_path, monkeypatch, machine)

    def interrupted(*given: Any) -> int:
        if len(machine.runs) == 2:
            raise KeyboardInterrupt
        return machine(*given)

    monkeypatch.setattr(scheduler, "run_experiment", interrupted)
    assert run_autotuning(found.args, {"localhost": [0, 1]}) == 130
    assert "interrupted" in capsys.readouterr().out
    assert (tmp_path / "autotuning_results" / "ds_config_optimal.json").exists()


def test_a_script_with_a_batch_size_of_its_own_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    class Fixed(Machine):
        def __call__(self, exp: dict[str, Any], *given: Any) -> int:
            code = super().__call__(exp, *given)
            file = Path(exp["result_dir"]) / "metrics.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), "samples": 1}))
            return code

    found = tuner(tmp_path, monkeypatch, Fixed())
    with pytest.raises(ValueError, match="arg_mappings"):
        found.tune()


@pytest.mark.parametrize("known", [True, False])
def test_micro_batches_end_where_the_data_do(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Where the engine has the data set, none beyond it is tried; where the script has it, the first one that is not
    full is no fault of the script."""

    class Small(Machine):
        def __call__(self, exp: dict[str, Any], *given: Any) -> int:
            code, size = super().__call__(exp, *given), exp["ds_config"]["train_micro_batch_size_per_gpu"]
            sizes.append(size)
            path = exp["ds_config"]["autotuning"].get("model_info_path")
            if path and known:
                info = {**json.loads(Path(path).read_text()), "samples_per_rank": 6}
                Path(path).write_text(json.dumps(info))
            file = Path(exp["result_dir"]) / "metrics.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), "samples": min(6, size)}))
            return code

    sizes: list[int] = []
    found = tuner(tmp_path, monkeypatch, Small())
    found.tune()
    best = json.loads((tmp_path / "autotuning_results" / "ds_config_optimal.json").read_text())
    assert best["train_micro_batch_size_per_gpu"] == max(size for size in sizes if size <= 6) > 1
    assert sum(size > 6 for size in sizes) == (0 if known else 1), sizes
    assert found.max_train_micro_batch_size_per_gpu() == 6


def test_experiments_take_as_many_slots_of_each_machine_as_the_smallest_has(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"autotuning": {"enabled": True}}))
    args = argparse.Namespace(user_script="train.py", user_args=["--deepspeed_config", str(file)])
    made = Autotuner(args, {"a": [0], "b": [0, 1, 2], "c": [4, 5]})
    assert (made.exp_num_nodes, made.exp_num_gpus) == (3, 1)


def test_machines_and_slots(tmp_path: Path) -> None:
    rm = scheduler.ResourceManager(argparse.Namespace(), ["a", "b"], 4, str(tmp_path), str(tmp_path), None)
    assert rm.devices() == "--include=a:0,1,2,3@b:0,1,2,3"
    wanted = {"name": "large", "num_nodes": 3, "num_gpus": 4, "result_dir": str(tmp_path / "large")}
    assert rm.run(wanted) == "3 machines with 4 slots each are not available"


def test_runs_without_a_number_count_and_are_never_the_best(tmp_path, monkeypatch) -> None:
    made: Any = tuner(tmp_path, monkeypatch, None)
    for name in ("first", "second"):
        made.update_records("z0", {"name": name}, None, 1)
    assert made.get_best_space_record("z0") is None
    made.update_records("z0", {"name": "third"}, 3.5, 3)
    assert made.get_best_space_record("z0") == ({"name": "third"}, 3.5, 3)
