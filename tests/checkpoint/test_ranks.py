"""Ranks that disagree, and nodes with local folders."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from deepspeed.checkpoint import names
from deepspeed.checkpoint.contents import RankCoordinates
from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.save import check_signatures
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.config.axes import MeshLayout
from tests.checkpoint.models import assert_restored, config, full_state, make_engine, train
from tests.pool import distributed


def test_ranks_that_train_different_models():
    check_signatures([(3, 100), (3, 90), None][:2])  # parts of one model may differ in size
    with pytest.raises(CheckpointError, match="rank 0 trains 3 parameters, rank 2 trains 4"):
        check_signatures([(3, 100), (3, 100), (4, 110)])


def test_files_are_numbered_by_the_position_on_the_mesh():
    """Each rank has its own number; ranks of one data-parallel group have the same model-parallel number."""
    layout = MeshLayout(pp=2, dp=3, sp=2, tp=2)
    places = [RankCoordinates.on(ProcessMesh(rank, {}, layout=layout), Ranks()) for rank in range(24)]
    in_order = sorted(places, key=lambda place: place.number)
    assert [place.number for place in in_order] == list(range(24))
    assert [(place.dp_rank, place.mp_rank) for place in in_order] == names.dp_mp_ranks(6, 4)
    for rank, place in enumerate(places):
        assert {places[other].mp_rank for other in layout.ranks(rank, "dp", "sp")} == {place.mp_rank}
        assert place.writes_model == (place.dp_rank == 0)


@distributed(world_size=2)
def test_ranks_that_load_different_checkpoints(tmp_path):
    engine = make_engine(config(1))
    engine.save_checkpoint(tmp_path, tag="a")
    engine.save_checkpoint(tmp_path, tag="b")
    with pytest.raises(
        CheckpointError, match=r"ranks load different checkpoints from .*: 'a', 'b'; use the same tag"
    ):
        engine.load_checkpoint(tmp_path, tag="ab"[dist.get_rank()])
    folder = tmp_path if dist.get_rank() == 0 else tmp_path / "elsewhere"
    with pytest.raises(CheckpointError, match="elsewhere does not exist|failed on rank 1.*elsewhere"):
        engine.load_checkpoint(folder, tag="a")
    assert engine.load_checkpoint(tmp_path, tag="a")[0]


@distributed(world_size=2)
def test_an_error_on_one_rank_is_raised_on_all():
    ranks = Ranks()
    with pytest.raises((KeyError, CheckpointError)) as caught, ranks.together("testing"):
        if dist.get_rank() == 1:
            raise KeyError("mine")
    expected = "testing failed on rank 1: KeyError: 'mine'" if dist.get_rank() == 0 else "'mine'"
    assert str(caught.value) == expected


@pytest.mark.parametrize("stage, decoupled", [(0, False), (0, True), (1, False), (3, False), (3, True)])
@distributed(world_size=2)
def test_each_node_keeps_its_own_folder(tmp_path, stage, decoupled):
    """Two ranks as two nodes: nothing is shared, and each node's folder has its files and its own ``latest``."""
    with mock.patch.dict(os.environ, {"LOCAL_RANK": "0"}):
        _save_and_resume_on_nodes(tmp_path, stage, decoupled)


def _save_and_resume_on_nodes(tmp_path: Path, stage: int, decoupled: bool) -> None:
    ds_config = config(stage, checkpoint={"use_node_local_storage": True, "writer": {"decoupled": decoupled}})
    folder = tmp_path / f"node{dist.get_rank()}"
    engine = make_engine(ds_config)
    train(engine, 0, 2)
    for _ in range(2):
        engine.save_checkpoint(folder, tag="t")
    if engine.background_writer is not None:
        engine.background_writer.wait()
    saved, expected = full_state(engine), train(engine, 2, 4)
    found = {path.name for path in (folder / "t").iterdir()}
    assert (folder / "latest").read_text() == "t" and (folder / "zero_to_fp32.py").exists()
    rank = dist.get_rank()
    optims = {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"} if stage else set()
    model = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    assert found == {model} | optims
    resumed = make_engine(ds_config, seed=9)
    resumed.load_checkpoint(folder)
    assert_restored(full_state(resumed), saved)
    assert train(resumed, 2, 4) == expected
    with pytest.raises(CheckpointNotFoundError, match="nowhere does not exist"):
        resumed.load_checkpoint(tmp_path / "nowhere", tag="t")


@pytest.mark.parametrize("stage, decoupled", [(0, False), (2, True), (3, False)])
@distributed(world_size=2)
def test_folders_of_the_ranks_own_make_one_checkpoint(tmp_path, stage, decoupled):
    """As the workers of Ray Train save, each into a temporary folder; its storage brings the files together. Then all
    save into one folder again. A folder that a killed save left behind is not taken for that of rank 0."""
    rank, ds_config = dist.get_rank(), config(stage, checkpoint={"writer": {"decoupled": decoupled}})
    engine = make_engine(ds_config)
    train(engine, 0, 2)
    own = tmp_path / f"worker{rank}"
    if rank == 1:
        (own / ".t.tmp").mkdir(parents=True)
    for folder in (own, tmp_path / "shared", own):
        engine.save_checkpoint(folder, tag="t")
        if engine.background_writer is not None:
            engine.background_writer.wait()
    expected = full_state(engine)
    dist.barrier()
    if rank == 0:
        for worker in ("worker0", "worker1") if stage else ("worker0",):  # at stage 0 only rank 0 has files
            assert (tmp_path / worker / "latest").read_text() == "t"
        for worker in ("worker0", "worker1"):
            assert not [path.name for path in (tmp_path / worker).iterdir() if path.name.startswith(".")]
            shutil.copytree(tmp_path / worker, tmp_path / "together", dirs_exist_ok=True)
        names = {path.name for path in (tmp_path / "together/t").iterdir()}
        assert names == {path.name for path in (tmp_path / "shared/t").iterdir()}
    dist.barrier()
    for folder in ("together", "shared"):
        resumed = make_engine(ds_config, seed=9)
        resumed.load_checkpoint(tmp_path / folder)
        assert_restored(full_state(resumed), expected)
