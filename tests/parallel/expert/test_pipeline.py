"""Layers with experts in the stages of a pipeline, against one process that holds all layers and all experts."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import deepspeed
from deepspeed.checkpoint.placement import local_part
from deepspeed.comm.topology import PipeDataParallelTopology
from deepspeed.engine.pipeline.engine import PipelineEngine
from deepspeed.parallel.expert.layer import MoE
from deepspeed.parallel.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.zero.tensor_fragment import safe_get_full_fp32_param
from tests.pool import distributed

VOCABULARY, WIDTH, EXPERTS, LENGTH, MICRO, COUNT, BALANCE = 12, 8, 4, 5, 2, 2, 0.05
State = tuple[Tensor, Tensor]


@torch.no_grad()
def fill(module: nn.Module, key: str) -> None:
    for name, param in module.named_parameters():
        source = torch.Generator().manual_seed(sum(map(ord, f"{key}.{name}")) + 7 * len(name))
        param.copy_(torch.randn(param.shape, generator=source) * 0.3)


class Embed(nn.Embedding):
    """Where the sum of the balancing losses begins."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH)
        fill(self, "embed")

    def forward(self, input: Tensor) -> State:  # type: ignore[override]
        return super().forward(input), torch.zeros(())


class Dense(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)
        fill(self, f"dense {number}")

    def forward(self, state: State) -> State:
        return state[0] + functional.gelu(self.map(state[0])), state[1]


class Mixture(nn.Module):
    """``share``: which of the ``ep_size`` runs of the experts this rank has. All experts differ."""

    def __init__(self, number: int, ep_size: int, share: int, **settings: Any) -> None:
        super().__init__()
        choice = {
            "k": 2,
            "drop_tokens": False,
            "top2_2nd_expert_sampling": False,
            "use_rts": False,
            **settings,
        }
        expert = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        self.norm, self.moe = nn.LayerNorm(WIDTH), MoE(WIDTH, expert, EXPERTS, ep_size, **choice)
        fill(self.moe.deepspeed_moe.gate, f"gate {number}")
        local = EXPERTS // ep_size
        for index, each in enumerate(self.moe.deepspeed_moe.experts.deepspeed_experts, share * local):  # type: ignore[union-attr, arg-type]
            fill(each, f"expert {number} {index}")

    def forward(self, state: State) -> State:
        output, l_aux, _ = self.moe(self.norm(state[0]))
        return state[0] + output, state[1] + l_aux


class Head(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, VOCABULARY)
        fill(self, "head")

    def forward(self, input: State) -> State:  # type: ignore[override]
        return super().forward(input[0]), input[1]


def loss_of(outputs: State, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs[0].flatten(0, 1), labels.flatten()) + BALANCE * outputs[1]


def specs(kinds: str, ep_size: int = 1, share: int = 0, **settings: Any) -> list[Any]:
    """``kinds``: "m" for a layer with experts, "d" for one without."""
    body = [
        LayerSpec(Mixture, n, ep_size, share, **settings) if kind == "m" else LayerSpec(Dense, n)
        for n, kind in enumerate(kinds)
    ]
    return [LayerSpec(Embed), *body, LayerSpec(Head)]


def batches(replica: int) -> Iterator[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(replica)
    while True:
        tokens = torch.randint(VOCABULARY, (MICRO, LENGTH + 1), generator=source)
        yield tokens[:, :-1], tokens[:, 1:]


def make_engine(
    kinds: str,
    ep_size: int,
    stage: int,
    *,
    stages: int = 2,
    module: dict[str, Any] | None = None,
    **more: Any,
) -> PipelineEngine:
    replicas = dist.get_world_size() // stages
    layers = specs(kinds, ep_size, dist.get_rank() % replicas % ep_size)
    options = {"partition_method": "uniform", **(module or {})}
    engine = deepspeed.initialize(
        model=PipelineModule(
            layers, topology=PipeDataParallelTopology(stages, replicas), loss_fn=loss_of, **options
        ),
        config={
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": COUNT,
            "gradient_clipping": 0.1,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 0.01, "torch_adam": True, "eps": 1e-4, "weight_decay": 0.0},
            },
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            **more,
        },
    )[0]
    assert isinstance(engine, PipelineEngine)
    return engine


class Alone:
    """The oracle: plain PyTorch."""

    def __init__(self, kinds: str) -> None:
        self.layers = nn.ModuleList(spec.build() for spec in specs(kinds))
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), lr=0.01, eps=1e-4, weight_decay=0.0)
        self.norm = 0.0

    def step(self, data: list[Iterator[Any]]) -> float:
        self.optimizer.zero_grad()
        total = 0.0
        for replica in data:
            for _ in range(COUNT):
                state, labels = next(replica)
                for layer in self.layers:
                    state = layer(state)
                loss = loss_of(state, labels) / COUNT / len(data)
                loss.backward()
                total += loss.item()
        self.norm = nn.utils.clip_grad_norm_(self.layers.parameters(), 0.1).item()
        self.optimizer.step()
        return total


def assert_equals_alone(engine: PipelineEngine, kinds: str, steps: int = 3) -> None:
    alone, replicas = Alone(kinds), engine.dp_world_size
    own, everyone = batches(engine.grid.get_data_parallel_id()), [batches(r) for r in range(replicas)]
    for _ in range(steps):
        expected = alone.step(everyone)
        assert engine.train_batch(own).item() == pytest.approx(expected, rel=1e-5)
        assert engine.get_global_grad_norm() == pytest.approx(alone.norm, rel=1e-5)
    for name, param in engine.module.named_parameters():
        wanted = local_part(param, alone.layers.get_parameter(name).detach())
        torch.testing.assert_close(
            safe_get_full_fp32_param(param), wanted, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=4)
def test_equals_one_process(stage: int, ep_size: int) -> None:
    """Two stages of two replicas, which share the experts of their stage's layers."""
    engine = make_engine("mdmm", ep_size, stage)
    assert_equals_alone(engine, "mdmm")
    engine.destroy()


@pytest.mark.parametrize(
    ("kinds", "stage", "more"),
    [
        ("ddmm", 1, {}),  # a stage without experts
        ("mmmm", 2, {"pipeline": {"schedule": "zero-bubble"}}),
        ("mdmm", 3, {"module": {"activation_checkpoint_interval": 1}}),
        ("mdmmmm", 1, {"module": {"chunks": 2}, "pipeline": {"schedule": "interleaved"}}),
        ("mdmm", 2, {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}),
    ],
    ids=str,
)
@distributed(world_size=4)
def test_combinations(kinds: str, stage: int, more: dict[str, Any]) -> None:
    engine = make_engine(kinds, 2, stage, **more)
    assert_equals_alone(engine, kinds)
    engine.destroy()


@pytest.mark.parametrize(
    ("kinds", "stage", "then"),
    [("mmdm", 0, 2), ("mmdm", 1, 1), ("mmdm", 2, 3), ("mmdm", 3, 0)]
    + [("ddmm", 0, 0), ("mmdd", 2, 3)],  # a stage without experts
)
@distributed(world_size=4)
def test_checkpoints(kinds: str, stage: int, then: int, tmp_path: Path) -> None:
    """Resumed with other stages and another number of ranks that share experts; every layer and every expert has its
    file, whatever stage it is on."""
    first = make_engine(kinds, 2, stage)
    data = batches(0)  # replicas read the same: their number may change
    for _ in range(2):
        first.train_batch(data)
    first.save_checkpoint(tmp_path, tag="here")
    expected = [first.train_batch(data).item() for _ in range(2)]
    first.destroy()
    found = sorted(path.name for path in (tmp_path / "here").glob("layer_*"))
    experts = [
        f"layer_{n}_expert_{e}_mp_rank_00_model_states.pt"
        for n in range(kinds.count("m"))
        for e in range(EXPERTS)
    ]
    assert found == sorted([f"layer_{n:02d}-model_states.pt" for n in range(6)] + experts)
    wanted = nn.ModuleList(spec.build() for spec in specs(kinds))
    whole: dict[str, Tensor] = {}
    for path in (tmp_path / "here").glob("layer_*"):
        state = torch.load(path, weights_only=True)
        number = "" if "expert" in path.name else f"{int(path.name[6:8])}."
        assert not whole.keys() & {number + name for name in state}
        whole |= {number + name: value for name, value in state.items()}
    assert whole.keys() == wanted.state_dict().keys()
    if stage:
        exported = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
        assert all(torch.equal(exported[name], value) for name, value in whole.items())
    for stages, ep_size in ((2, 2), (4, 1), (1, 4)):
        second = make_engine(kinds, ep_size, then, stages=stages)
        second.load_checkpoint(tmp_path)
        again = batches(0)
        for _ in range(2 * COUNT):
            next(again)
        assert [second.train_batch(again).item() for _ in range(2)] == pytest.approx(expected, rel=1e-5)
        second.destroy()


@pytest.mark.parametrize("stage", [0, 3])
@distributed(world_size=4)
def test_files_of_layers_load_by_themselves(stage: int, tmp_path: Path) -> None:
    engine = make_engine("mm", 2, stage)
    engine.train_batch(batches(0))
    engine.save_checkpoint(tmp_path, tag="here")
    own = {name: safe_get_full_fp32_param(param) for name, param in engine.module.named_parameters()}
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        for param in engine.module.parameters():
            nn.init.zeros_(param)
    engine.module.load_state_dir(tmp_path / "here", engine.checkpoint_engine)
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for name, param in engine.module.named_parameters():
            torch.testing.assert_close(param.detach(), own[name], rtol=0, atol=0)
    engine.destroy()


@distributed(world_size=4)
def test_curves_of_all_stages(tmp_path: Path) -> None:
    monitor = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine = make_engine("dmmm", 2, 1, csv_monitor=monitor)  # one layer with experts on the first stage
    engine.train_batch(batches(engine.grid.get_data_parallel_id()))
    engine.monitor.close()
    if dist.get_rank() == 0:
        curves = {path.stem: list(csv.reader(path.open())) for path in (tmp_path / "job").glob("*.csv")}
        for layer in range(3):
            shares = [float(curves[f"Train_Experts_layer_{layer}_expert_{e}"][-1][1]) for e in range(EXPERTS)]
            assert sum(shares) == pytest.approx(1.0)
        assert "Train_Experts_layer_3_expert_0" not in curves
    engine.destroy()


@distributed(world_size=4)
def test_ties_of_shared_experts_are_refused() -> None:
    tie = [TiedLayerSpec("mixture", Mixture, 0, 2, 0, tied_weight_attr="norm.weight") for _ in range(2)]
    with pytest.raises(PipelineError, match=r"the tie 'mixture' has experts .* stages \[0, 1\].*ep_size=1"):
        PipelineModule(
            [LayerSpec(Embed), tie[0], tie[1], LayerSpec(Head)],
            topology=PipeDataParallelTopology(2, 2),
            loss_fn=loss_of,
            partition_method="uniform",
        )
