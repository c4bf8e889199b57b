"""Data-parallel training of several ranks in one process and plain PyTorch, where each step says what is averaged."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BETA, LR = 0.9, 0.1


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3))


def loss_of(model: Any, step: int, micro: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return model(torch.randn(4, 5, generator=generator).to(dtype)).float().pow(2).sum()


def mean(tensors: list[Tensor]) -> Tensor:
    """In rank order in fp32, rounded once."""
    total = tensors[0].float()
    for tensor in tensors[1:]:
        total = total + tensor.float()
    return (total * (1 / len(tensors))).to(tensors[0].dtype)


class SimulatedRanks:
    """Momentum SGD on fp32 masters of models in ``dtype``. ``exchange(momenta of all ranks, number of the tensor)``:
    what the ranks' momenta become in steps whose gradients are not averaged."""

    def __init__(
        self,
        ranks: int,
        *,
        dtype: torch.dtype = torch.float32,
        micro_batches: int = 1,
        clip: float = 0.0,
        exchange: Callable[[list[Tensor], int], list[Tensor]] = lambda momenta, _: momenta,
    ) -> None:
        model = make_model().to(dtype)
        self.models = [copy.deepcopy(model) for _ in range(ranks)]
        self.masters = [[p.detach().float() for p in m.parameters()] for m in self.models]
        self.momenta = [[torch.zeros_like(p) for p in masters] for masters in self.masters]
        self.dtype, self.micro_batches, self.clip, self.exchange = dtype, micro_batches, clip, exchange
        self.norm = 0.0

    def step(self, step: int, *, average_gradients: bool) -> None:
        grads = [self._gradients(model, step, rank) for rank, model in enumerate(self.models)]
        if average_gradients:
            grads = [[mean(list(same)) for same in zip(*grads, strict=True)]] * len(grads)
        scale = self._clip(grads)
        for momenta, own in zip(self.momenta, grads, strict=True):
            for momentum, grad in zip(momenta, own, strict=True):
                momentum.mul_(BETA).add_(grad.float() * scale)
        if not average_gradients:
            for i, same in enumerate(zip(*self.momenta, strict=True)):
                for momentum, value in zip(same, self.exchange(list(same), i), strict=True):
                    momentum.copy_(value)
        for model, masters, momenta in zip(self.models, self.masters, self.momenta, strict=True):
            for param, master, momentum in zip(model.parameters(), masters, momenta, strict=True):
                master.add_(momentum, alpha=-LR)
                param.data.copy_(master)

    def _gradients(self, model: nn.Module, step: int, rank: int) -> list[Tensor]:
        model.zero_grad()
        for micro in range(self.micro_batches):
            (loss_of(model, step, micro, rank, self.dtype) / self.micro_batches).backward()
        return [p.grad for p in model.parameters()]  # type: ignore[misc]

    def _clip(self, grads: list[list[Tensor]]) -> float:
        """By the root mean square of the ranks' norms, which is the norm if all are the same."""
        squares = [sum(float(g.double().pow(2).sum()) for g in own) for own in grads]
        norm = torch.tensor(math.sqrt(sum(squares) / len(squares)), dtype=torch.float32)
        self.norm = norm.item()
        return min(1.0, (self.clip / (norm + 1e-6)).item()) if self.clip else 1.0


def config_of(stage: int, dtype: torch.dtype, micro_batches: int, clip: float, ranks: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": 4 * micro_batches * ranks,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage},
    }
    if dtype is torch.bfloat16:
        config["bf16"] = {"enabled": True}
    return config


def train_batch(engine: Any, step: int, micro_batches: int, dtype: torch.dtype, rank: int) -> None:
    for micro in range(micro_batches):
        engine.backward(loss_of(engine, step, micro, rank, dtype))
        engine.step()
