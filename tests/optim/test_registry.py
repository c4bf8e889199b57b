from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.config.optimizers import check_optimizer
from deepspeed.ops.adagrad import Adagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import FusedLion
from deepspeed.ops.sgd import SGD
from deepspeed.zero.optimizer_registry import build_optimizer


def _params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize(
    ("name", "params", "cls"),
    [
        ("Adam", {"lr": 1e-3, "betas": [0.8, 0.9]}, FusedAdam),
        ("ADAMW", None, FusedAdam),
        ("FusedAdam", {"set_grad_none": False}, FusedAdam),
        ("Adam", {"torch_adam": True}, torch.optim.AdamW),
        ("Adam", {"torch_adam": True, "adam_w_mode": False, "amsgrad": True}, torch.optim.Adam),
        ("AdamW", {"torch_adam": True, "bias_correction": True}, torch.optim.AdamW),
        ("adam", {"fp32_optimizer_states": False, "adam_w_mode": False}, DeepSpeedCPUAdam),
        ("Lamb", {"max_coeff": 5.0}, FusedLamb),
        ("FusedLamb", {}, FusedLamb),
        ("Lion", {"lr": "auto"}, FusedLion),
        ("Adagrad", {"lr_decay": 0.1}, Adagrad),
        ("Adagrad", {"maximize": True}, torch.optim.Adagrad),
        ("SGD", {"momentum": 0.9, "nesterov": True}, SGD),
        ("sgd", {"foreach": True}, torch.optim.SGD),
        ("RMSprop", {"lr": 0.1}, torch.optim.RMSprop),
        ("nadam", {}, torch.optim.NAdam),
        ("Adafactor", {}, torch.optim.Adafactor),
    ],
)
def test_names(name: str, params: dict[str, Any] | None, cls: type) -> None:
    assert check_optimizer(name, params) == []
    optimizer = build_optimizer(name, params, _params())
    assert type(optimizer) is cls
    for key in ("lr", "momentum", "max_coeff", "lr_decay"):
        if params and params.get(key, "auto") != "auto":
            assert optimizer.param_groups[0][key] == params[key]


@pytest.mark.parametrize(
    ("name", "mode", "decoupled"),
    [
        ("Adam", None, True),
        ("Adam", True, True),
        ("Adam", False, False),
        ("AdamW", None, True),
        ("AdamW", False, True),
    ],
)
def test_adam_w_mode(name: str, mode: bool | None, decoupled: bool) -> None:
    """ "Adam" decays weights like AdamW unless configured not to; "AdamW" always does."""
    params = {"lr": 0.1, "weight_decay": 0.5} | ({} if mode is None else {"adam_w_mode": mode})
    optimizer = build_optimizer(name, params, p := _params())
    oracle = (torch.optim.AdamW if decoupled else torch.optim.Adam)(q := _params(), lr=0.1, weight_decay=0.5)
    p[0].grad, q[0].grad = torch.full((3,), 0.01), torch.full((3,), 0.01)
    optimizer.step()
    oracle.step()
    torch.testing.assert_close(p[0], q[0])


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("Addam", None, ["optimizer.type='Addam'", "did you mean"]),
        ("Optimizer", None, ["optimizer.type='Optimizer'", "unknown"]),
        (None, None, ["optimizer.type=None"]),
        ("Adam", [1], ["optimizer.params"]),
        ("Adam", {"learning_rate": "auto"}, ["optimizer.params.learning_rate", "allowed:", "lr"]),
        ("Adam", {"learning_rate": 1}, ["optimizer.params.learning_rate", "allowed:", "lr"]),
        ("Adam", {"beta": (0.9, 0.99)}, ["optimizer.params.beta ", "did you mean betas"]),
        ("Adam", {"max_grad_norm": 1.0}, ["max_grad_norm", "gradient_clipping"]),
        ("Lamb", {"max_grad_norm": 1.0}, ["max_grad_norm", "gradient_clipping"]),
        ("Adam", {"lr": "1e-3"}, ["optimizer.params.lr='1e-3'", "number"]),
        ("Adam", {"lr": -1}, ["optimizer.params.lr=-1"]),
        ("Adam", {"lr": float("nan")}, ["optimizer.params.lr=nan"]),
        ("Adam", {"betas": [0.9]}, ["optimizer.params.betas"]),
        ("Adam", {"betas": [0.9, 1.0]}, ["optimizer.params.betas"]),
        ("Adam", {"eps": True}, ["optimizer.params.eps=True"]),
        ("Adam", {"amsgrad": True}, ["amsgrad", "torch_adam"]),
        ("Adam", {"capturable": True}, ["optimizer.params.capturable"]),
        ("RMSprop", {"alhpa": 0.9}, ["optimizer.params.alhpa", "did you mean alpha", "RMSprop"]),
        ("SGD", {"nesterov": True}, ["nesterov"]),
        ("Adam", {"lrr": 1, "epps": 2}, ["optimizer.params.lrr", "optimizer.params.epps"]),
    ],
)
def test_refusals_name_key_value_and_remedy(name: Any, params: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        build_optimizer(name, params, _params())
    for word in words:
        assert word in str(caught.value)


def test_groups_and_iterators_are_passed_on() -> None:
    groups = [{"params": _params(), "lr": 0.5}, {"params": iter(_params()), "weight_decay": 0.0}]
    optimizer = build_optimizer("AdamW", {"lr": 0.1, "weight_decay": 0.2}, groups)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.1]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.2, 0.0]
