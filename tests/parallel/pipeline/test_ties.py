"""Weights that stages share, of which only some stages use a part, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.checkpoint.placement import placement_of
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.comm.topology import PipeModelDataParallelTopology
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.optim.onebit import zoadam
from deepspeed.parallel.pipeline import PipelineModule, TiedLayerSpec
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.zero.placements import find_placements
from deepspeed.zero.replica_groups import ReplicaGroups
from tests.ops.cases import Lamb
from tests.parallel.pipeline.test_engine import (
    COUNT,
    VOCABULARY,
    WIDTH,
    Plain,
    batches,
    compare,
    layers,
    loss_of,
    make_engine,
)
from tests.pool import distributed


class Embedding(nn.Module):
    """``shift`` moves its outputs and ``bias`` the logits; which layer of the tie uses which, its functions say."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH))
        self.shift = nn.Parameter(torch.empty(WIDTH))
        self.bias = nn.Parameter(torch.empty(VOCABULARY))


def embed(module: Embedding, tokens: Tensor) -> Tensor:
    """Only the first stage uses ``shift``."""
    return module.weight[tokens] + module.shift


def head(module: Embedding, x: Tensor) -> Tensor:
    """Only the last stage uses ``bias``."""
    return x @ module.weight.T + module.bias


def tied_layers(blocks: int = 4) -> list[Any]:
    body = layers(blocks)[1:-1]
    tie: list[Any] = [TiedLayerSpec("e", Embedding, forward_fn=function) for function in (embed, head)]
    return [tie[0], *body, tie[1]]


TWO_STAGES = (2, 1, 1)
LAMB = {"type": "Lamb", "params": {"lr": 0.01, "weight_decay": 0.1}}


def trained_like_one_process(
    ranks: tuple[int, int, int],
    stage: int,
    oracle: type[torch.optim.Optimizer] | None = None,
    chunks: int = 1,
    unfrozen_at: int = 0,
    steps: int = 3,
    **config: Any,
) -> None:
    """``ranks``: pipeline, model, data. ``oracle``: its optimizer, if not Adam. ``unfrozen_at``: the step from which
    on the tie is trained."""
    specs = tied_layers()
    topology = PipeModelDataParallelTopology(*ranks)
    module = PipelineModule(specs, topology=topology, loss_fn=loss_of, chunks=chunks)
    plain = Plain(specs, lr=0.01, clip=0.1)
    if oracle is not None:
        plain.optimizer = oracle(plain.params.values(), lr=0.01, weight_decay=0.1)
    ties = [*module.tied_modules.parameters(), *plain.modules["tied_modules.e"].parameters()]
    for param in ties:
        param.requires_grad_(unfrozen_at == 0)
    engine = make_engine(module, stage, clip=0.1, **config)
    own, everyone = batches(engine.grid.get_data_parallel_id()), [batches(r) for r in range(ranks[2])]
    for step in range(steps):
        if step == unfrozen_at:
            for param in ties:
                param.requires_grad_()
        expected = plain.step(everyone)
        assert engine.train_batch(own).item() == pytest.approx(expected, rel=1e-5)
        assert engine.get_global_grad_norm() == pytest.approx(plain.norm, rel=1e-5)
    compare(engine, plain)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_one_rank_for_each_stage(stage: int) -> None:
    trained_like_one_process(TWO_STAGES, stage)


@distributed(world_size=2)
def test_local_steps_keep_the_copies_of_a_tie_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """0/1 Adam exchanges at every update then; DiLoCo, all of which is local, is refused."""
    said: list[str] = []
    monkeypatch.setattr(zoadam, "warning_once", said.append)
    local = {"var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 4}
    optimizer = {"type": "ZeroOneAdam", "params": {"lr": 0.01, **local}}
    engine = make_engine(PipelineModule(tied_layers(), num_stages=2, loss_fn=loss_of), optimizer=optimizer)
    for _ in range(6):
        engine.train_batch(batches(0))
    assert engine.core.store.optimizer.exchanges == 5
    assert said and all("every update instead of every" in text for text in said)
    for param in engine.module.tied_modules.parameters():
        first = param.detach().clone()
        dist.broadcast(first, src=0)
        assert torch.equal(first, param)
    engine.destroy()
    with pytest.raises(
        DeepSpeedConfigError, match="'DiLoCo' trains every copy .* pipeline stages hold copies"
    ):
        make_engine(
            PipelineModule(tied_layers(), num_stages=2, loss_fn=loss_of), optimizer={"type": "DiLoCo"}
        )


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=2)
def test_checkpoint_export_and_evaluation_have_what_the_other_stage_trained(
    tmp_path: Path, stage: int
) -> None:
    def start() -> Any:
        module = PipelineModule(tied_layers(), num_stages=2, loss_fn=loss_of)
        return make_engine(module, stage, clip=0.1)

    engine, plain, own, everyone = start(), Plain(tied_layers(), lr=0.01, clip=0.1), batches(0), [batches(0)]
    for _ in range(3):
        plain.step(everyone)
        engine.train_batch(own)
    engine.save_checkpoint(tmp_path)
    exported = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    for name in ("weight", "shift", "bias"):
        expected = plain.params[f"tied_modules.e.{name}"].detach()
        torch.testing.assert_close(exported[f"tied_modules.e.{name}"], expected, rtol=1e-5, atol=1e-6)
    pairs = [next(own) for _ in range(COUNT)]
    found = engine.eval_batch(iter(pairs)).item()
    engine.destroy()
    torch.manual_seed(99)
    fresh = start()
    fresh.load_checkpoint(tmp_path)
    assert fresh.eval_batch(iter(pairs)).item() == pytest.approx(found, rel=1e-6)
    fresh.destroy()


@pytest.mark.parametrize(
    ("ranks", "stage", "chunks"),
    [((2, 1, 2), 0, 1), ((2, 1, 2), 2, 1), ((2, 2, 1), 1, 1), ((4, 1, 1), 1, 1), ((2, 1, 2), 1, 2)],
)
@distributed(world_size=4)
def test_replicas_parts_and_chunks(ranks: tuple[int, int, int], stage: int, chunks: int) -> None:
    trained_like_one_process(ranks, stage, chunks=chunks)


@distributed(world_size=2)
def test_every_parameter_is_used_by_some_stage() -> None:
    """Those of a tie that only the other stage uses are not called unused."""
    trained_like_one_process(
        TWO_STAGES, 1, steps=1, zero_optimization={"stage": 1, "ignore_unused_parameters": False}
    )


@pytest.mark.parametrize("stage", [0, 1])
@distributed(world_size=2)
def test_a_tie_that_is_unfrozen_later(stage: int) -> None:
    trained_like_one_process(TWO_STAGES, stage, unfrozen_at=1)


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=4)
def test_trust_ratios_beside_a_tie(stage: int) -> None:
    """The ranks that share the slices of a tie are those that share all others: their sums are one list."""
    trained_like_one_process((2, 1, 2), stage, Lamb, optimizer=LAMB)


@distributed(world_size=2)
def test_a_copy_that_a_script_ties_counts_on_one_stage() -> None:
    """Of a parameter that Megatron's scripts mark, also where no rank shares a layer."""
    mesh = ProcessMesh.build(2, pp=2)
    param = nn.Parameter(torch.ones(3))
    param.ds_pipe_replicated = mesh.rank("pp") == 1  # type: ignore[attr-defined]
    find_placements([param], mesh, ReplicaGroups(mesh).find([param]))
    assert placement_of(param).counts is (mesh.rank("pp") == 0)
