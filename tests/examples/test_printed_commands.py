"""Every command that a page, a README or a docstring prints is one that its program accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import forked
from tests.examples import command_runs
from tests.examples.printed_commands import Command, collect, documents
from tests.tools.launcher.programs import REPOSITORY, environment

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
}
SCRIPT = """
import torch

def build_model():
    return torch.nn.Linear(8, 8)

CharacterModel = build_model
"""
# Commands, and what is wrong with each.
WRONG = {
    "python examples/pipeline/train.py --stagse 2": "unrecognized arguments: --stagse 2",
    "torchrun --nproc-per-node 2 examples/pipeline/train.py --schedule none": "invalid choice: 'none'",
    "python examples/pipeline/trian.py": "'examples/pipeline/trian.py' is none of",
    "python benchmarks/adam.py --save": "expected one argument",
    "python examples/moe_gpt/train.py --num-layers 3 --num-experts 4 8": "--num-experts 4 8: give one number, or 1",
    "deepspeed --num_gpu two train.py": "--num_gpu",
    "deepspeed --num_gpus 2 examples/rlhf/train.py --actor_stage 3": "--actor_stage",
    "deepspeed --hostfile machines train.py": "machines",
    "ds_check config.json --gpu": "--gpu",
    "ds_check missing/config.json": "there is no missing/config.json",
    "ds_plan config.json": "'ds_plan' is none of",
    "ds plan config.json --model absent:build_model --gpus 2": "No module named 'absent'",
    "ds_bench --num_gpus 2 --all-redcue": "--all-redcue",
    "make tset": "'tset' is none of",
    'pip install ".[client]"': "'client' is none of",
    "pip instal .": "'instal' is none of",
    "pytest -m fast": "'fast' is none of",
    "python -m deepspeed.checkpoint.ds_to_universe": "there is no module",
    "accelerate tune": "'tune' is none of",
}


def report(tmp_path: Path, texts: list[str]) -> dict[str, Any]:
    """In a folder of the reader's, with a config and a script."""
    (tmp_path / "train.py").write_text(SCRIPT)
    for name in ("config.json", "ds_config.json"):
        (tmp_path / name).write_text(json.dumps(CONFIG))
    code = f"from tests.examples import printed_commands; printed_commands.report({texts!r})"
    done = forked.run(["-c", code], env=environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_printed_commands_are_accepted(tmp_path: Path) -> None:
    found = report(tmp_path, [])
    assert found["commands"] > 350
    assert found["wrong"] == {}


def test_wrong_commands_are_found(tmp_path: Path) -> None:
    found = report(tmp_path, list(WRONG))["wrong"]
    reasons = {command.removeprefix("docs/page.md:1: "): reason for command, reason in found.items()}
    assert list(reasons) == list(WRONG)
    assert [command for command, part in WRONG.items() if part not in reasons[command]] == [], reasons


def printed() -> list[Command]:
    return [each for document in documents() for each in collect(document) if not each.mention]


def test_every_printed_command_is_run_by_a_test() -> None:
    missing = {str(command): why for command in printed() if (why := command_runs.why_not_run(command))}
    assert missing == {}


def test_the_table_of_runs_names_tests_that_exist_and_commands_that_are_printed() -> None:
    targets = [command_runs.target_of(command) for command in printed()]
    names = {name for name, _ in targets}
    assert (command_runs.RUN_BY.keys() | command_runs.NOT_RUN.keys()) <= names
    assert not command_runs.RUN_BY.keys() & command_runs.NOT_RUN.keys()
    for place, option in command_runs.OPTIONS_NOT_RUN:
        assert any(name.startswith(place) and option in given for name, given in targets), (place, option)
    for target, tests in [*command_runs.RUN_BY.items(), ("plans", [command_runs.PLANS_OF_RECIPES])]:
        for test in tests:
            file, _, function = test.partition("::")
            text = (REPOSITORY / file).read_text(encoding="utf-8")
            assert f"def {function or 'test_'}" in text, (target, test)


NOT_RUN = {
    "python examples/gan/train.py --speed 3": "no test that runs examples/gan/train.py gives it --speed",
    "python examples/new/train.py": "'examples/new/train.py'",
    "ds shine config.json": "no test runs ds shine",
    "deepspeed --num_gpus 2 --new_way train.py": "no test that runs deepspeed gives it --new_way",
    "python benchmarks/new.py": "'benchmarks/new.py'",
    "python -m deepspeed.tools.starter": "no test runs deepspeed.tools.starter",
}


def test_a_command_that_no_test_runs_is_found() -> None:
    for text, reason in NOT_RUN.items():
        assert reason in str(command_runs.why_not_run(Command(Path("docs/page.md"), 1, text)))
