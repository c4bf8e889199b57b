"""Help and mistakes in arguments cost none of the seconds that torch takes to import (counted, not timed)."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from deepspeed.tools import parsers
from deepspeed.tools.ds import TOOLS
from deepspeed.tools.launcher.shim import USAGE_ERROR

HEAVY = ("torch", "numpy", "pydantic", "transformers", "deepspeed.config.schema", "deepspeed.engine")
CALLS = """
import contextlib, io, sys
from deepspeed.tools import ds
def call(arguments):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            ds.main(arguments)
        except SystemExit:
            pass
    assert "usage:" in said.getvalue(), (arguments, said.getvalue())
for words in {calls}:
    call(words)
    loaded = set({heavy}) & set(sys.modules)
    assert not loaded, (words, loaded)
ours = [name for name in sys.modules if name.startswith("deepspeed")]
assert len(ours) < 80, len(ours)
"""


def test_help_of_every_command_needs_no_torch() -> None:
    calls = [[], ["--help"], *([name, "--help"] for name in TOOLS), ["check"], ["io", "--loops", "0"]]
    code = CALLS.format(calls=calls, heavy=HEAVY)  # an interpreter without torch: forked ones have it
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


CHECKS = """
import json, pathlib, sys
from deepspeed.tools import ds
adam = {"type": "AdamW", "params": {"lr": 1e-3, "fused": True, "torch_adam": True}}
good = {"train_batch_size": 8, "optimizer": adam, "scheduler": {"type": "WarmupLR", "params": {}},
        "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
bad = {**good, "optimizer": {"type": "Adan", "params": {"lerning_rate": 1}}, "zero_optimisation": {"stage": 9}}
elastic = {"elasticity": {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4], "min_gpus": 1,
           "max_gpus": 8, "version": 0.1}}
calls = (("good", good, ["check"]), ("bad", bad, ["check"]), ("elastic", elastic, ["elastic", "-c"]))
for name, config, words in calls:
    path = pathlib.Path(sys.argv[1], name + ".json")
    path.write_text(json.dumps(config))
    try:
        code = ds.main([*words, str(path)]) or 0
    except SystemExit as exit:
        code = exit.code or 0
    assert bool(code) == (name == "bad"), (name, code)
    loaded = {"torch", "numpy", "transformers", "deepspeed.engine"} & set(sys.modules)
    assert not loaded, (name, loaded)
"""


def test_checks_of_configs_need_no_torch(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHECKS, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "Adan" in done.stdout + done.stderr and "did you mean" in done.stdout + done.stderr


@pytest.mark.parametrize("name", [name for name, tool in TOOLS.items() if tool.parser is not None])
def test_every_option_has_help(name: str) -> None:
    parser: argparse.ArgumentParser = getattr(parsers, name)()
    assert not [action.dest for action in parser._actions if not action.help]


def test_deepspeed_alone_prints_its_usage(capsys: pytest.CaptureFixture[str]) -> None:
    from deepspeed.tools.launcher import runner

    with pytest.raises(SystemExit) as exit_:
        runner.main([])
    said = capsys.readouterr().err
    assert exit_.value.code == USAGE_ERROR
    assert "usage: deepspeed [options] script" in said and "--num_gpus" in said and "required" not in said
