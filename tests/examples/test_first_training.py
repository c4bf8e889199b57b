"""The tutorial: its files are written and its commands are run, in the order of the page."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.tools.launcher.programs import REPOSITORY, environment

PAGE = REPOSITORY / "docs" / "first_training.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([\w.]+)")?\n(.*?)^```$', flags=re.S | re.M)


def as_pattern(line: str) -> str:
    """The line with any numbers: losses are not the same on every machine."""
    return r"\d+(\.\d+)?".join(re.escape(part) for part in re.split(r"\d+(?:\.\d+)?", line))


def run(command: str, folder: Path) -> str:
    """Return the output; our commands are next to the interpreter that runs this test."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = environment(OMP_NUM_THREADS="1", PATH=path)
    program, *arguments = shlex.split(command)
    if program == "python":
        result = forked.run(arguments, cwd=folder, env=env)
    else:
        result = subprocess.run(
            [program, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=240
        )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def test_the_tutorial(tmp_path: Path) -> None:
    seen: dict[str, str] = {}
    for language, title, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if language != "console":
            (tmp_path / title).write_text(text, encoding="utf-8")
            continue
        command, *promised = text.splitlines()
        said = seen[command] = run(command.removeprefix("$ "), tmp_path)
        for line in promised:
            assert re.search("^" + as_pattern(line), said, flags=re.M), (command, line, said)
    assert {"train.py", "ds_config.json", "write.py", "weights", "curves"} <= {
        path.name for path in tmp_path.iterdir()
    }
    assert len(seen) == 7
    losses = [float(loss) for said in seen.values() for loss in re.findall(r"loss (\d+\.\d+)", said)]
    unseen = [float(loss) for said in seen.values() for loss in re.findall(r"held-out text (\d+\.\d+)", said)]
    assert len(losses) == len(unseen) == 5
    assert max(losses + unseen) < 3.5  # 4.85 is the loss of a model that knows nothing
    assert [line.split(":")[0] for line in seen["$ python curves.py"].splitlines()] == [
        "Train_Samples_train_loss",
        "Train_Samples_lr",
        "Validation_loss",
    ]
    assert seen["$ python curves.py"].count(" 300 points") == 2, "the resumed run continues the curves"


@pytest.mark.slow
def test_its_script_can_be_tuned(tmp_path: Path) -> None:
    """By the command of the page, from what the page has written."""
    page = PAGE.read_text(encoding="utf-8")
    for language, title, text in BLOCK.findall(page):
        if language != "console" and title:
            (tmp_path / title).write_text(text, encoding="utf-8")
    (command,) = re.findall(r"^ +(deepspeed --autotuning .*)$", page, flags=re.M)
    said = run(command, tmp_path)
    best = tmp_path / "autotuning_results" / "ds_config_optimal.json"
    assert json.loads(best.read_text())["train_micro_batch_size_per_gpu"] >= 1, said
