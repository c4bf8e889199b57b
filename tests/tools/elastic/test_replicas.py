"""States in memory, of ranks that count as separate machines: each has another folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed import comm as dist
from deepspeed.base.constants import ELASTIC_PROGRESS, ELASTIC_STATE
from deepspeed.data.loader import RepeatingLoader
from tests.pool import run
from tests.tools.elastic.elastic_run import WIDTH, Numbered
from tests.tools.elastic.test_going_on import config


@contextmanager
def machine(folder: Path, *, own: bool) -> Iterator[None]:
    """This rank under an elastic launcher: each on its own machine, or all on one."""
    rank = dist.get_rank()
    memory = folder / f"machine{rank}" if own else folder / "machine0"
    memory.mkdir(exist_ok=True)
    (memory / ELASTIC_PROGRESS).write_bytes(bytes(8))
    changes = {ELASTIC_STATE: str(memory)}
    if own:
        changes |= {"GROUP_RANK": str(rank), "LOCAL_RANK": "0"}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def state_of(folder: Path, stage: int, steps: int, own: bool) -> tuple[int, dict[str, Any], list[float]]:
    """Trains to ``steps``: where it began, whole weights and first moments at the end, and losses on the way."""
    with machine(folder, own=own):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
        engine, _, loader, _ = deepspeed.initialize(
            model=model, training_data=Numbered(), config=config(stage)
        )
        began, losses, batches = engine.global_steps, [], iter(RepeatingLoader(loader))
        while engine.global_steps < steps:
            for _ in range(engine.gradient_accumulation_steps()):
                loss = engine(next(batches)[1]).pow(2).mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        found = {}
        for name, param in engine.module.named_parameters():
            found[name] = engine.whole_tensor(param).clone()
            found[f"{name} exp_avg"] = deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg").clone()
        engine.destroy()
    return began, found, losses


@pytest.mark.parametrize("stage", [1, 3])
def test_the_loss_of_a_machine_costs_nothing(tmp_path: Path, stage: int) -> None:
    calm = run(state_of, 2, folder=tmp_path, stage=stage, steps=4, own=False)[0]
    for entry in tmp_path.iterdir():
        shutil.rmtree(entry)
    before = run(state_of, 2, folder=tmp_path, stage=stage, steps=2, own=True)[0]
    files = [sorted(p.name for p in (tmp_path / f"machine{m}").rglob("*states.pt")) for m in range(2)]
    assert files[0] == files[1] and len(files[0]) >= 2 * 3  # two states with the files of both ranks

    shutil.rmtree(tmp_path / "machine0")  # another one takes its place
    began, at_step_2, _ = run(state_of, 2, folder=tmp_path, stage=stage, steps=2, own=True)[0]
    assert began == 2
    torch.testing.assert_close(at_step_2, before[1], rtol=0, atol=0)
    shutil.copytree(tmp_path / "machine1", tmp_path / "machine_left")
    _, after, losses = run(state_of, 2, folder=tmp_path, stage=stage, steps=4, own=True)[0]
    torch.testing.assert_close(after, calm[1], rtol=0, atol=0)
    assert losses == calm[2][len(losses) :]

    shutil.rmtree(tmp_path / "machine0")  # one machine is left
    (tmp_path / "machine_left").rename(tmp_path / "machine0")
    began, after, _ = run(state_of, 1, folder=tmp_path, stage=stage, steps=4, own=True)[0]
    assert began == 2  # and sums in another order give nearly the same
    torch.testing.assert_close(after, calm[1], rtol=1e-4, atol=1e-6)
