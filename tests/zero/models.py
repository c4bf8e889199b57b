"""Small models with the traits that break sharded training, and the oracle loop in plain PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.native import sum_of_squares
from deepspeed.zero.step import clip_coefficient, norm_from_squares


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Zoo(nn.Module):
    """Tied, frozen, unused (always, and on some ranks only), twice-used and zero-sized parameters, two dtypes of
    layers, repeated blocks."""

    def __init__(self, width: int = 12, blocks: int = 3, checkpoint: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.twice = nn.Linear(width, width)
        self.sometimes = nn.Linear(width, width)
        self.never = nn.Linear(5, 3)
        self.nothing = nn.Parameter(torch.empty(0))
        self.head = nn.Linear(width, 19, bias=False)
        self.head.weight = self.embed.weight
        self.checkpoint = checkpoint  # use_reentrant, or None for no checkpointing

    def forward(self, ids: Tensor, sometimes: bool = False) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            if self.checkpoint is None:
                x = block(x)
            else:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.checkpoint)
        x = self.twice(torch.tanh(self.twice(self.frozen(x))))
        if sometimes:
            x = x + self.sometimes(x)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), ids.roll(-1, 1).view(-1))


def make_zoo(seed: int = 0, **options: Any) -> Zoo:
    torch.manual_seed(seed)
    return Zoo(**options)


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, 19, (2, 7), generator=generator)


def uses_sometimes(step: int, rank: int) -> bool:
    """Rank-dependent control flow: used by no rank, by one rank, by all."""
    return step % 3 == 1 and rank == 0 or step % 3 == 2


def in_rank_order(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP communication hook that averages as we do: summed in rank order (gloo's ring order depends on N)."""
    mine = bucket.buffer()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(total / dist.get_world_size())
    return future


# DDP checks the annotations themselves, not their text.
in_rank_order.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


def ddp_losses(
    make: Callable[[], Zoo], steps: int, gas: int, clip: float, lr: float = 1e-2, groups: bool = False
) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """Losses, final weights and norms of DDP with our optimizer kernel and our norm."""
    model = make()
    trainable = param_groups(model) if groups else [p for p in model.parameters() if p.requires_grad]
    optimizer = FusedAdam(trainable, lr=lr, weight_decay=0.1)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    if dist.get_world_size() > 2:
        ddp.register_comm_hook(None, in_rank_order)
    rank, losses, norms = dist.get_rank(), [], []
    params = [p for p in model.parameters() if p.requires_grad]
    for step in range(steps):
        for micro in range(gas):
            context = ddp.no_sync() if micro < gas - 1 else contextlib.nullcontext()
            with context:
                loss = ddp(batch(step, micro, rank), uses_sometimes(step, rank))
                (loss / gas).backward()
            losses.append(loss.item())
        grads = [p.grad for p in params if p.grad is not None]
        norm = norm_from_squares(sum_of_squares(grads))
        norms.append(norm)
        torch._foreach_mul_(grads, clip_coefficient(norm, clip))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses, {k: v.clone() for k, v in model.state_dict().items()}, norms


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Decay and no-decay groups, an empty one between."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [], "lr": 0.5},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]


def engine_losses(
    make: Callable[[], Zoo], config: dict[str, Any], steps: int, *, groups: bool = False, plain: bool = False
) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """The same loop through the engine."""
    import deepspeed

    model = make()
    rank = dist.get_rank()
    parameters = param_groups(model) if groups else None
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=parameters)
    losses, norms = [], []
    gas = engine.gradient_accumulation_steps()
    for step in range(steps):
        for micro in range(gas):
            loss = engine(batch(step, micro, rank), uses_sometimes(step, rank))
            if plain:
                loss.backward()
            else:
                engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    engine.destroy()  # at stage 3 the parameters become whole
    return losses, {k: v.clone() for k, v in model.state_dict().items()}, norms


def config_for(stage: int, gas: int = 1, clip: float = 1.0, lr: float = 1e-2, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": clip,
        "optimizer": {"type": "FusedAdam", "params": {"lr": lr, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, **zero},
    }


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), f"{name} differs by {(value - right[name]).abs().max()}"
