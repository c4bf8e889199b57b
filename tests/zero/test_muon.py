"""Muon: its arithmetic against singular value decompositions, and training with it at every stage."""

from __future__ import annotations

import copy
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.checkpoint.placement import interval, place
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.ops.adam import FusedAdam
from deepspeed.zero.layout import BucketLayout, Slot
from deepspeed.zero.muon.muon_optimizer import (
    COEFFICIENTS,
    Muon,
    MuonWithAuxAdam,
    SingleDeviceMuon,
    muon_update,
    orthogonalize,
)
from deepspeed.zero.optimizer_registry import build_optimizer, set_optimizer_flags
from deepspeed.zero.whole_matrices import Matrix, MatrixPart, batches, matrices_of
from tests.pool import distributed
from tests.zero.models import Block

METHODS = ["gram", "standard"]


def by_svd(matrix: Tensor, steps: int = 5) -> Tensor:
    """The polynomial applied to the singular values in fp64."""
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / matrix.double().norm()
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    rows, cols = matrix.shape
    return (u * s) @ v * max(1.0, rows / cols) ** 0.5


@pytest.mark.parametrize("shape", [(8, 8), (8, 40), (40, 8), (1, 5), (5, 1)])
@pytest.mark.parametrize("method", METHODS)
def test_orthogonalize_equals_the_polynomial_of_singular_values(method: str, shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape)
    result = orthogonalize(matrix, ns_method=method)
    torch.testing.assert_close(result.double(), by_svd(matrix), rtol=2e-3, atol=2e-3)
    values = torch.linalg.svdvals(result) / max(1.0, shape[0] / shape[1]) ** 0.5
    assert 0.6 < values.min() <= values.max() < 1.25


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("scale", [1e-40, 1e-20, 1e20, 1e38])
def test_only_the_direction_of_the_momentum_counts(method: str, scale: float) -> None:
    matrices = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)) / 8
    expected = orthogonalize(matrices, ns_method=method, is_expert_group=True)
    result = orthogonalize(matrices * scale, ns_method=method, is_expert_group=True)
    torch.testing.assert_close(result, expected, rtol=1e-2 if scale < 1e-38 else 1e-4, atol=1e-3)
    assert not orthogonalize(torch.zeros(6, 4), ns_method=method).any()


def test_numbers_of_release_0_19() -> None:
    """The result of DeepSpeed 0.19.8's `muon_update` (ns_method gram) for this diagonal."""
    seen = torch.tensor([0.7909865, 1.1310790, 1.0266838, 0.7366879, 0.8185263, 0.6912019])
    grad = torch.diag(torch.tensor([1.0, 0.5, 0.2, 0.1, 0.05, 0.01]))
    for method in METHODS:
        update = muon_update(grad, torch.zeros(6, 6), ns_method=method)
        torch.testing.assert_close(update.diagonal(), seen, rtol=0, atol=0.01)


@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum(nesterov: bool) -> None:
    grads = torch.randn(3, 6, 9)
    momentum, expected = torch.zeros(6, 9), torch.zeros(6, 9)
    for grad in grads:
        update = muon_update(grad, momentum, beta=0.9, nesterov=nesterov)
        expected = 0.9 * expected + 0.1 * grad
        direction = 0.9 * expected + 0.1 * grad if nesterov else expected
        torch.testing.assert_close(momentum, expected)
        torch.testing.assert_close(update, orthogonalize(direction), rtol=1e-4, atol=1e-5)


def test_more_dimensions() -> None:
    kernel = torch.randn(6, 3, 2, 2)
    torch.testing.assert_close(orthogonalize(kernel), orthogonalize(kernel.view(6, 12)).view(6, 3, 2, 2))
    experts = torch.randn(4, 5, 7)
    together = muon_update(experts, torch.zeros_like(experts), is_expert_group=True)
    alone = torch.stack([muon_update(e, torch.zeros_like(e)) for e in experts])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    assert orthogonalize(torch.zeros(3, 4)).eq(0).all()
    with pytest.raises(ValueError, match="is not one"):
        orthogonalize(torch.randn(4))
    with pytest.raises(ValueError, match="ns_method='svd'"):
        orthogonalize(torch.randn(4, 4), ns_method="svd")


def test_single_device_against_the_formula() -> None:
    param = nn.Parameter(torch.randn(6, 4))
    before, momentum = param.detach().clone(), torch.zeros(6, 4)
    optimizer = SingleDeviceMuon([param], lr=0.1, weight_decay=0.5)
    for _ in range(3):
        param.grad = torch.randn(6, 4)
        update = muon_update(param.grad.clone(), momentum)
        before = before * (1 - 0.1 * 0.5) - 0.1 * update
        optimizer.step()
        torch.testing.assert_close(param.detach(), before)


@distributed(world_size=[2, 4])
def test_muon_shares_the_work(world_size: int) -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(4, 3 + i)) for i in range(5)]
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer, expected = Muon(params, weight_decay=0.1), SingleDeviceMuon(twins, weight_decay=0.1)
    for _ in range(3):
        for param, twin in zip(params, twins, strict=True):
            param.grad = torch.randn(param.shape)
            twin.grad = param.grad.clone()
        optimizer.step()
        expected.step()
        assert all(torch.equal(p, t) for p, t in zip(params, twins, strict=True))
    assert len(optimizer.state) < len(params)


def test_aux_adam_is_muon_and_adamw() -> None:
    torch.manual_seed(0)
    matrix, vector = nn.Parameter(torch.randn(5, 8)), nn.Parameter(torch.randn(7))
    twins = [nn.Parameter(p.detach().clone()) for p in (matrix, vector)]
    both = MuonWithAuxAdam(
        [
            {"params": [matrix], "use_muon": True, "lr": 0.1, "weight_decay": 0.01},
            {"params": [vector], "use_muon": False, "lr": 0.01, "weight_decay": 0.1},
        ]
    )
    muon = SingleDeviceMuon([twins[0]], lr=0.1, weight_decay=0.01)
    adam = FusedAdam([twins[1]], lr=0.01, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)
    for _ in range(4):
        for param, twin in zip((matrix, vector), twins, strict=True):
            param.grad = torch.randn(param.shape)
            twin.grad = param.grad.clone()
        for optimizer in (both, muon, adam):
            optimizer.step()
    assert torch.equal(matrix, twins[0])
    assert torch.equal(vector, twins[1])
    resumed = MuonWithAuxAdam(copy.deepcopy(both).param_groups)
    resumed.load_state_dict(both.state_dict())
    assert set(resumed.state[resumed.param_groups[0]["params"][0]]) == {"momentum_buffer"}
    with pytest.raises(ValueError, match="use_muon"):
        MuonWithAuxAdam([{"params": [matrix]}])


def test_config_section() -> None:
    matrix, head = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    matrix.use_muon = True  # type: ignore[attr-defined]
    settings = {"lr": 0.5, "adam_lr": 0.25, "weight_decay": 0.1, "betas": [0.8, 0.9], "ns_method": "standard"}
    muon, adam = build_optimizer("Muon", settings, [matrix, head]).param_groups
    assert (muon["lr"], muon["ns_method"], muon["weight_decay"]) == (0.5, "standard", 0.1)
    assert (adam["lr"], adam["betas"], adam["params"]) == (0.25, (0.8, 0.9), [head])
    (group,) = build_optimizer("muon", {}, [{"params": [head], "lr": 7.0}]).param_groups
    assert (group["lr"], group["use_muon"]) == (7.0, False)
    with pytest.raises(DeepSpeedConfigError, match="ns_method"):
        build_optimizer("Muon", {"ns_method": "svd"}, [matrix])
    with pytest.raises(DeepSpeedConfigError, match="nesterov"):
        build_optimizer("Muon", {"nesterov": True}, [matrix])


# Who owns what --------------------------------------------------------------------------------------------------


def test_owner_holds_most() -> None:
    layout = BucketLayout(
        index=0,
        replica_group="dense",
        dtype=torch.float32,
        wire_dtype=torch.float32,
        requires_grad=True,
        slots=(Slot(0, 0, 20), Slot(1, 32, 60), Slot(2, 96, 32)),
        padded_numel=128,
        num_shards=4,
    )
    params = [torch.empty(4, 5), torch.empty(6, 10), torch.empty(4, 8)]
    store = SimpleNamespace(param_buckets=[SimpleNamespace(layout=layout, params=params)])
    matrices = list(matrices_of(store))  # type: ignore[arg-type]
    assert matrices[0] == Matrix(0, (4, 5), (MatrixPart(0, 0, 20),), 0)
    assert matrices[1] == Matrix(1, (6, 10), (MatrixPart(1, 0, 32), MatrixPart(2, 32, 60)), 1)
    assert matrices[2].owner == 3
    assert [len(run) for run in batches(matrices, attrgetter("numel"), 80)] == [2, 1]
    assert [len(run) for run in batches(matrices, attrgetter("numel"), 1)] == [1, 1, 1]


# Training ---------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(11, 12)
        self.blocks = nn.ModuleList(Block(12) for _ in range(3))
        self.conv = nn.Conv1d(12, 10, 3, padding=1)
        self.never = nn.Linear(7, 6)
        self.lm_head = nn.Linear(10, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.conv(x.transpose(1, 2)).transpose(1, 2))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())


def ids(step: int, rank: int) -> Tensor:
    return torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(10 * step + rank))


def config(stage: int, **more: Any) -> dict[str, Any]:
    small = {"stage3_param_persistence_threshold": 20} if stage == 3 else {}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.005, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 300, **small},
        **more,
    }


def train(steps: int, settings: dict[str, Any], init: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    values = Model().state_dict()
    with deepspeed.zero.Init(enabled=init, config_dict_or_path=settings):
        model = Model()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        model.load_state_dict(values)
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    losses = run(engine, 0, steps)
    engine.destroy()
    return losses, {k: v.clone() for k, v in model.state_dict().items()}


def run(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine(ids(step, dist.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def oracle(steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Averaged gradients, torch's clipping, and the plain optimizers on whole tensors."""
    torch.manual_seed(0)
    model = Model()
    hidden = [
        p for n, p in model.named_parameters() if p.ndim >= 2 and "embed" not in n and "lm_head" not in n
    ]
    others = [p for p in model.parameters() if not any(p is h for h in hidden)]
    muon = SingleDeviceMuon(hidden, lr=0.02, weight_decay=0.1)
    adam = FusedAdam(others, lr=0.005, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)
    losses = []
    for step in range(steps):
        loss = model(ids(step, dist.get_rank()))
        loss.backward()
        losses.append(loss.item())
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        for grad in grads:
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (muon, adam):
            optimizer.step()
            optimizer.zero_grad()
    return losses, model.state_dict()


@distributed(world_size=[1, 2, 4])
def test_every_stage_equals_one_process(world_size: int) -> None:
    expected_losses, expected = oracle(5)
    losses, weights = train(5, config(0))
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    for stage in (1, 2, 3):
        sharded_losses, sharded = train(5, config(stage))
        assert sharded_losses == losses, stage
        assert all(torch.equal(value, weights[name]) for name, value in sharded.items()), stage


@distributed(world_size=2)
def test_bf16_and_zero_init() -> None:
    bf16 = {"bf16": {"enabled": True}}
    losses, weights = train(4, config(0, **bf16))
    for stage, init in ((1, False), (2, False), (3, False), (3, True)):
        sharded_losses, sharded = train(4, config(stage, **bf16), init=init)
        assert sharded_losses == losses
        assert all(torch.equal(value, weights[name]) for name, value in sharded.items())


@pytest.mark.parametrize(("saved", "loaded"), [(0, 3), (1, 2), (2, 3), (3, 0), (3, 1), (3, 3)])
@distributed(world_size=2)
def test_resume_from_another_stage(tmp_path: Path, saved: int, loaded: int) -> None:
    expected, weights = train(6, config(saved))
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(model=Model(), config=config(saved))
    losses = run(engine, 0, 3)
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    torch.manual_seed(5)
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, config=config(loaded))
    engine.load_checkpoint(str(tmp_path))
    losses += run(engine, 3, 6)
    engine.destroy()
    assert losses == expected
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@distributed(world_size=2)
def test_momentum_stays_in_shards_and_the_wire_is_counted() -> None:
    engine, *_ = deepspeed.initialize(model=Model(), config=config(2))
    run(engine, 0, 1)
    state = engine.optimizer.state
    hidden = sum(p.numel() for p in engine.module.parameters() if p.use_muon)
    local = sum(s["momentum_buffer"].numel() for s in state.values() if "momentum_buffer" in s)
    total = torch.tensor(local)
    dist.all_reduce(total)
    assert local < hidden
    assert total == hidden - 42  # except those of the unused layer
    wire = engine.mesh.communicator("dp", "sp")
    before = wire.collectives["all_to_all"]
    run(engine, 1, 2)
    assert wire.collectives["all_to_all"] - before == 2  # there and back
    momentum = deepspeed.utils.safe_get_full_optimizer_state(
        engine.module.blocks[0].up.weight, "momentum_buffer"
    )
    assert momentum.shape == (24, 12)
    assert momentum.abs().sum() > 0
    engine.destroy()


@distributed(world_size=2)
def test_warmup_from_zero() -> None:
    """A rate of 0 leaves the weights alone and fills the momentum."""
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4}}}
    losses, weights = train(4, config(0, **schedule))
    sharded_losses, sharded = train(4, config(3, **schedule))
    assert losses == sharded_losses
    assert all(torch.equal(value, weights[name]) for name, value in sharded.items())


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_a_client_s_own_groups(stage: int) -> None:
    """Groups that say `use_muon`, and an optimizer that the client made."""

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        blocks = list(model.blocks.parameters())
        rest = [p for p in model.parameters() if not any(p is b for b in blocks)]
        return [
            {"params": [p for p in blocks if p.ndim == 2], "use_muon": True, "lr": 0.03},
            {"params": [p for p in blocks if p.ndim < 2] + rest, "use_muon": False, "lr": 0.002},
        ]

    def losses(client: bool, stage: int) -> list[float]:
        torch.manual_seed(0)
        model = Model()
        settings = config(stage, optimizer={"type": "Muon"})
        if client:
            del settings["optimizer"]
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=MuonWithAuxAdam(groups(model)), config=settings
            )
        else:
            engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=settings)
        result = run(engine, 0, 4)
        engine.destroy()
        return result

    assert losses(True, stage) == losses(False, stage) == losses(False, 0)


@distributed(world_size=2)
def test_optimizers_that_cannot_be_cut_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    with pytest.raises(DeepSpeedConfigError, match="SingleDeviceMuon does not update elements independently"):
        deepspeed.initialize(
            model=model, optimizer=SingleDeviceMuon(model.parameters()), config=config(1, optimizer=None)
        )


class Attention(nn.Module):
    """Four heads of queries, two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=4)
        self.q_proj, self.o_proj = nn.Linear(12, 16, bias=False), nn.Linear(16, 12, bias=False)
        self.k_proj, self.v_proj = nn.Linear(12, 8, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.q_proj(x) * torch.cat([self.k_proj(x), self.v_proj(x)], -1)
        return self.o_proj(mixed).square().mean()


def attention_config(stage: int, per_head: bool) -> dict[str, Any]:
    muon = {"type": "Muon", "params": {"lr": 0.05, "per_head_muon": per_head}}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": muon, "zero_optimization": zero}


@distributed(world_size=2)
def test_heads_are_orthogonalized_by_themselves() -> None:
    inputs = torch.randn(2, 12, generator=torch.Generator().manual_seed(dist.get_rank()))
    for stage in (0, 1, 2, 3):
        for per_head in (True, False):
            torch.manual_seed(0)
            model = Attention()
            before = {name: value.clone() for name, value in model.state_dict().items()}
            expected = copy.deepcopy(model)
            expected(inputs).backward()
            engine, *_ = deepspeed.initialize(model=model, config=attention_config(stage, per_head))
            heads = {name: param.muon_num_heads for name, param in model.named_parameters()}
            assert list(heads.values()) == ([4, None, 2, 2] if per_head else [None] * 4), heads
            engine.backward(engine(inputs))
            engine.step()
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                after = {name: value.clone() for name, value in model.state_dict().items()}
            for name, param in expected.named_parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                update = muon_update(param.grad / 2, torch.zeros_like(param))
                if heads[name] is not None:
                    blocks = (param.grad / 2).chunk(heads[name])
                    update = torch.cat([muon_update(each, torch.zeros_like(each)) for each in blocks])
                torch.testing.assert_close(after[name], before[name] - 0.05 * update, rtol=1e-4, atol=1e-5)
            engine.destroy()


QUERIES_OF_TWO_PARTS = {"qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 4}


@pytest.mark.parametrize(
    ("layer", "rows", "config", "heads"),
    [
        ("qkv_proj", 32, {"head_dim": 4}, 8),  # 4 of queries, 2 each of keys and values
        ("query_key_value", 32, {"hidden_size": 16}, 8),
        ("qkv_proj", 48, {"head_dim": 4}, None),  # as many keys as queries: not what the config says
        ("q_proj", 32, QUERIES_OF_TWO_PARTS | {"head_dim": 4}, 4),
        ("q_proj", 16, QUERIES_OF_TWO_PARTS | {"head_dim": 4}, 4),
        ("q_proj", 24, QUERIES_OF_TWO_PARTS | {"head_dim": 4}, None),
        ("q_b_proj", 32, QUERIES_OF_TWO_PARTS, 4),
        ("q_b_proj", 24, QUERIES_OF_TWO_PARTS, None),
        ("kv_b_proj", 40, QUERIES_OF_TWO_PARTS, 4),
        ("kv_b_proj", 32, QUERIES_OF_TWO_PARTS, None),
        ("q_proj", 32, {"hidden_size": 16}, None),
        ("q_proj", 24, {}, 4),  # a config without widths
    ],
)
def test_heads_are_counted_where_the_shape_is_that_of_heads(
    layer: str, rows: int, config: dict[str, int], heads: int | None
) -> None:
    model = nn.Module()
    model.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, **config)  # type: ignore[assignment]
    setattr(model, layer, nn.Linear(12, rows, bias=False))
    model.wv = nn.Linear(12, 2 * config.get("head_dim", 4), bias=False)  # so that there is one in any case
    set_optimizer_flags(
        SimpleNamespace(optimizer_name="Muon", optimizer_params={"per_head_muon": True}), model
    )
    assert model.get_parameter(f"{layer}.weight").muon_num_heads == heads  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("layer", "rows", "heads"),
    [
        ("q_proj", [8, 8], 2),
        ("q_proj", [12, 4], 3),
        ("qkv_proj", [16, 16], 4),
        ("q_proj", [6, 10], None),  # a head in two parts
    ],
)
def test_heads_are_those_of_the_rank_s_part_of_a_layer(
    layer: str, rows: list[int], heads: int | None
) -> None:
    model = nn.Module()
    model.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=4)  # type: ignore[assignment]
    setattr(model, layer, nn.Linear(12, rows[0], bias=False))
    weight = model.get_parameter(f"{layer}.weight")
    place(weight, interval((rows[0], 12), 0, rows, 0))
    model.wv = nn.Linear(12, 8, bias=False)
    set_optimizer_flags(
        SimpleNamespace(optimizer_name="Muon", optimizer_params={"per_head_muon": True}), model
    )
    assert weight.muon_num_heads == heads  # type: ignore[attr-defined]
    assert model.wv.weight.muon_num_heads == 2  # type: ignore[union-attr]


def test_no_heads_to_be_found_is_an_error() -> None:
    config = SimpleNamespace(optimizer_name="Muon", optimizer_params={"per_head_muon": True})
    with pytest.raises(DeepSpeedConfigError, match=r"per_head_muon: no projection .* Linear\.config"):
        set_optimizer_flags(config, nn.Linear(4, 4))
