"""`ds_check` on files of Accelerate and on TrainingArguments: what they come to, and what the clients refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed.tools.config.command import check_config, main
from deepspeed.tools.config.report import ConfigReport

pytest.importorskip("yaml")

# As `accelerate config` writes it.
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
debug: false
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 2
  gradient_clipping: 0.5
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
use_cpu: false
"""

CONFIG = {
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
ARGUMENTS = {
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 3e-4,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "max_grad_norm": 0.5,
    "max_steps": 100,
    "warmup_steps": 10,
    "bf16": True,
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def checked(folder: Path, text: str | dict[str, Any], ranks: int | None = None) -> ConfigReport:
    path = folder / ("client.yaml" if isinstance(text, str) else "client.json")
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return check_config(path, ranks)


def test_fields_of_the_plugin(tmp_path: Path) -> None:
    report = checked(tmp_path, ACCELERATE)
    assert report.ok and not report.warnings and report.client == "Accelerate"
    assert (report.ranks, report.ranks_from) == (8, "from Accelerate's file")
    config = report.config
    assert config is not None and config.zero_optimization.stage == 3 and config.bf16.enabled
    assert config.gradient_clipping == 0.5 and config.gradient_accumulation_steps == 2
    assert config.zero_optimization.gather_16bit_weights_on_model_save
    assert "train_micro_batch_size_per_gpu" in report.auto_keys
    assert "of Accelerate: 8 ranks" in str(report) and "left to Trainer or Accelerate" in str(report)


def test_the_fields_come_to_what_accelerates_plugin_makes(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="the clients extra is not installed")
    from deepspeed.tools.config.clients import read_any, read_client

    path = tmp_path / "client.yaml"
    path.write_text(ACCELERATE)
    ours = read_client(read_any(path), 8)
    plugin = accelerate.DeepSpeedPlugin(
        gradient_accumulation_steps=2, gradient_clipping=0.5, zero_stage=3, zero3_save_16bit_model=True
    )
    plugin.set_mixed_precision("bf16")
    theirs = dict(plugin.deepspeed_config)
    assert theirs.pop("fp16") == {"enabled": False}
    for section in ("offload_optimizer", "offload_param"):
        assert theirs["zero_optimization"][section].pop("nvme_path") is None
    assert ours is not None and ours.source.data == theirs


def test_problems_are_told_under_the_fields_name(tmp_path: Path) -> None:
    report = checked(tmp_path, ACCELERATE.replace("zero_stage: 3", "zero_stage: 7"), 2)
    assert [problem.key for problem in report.errors] == ["deepspeed_config.zero_stage"]
    assert (report.ranks, report.ranks_from) == (2, "as requested")


def test_a_field_that_is_none(tmp_path: Path) -> None:
    report = checked(tmp_path, ACCELERATE.replace("zero_stage: 3", "zero_stage: 3\n  zero_satge: 2"))
    assert any("zero_satge" in warning for warning in report.warnings)


def test_not_launched_for_us(tmp_path: Path) -> None:
    report = checked(tmp_path, ACCELERATE.replace("DEEPSPEED", "FSDP"))
    assert [problem.key for problem in report.errors] == ["distributed_type"]


@pytest.mark.parametrize("extra", ["", "mixed_precision: bf16\n"])
def test_file_named_by_accelerate(tmp_path: Path, extra: str) -> None:
    """Beside such a file Accelerate refuses its own fields."""
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "train_batch_size": 16}))
    file = "deepspeed_config:\n  deepspeed_config_file: ds.json\n"
    text = f"distributed_type: DEEPSPEED\nnum_processes: 2\n{extra}{file}"
    report = checked(tmp_path, text)
    assert [problem.key for problem in report.errors] == (["mixed_precision"] if extra else [])
    assert report.batch is not None and report.batch.micro == 8


def test_file_that_is_not_there(tmp_path: Path) -> None:
    report = checked(
        tmp_path, "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: gone.json\n"
    )
    assert [problem.key for problem in report.errors] == ["deepspeed_config_file"]
    assert "gone.json" in str(report)


@pytest.mark.parametrize("inline", [True, False])
def test_training_arguments(tmp_path: Path, inline: bool) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    report = checked(tmp_path, ARGUMENTS | {"deepspeed": CONFIG if inline else "ds.json"}, 2)
    assert report.ok and report.client == "Trainer"
    assert report.batch is not None
    assert (report.batch.train, report.batch.micro, report.batch.accumulation) == (16, 4, 2)
    assert report.filled["optimizer.params.lr"] == 3e-4 and report.filled["bf16.enabled"] is True
    assert report.filled["optimizer.params.betas"] == [0.9, 0.95]
    assert report.filled["scheduler.params.total_num_steps"] == 100
    assert report.auto_keys == ["optimizer.params.eps", "optimizer.params.weight_decay"] + [
        "zero_optimization.reduce_bucket_size"
    ]
    assert "optimizer.params.lr=0.0003" in str(report)


def test_what_the_trainer_refuses(tmp_path: Path) -> None:
    config = json.loads(json.dumps(CONFIG))
    config["optimizer"]["params"]["lr"] = 1e-3
    config["train_batch_size"] = 64
    (tmp_path / "ds.json").write_text(json.dumps(config, indent=1))
    report = checked(tmp_path, ARGUMENTS | {"deepspeed": "ds.json"}, 2)
    assert {"optimizer.params.lr", "train_batch_size"} <= {problem.key for problem in report.errors}
    assert all(problem.line for problem in report.errors if problem.key == "optimizer.params.lr")


def test_agrees_with_the_trainers_own_plumbing(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    from deepspeed.tools.config.clients import read_any, read_client

    path = tmp_path / "client.json"
    path.write_text(json.dumps(ARGUMENTS | {"deepspeed": CONFIG}))
    ours = read_client(read_any(path), 1)
    theirs = HfTrainerDeepSpeedConfig(json.loads(json.dumps(CONFIG)))
    arguments = transformers.TrainingArguments(**{key: ARGUMENTS[key] for key in ARGUMENTS if key != "bf16"})
    arguments.bf16 = True
    theirs.trainer_config_process(arguments)
    assert ours is not None
    open_keys = {
        "eps": 1e-8,
        "weight_decay": 0.0,
    }  # the file does not say them; they are the Trainer's defaults
    expected = theirs.config["optimizer"]["params"]
    assert {k: v for k, v in expected.items() if k not in open_keys} == {
        k: v for k, v in ours.source.data["optimizer"]["params"].items() if k not in open_keys
    }
    for key in ("train_batch_size", "gradient_clipping", "bf16", "train_micro_batch_size_per_gpu"):
        assert ours.source.data[key] == theirs.config[key]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "client.yaml"
    path.write_text(ACCELERATE)
    assert main([str(path)]) == 0
    assert "no errors" in capsys.readouterr().out
    path.write_text("- a\n- b\n")
    assert main([str(path)]) == 1
    path.write_text("a: [")
    assert main([str(path)]) == 1
    assert "not valid YAML" in capsys.readouterr().out
