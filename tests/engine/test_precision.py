"""Precision modes: dtypes of the actual tensors, loss scaling, skipped steps."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.config.plan import LossScalePlan
from deepspeed.engine.observers.progress.start_report import precision_rows
from deepspeed.optim.loss_scaler import LossScaleError, LossScaler
from deepspeed.utils import safe_get_full_fp32_param
from tests.pool import distributed

WIDTH = 16


def build(config: dict[str, Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    base = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    engine, *_ = deepspeed.initialize(model=model, config={**base, **config})
    return engine


def train(engine: Any, steps: int = 3, poison: int | None = None) -> list[float]:
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step + 100 * engine.global_rank)
        x = torch.randn(4, WIDTH, generator=generator)
        loss = engine(x).float().square().mean()
        if step == poison:
            loss = loss * float("nan")
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


MODES = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16, fp32 accumulation": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "bf16 master": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "bf16 master and state": {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    },
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "fp16 static": {"fp16": {"enabled": True, "loss_scale": 128}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "autocast fp16": {
        "torch_autocast": {"enabled": True, "dtype": "float16"},
        "fp16": {"initial_scale_power": 4},
    },
    "fp32, bf16 wire": {"communication_data_type": "bf16"},
}


@pytest.mark.parametrize("mode", list(MODES))
@distributed(world_size=2)
def test_stages_agree_bit_for_bit(mode: str) -> None:
    """One micro-batch per step: the stage changes where things are kept, not one bit of the result."""
    runs = {}
    # Stage 0 refuses to do without fp32 masters.
    stages = (1, 2, 3) if "bf16 master" in mode else (0, 1, 2, 3)
    for stage in stages:
        engine = build({**MODES[mode], "zero_optimization": {"stage": stage}})
        losses = train(engine, steps=4)
        engine.destroy()  # at stage 3 the parameters become whole
        runs[stage] = (losses, [p.detach().clone() for p in engine.module.parameters()])
    first = runs[stages[0]]
    for stage in stages[1:]:
        assert runs[stage][0] == first[0]
        assert all(torch.equal(a, b) for a, b in zip(runs[stage][1], first[1], strict=True))
    assert first[0][-1] != first[0][0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("fp32", ("float32", "float32", "float32", "float32", "float32")),
        ("bf16", ("bfloat16", "float32", "bfloat16", "bfloat16", "float32")),
        ("bf16, fp32 accumulation", ("bfloat16", "float32", "float32", "bfloat16", "float32")),
        ("fp16", ("float16", "float32", "float16", "float16", "float32")),
        ("fp32, bf16 wire", ("float32", "float32", "float32", "bfloat16", "float32")),
        ("bf16 master", ("bfloat16", "bfloat16", "bfloat16", "bfloat16", "float32")),
        ("bf16 master and state", ("bfloat16", "bfloat16", "bfloat16", "bfloat16", "bfloat16")),
    ],
)
@distributed(world_size=2)
def test_table_equals_tensors(stage: int, mode: str, expected: tuple[str, ...]) -> None:
    if stage == 0 and "bf16 master" in mode:
        with pytest.raises(ValueError, match="bf16_master_weights_and_grads"):
            build({**MODES[mode], "zero_optimization": {"stage": 0}})
        return
    engine = build({**MODES[mode], "zero_optimization": {"stage": stage}})
    before = precision_rows(engine)
    train(engine, steps=1)
    after = precision_rows(engine)
    assert before == after
    assert tuple(str(next(iter(dtypes))).removeprefix("torch.") for _, dtypes in after) == expected
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
@distributed(world_size=2)
def test_non_finite_step_is_skipped(stage: int, mode: str) -> None:
    engine = build({**MODES[mode], "zero_optimization": {"stage": stage}})
    train(engine, steps=1)
    before = [p.detach().clone() for p in engine.module.parameters()]
    loss = engine(torch.ones(4, WIDTH)).sum() * float("inf")
    engine.backward(loss)
    engine.step()
    assert engine.skipped_steps == 1
    assert not engine.was_step_applied()
    assert engine.global_steps == 2
    assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))
    train(engine, steps=1)
    assert engine.was_step_applied()
    engine.destroy()


@distributed(world_size=2)
def test_amp_is_autocast_to_fp16_with_a_loss_scale() -> None:
    engine = build({"amp": {"enabled": True, "opt_level": "O1"}, "fp16": {"initial_scale_power": 4}})
    assert engine(torch.ones(4, WIDTH)).dtype is torch.float16
    losses = train(engine, steps=4)
    assert losses[-1] < losses[0]
    assert engine.optimizer.cur_scale == 16.0
    assert {p.dtype for p in engine.module.parameters()} == {torch.float32}
    engine.destroy()


@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mode", ["fp32", "fp16"])
@distributed(world_size=2)
def test_the_norm_of_a_skipped_step_is_inf(mode: str, stage: int, bad: str) -> None:
    engine = build({**MODES[mode], "zero_optimization": {"stage": stage}})
    for step in range(3):
        loss = engine(torch.ones(4, WIDTH)).float().sum()
        engine.backward(loss * float(bad) if step == 1 and engine.global_rank == 1 else loss)
        engine.step()
        assert engine.was_step_applied() is (step != 1)
        norm = engine.get_global_grad_norm()
        assert norm == math.inf if step == 1 else math.isfinite(norm)
        if stage:
            assert engine.optimizer.scaled_global_norm() == norm
    engine.destroy()


@distributed(world_size=1)
def test_fp32_gives_up_after_fifty_bad_steps() -> None:
    engine = build({"zero_optimization": {"stage": 1}})
    with pytest.raises(LossScaleError, match=r"50 steps.*parameter 0\.weight"):
        for _ in range(60):
            engine.backward(engine(torch.full((4, WIDTH), float("nan"))).sum())
            engine.step()
    assert engine.skipped_steps == 49
    engine.destroy()


@distributed(world_size=1)
def test_fp16_gives_up_at_the_minimum_scale() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 2, "hysteresis": 1}
    engine = build({"fp16": fp16, "zero_optimization": {"stage": 1}})
    with pytest.raises(LossScaleError, match="minimum"):
        for _ in range(10):
            engine.backward(engine(torch.full((4, WIDTH), float("nan"))).sum())
            engine.step()
    assert engine.optimizer.cur_scale == 1.0
    engine.destroy()


@distributed(world_size=1)
def test_fp16_at_stage_0_skips_steps_at_the_minimum_scale_before_it_gives_up() -> None:
    engine = build({"fp16": {"enabled": True, "initial_scale_power": 2, "hysteresis": 1}})
    scales = []
    with pytest.raises(LossScaleError, match="50 steps"):
        for _ in range(60):
            engine.backward(engine(torch.full((4, WIDTH), float("nan"))).sum())
            engine.step()
            scales.append(engine.optimizer.loss_scale_config.cur_scale)
    assert scales == [2.0] + [1.0] * 48
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("gas", [2, 3])
@distributed(world_size=1)
def test_a_16_bit_loss_is_divided_in_fp32(gas: int, stage: int) -> None:
    """Its share times the first loss scale, 65536, fits in fp16, in which the scale itself is Inf."""
    config = {"gradient_accumulation_steps": gas, "zero_optimization": {"stage": stage}}
    engine = build({"fp16": {"enabled": True}, **config})
    for _ in range(gas):
        loss = engine(torch.full((4, WIDTH), 0.25)).square().mean()
        assert loss.dtype == torch.float16
        share = engine.backward(loss)
        assert share.dtype == torch.float32 and share.item() == loss.float().div(gas).item()
        engine.step()
    assert engine.skipped_steps == 0 and math.isfinite(engine.get_global_grad_norm())
    engine.destroy()


@distributed(world_size=1)
def test_plain_backward_under_fp16_needs_the_scale() -> None:
    engine = build({"fp16": {"enabled": True, "initial_scale_power": 8}})
    loss = engine(torch.ones(4, WIDTH)).float().square().mean()
    with pytest.raises(RuntimeError, match=r"engine\.scale"):
        loss.backward()
    loss = engine(torch.ones(4, WIDTH)).float().square().mean()
    engine.scale(loss).backward()
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=1)
def test_the_gradient_of_an_output_is_scaled_under_fp16(stage: int) -> None:
    """Every remedy that the error for a plain backward names is one."""
    engine = build({"fp16": {"enabled": True, "loss_scale": 64}, "zero_optimization": {"stage": stage}})
    inputs = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    plain = copy.deepcopy(build({"fp16": {"enabled": True, "loss_scale": 64}}).module).float()
    output = plain(inputs)
    gradient = torch.linspace(0.1, 0.9, output.numel()).view(output.shape)
    output.backward(gradient)
    expected = math.sqrt(sum(p.grad.square().sum().item() for p in plain.parameters()))
    with pytest.raises(RuntimeError, match=r"engine\.scale\(output\)\.backward\(gradient\)"):
        engine(inputs).backward(gradient.half())
    with pytest.raises(ValueError, match=r"engine\.scale\(output\)\.backward\(gradient\)"):
        engine.backward(engine(inputs))
    engine.scale(engine(inputs)).backward(gradient.half())
    engine.step()
    assert engine.was_step_applied()
    assert engine.get_global_grad_norm() == pytest.approx(expected, rel=2e-3)
    engine.destroy()


@distributed(world_size=1)
def test_static_scale_changes_nothing_but_rounding() -> None:
    plain, scaled = build({}), build({"fp16": {"enabled": False}})
    assert train(plain) == train(scaled)
    one, other = build(MODES["fp16 static"]), build({"fp16": {"enabled": True, "loss_scale": 256}})
    assert train(one) == pytest.approx(train(other), rel=1e-3)
    for engine in (plain, scaled, one, other):
        engine.destroy()


def test_dynamic_scale_follows_the_documented_rules() -> None:
    scaler = LossScaler(LossScalePlan(static=None, initial=16.0, window=3, hysteresis=2))
    scaler.update(overflow=True)
    assert scaler.scale == 16.0  # one overflow is tolerated
    scaler.update(overflow=True)
    assert scaler.scale == 8.0
    for _ in range(3):
        scaler.update(overflow=False)
        assert scaler.scale == 8.0
    scaler.update(overflow=False)  # three good steps went before this one
    assert scaler.scale == 16.0
    assert (scaler.cur_iter, scaler.last_overflow_iter) == (6, 1)
    restored = LossScaler(scaler.plan)
    restored.load_state_dict(scaler.state_dict())
    assert (restored.scale, restored.good_steps) == (16.0, 4)


def test_consecutive_hysteresis_refills_after_a_good_step() -> None:
    plan = LossScalePlan(static=None, initial=16.0, window=100, hysteresis=2, consecutive_hysteresis=True)
    scaler = LossScaler(plan)
    for _ in range(3):
        scaler.update(overflow=True)
        scaler.update(overflow=False)
    assert scaler.scale == 16.0


class Noted(nn.Module):
    """Keeps the dtypes that reach its forward."""

    offset: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("offset", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, *, extra: torch.Tensor, nested: dict[str, Any]) -> torch.Tensor:
        self.seen = [x.dtype, extra.dtype, nested["deep"][0].dtype, nested["ids"].dtype]
        return self.inner((x + self.offset).to(self.inner.weight.dtype)).float().square().mean()


@pytest.mark.parametrize(
    ("section", "positional", "keyword"),
    [
        ({}, torch.float32, torch.float32),
        ({"bf16": {"enabled": True}}, torch.bfloat16, torch.bfloat16),
        ({"fp16": {"enabled": True}}, torch.float16, torch.float32),
        ({"fp16": {"enabled": True, "auto_cast": True}}, torch.float16, torch.float16),
        ({"data_types": {"param_dtype": "bf16"}}, torch.bfloat16, torch.bfloat16),
    ],
)
@distributed(world_size=1)
def test_inputs_are_cast_and_buffers_are_not(
    section: dict[str, Any], positional: torch.dtype, keyword: torch.dtype
) -> None:
    """Floating inputs follow the parameters; by keyword under fp16 only with `auto_cast`. Integers and buffers stay."""
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, **section}
    engine, *_ = deepspeed.initialize(model=Noted(), config=config)
    ids = torch.ones(2, dtype=torch.int64)
    x = torch.ones(1, WIDTH)
    engine(x, extra=torch.ones(2), nested={"deep": [torch.ones(1)], "ids": ids})
    assert engine.module.seen == [positional, keyword, keyword, torch.int64]
    assert engine.module.offset.dtype is torch.float32 and engine.module.count.dtype is torch.int64
    engine.destroy()


@distributed(world_size=1)
def test_buffers_may_have_a_dtype_of_their_own() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True},
        "data_types": {"buffer_dtype": "fp16"},
    }
    engine, *_ = deepspeed.initialize(model=Noted(), config=config)
    assert engine.module.offset.dtype is torch.float16
    assert engine.module.inner.weight.dtype is torch.bfloat16
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_bf16_may_go_on_after_a_step_that_is_not_finite(stage: int) -> None:
    """`check_grad_overflow: false`: nobody looks, and the weights become what the arithmetic says."""
    engine = build(
        {
            "bf16": {"enabled": True, "check_grad_overflow": False},
            "zero_optimization": {"stage": stage},
            "gradient_clipping": 0.0,
        }
    )
    engine.backward(engine(torch.ones(4, WIDTH)).float().sum() * float("nan"))
    engine.step()
    assert engine.was_step_applied() and engine.skipped_steps == 0
    module = engine.module
    engine.destroy()
    assert all(torch.isnan(p).all() for p in module.parameters())


@distributed(world_size=2)
def test_gradients_of_safe_modules_travel_in_the_autocast_dtype() -> None:
    """By default those of linear and convolution layers; `lower_precision_safe_modules` names others."""
    for safe, expected in (
        (None, [torch.bfloat16, torch.float32]),
        (["torch.nn.LayerNorm"], [torch.float32, torch.bfloat16]),
        ([], [torch.float32, torch.float32]),
    ):
        section: dict[str, Any] = {"enabled": True, "dtype": "bfloat16"}
        if safe is not None:
            section["lower_precision_safe_modules"] = safe
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW"},
            "torch_autocast": section,
        }
        engine, *_ = deepspeed.initialize(model=model, config=config)
        wire = {
            engine.core.trained.names[slot.param]: bucket.layout.wire_dtype
            for bucket in engine.core.reducer.buckets
            for slot in bucket.layout.slots
        }
        assert [wire["0.weight"], wire["1.weight"]] == expected
        train(engine, steps=1)
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@distributed(world_size=2)
def test_autocast_beside_16_bit_weights(kind: str, stage: int) -> None:
    """Parameters are 16-bit, inputs come as they are, and operations that need fp32 get it."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]

    class Probe(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.dtype is torch.float32 and self.weight.dtype is dtype
            out = super().forward(x)
            assert out.dtype is dtype
            loss = nn.functional.cross_entropy(out, torch.zeros(4, dtype=torch.int64))
            assert loss.dtype is torch.float32
            return loss

    section = {
        kind: {"enabled": True},
        "torch_autocast": {"enabled": True, "dtype": str(dtype).split(".")[1]},
    }
    if kind == "fp16":
        section["fp16"]["initial_scale_power"] = 4
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        **section,
    }
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(model=Probe(WIDTH, WIDTH), config=config)
    losses = []
    for _ in range(4):
        loss = engine(torch.ones(4, WIDTH))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    assert losses[-1] < losses[0]
    engine.destroy()


class Adapted(nn.Module):
    """A frozen and a trained layer, with an adapter that is attached later, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.base.weight.requires_grad_(False)

    def attach(self) -> Adapted:
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x) + self.up(self.down(x))).float().square().mean()


def adapted_by_torch(steps: int) -> dict[str, Tensor]:
    """Train ``Adapted`` by torch over the batches of two ranks: masters in fp32, refreshed weights in their dtypes."""
    torch.manual_seed(0)
    model = Adapted().bfloat16().attach()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: p.detach().float().requires_grad_() for name, p in named.items()}
    optimizer = torch.optim.SGD(masters.values(), lr=0.5)
    for step in range(steps):
        for rank in range(2):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step + 100 * rank))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(x)
            (loss / 2).backward()
        for name, param in named.items():
            masters[name].grad, param.grad = param.grad.float(), None
        optimizer.step()
        for name, param in named.items():
            param.data.copy_(masters[name])
    return {name: master.detach() for name, master in masters.items()}


@pytest.mark.parametrize("attached", ["before", "under zero.Init"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_adapters_in_fp32_on_a_bf16_base_keep_their_dtype_under_autocast(stage: int, attached: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "bf16": {"enabled": True},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
        "zero_optimization": {"stage": stage},
    }
    torch.manual_seed(0)
    model = Adapted().bfloat16()
    if attached == "before":
        model.attach()
    else:
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
        base: Any = model.attach().base.weight
        base.convert_to_zero_parameters([model.down.weight, model.up.weight])
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step + 100 * engine.global_rank))
        engine.backward(engine(x))
        engine.step()
    wanted = adapted_by_torch(steps=3)
    for name, param in model.named_parameters():
        dtype = torch.float32 if name in ("down.weight", "up.weight") else torch.bfloat16
        assert param.dtype is dtype, name
        if not param.requires_grad:
            continue
        master = safe_get_full_fp32_param(param)
        assert torch.allclose(master, wanted[name], atol=2e-3), name  # gradients are summed in bf16
        with deepspeed.zero.GatheredParameters([param]):
            assert torch.equal(param.data, master.to(dtype)), name
    engine.destroy()


@distributed(world_size=1)
def test_a_whole_model_in_fp32_becomes_bf16_beside_autocast() -> None:
    """So `bf16.enabled` says; and `data_types.param_dtype` says it for each parameter of any model."""
    section = {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    for model, more in (
        (Adapted().attach(), {}),
        (Adapted().bfloat16().attach(), {"data_types": {"param_dtype": "bf16"}}),
    ):
        config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD"}, **section, **more}
        engine, *_ = deepspeed.initialize(model=model, config=config)
        assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
        engine.destroy()


class Several(nn.Module):
    """Outputs of several dtypes, as models with a loss in fp32, masks and tables give."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.inner(x)
        return {"loss": y.float().sum(), "y": y, "nested": (y.double(), [y > 0]), "ids": torch.arange(3)}


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@distributed(world_size=1)
def test_each_output_keeps_its_dtype(name: str, dtype: torch.dtype, stage: int) -> None:
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "Adam"},
        name: {"enabled": True},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=Several(), config=config)
    outputs = engine(torch.ones(2, WIDTH))
    wide, (mask,) = outputs["nested"]
    found = [each.dtype for each in (outputs["loss"], outputs["y"], wide, mask, outputs["ids"])]
    assert found == [torch.float32, dtype, torch.float64, torch.bool, torch.int64]
    engine.destroy()


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 2])
@distributed(world_size=1)
def test_a_scripted_part_of_a_model_trains(stage: int, mode: str) -> None:
    torch.manual_seed(0)
    scripted = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": mode == "bf16"},
    }
    engine, *_ = deepspeed.initialize(model=nn.Sequential(scripted, nn.Linear(WIDTH, 1)), config=config)
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16 if mode == "bf16" else torch.float32)
    losses = []
    for _ in range(4):
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
