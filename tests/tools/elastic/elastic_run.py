"""A training script for an elastic launcher: `elastic_run.py FOLDER CONFIG STEPS [DEATH]`, DEATH as in `dies`.

Each rank appends a line per micro-batch to its own file: the samples that it was given, and the loss.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import deepspeed
from deepspeed import comm as dist
from deepspeed.data.loader import RepeatingLoader

SAMPLES, WIDTH = 24, 8


class Numbered(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.sin(torch.arange(WIDTH) * (index + 1.0))


def dies(death: str, folder: Path, rank: int, step: int) -> None:
    """``death``: RANK:STEP, once in this folder, after the losses of that step are known to the other ranks."""
    victim, _, at = death.partition(":")
    if death and (rank, step) == (int(victim), int(at)) and not (folder / "died").exists():
        (folder / "died").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


def train(
    folder: Path, config: dict[str, Any], steps: int, death: str = "", pause: float = 0.0, save: str = ""
) -> int:
    """Trains to ``steps``; returns the number of steps that had been made when it started. ``save``: a folder of
    checkpoints, one after each step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    engine, _, loader, _ = deepspeed.initialize(model=model, training_data=Numbered(), config=config)
    began, rank = engine.global_steps, engine.global_rank
    with open(folder / f"rank{rank}", "a") as log:
        log.write(json.dumps({"began": began, "size": engine.world_size, "at": time.time()}) + "\n")
        batches = iter(RepeatingLoader(loader))
        while engine.global_steps < steps:
            step = engine.global_steps
            for _ in range(engine.gradient_accumulation_steps()):
                indices, samples = next(batches)
                loss = engine(samples).pow(2).mean()
                engine.backward(loss)
                dies(death, folder, rank, step)
                record = {"step": step, "samples": indices.tolist(), "loss": loss.item(), "at": time.time()}
                log.write(json.dumps(record) + "\n")
                log.flush()  # before the step, which may save: a rank killed after it leaves its record
                engine.step()
            if save:
                engine.save_checkpoint(save)
            time.sleep(pause)
    return began


def read(folder: Path) -> tuple[list[dict[str, Any]], dict[int, dict[int, list[Any]]]]:
    """The starts, by time; and by step and rank the micro-batches, of each step the last time that it was made."""
    starts, made, sizes = [], {}, {}
    for path in folder.glob("rank*"):
        rank, size, current = int(path.name[4:]), 0, {}
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if "began" in record:
                starts.append(record | {"rank": rank})
                current, size = {}, record["size"]
            else:
                fresh = current.setdefault(record["step"], [])
                fresh.append((record["samples"], record["loss"]))
                made.setdefault(record["step"], {}).setdefault(rank, {})
                made[record["step"]][rank] = fresh
                if rank == 0:
                    sizes[record["step"]] = size
    for step, by_rank in made.items():  # drop ranks of earlier starts, and steps that rank 0 is still in
        made[step] = {rank: by_rank[rank] for rank in range(sizes.get(step, 0)) if rank in by_rank}
    return sorted(starts, key=lambda start: start["at"]), made


if __name__ == "__main__":
    where, settings, wanted = sys.argv[1:4]
    options = dict(word.split("=", 1) for word in sys.argv[4:])
    train(
        Path(where),
        json.loads(settings),
        int(wanted),
        options.get("death", ""),
        float(options.get("pause", 0)),
        options.get("save", ""),
    )
    dist.barrier()
