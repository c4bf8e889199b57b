"""The configs and commands that the documents print: each is accepted as it is printed.

The table is our own: document, section, and the keys that are printed there. `printed_sections.json` has those of the
documents' page of the config and of its tutorials, with one of the choices where a page names all of them.
tests/examples/documented_blocks.py lists all blocks of the documents, with the test of each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import deepspeed
from deepspeed.tools.launcher.runner import parse_args

FP16 = {"enabled": True, "loss_scale": 0}
PRINTED: dict[str, dict[str, Any]] = {
    "features: mixed precision": {
        "fp16": {**FP16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
    },
    "features: clipping": {"gradient_clipping": 1.0},
    "features: wall clock": {"wall_clock_breakdown": True},
    "features: timing checkpoints": {"activation_checkpointing": {"profile": True}},
    "features: flops profiler": {
        "flops_profiler": {
            "enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 3, "detailed": True,
        }
    },
    "features: autotuning": {
        "autotuning": {
            "enabled": True, "results_dir": None, "exps_dir": None, "overwrite": False, "metric": "throughput",
            "num_nodes": None, "num_gpus": None, "start_profile_step": 3, "end_profile_step": 5, "fast": True,
            "num_tuning_micro_batch_sizes": 3, "tuner_type": "model_based", "tuner_early_stopping": 5,
            "tuner_num_trials": 50, "arg_mappings": None,
        }
    },
    "features: sparse attention": {
        "sparse_attention": {
            "mode": "fixed", "block": 16, "different_layout_per_head": True, "num_local_blocks": 4,
            "num_global_blocks": 1, "attention": "bidirectional", "horizontal_global_attention": False,
            "num_different_global_patterns": 4,
        }
    },
    "wiki: configuration example": {
        "train_batch_size": 32,
        "gradient_accumulation_steps": 1,
        "fp16": {**FP16, "initial_scale_power": 16},
        "zero_optimization": {
            "stage": 2, "allgather_partitions": True, "reduce_scatter": True, "overlap_comm": True,
        },
        "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "betas": [0.9, 0.999], "eps": 1e-8}},
    },
}  # fmt: skip


@pytest.mark.parametrize("place", PRINTED)
def test_a_printed_config_has_no_problem(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    report = deepspeed.check_config({"train_batch_size": 32, **PRINTED[place]}, 8)
    assert report.ok, report.errors


SECTIONS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("printed_sections.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("place", SECTIONS)
def test_a_printed_section_has_no_problem(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    report = deepspeed.check_config({"train_batch_size": 32, **SECTIONS[place]}, 8)
    assert report.ok, report.errors
    assert not [warning for warning in report.warnings if "unknown" in warning]


@pytest.mark.parametrize(
    "printed",
    [
        "from deepspeed.accelerator import get_accelerator",
        "from deepspeed.monitor.monitor import MonitorMaster",
        "from deepspeed.ops.op_builder import AsyncIOBuilder, GDSBuilder",
        "from deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile",
        "from deepspeed.runtime.config import DeepSpeedConfig",
        "import deepspeed.module_inject as module_inject",
    ],
)
def test_a_printed_import_finds_its_names(printed: str) -> None:
    found: dict[str, Any] = {}
    exec(printed, found)
    names = [name.strip() for name in printed.rpartition("import ")[2].rpartition(" as ")[2].split(",")]
    assert all(found[name] is not None for name in names)


@pytest.mark.parametrize(
    ("printed", "script", "rest"),
    [
        ("--num_gpus=8 train.py --deepspeed ds_config.json", "train.py", "--deepspeed ds_config.json"),
        (
            "--hostfile=hosts entry.py --epochs 3 --deepspeed --deepspeed_config ds_config.json",
            "entry.py",
            "--epochs 3 --deepspeed --deepspeed_config ds_config.json",
        ),
    ],
)
def test_a_printed_command_parses(printed: str, script: str, rest: str) -> None:
    options = parse_args(printed.split())
    assert options.user_script == script and options.user_args == rest.split()
