from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

import deepspeed
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.tools.config import command
from deepspeed.tools.config.command import check_config, main
from tests.config.test_deepspeed_config import TRAINER_CONFIG

ALL_AUTO = TRAINER_CONFIG | {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def test_public_name() -> None:
    assert deepspeed.check_config is check_config


def test_the_module_as_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": 1}')
    monkeypatch.setattr("sys.argv", ["command.py", str(path)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(command.__file__, run_name="__main__")
    assert end.value.code == 0


def test_a_good_config() -> None:
    report = check_config(
        {"train_batch_size": 64, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}, 8
    )
    assert report.ok and not report.warnings
    assert report.batch is not None and report.batch.micro == 8
    text = str(report)
    assert (
        "8 ranks" in text
        and "stage 2" in text
        and "bf16, fp32 master weights" in text
        and "no errors" in text
    )
    report.raise_for_errors()


def test_everything_is_returned_and_can_be_raised() -> None:
    report = check_config({"train_batch_size": 5, "fp61": {}, "zero_optimization": {"stage": 9}}, 2)
    assert [problem.key for problem in report.errors] == [
        "fp61",
        "zero_optimization.stage",
        "train_batch_size",
    ]
    with pytest.raises(DeepSpeedConfigError, match="3 errors"):
        report.raise_for_errors()


@pytest.mark.parametrize("config", [TRAINER_CONFIG, ALL_AUTO], ids=["some auto", "all auto"])
def test_trainer_configs_are_fine(config: dict[str, object]) -> None:
    report = check_config(config, 4)
    assert report.ok and not report.warnings
    assert "gradient_clipping" in report.auto_keys and "optimizer.params.lr" in report.auto_keys
    assert ("left to Trainer or Accelerate" in str(report)) == (config is ALL_AUTO)


def test_choices_named_auto_are_not_open() -> None:
    assert (
        check_config(
            {"train_batch_size": 4, "expert_parallel": {"score_func": "auto", "top_k": "auto"}}
        ).auto_keys
        == []
    )


def test_launcher_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    report = check_config({"train_batch_size": 8})
    assert report.ranks == 4 and report.batch is not None and report.batch.micro == 2


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "8"])
def test_world_size_must_be_a_count(count: object) -> None:
    with pytest.raises(ValueError, match="world_size"):
        check_config({"train_batch_size": 8}, count)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"optimizer": {"type": "Adam", "params": {"lrr": 0.1}}}, "optimizer.params.lrr"),
        ({"optimizer": {"type": "Adam", "params": {"lr": -1}}}, "optimizer.params.lr"),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_step": 5}}},
            "scheduler.params.warmup_num_step",
        ),
        ({"scheduler": {"type": "StepLR", "params": {"stepsize": 5}}}, "scheduler.params.stepsize"),
    ],
)
def test_arguments_are_checked(section: dict[str, object], key: str) -> None:
    assert [problem.key for problem in check_config({"train_batch_size": 8, **section}).errors] == [key]


def test_unreadable_config() -> None:
    report = check_config("no/such/file.json")
    assert not report.ok and "no/such/file.json" in str(report)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps({"train_batch_size": 16, "nebula": {"enabled": True}}))
    bad.write_text('{\n "train_batch_size": 16,\n "graident_clipping": 1\n}')
    assert main([str(good), "--gpus", "8"]) == 0
    out = capsys.readouterr().out
    assert (
        "train_micro_batch_size_per_gpu 2 (derived)" in out and "1 warning" in out and "nebula.enabled" in out
    )
    assert main([str(bad), "--gpus", "8"]) == 1
    out = capsys.readouterr().out
    assert f"graident_clipping ({bad}:3:2)" in out and "'gradient_clipping'" in out and "\x1b" not in out


@pytest.mark.parametrize(
    ("given", "told"),
    [({}, "1 (default)"), ({"gradient_clipping": 1.0}, "1"), ({"gradient_clipping": 0}, "none")],
)
def test_clipping_that_nobody_asked_for_is_marked(
    given: dict[str, float], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 8, **given}))
    main([str(path)])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  clipping"))
    assert line.split(maxsplit=1)[1].removeprefix("global norm ") == told


def test_command_help_and_bad_counts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0 and "--gpus" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["x.json", "--gpus", "0"])
