"""Help, mistakes in arguments and checks of configs cost none of the seconds that torch takes to import (counted, not
timed)."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.config import optimizers as torch_classes
from deepspeed.tools import doctor, parsers, serve_options
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


GOOD = {
    "train_batch_size": 8,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "tensor_parallel": {"autotp_size": 1, "dtype": "bf16"},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "foreach": False}},
    "scheduler": {"type": "StepLR", "params": {"step_size": 10}},
    "elasticity": {"enabled": False, "max_train_batch_size": 8, "micro_batch_sizes": [1, 2]},
}
BAD = {
    "train_batch_size": 8,
    "bf16": {"enabled": True},
    "torch_autocast": {"enabled": True, "dtype": "fp16"},
    "optimizer": {"type": "AdamWW", "params": {}},
    "scheduler": {"type": "StepLR", "params": {"stepsize": 10}},
    "zero_optimization": {"stagee": 2, "offload_optimizer": {"device": "nvme"}},
}
ELASTIC = {
    "elasticity": {"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [1, 2], "version": 0.1}
}
CHECKS = """
import gc, os, sys
from deepspeed.tools import ds
assert ds.main(["check", "good.json"]) == 0
from deepspeed.config.section import DeepSpeedConfigModel
def below(model):
    for each in model.__subclasses__():
        yield each
        yield from below(each)
models = {*below(DeepSpeedConfigModel)}
built = [model.__name__ for model in models if model.__pydantic_complete__]
assert len(models) > 70 and len(built) < 20, sorted(built)
assert "deepspeed.tools.launcher.runner" not in sys.modules
assert gc.isenabled() and "PYDANTIC_DISABLE_PLUGINS" not in os.environ
assert ds.main(["check", "bad.json"]) == 1
assert ds.main(["check", "bad.json", "--fix", "--output", "fixed.json"]) == 1
assert ds.main(["elastic", "-c", "elastic.json"]) == 0
import deepspeed
assert deepspeed.check_config({"train_batch_size": 8}).ok
loaded = {"torch", "numpy", "scipy", "transformers", "yaml"} & set(sys.modules)
assert not loaded, loaded
ours = [name for name in sys.modules if name.startswith("deepspeed")]
assert len(ours) < 120, len(ours)
"""


def test_checks_of_configs_need_no_torch(tmp_path: Path) -> None:
    for name, config in (("good", GOOD), ("bad", BAD), ("elastic", ELASTIC)):
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", CHECKS],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    for words in ("did you mean 'adamw'?", "did you mean 'step_size'?", "float16 contradicts bf16.enabled"):
        assert words in done.stdout


def test_the_source_of_torch_says_what_its_classes_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, base in torch_classes.BASES.items():
        owner = torch.optim.lr_scheduler if module == torch_classes.SCHEDULES else torch.optim
        assert len(loaded := torch_classes.classes_of(module)) >= 12 and base not in loaded
        with monkeypatch.context() as patched:
            patched.setattr(torch_classes, "_loaded", lambda _: None)
            assert torch_classes.classes_of(module) == loaded
            for name in loaded:
                parameters = inspect.signature(getattr(owner, name)).parameters.values()
                needed = [(each.name, each.default is each.empty) for each in parameters]
                assert list(torch_classes.arguments_of(module, name).items()) == needed


def test_a_class_that_a_script_adds_to_torch_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = type("Mine", (torch.optim.SGD,), {})
    monkeypatch.setattr(torch.optim, "Mine", mine, raising=False)
    assert "Mine" in torch_classes.classes_of(torch_classes.OPTIMIZERS)


@pytest.mark.parametrize("name", [name for name, tool in TOOLS.items() if tool.parser is not None])
def test_every_option_has_help(name: str) -> None:
    make = TOOLS[name].parser
    assert make is not None
    parser: argparse.ArgumentParser = make()
    assert not [action.dest for action in parser._actions if not action.help]


def test_deepspeed_alone_prints_its_usage(capsys: pytest.CaptureFixture[str]) -> None:
    from deepspeed.tools.launcher import runner

    with pytest.raises(SystemExit) as exit_:
        runner.main([])
    said = capsys.readouterr().err
    assert exit_.value.code == USAGE_ERROR
    assert "usage: deepspeed [options] script" in said and "--num_gpus" in said and "required" not in said


@pytest.mark.parametrize("made", [parsers.elastic, doctor.parser, serve_options.parser])
def test_help_has_an_example_that_parses(made: Any) -> None:
    example = (made().epilog or "").partition("example: ")[2]
    assert example.startswith(made().prog)
    made().parse_args(example.removeprefix(made().prog).split())


def test_help_shows_nothing_internal() -> None:
    assert "--report" not in doctor.parser().format_help()
    text = parsers.io().format_help()
    assert "default: None" not in text and "default: False" not in text and "(default: 1M)" in text
