"""Files, opens and bytes of one rank among many: one process stands for each of them in turn.

The process group is torch's fake one, which moves nothing; the training state is a fake as well, cut as ZeRO cuts it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.base import rng
from deepspeed.checkpoint import names
from deepspeed.checkpoint.contents import RankCoordinates, StateToSave
from deepspeed.checkpoint.files import archive_reader as archives
from deepspeed.checkpoint.load import Restorer
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.reader import open_checkpoint
from deepspeed.checkpoint.save import SaveRequest, save
from deepspeed.checkpoint.shards import ShardCut, ShardIndex
from tests.checkpoint.held_state import Entry, HeldState
from tests.checkpoint.models import config, make_engine, train
from tests.checkpoint.test_intervals import KINDS, value_of
from tests.pool import distributed, run

WIDTH, LAYERS = 96, 4


class EvenState(HeldState):
    """Two buckets of layers, each cut evenly over all ranks: masters and moments of this rank's shards."""

    def __init__(self, model: nn.Module, rank: int, world: int) -> None:
        self.entries = [Entry(name, p, tuple(p.shape)) for name, p in model.named_parameters()]
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.1}]
        self.held: list[tuple[ShardIndex, dict[str, Tensor]]] = []
        self.known_cuts: dict[str, ShardCut] = {}
        for bucket in (self.entries[: len(self.entries) // 2], self.entries[len(self.entries) // 2 :]):
            size = -(-sum(entry.param.numel() for entry in bucket) // world)
            position = -rank * size
            for entry in bucket:
                self.known_cuts[entry.name] = ShardCut(position + rank * size, size, world)
                low, high = max(0, -position), min(entry.param.numel(), size - position)
                if low < high:
                    index = ShardIndex(entry.name, entry.shape, (), low, high)
                    tensors = {kind: value_of(entry.name, kind, low, high) for kind in KINDS}
                    self.held.append((index, {**tensors, "step": torch.tensor(7.0)}))
                position += entry.param.numel()

    def cuts(self) -> dict[str, ShardCut]:
        return self.known_cuts


class ShardOwner:
    """Where stage 3 keeps a frozen weight: cut evenly, as ``ShardedWeights`` sees it."""

    first_replica = True

    def __init__(self, values: Tensor, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.size = size = -(-values.numel() // world)
        self.bounds = (min(rank * size, values.numel()), min((rank + 1) * size, values.numel()))
        self.part = values[slice(*self.bounds)].clone()

    def owning_ranks(self, position: int) -> list[tuple[int, int, int]]:
        return [(self.rank, *self.bounds)] if self.bounds[0] < self.bounds[1] else []

    def cut_of(self, position: int) -> ShardCut:
        return ShardCut(0, self.size, self.world)

    def local_part(self, position: int) -> Tensor:
        return self.part


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))


_WHOLE = nn.Sequential(*(Layer() for _ in range(LAYERS)))


def model(stage: int, rank: int, world: int) -> nn.Module:
    net = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    net[0].weight.requires_grad_(False)
    if stage == 3:
        for number, param in enumerate(net.parameters()):
            values = torch.arange(param.numel()).float() + number
            param.ds_shape, param.ds_position = tuple(param.shape), 0
            param.ds_owner = ShardOwner(values, rank, world)
            param.data = param.data.new_empty(0)
    return net


def trained(net: nn.Module, rank: int, world: int) -> EvenState:
    """As if the frozen weight were not there."""
    state = EvenState(_WHOLE, rank, world)
    state.entries = [entry for entry in state.entries if entry.name != "0.weight"]
    state.held = [(index, tensors) for index, tensors in state.held if index.name != "0.weight"]
    return state


def state_to_save(stage: int, rank: int, world: int) -> tuple[StateToSave, RankCoordinates]:
    net = model(stage, rank, world)
    state: Any = trained(net, rank, world)
    torch.manual_seed(rank)
    training = StateToSave(
        module=net,
        state=state,
        zero_stage=stage,
        bf16=False,
        ds_config={},
        header={"global_steps": 7, "skipped_steps": 0, "global_samples": 28},
        index_entries={"world_size": world},
        rank_state={"random": rng.capture(), "data": None},
    )
    return training, RankCoordinates(
        dp_rank=rank, dp_size=world, mp_rank=0, mp_size=1, writes_model=rank == 0
    )


@contextmanager
def fake_rank(rank: int, world: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def saved_by(folder: Path, stage: int, world: int, writers: list[int]) -> dict[int, int]:
    """Write checkpoint "t" of ``world`` ranks, of which only ``writers`` write files; the files of the others are
    empty, and must not be opened. Returns the bytes that each writer has written in addition to its part of the state.
    Ranks do not learn what others hold."""
    beside: dict[int, int] = {}
    final = folder / "t"
    final.mkdir(parents=True)
    for rank in writers:
        before = {path.name for path in final.iterdir()}
        training, place = state_to_save(stage, rank, world)
        alone = mock.patch.object(Ranks, "gather", side_effect=AssertionError("grows with the ranks"))
        neither = mock.patch.object(Ranks, "gather_at_writers", side_effect=AssertionError("grows, too"))
        same_id = mock.patch("deepspeed.checkpoint.contents.new_id", lambda: 5)  # which ranks agree on
        with fake_rank(rank, world), alone, neither, same_id, kinds_of_all():
            writes_into = mock.patch(
                "deepspeed.checkpoint.save.StagedFolder", lambda *_: mock.Mock(staging=final, final=final)
            )
            with writes_into, mock.patch("deepspeed.checkpoint.save.flush_later"):
                save(training, SaveRequest(folder, "t", place), Ranks())
        state = sum(t.numel() for _, tensors in training.state.held for t in tensors.values())  # type: ignore[union-attr]
        frozen = training.module[0].weight  # type: ignore[index]
        state += frozen.ds_owner.part.numel() if stage == 3 else WIDTH * (WIDTH + 1) * LAYERS * (rank == 0)
        beside[rank] = sum(p.stat().st_size for p in final.iterdir() if p.name not in before) - 4 * state
    for rank in range(world):
        for name in (
            names.optim_file(rank, 0, bf16=False),
            names.zero_model_file(rank, 0) if stage == 3 else None,
        ):
            if name is not None:
                (final / name).touch()
    return beside


def kinds_of_all() -> Any:
    """Return the ranks' kinds of state together: on the fake group, ranks do not exchange them."""
    found = [(*KINDS,)]
    return mock.patch(
        "deepspeed.checkpoint.shard_map._kinds_of_all",
        lambda contents, ranks: (found if any(contents.shards.kinds) else [()]) * len(contents.names),
    )


def loaded_by(folder: Path, stage: int, rank: int, world: int) -> tuple[set[str], int]:
    """Loads as rank ``rank`` of ``world``; the names of the files that it opened, and the bytes that it read."""
    opened: dict[str, archives.Archive] = {}
    original = archives.open_archive

    def opening(path: Path) -> archives.Archive:
        opened[path.name] = original(path)
        return opened[path.name]

    net = model(stage, rank, world)
    state: Any = trained(net, rank, world)
    for _, tensors in state.held:
        for kind in KINDS:
            tensors[kind].fill_(-1)
    with mock.patch.object(archives, "open_archive", opening), fake_rank(rank, world):
        catalog = open_checkpoint(folder / "t", fetch=False)
        restorer = Restorer(catalog, net, state, strict=True)
        catalog.files.fetch(restorer.needed_shards(masters=True, optimizer=True), prefer=rank)
        restorer.check_names()
        restorer.load_weights_from_masters()
        restorer.load_optimizer_states()
        random = catalog.files.rank_state(rank)["random"]["torch"]
    for index, tensors in state.held:
        for kind in KINDS:
            assert torch.equal(tensors[kind], value_of(index.name, kind, index.start, index.stop))
        assert tensors["step"] == 7
    if stage == 3:
        owner = net[0].weight.ds_owner
        assert torch.equal(owner.part, torch.arange(*owner.bounds).float())
    assert torch.equal(random, torch.Generator().manual_seed(rank).get_state())
    return set(opened), sum(archive.bytes_read for archive in opened.values())


def own_files(stage: int, rank: int) -> set[str]:
    first = names.zero_model_file(0, 0) if stage == 3 else names.model_file(0)
    own = {first, names.optim_file(rank, 0, bf16=False)}
    return own | {names.zero_model_file(rank, 0)} if stage == 3 else own


@pytest.mark.parametrize("many", [256, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_of_many_ranks_writes_and_opens_its_own(tmp_path, stage, many):
    """The bytes that a rank writes and reads in addition to its state are the same with 16 ranks and with ``many``,
    also on rank 0, whose file contains the shard map."""
    beside: dict[int, dict[int, int]] = {}
    read: dict[int, int] = {}
    for world in (16, many):
        ranks = [0, 1, world // 2, world - 1]
        beside[world] = saved_by(tmp_path / str(world), stage, world, ranks)
        for rank in ranks:
            opened, read[world] = loaded_by(tmp_path / str(world), stage, rank, world)
            assert opened <= own_files(stage, rank)
    assert max(beside[many][rank] for rank in (1, many // 2, many - 1)) < 40_000
    assert beside[many][0] < beside[16][0] + 2000
    assert read[many] < read[16] + archives.BLOCK


def test_other_numbers_of_ranks_open_what_they_need(tmp_path):
    """Each of 64 ranks' files is there; 48, 64 and 100 ranks read them."""
    for stage in (2, 3):
        folder = tmp_path / str(stage)
        saved_by(folder, stage, 64, list(range(64)))
        for world in (48, 100):
            for rank in (0, 17, 33, 47):
                opened, _ = loaded_by(folder, stage, rank, world)
                # Those of two buckets, and the random state.
                assert len({name for name in opened if "optim" in name}) <= 2 * 3 + 1


def _opened(folder: str, stage: int) -> set[str]:
    """Names of the checkpoint's files that this process opens while an engine loads."""
    engine = make_engine(config(stage), seed=9)
    found: set[str] = set()
    watching = [True]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and str(arguments[0]).endswith(".pt"):
            found.add(Path(arguments[0]).name)

    sys.addaudithook(watch)
    engine.load_checkpoint(folder)
    watching.clear()
    return found


def _save(folder: str, stage: int) -> None:
    engine = make_engine(config(stage))
    train(engine, 0, 2)
    engine.save_checkpoint(folder)


@pytest.mark.parametrize("stage", [1, 3])
def test_engines_open_the_first_file_and_their_own(tmp_path, stage):
    run(_save, 3, folder=str(tmp_path), stage=stage)
    for rank, opened in enumerate(run(_opened, 3, folder=str(tmp_path), stage=stage)):
        assert opened <= own_files(stage, rank)


@distributed(world_size=2)
def test_files_hold_the_random_state_of_their_own_rank(tmp_path):
    engine = make_engine(config(2))
    torch.manual_seed(40 + engine.global_rank)
    engine.save_checkpoint(tmp_path, tag="t")
    for rank in range(2):
        index = torch.load(tmp_path / "t" / names.optim_file(rank, 0, bf16=False))[names.INDEX]
        expected = torch.Generator().manual_seed(40 + rank).get_state()
        assert torch.equal(index["rank_state"]["random"]["torch"], expected)
    assert "rank_states" not in torch.load(tmp_path / "t/mp_rank_00_model_states.pt")[names.INDEX]
