"""State that rests in files and is cut into several intervals per parameter and rank, as offloading to NVMe keeps it.

The training state is a fake: whatever implements ``TrainingState`` can be saved and loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.checkpoint.consolidate import consolidate
from deepspeed.checkpoint.contents import RankCoordinates, StateToSave
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.foreign.upstream_export import export_checkpoint
from deepspeed.checkpoint.load import Restorer
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.reader import open_checkpoint
from deepspeed.checkpoint.save import SaveRequest, save
from deepspeed.checkpoint.shards import ShardIndex
from tests.allocations import counted
from tests.checkpoint.held_state import Entry, HeldState
from tests.pool import distributed

KINDS = ("fp32", "exp_avg", "exp_avg_sq")
INTERVAL = 100_000
SMALL = 300 << 10
"""Less than one of an interval's tensors."""


class FileState(HeldState):
    """Each ``interval`` elements (the last are fewer) belong to one rank in turn, ``first`` to begin with; their
    tensors are mapped from one file each."""

    def __init__(self, model: nn.Module, folder: Path, first: int = 0, interval: int = INTERVAL) -> None:
        folder.mkdir(parents=True)
        self.entries = [Entry(name, p, tuple(p.shape)) for name, p in model.named_parameters()]
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.1, "betas": (0.9, 0.99)}]
        self.held: list[tuple[ShardIndex, dict[str, Tensor]]] = []
        number = first
        for entry in self.entries:
            numel = entry.param.numel()
            for start in range(0, numel, interval):
                if number % dist.get_world_size() == dist.get_rank():
                    index = ShardIndex(entry.name, entry.shape, (), start, min(start + interval, numel))
                    mapped = {kind: self._map(folder / f"{number}.{kind}", index.numel) for kind in KINDS}
                    self.held.append((index, {**mapped, "step": torch.tensor(7.0)}))
                number += 1

    @staticmethod
    def _map(path: Path, numel: int) -> Tensor:
        return torch.from_file(str(path), shared=True, size=numel, dtype=torch.float32)

    def fill(self) -> None:
        """Values that say where they belong."""
        for index, tensors in self.held:
            for kind in KINDS:
                tensors[kind].copy_(value_of(index.name, kind, index.start, index.stop))


def value_of(name: str, kind: str, start: int, stop: int) -> Tensor:
    offset = 1000 * KINDS.index(kind) + 100 * (name == "1.weight")
    return (torch.arange(start, stop) % 997 + offset).float()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(700, 801), nn.Linear(801, 300)).bfloat16()


def saved(folder: Path) -> FileState:
    net = model()
    state = FileState(net, folder / f"state{dist.get_rank()}")
    state.fill()
    with torch.no_grad():
        for name, param in net.named_parameters():
            param.copy_(value_of(name, "fp32", 0, param.numel()).view(param.shape))
    training = StateToSave(
        module=net,
        state=state,
        zero_stage=1,
        bf16=True,
        ds_config={"bf16": {"enabled": True}},
        header={"global_steps": 7, "skipped_steps": 0, "global_samples": 28},
    )
    rank, world = dist.get_rank(), dist.get_world_size()
    place = RankCoordinates(dp_rank=rank, dp_size=world, mp_rank=0, mp_size=1, writes_model=rank == 0)
    save(training, SaveRequest(folder / "checkpoints", "t", place), Ranks())
    return state


@distributed(world_size=2)
def test_many_intervals_per_parameter_and_rank(tmp_path):
    """Saved and loaded with other cuts and owners: every element comes back, and no rank holds a copy of its state."""
    state = saved(tmp_path)
    assert len([index for index, _ in state.held if index.name == "0.weight"]) >= 3
    for interval in (33_333, 10**9):
        net = model()
        other = FileState(net, tmp_path / f"{interval}_{dist.get_rank()}", first=1, interval=interval)
        with counted(tmp_path) as loading:
            catalog = open_checkpoint(tmp_path / "checkpoints/t")
            restorer = Restorer(catalog, net, other, strict=True)  # type: ignore[arg-type]
            restorer.check_names()
            restorer.load_weights_from_masters()
            restorer.load_optimizer_states()
            report = restorer.finish()
        for index, tensors in other.held:
            for kind in KINDS:
                assert torch.equal(tensors[kind], value_of(index.name, kind, index.start, index.stop)), (
                    index,
                    kind,
                )
            assert tensors["step"] == 7
        assert loading.peak < SMALL
        assert report.bytes_read >= 12 * sum(index.numel for index, _ in other.held)


@distributed(world_size=2)
def test_saving_reads_one_part_at_a_time(tmp_path):
    saved(tmp_path / "warm-up")
    state, net = saved(tmp_path), model()
    training = StateToSave(
        module=net,
        state=state,  # type: ignore[arg-type]
        zero_stage=1,
        bf16=True,
        ds_config={},
        header={"global_steps": 8, "skipped_steps": 0, "global_samples": 32},
    )
    rank = dist.get_rank()
    place = RankCoordinates(dp_rank=rank, dp_size=2, mp_rank=0, mp_size=1, writes_model=rank == 0)
    with counted(tmp_path) as saving:
        save(training, SaveRequest(tmp_path / "checkpoints", "t", place), Ranks())
    assert saving.peak < SMALL < sum(4 * index.numel for index, _ in state.held)


@distributed(world_size=2)
def test_exports_and_consolidation_join_the_intervals(tmp_path):
    saved(tmp_path)
    if dist.get_rank():
        return
    folder = tmp_path / "checkpoints"
    whole = {
        name: value_of(name, "fp32", 0, p.numel())
        for name, p in model().named_parameters()
        if "weight" in name
    }
    for stage in (1, 2, 3):
        exported = export_checkpoint(folder, tmp_path / f"out{stage}", zero_stage=stage, world_size=3)
        for source in (folder / "t", exported):
            found = consolidate(source).materialized()
            assert all(torch.equal(found[name].view(-1), value) for name, value in whole.items())


@distributed(world_size=2)
def test_damage_in_one_interval_is_found(tmp_path):
    saved(tmp_path)
    if dist.get_rank() == 0:
        path = tmp_path / "checkpoints/t/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        content = bytearray(path.read_bytes())
        content[len(content) // 3] ^= 4
        path.write_bytes(content)
    dist.barrier()
    net = model()
    other = FileState(net, tmp_path / f"other{dist.get_rank()}", interval=77_777)
    restorer = Restorer(open_checkpoint(tmp_path / "checkpoints/t"), net, other, strict=True)  # type: ignore[arg-type]
    message = r"zero_pp_rank_1.*damaged|damaged.*zero_pp_rank_1"  # on the rank that reads it, and so on all
    with pytest.raises(CheckpointError, match=message), Ranks().together("loading"):
        restorer.load_weights_from_masters()
        restorer.load_optimizer_states()
        restorer.finish()
