"""With optimizer offload the config makes the optimizer for the host, as in 0.19: scripts ask for its class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from tests.pool import distributed

OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


def made(name: str, offload: bool, *, client: Any = None, params: Any = None, **config: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    zero = {"stage": 2, **(OFFLOADED if offload else {})}
    section = {"type": name, "params": {"lr": 0.1, **(params or {})}}
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": zero, **config}
    if client is None:
        config["optimizer"] = section
    parameters = list(model.parameters()) if client is None else None
    optimizer = client(model.parameters()) if client is not None else None
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=parameters, config=config
    )
    return engine


def train(engine: Any, first: int, last: int) -> dict[str, Tensor]:
    for number in range(first, last):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(number))
        engine.backward(engine(x).square().mean())
        engine.step()
    return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


@pytest.mark.parametrize(
    ("name", "params", "on_device", "on_host"),
    [
        ("Adam", {"adam_w_mode": False}, FusedAdam, DeepSpeedCPUAdam),
        ("AdamW", {"set_grad_none": True}, FusedAdam, DeepSpeedCPUAdam),
        ("AdamW", {"torch_adam": True}, torch.optim.AdamW, torch.optim.AdamW),
        ("FusedAdam", {}, FusedAdam, FusedAdam),
        ("Lion", {"set_grad_none": True}, FusedLion, DeepSpeedCPULion),
    ],
)
@distributed(world_size=1)
def test_class(name, params, on_device, on_host):
    for offload, expected in ((False, on_device), (True, on_host)):
        engine = made(name, offload, params=params)
        assert type(engine.basic_optimizer) is expected
        assert engine.optimizer.optimizer is engine.basic_optimizer
        if expected is DeepSpeedCPUAdam:
            (group,) = engine.optimizer.param_groups
            assert group["adamw_mode"] == (name == "AdamW") and "adam_w_mode" not in group


@distributed(world_size=1)
def test_low_precision_states():
    """Attributes of the optimizer that scripts read describe its behaviour."""
    keys = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    engine = made("AdamW", True, bf16=keys)
    assert not engine.basic_optimizer.fp32_optimizer_states
    assert not engine.basic_optimizer.param_groups[0]["fp32_optimizer_states"]


@pytest.mark.parametrize("name", ["Adam", "Lion"])
@pytest.mark.parametrize("offloaded_first", [False, True])
@distributed(world_size=2)
def test_checkpoints_of_the_other_class(tmp_path, name, offloaded_first):
    """Hyperparameters too: each class finds them under the name it uses."""
    params: dict[str, Any] = {"weight_decay": 0.5}
    if name == "Adam":
        params["adam_w_mode"] = False
    first = made(name, offloaded_first, params=params)
    train(first, 0, 2)
    first.save_checkpoint(str(tmp_path))
    second = made(name, not offloaded_first)  # with another mode and decay, which the checkpoint overrules
    second.load_checkpoint(str(tmp_path))
    keys = set(made(name, not offloaded_first).optimizer.param_groups[0])
    assert not {"adam_w_mode", "adamw_mode"} <= set(second.optimizer.param_groups[0])
    assert keys <= set(second.optimizer.param_groups[0])
    third = made(name, not offloaded_first)
    third.optimizer.load_state_dict(first.optimizer.state_dict())
    expected = train(first, 2, 4)
    for weight, value in train(second, 2, 4).items():
        assert torch.equal(value, expected[weight])
    for weight, value in train(third, 2, 3).items():
        assert value.isfinite().all(), weight


@distributed(world_size=1)
def test_forced():
    """`zero_force_ds_cpu_optimizer` is about the client's optimizers: those of the config are its author's choice."""
    forced = {"zero_force_ds_cpu_optimizer": True}
    engine = made("AdamW", True, params={"torch_adam": True}, **forced)
    assert type(engine.basic_optimizer) is torch.optim.AdamW
    made("", True, client=DeepSpeedCPUAdam, **forced)
    with pytest.raises(Exception, match="zero_force_ds_cpu_optimizer"):
        made("", True, client=torch.optim.AdamW, **forced)
