"""Run as a script: fork a child that saves checkpoints, kill it at a random instant, load what is left;
repeat.

    python tests/checkpoint/crash_while_saving.py FOLDER same|new yes|no KILLS [ranks]

``same`` saves under one tag again and again; ``no`` does without exchanging folders in one step. With ``ranks`` two
children are the ranks of an engine at stage 2, and one or both are killed; the survivor does what it does for a moment.
Every call of the operating system that matters takes a moment longer in the child, so that kills hit between
any two of them.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from deepspeed.checkpoint.consolidate import consolidate  # noqa: E402
from deepspeed.checkpoint.contents import RankCoordinates, StateToSave  # noqa: E402
from deepspeed.checkpoint.files import archive_writer, writers  # noqa: E402
from deepspeed.checkpoint.ranks import Ranks  # noqa: E402
from deepspeed.checkpoint.reader import open_checkpoint  # noqa: E402
from deepspeed.checkpoint.save import SaveRequest, save  # noqa: E402

PLACE = RankCoordinates(dp_rank=0, dp_size=1, mp_rank=0, mp_size=1, writes_model=True)


def slow(module: Any, name: str) -> None:
    original = getattr(module, name)

    def delayed(*args: Any, **kwargs: Any) -> Any:
        time.sleep(random.random() * 0.002)
        result = original(*args, **kwargs)
        time.sleep(random.random() * 0.002)
        return result

    setattr(module, name, delayed)


def slow_down() -> None:
    for module, name in (
        (os, "fsync"),
        (os, "rename"),
        (os, "replace"),
        (os, "unlink"),
        (shutil, "rmtree"),
        (archive_writer, "_write_tensor"),
        (writers, "_exchange"),
    ):
        slow(module, name)


def tag_of(tags: str, number: int) -> str:
    return "same" if tags == "same" else f"global_step{number}"


def forget_old(folder: Path) -> None:
    for old in sorted(folder.glob("global_step*"), key=lambda p: p.stat().st_mtime)[:-3]:
        shutil.rmtree(old)


def save_forever(folder: Path, tags: str, first: int) -> None:
    slow_down()
    number = first
    while True:
        number += 1
        save_once(folder, tag_of(tags, number), number)
        forget_old(folder)


def save_once(folder: Path, tag: str, number: int) -> None:
    model = nn.Linear(40, 40)
    nn.init.constant_(model.weight, number)
    nn.init.constant_(model.bias, number)
    training = StateToSave(
        module=model,
        state=None,
        zero_stage=0,
        bf16=False,
        ds_config={},
        header={"global_steps": number, "skipped_steps": 0, "global_samples": 0},
    )
    save(training, SaveRequest(folder, tag, PLACE), Ranks())


def check_nothing_unfinished(folder: Path, number: int) -> None:
    """After the next save, under whatever tag, what was killed has left nothing. One killed while it renamed ``latest``
    leaves a file of some bytes for an hour; one killed before it wrote its name into a new lock file, an empty one."""
    save_once(folder, "the_next", number + 1)
    hidden = [path for path in folder.iterdir() if path.name.startswith(".")]
    nameless = {path.name for path in hidden if path.suffix == ".lock" and path.stat().st_size == 0}
    left = {path.name for path in hidden if not path.name.startswith((".latest.", ".zero_to_"))}
    assert not left - nameless, left
    assert not left & {name.removesuffix("lock") + "tmp" for name in nameless}, left


def save_on_a_rank_forever(folder: Path, tags: str, first: int, rank: int, store: Path) -> None:
    """All that the optimizer holds, on all ranks, is the number of the save."""
    import deepspeed

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0}},
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
    }
    engine, _, _, _ = deepspeed.initialize(model=nn.Linear(40, 40), config=config)
    state = engine.state_access
    state.ensure_state()
    slow_down()
    if rank == 0:
        store.with_name("ready").touch()
    number = first
    while True:
        number += 1
        for _, tensors in state.shards():
            for tensor in tensors.values():
                tensor.fill_(number)
        state.publish()
        engine.global_steps = number
        engine.save_checkpoint(folder, tag=tag_of(tags, number))
        if rank == 0:
            forget_old(folder)


def check(folder: Path) -> int:
    """The number in the checkpoint that ``latest`` names, of which every tensor must be whole and alike."""
    tag = writers.read_latest(folder)
    assert tag is not None
    found = writers.find_folder(folder, tag)
    whole = list(consolidate(found).materialized().values())
    assert len(whole) == 2
    catalog = open_checkpoint(found)
    for kinds in catalog.fragments.values():
        assert {
            kind: sum(s.index.numel for s in sources) for kind, sources in kinds.items()
        } == dict.fromkeys(kinds, sum(source.index.numel for source in kinds["fp32"]))
        whole += [source.data for sources in kinds.values() for source in sources]
    values = {value for tensor in whole for value in tensor.unique().tolist()}
    assert len(values) == 1, values
    number = int(values.pop())
    assert number == catalog.model_states["global_steps"]
    return number


def fork(run: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(1)
    return child


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)


def main() -> None:
    folder, tags, exchange, kills = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    on_ranks = sys.argv[5:] == ["ranks"]
    if exchange == "no":
        writers._exchange = lambda one, other: False
    torch.set_num_threads(1)
    number, in_between, saved = 0, 0, 0
    for attempt in range(10 * kills):
        if attempt >= kills and in_between and saved:
            break  # a busy machine may hit no save at all in the first ones
        if on_ranks:
            with tempfile.TemporaryDirectory() as scratch:
                children = [
                    fork(partial(save_on_a_rank_forever, folder, tags, number, rank, Path(scratch, "store")))
                    for rank in range(2)
                ]
                wait_for(Path(scratch, "ready") if number else folder / "latest")  # the first one may arrive
                time.sleep(random.random() * 0.3)
                kill(children[attempt % 2])
                time.sleep(random.choice((0, 0, 0.03, 0.1)))
                kill(children[1 - attempt % 2])
                reap(children, by_signal=children[attempt % 2])
        else:
            child = fork(partial(save_forever, folder, tags, number))
            while number == 0 and not (folder / "latest").exists():  # the first one is allowed to arrive
                time.sleep(0.005)
            time.sleep(random.random() * 0.12)
            kill(child)
            reap([child], by_signal=child)
        in_between += any(p.name.startswith(".") for p in folder.iterdir())
        found = check(folder)
        assert found >= number, f"went back from {number} to {found}"
        saved += found > number
        number = found
    check_nothing_unfinished(folder, number)
    print(f"{kills} kills, {in_between} in the middle of a save, {saved} with a newer checkpoint")
    assert in_between and saved


def wait_for(file: Path) -> None:
    begin = time.monotonic()
    while not file.exists():
        assert time.monotonic() - begin < 60, "the ranks do not start"
        time.sleep(0.002)


def reap(children: list[int], *, by_signal: int) -> None:
    for child in children:
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert killed or child != by_signal, "the child failed by itself"


if __name__ == "__main__":
    main()
