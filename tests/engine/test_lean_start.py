"""What a start imports, counted: modules of ours and their lines, after `initialize` of a plain run.

The ceilings leave a little room. A feature that is imported where its part of the plan asks for it does not touch
them; one that every run needs raises them on purpose.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pool import free_port

CEILINGS = {0: (150, 25_000), 2: (150, 25_000), 3: (170, 28_000)}
"""By stage: modules, lines."""

NOT_IN_A_PLAIN_RUN = (
    "deepspeed.base.accelerator.cuda_accelerator", "deepspeed.checkpoint.foreign", "deepspeed.checkpoint.load",
    "deepspeed.checkpoint.originals", "deepspeed.checkpoint.save", "deepspeed.checkpoint.storage",
    "deepspeed.comm.documented_groups", "deepspeed.comm.functions", "deepspeed.comm.hangs.watch",
    "deepspeed.comm.timed", "deepspeed.comm.torch", "deepspeed.comm.transports.gloo",
    "deepspeed.comm.transports.hierarchical", "deepspeed.comm.transports.process_group",
    "deepspeed.comm.transports.shared_memory", "deepspeed.compression", "deepspeed.config.availability",
    "deepspeed.config.elastic_batch", "deepspeed.data", "deepspeed.engine.hybrid_engine",
    "deepspeed.engine.loading", "deepspeed.engine.observers.progress.live_line", "deepspeed.engine.pipeline",
    "deepspeed.inference", "deepspeed.observe", "deepspeed.ops.adam.cpu_adam", "deepspeed.ops.formats",
    "deepspeed.ops.lamb", "deepspeed.ops.lion", "deepspeed.ops.sparse_attention", "deepspeed.optim.lr_schedules",
    "deepspeed.optim.onebit", "deepspeed.parallel.expert.layer", "deepspeed.parallel.pipeline",
    "deepspeed.parallel.sequence", "deepspeed.parallel.tensor", "deepspeed.planning.planner", "deepspeed.tools",
    "deepspeed.transforms.module_transforms", "deepspeed.transforms.recompute.checkpointing",
    "deepspeed.zero.gathering.scheduled_gatherer", "deepspeed.zero.gathering.shard_server",
    "deepspeed.zero.gradients.quantized_sum", "deepspeed.zero.muon", "deepspeed.zero.offload.tiers",
    "deepspeed.zero.offload.zenflow",
)  # fmt: skip

START = """
import json, os, sys, torch
for stage in {stages}:
    if os.fork():
        os.wait()
        continue
    import deepspeed
    model = torch.nn.Linear(4, 4)
    config = {{
        "train_batch_size": 1,
        "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-3}}}},
        "zero_optimization": {{"stage": stage}},
    }}
    deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    found = {{name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}}
    ours = {{name: file for name, file in found.items() if name.startswith("deepspeed") and file}}
    print("LOADED" + json.dumps([stage, ours]), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def loaded() -> dict[int, dict[str, str]]:
    """By stage: the file of each module of ours. Of processes that had torch, and nothing of ours."""
    environment = {
        **os.environ, "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "DEEPSPEED_PROGRESS": "0",
    }  # fmt: skip
    code = START.format(stages=list(CEILINGS))
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    found = [json.loads(line.partition("LOADED")[2]) for line in done.stdout.splitlines() if "LOADED" in line]
    assert len(found) == len(CEILINGS), done.stderr
    return dict(found)


@pytest.mark.parametrize("stage", CEILINGS)
def test_a_plain_run_imports_what_it_uses(loaded: dict[int, dict[str, str]], stage: int) -> None:
    inside = tuple(f"{name}." for name in NOT_IN_A_PLAIN_RUN)
    assert not [n for n in loaded[stage] if n in NOT_IN_A_PLAIN_RUN or n.startswith(inside)]
    files = {Path(path) for path in loaded[stage].values() if path.endswith(".py")}
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
    most_modules, most_lines = CEILINGS[stage]
    assert len(files) <= most_modules and lines <= most_lines, (len(files), lines)
