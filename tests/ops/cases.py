"""Optimizers under test, each with the class of torch.optim that is its oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops import native
from deepspeed.ops.adagrad import Adagrad, DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.multi_tensor import MultiTensorOptimizer
from deepspeed.ops.sgd import SGD

Step = Callable[[Tensor, Tensor, dict[str, Any], int], None]


@dataclass(frozen=True)
class Case:
    name: str
    ours: Callable[..., MultiTensorOptimizer]
    oracle: Callable[..., torch.optim.Optimizer]

    def __str__(self) -> str:
        return self.name


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of the paper, element by element as it stands there."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                c = beta1 * m + (1 - beta1) * p.grad
                p -= group["lr"] * (c.sign() + group["weight_decay"] * p)
                m.copy_(beta2 * m + (1 - beta2) * p.grad)


class Lamb(torch.optim.Optimizer):
    """Algorithm 2 of the paper with the clamped trust ratio."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("m", torch.zeros_like(p))
                v = state.setdefault("v", torch.zeros_like(p))
                t = state["t"] = state.get("t", 0) + 1
                m.copy_(0.9 * m + 0.1 * p.grad)
                v.copy_(0.999 * v + 0.001 * p.grad**2)
                r = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8) + group["weight_decay"] * p
                ratio = (p.norm() / r.norm()).clamp(0.01, 10.0) if p.norm() > 0 and r.norm() > 0 else 1.0
                p -= group["lr"] * ratio * r


_DECAY = {"lr": 1e-2, "weight_decay": 0.1}
_LION = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
_MOMENTUM = {"lr": 1e-2, "momentum": 0.9}


def _both(name: str, ours: Any, oracle: Any, arguments: dict[str, Any], **only_ours: Any) -> Case:
    return Case(
        name,
        lambda params: ours(params, **arguments, **only_ours),
        lambda params: oracle(params, **arguments),
    )


CASES = [
    _both("adamw", FusedAdam, torch.optim.AdamW, _DECAY),
    _both("adam-l2", FusedAdam, torch.optim.Adam, _DECAY, adam_w_mode=False),
    _both("adam-no-decay", FusedAdam, torch.optim.Adam, {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6}),
    _both("cpu-adamw", DeepSpeedCPUAdam, torch.optim.AdamW, _DECAY),
    _both("cpu-adam-l2", DeepSpeedCPUAdam, torch.optim.Adam, _DECAY, adamw_mode=False),
    _both("lion", FusedLion, Lion, _LION),
    _both("cpu-lion", DeepSpeedCPULion, Lion, _LION),
    _both(
        "adagrad", Adagrad, torch.optim.Adagrad, {**_DECAY, "lr_decay": 0.1, "initial_accumulator_value": 0.2}
    ),
    _both("cpu-adagrad", DeepSpeedCPUAdagrad, torch.optim.Adagrad, _DECAY),
    _both("sgd", SGD, torch.optim.SGD, _DECAY),
    _both("sgd-momentum", SGD, torch.optim.SGD, {**_MOMENTUM, "dampening": 0.5, "weight_decay": 0.1}),
    _both("sgd-nesterov", SGD, torch.optim.SGD, {**_MOMENTUM, "nesterov": True}),
    _both("lamb", FusedLamb, Lamb, _DECAY),
]
ELEMENTWISE = [case for case in CASES if case.name != "lamb"]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(10007,), (64, 33), (3,), (0,), (1,), (5, 0, 2)]


def parameters(
    dtype: torch.dtype = torch.float32, shapes: Any = SHAPES, seed: int = 0
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients(params: list[Any], step: int, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Random, of sizes from 2^-13 to 2^7, so that rounding in every term shows."""
    generator = torch.Generator().manual_seed(1000 + step)
    values = []
    for p in params:
        exponent = torch.randint(-13, 8, p.shape, generator=generator)
        # exact whatever the number of threads, as pow() is not
        values.append(torch.ldexp(torch.randn(p.shape, generator=generator), exponent).to(dtype or p.dtype))
    return values


def train(optimizer: torch.optim.Optimizer, params: list[Any], steps: int = 4, scale: float = 1.0) -> None:
    for step in range(steps):
        for p, g in zip(params, gradients(params, step), strict=True):
            p.grad = g * scale
        optimizer.step()


def bits(tensor: Tensor) -> Tensor:
    """For comparisons in which NaN equals NaN and 0 does not equal -0."""
    return (
        tensor.detach()
        .reshape(-1)
        .view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    )


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(bits(left), bits(right))


def has_library() -> bool:
    return native.library() is not None
