"""Run as a script: fork a child that saves checkpoints, kill it at a random instant, load what is left;
repeat.

Every call of the operating system that matters takes a moment longer in the child, so that kills hit between
any two of them.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from deepspeed.checkpoint import archive, writers  # noqa: E402
from deepspeed.checkpoint.consolidate import consolidate  # noqa: E402
from deepspeed.checkpoint.ranks import Ranks  # noqa: E402
from deepspeed.checkpoint.save import Place, Training, save  # noqa: E402

PLACE = Place(dp_rank=0, dp_size=1, mp_rank=0, mp_size=1, writes_model=True)


def slow(module: Any, name: str) -> None:
    original = getattr(module, name)

    def delayed(*args: Any, **kwargs: Any) -> Any:
        time.sleep(random.random() * 0.002)
        result = original(*args, **kwargs)
        time.sleep(random.random() * 0.002)
        return result

    setattr(module, name, delayed)


def save_forever(folder: Path, tags: str, first: int) -> None:
    for module, name in (
        (os, "fsync"),
        (os, "rename"),
        (os, "replace"),
        (os, "unlink"),
        (shutil, "rmtree"),
        (archive, "_write_tensor"),
        (writers, "_exchange"),
    ):
        slow(module, name)
    number = first
    while True:
        number += 1
        model = nn.Linear(40, 40)
        nn.init.constant_(model.weight, number)
        nn.init.constant_(model.bias, number)
        training = Training(
            module=model,
            state=None,
            zero_stage=0,
            bf16=False,
            ds_config={},
            header={"global_steps": number, "skipped_steps": 0, "global_samples": 0},
        )
        save(training, folder, "same" if tags == "same" else f"global_step{number}", PLACE, Ranks())
        for old in sorted(folder.glob("global_step*"), key=lambda p: p.stat().st_mtime)[:-3]:
            shutil.rmtree(old)


def check(folder: Path) -> int:
    """The number in the checkpoint that ``latest`` names, of which every tensor must be whole and alike."""
    tag = writers.read_latest(folder)
    assert tag is not None
    found = writers.find_folder(folder, tag)
    tensors = consolidate(found).materialized()
    values = {value for tensor in tensors.values() for value in tensor.unique().tolist()}
    assert len(tensors) == 2 and len(values) == 1, values
    return int(values.pop())


def main() -> None:
    folder, tags, exchange, kills = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    if exchange == "no":
        writers._exchange = lambda one, other: False
    torch.set_num_threads(1)
    number, in_between, saved = 0, 0, 0
    for _ in range(kills):
        child = os.fork()
        if child == 0:
            try:
                save_forever(folder, tags, number)
            finally:
                os._exit(1)
        while number == 0 and not (folder / "latest").exists():  # the first one is allowed to arrive
            time.sleep(0.005)
        time.sleep(random.random() * 0.12)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, "the child failed by itself"
        in_between += any(p.name.startswith(".") for p in folder.iterdir())
        found = check(folder)
        assert found >= number, f"went back from {number} to {found}"
        saved += found > number
        number = found
    print(f"{kills} kills, {in_between} in the middle of a save, {saved} with a newer checkpoint")
    assert in_between and saved


if __name__ == "__main__":
    main()
