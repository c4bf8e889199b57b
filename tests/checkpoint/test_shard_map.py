"""The shard map of a checkpoint: computed from the cuts, and listed fragment by fragment, with the same result."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.checkpoint import names
from deepspeed.checkpoint.file_format import OPTIMIZER_MAP, PARTS_MAP
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.shard_map import (
    FileShards,
    ShardMapInput,
    make_shard_map,
    pack_listed,
    read_shard_map,
)
from deepspeed.checkpoint.shards import ShardCut, ShardIndex
from tests.checkpoint.models import config, make_engine, train
from tests.pool import distributed

KINDS = ("fp32", "exp_avg")


def held_by(file: int, cuts: dict[str, ShardCut], numels: dict[str, int], kinds=lambda name: KINDS):
    """The fragments in one file, some of them in two pieces."""
    for name, cut in cuts.items():
        start, stop = cut.interval(file, numels[name])
        middle = (start + stop) // 2
        for low, high in ((start, middle), (middle, stop)):
            if low < high:
                yield ShardIndex(name, (numels[name],), (), low, high), kinds(name)


def not_needed(part: Tensor) -> None: ...


def some_cuts(dice: random.Random) -> tuple[dict[str, ShardCut], dict[str, int], int]:
    """Tensors end to end in two runs, of which the second one is cut into fewer shards; the number of files."""
    numels = {f"p{i}": dice.choice([0, 1, 5, 40, 1000]) for i in range(8)}
    files = dice.choice([1, 3, 8, 50])
    cuts: dict[str, ShardCut] = {}
    for run, count in ((list(numels)[:4], files), (list(numels)[4:], max(1, files // 2))):
        length = -(-(sum(numels[name] for name in run) + 16) // count)
        position = 0
        for name in run:
            cuts[name] = ShardCut(position, length, count)
            position += numels[name] + dice.choice([0, 3])
    return cuts, numels, files


def test_computed_and_listed_maps_name_the_same_files():
    dice = random.Random(3)
    for _ in range(60):
        cuts, numels, files = some_cuts(dice)
        shapes = [(numels[name],) for name in cuts]
        reports = [FileShards.of(held_by(f, cuts, numels), list(cuts)).packed() for f in range(files)]
        packed = pack_listed(list(cuts), shapes, reports)
        assert packed is not None
        listed = read_shard_map(packed, not_needed)
        numbers = [(cut.offset, cut.length, cut.count) for cut in cuts.values()]
        computed = read_shard_map(
            {"names": list(cuts), "shapes": shapes, "kinds": [KINDS] * 8, "cuts": numbers}, not_needed
        )
        assert type(listed) is not type(computed) and listed.shapes == computed.shapes
        for name, numel in numels.items():
            for _ in range(5 if numel else 0):
                start = dice.randrange(numel)
                shard = ShardIndex(name, (numel,), (), start, dice.randrange(start, numel) + 1)
                assert computed.files(shard, 0) == listed.files(shard, 0)
        assert computed.files(ShardIndex("unknown", (1,), (), 0, 1), 0) == set()


def contents(file: int, *, of: int | None = None, kinds=lambda name: KINDS) -> ShardMapInput:
    """Return the contents of file ``file``, for two tensors cut over two ranks; ``of``: it holds that file's
    fragments."""
    cuts, numels = {"a": ShardCut(0, 8, 2), "b": ShardCut(10, 8, 2)}, {"a": 10, "b": 6}
    held = FileShards.of(held_by(file if of is None else of, cuts, numels, kinds), list(cuts))
    return ShardMapInput(list(cuts), [(10,), (6,)], list(cuts.values()), held, file)


@distributed(world_size=2)
def test_exceptions_are_listed():
    """A rank that holds anything but its shard makes all of them list what they hold."""
    ranks, rank = Ranks(), dist.get_rank()
    made = make_shard_map(contents(rank), ranks)
    assert made is not None and "cuts" in made and "rows" not in made
    assert made["kinds"] == [KINDS, KINDS]
    swapped = make_shard_map(contents(rank, of=1 - rank), ranks)
    assert (swapped is None) == bool(rank)
    if swapped is not None:
        read = read_shard_map(swapped, not_needed)
        assert read.files(ShardIndex("a", (10,), (), 0, 8), 0) == {1}
        assert read.files(ShardIndex("a", (10,), (), 7, 9), 0) == {0, 1}


@distributed(world_size=2)
def test_kinds_of_state_that_not_every_rank_has():
    """Rank 1 holds no part of ``a`` that rank 0 knows to be without moments; ``b`` is only on rank 1."""
    ranks, rank = Ranks(), dist.get_rank()
    some = make_shard_map(contents(rank, kinds=lambda name: KINDS if name == "b" else KINDS[:1]), ranks)
    assert some is not None and some["kinds"] == [KINDS[:1], KINDS] and "cuts" in some
    apart = make_shard_map(contents(rank, kinds=lambda name: (f"only{rank}",)), ranks)
    if rank == 0:
        assert apart is not None and "cuts" not in apart
        assert apart["kinds"] == [("only0", "only1"), ("only1",)]


@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=3)
def test_engines_compute_it(tmp_path: Path, stage: int):
    """The first file of an engine's checkpoint has no row for any fragment, and names the files that hold them."""
    engine = make_engine(config(stage))
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path, tag="t")
    if dist.get_rank():
        return
    first = names.zero_model_file(0, 0) if stage == 3 else names.model_file(0)
    index = torch.load(tmp_path / "t" / first)[names.INDEX]
    for key in (OPTIMIZER_MAP, PARTS_MAP)[: 1 + (stage == 3)]:
        assert "cuts" in index[key] and "rows" not in index[key]
    read = read_shard_map(index[OPTIMIZER_MAP], not_needed)
    for number in range(3):
        section = torch.load(tmp_path / "t" / names.optim_file(number, 0, bf16=False))[names.OPTIMIZER_STATE]
        assert section["shards"]
        for entry in section["shards"]:
            assert read.files(ShardIndex(*entry), 0) == {number}
