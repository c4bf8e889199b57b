"""Without their sections, `audit` and `trace` are not even imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import forked

SCRIPT = """
import sys
import torch
import deepspeed

config = {{"train_batch_size": 1, "optimizer": {{"type": "Adam", "params": {{"lr": 0.1}}}}, **{section}}}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 1), config=config)
engine.backward(engine(torch.ones(1, 2)).sum())
engine.step()
engine.destroy()
parts = ("deepspeed.observe.audit.fingerprints", "deepspeed.observe.audit.records", "deepspeed.engine.observers.audit",
         "deepspeed.engine.observers.progress.timeline", "deepspeed.observe.timeline")
print("loaded:", *[name for name in parts if name in sys.modules])
"""


@pytest.mark.parametrize("section, loaded", [({}, 0), ({"audit": {"record": "folder"}}, 3)])
def test_what_an_engine_imports(section: dict[str, object], loaded: int, tmp_path: Path) -> None:
    env = {**os.environ, "DEEPSPEED_PROGRESS": "0"}
    done = forked.run(["-c", SCRIPT.format(section=section)], env=env, cwd=tmp_path)
    line = next(line for line in done.stdout.splitlines() if line.startswith("loaded:"))
    assert len(line.split()) - 1 == loaded
