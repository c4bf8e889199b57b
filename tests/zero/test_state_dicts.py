"""``state_dict`` and ``load_state_dict`` of the engine's optimizer and of the client's own, and parts of parameters."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.ops.adam import FusedAdam
from deepspeed.zero.tensor_fragment import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from tests.pool import distributed
from tests.zero.models import assert_same

LAYOUTS = [(0, None), (1, None), (1, "nvme"), (2, None), (2, "cpu"), (3, None), (3, "nvme")]
PRECISIONS = ["fp32", "bf16", "fp16"]


class Net(nn.Module):
    """Large and small, a scalar, one frozen and one that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 24)
        self.frozen = nn.Linear(24, 24)
        self.down = nn.Linear(24, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.never = nn.Parameter(torch.ones(5))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.frozen(torch.tanh(self.up(x)))) * self.scale


def settings(stage: int, offload: str | None, precision: str, folder: Path) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "sub_group_size": 100, "stage3_param_persistence_threshold": 10}
    if offload is not None:
        zero["offload_optimizer"] = {
            "device": offload,
            **({"nvme_path": str(folder)} if offload == "nvme" else {}),
        }
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "zero_optimization": zero}
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}
    return config


def make(config: dict[str, Any], kind: type[torch.optim.Optimizer], seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = kind(model.parameters(), lr=1e-2)  # type: ignore[call-arg]
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, optimizer


def train(engine: Any, first: int, last: int) -> dict[str, Tensor]:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(10 * step + engine.global_rank)
        dtype = next(engine.module.parameters()).dtype
        engine.backward(engine(torch.randn(2, 16, generator=generator).to(dtype)).float().square().mean())
        engine.step()
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    return {
        str(i): whole for i, p in enumerate(trained) if (whole := safe_get_full_fp32_param(p)) is not None
    }


def through_a_file(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage, offload", LAYOUTS)
@distributed(world_size=2)
def test_round_trip(tmp_path: Path, stage: int, offload: str | None, precision: str) -> None:
    """With either optimizer: both at each precision, and both at each stage and place."""
    config = settings(stage, offload, precision, tmp_path)
    number = LAYOUTS.index((stage, offload)) + PRECISIONS.index(precision)
    kind = (torch.optim.AdamW, FusedAdam)[number % 2]
    engine, client = make(config, kind)
    train(engine, 0, 2)
    engine.save_checkpoint(tmp_path / "weights")
    of_engine = through_a_file(engine.optimizer.state_dict())
    of_client = through_a_file(client.state_dict())
    expected = train(engine, 2, 5)

    resumed, client = make(config, kind)
    train(resumed, 7, 8)
    resumed.load_checkpoint(tmp_path / "weights", load_optimizer_states=False)
    client.load_state_dict(of_client)
    if precision == "fp16":  # the scale is the engine's, not the client's
        resumed.state_access.load_scalars(of_engine)
    assert client.param_groups is resumed.optimizer.param_groups
    assert_same(train(resumed, 2, 5), expected)

    if engine.optimizer is not engine.basic_optimizer:
        resumed, _ = make(config, kind, seed=0)
        train(resumed, 7, 9)
        resumed.optimizer.load_state_dict(of_engine)
        assert_same(train(resumed, 2, 5), expected)


@distributed(world_size=1)
def test_state_of_a_client_that_trained_without_an_engine(tmp_path: Path) -> None:
    """The format is torch's own: whole state is loaded, and saved on one rank."""
    torch.manual_seed(0)
    plain = Net()
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(2):
        plain(torch.ones(2, 16) * step).square().mean().backward()
        reference.step()
        reference.zero_grad()
    for stage, offload in LAYOUTS:
        engine, client = make(settings(stage, offload, "fp32", tmp_path), torch.optim.AdamW)
        client.load_state_dict(reference.state_dict())
        for param, other in zip(engine.module.parameters(), plain.parameters(), strict=True):
            if other in reference.state:
                found = safe_get_full_optimizer_state(param, "exp_avg_sq")
                assert found is not None and torch.equal(found, reference.state[other]["exp_avg_sq"])
        found = client.state_dict()["state"]
        assert found.keys() == reference.state_dict()["state"].keys()
        for number, state in reference.state_dict()["state"].items():
            assert_same(found[number], state)
        engine.destroy()
        assert client.state_dict()["state"].keys() == found.keys()


@distributed(world_size=2)
def test_parts_of_another_number_of_ranks_are_refused(tmp_path: Path) -> None:
    engine, client = make(settings(1, None, "fp32", tmp_path), torch.optim.AdamW)
    before = train(engine, 0, 2)
    saved = client.state_dict()
    number = next(n for n, state in saved["state"].items() if state["exp_avg"].dim() == 1)
    saved["state"][number]["exp_avg"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"'exp_avg' of .* has 3 elements.*load_checkpoint"):
        client.load_state_dict(saved)
    assert_same(train(engine, 2, 2), before)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        client.load_state_dict({**client.state_dict(), "param_groups": []})
    train(engine, 2, 3)


@pytest.mark.parametrize("stage, offload", LAYOUTS[1:])
@distributed(world_size=2)
def test_local_parts_are_all_of_them(tmp_path: Path, stage: int, offload: str | None) -> None:
    engine, _ = make(settings(stage, offload, "bf16", tmp_path), torch.optim.AdamW)
    train(engine, 0, 1)
    engine.backward(engine(torch.ones(2, 16, dtype=torch.bfloat16)).float().square().mean())
    param = engine.module.up.weight
    held = {index.name: index.numel for index, _ in engine.state_access.local_states()}.get("up.weight", 0)
    total = torch.tensor(held)
    torch.distributed.all_reduce(total)
    assert total == 16 * 24
    for get, put in (
        (safe_get_local_fp32_param, safe_set_local_fp32_param),
        (lambda p: safe_get_local_optimizer_state(p, "exp_avg"), None),
        (safe_get_local_grad, safe_set_local_grad),
    ):
        part = get(param)
        assert part is not None and part.shape == (held,)
        new = torch.arange(held, dtype=torch.float32)
        put(param, new) if put else safe_set_local_optimizer_state(param, new, "exp_avg")
        assert torch.equal(get(param).float(), new)
