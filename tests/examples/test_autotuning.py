"""The example of autotuning: what its config asks for, and that the script trains with what the tuner gives it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepspeed.tools.launcher.runner import parse_args
from tests.examples.scripts import script
from tests.pool import distributed
from tests.tools.launcher.programs import REPOSITORY

FOLDER = REPOSITORY / "examples/autotuning"


@distributed(world_size=2)
def test_the_script_trains_with_a_config_and_a_batch_of_the_tuner(tmp_path: Path) -> None:
    config = json.loads((FOLDER / "ds_config.json").read_text())
    (flag,) = config.pop("autotuning")["arg_mappings"].values()
    config["zero_optimization"]["stage"] = 1
    config["train_micro_batch_size_per_gpu"] = 8
    (tmp_path / "chosen.json").write_text(json.dumps(config))
    tuned = script("autotuning")
    losses = tuned.main(
        [flag, "8", "--width", "16", "--steps", "10", "--deepspeed_config", str(tmp_path / "chosen.json")]
    )
    assert len(losses) == 10 and losses[-1] < losses[0]


@pytest.mark.parametrize("action", ["tune", "run"])
def test_the_printed_command(action: str) -> None:
    printed = f"--num_gpus 2 --autotuning {action} train.py --batch 4 --deepspeed_config ds_config.json"
    options = parse_args(printed.split())
    assert options.autotuning == action and options.user_script == "train.py"
