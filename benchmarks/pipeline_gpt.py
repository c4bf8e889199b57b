"""One rank of a pipeline benchmark: the GPT of ``gpt.py`` as layers, or the same layers in plain PyTorch on one rank.

Runs in this environment and in the peer's.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import gpt
from trainers import CLIP, engine_config, fused_adamw

LAYOUTS = {"interleaved": {"chunks": 2}, "zero-bubble-v": {"chunks": 2, "zigzag": True}}


class First(nn.Module):
    """Tokens -> the stream."""

    def __init__(self, size: gpt.GPTSize, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(gpt.VOCABULARY, size.width)
        self.positions = nn.Embedding(context, size.width)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.tokens(tokens_BT) + self.positions(
            torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        )


def layers(size: gpt.GPTSize, context: int) -> list[nn.Module]:
    """The same weights everywhere. The head is not tied: the middle of the model is where the work is halved."""
    torch.manual_seed(1)
    head = nn.Linear(size.width, gpt.VOCABULARY, bias=False)
    blocks = [gpt.Block(size) for _ in range(size.layers)]
    return [First(size, context), *blocks, nn.Sequential(nn.LayerNorm(size.width), head)]


def loss_fn(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())


def bounds_by_work(size: gpt.GPTSize, context: int, pieces: int) -> list[int]:
    """Cuts of equal FLOPs: a head counts as its product, an embedding as nothing."""
    block = 12 * size.width**2 + 2 * context * size.width
    work = [0, *[block] * size.layers, gpt.VOCABULARY * size.width]
    ends = [sum(work[:number]) for number in range(len(work) + 1)]
    return [
        min(range(len(ends)), key=lambda i: abs(ends[i] - ends[-1] * k / pieces)) for k in range(pieces)
    ] + [len(work)]


class WithLoss(nn.Sequential):
    """All layers on one rank."""

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:  # type: ignore[override]
        return loss_fn(super().forward(tokens_BT), targets_BT)


class PipelineRank:
    """Args: ``schedule``: of ours; "1f1b" for the peer; "plain" for one rank without an engine; "data" for an engine
    whose ranks divide the micro-batches. ``held``: ``pipeline.max_held``. ``micro_batches`` of ``batch`` sequences of
    ``context`` tokens are one step.
    """

    def __init__(
        self,
        schedule: str,
        size: str,
        precision: str,
        micro_batches: int,
        batch: int,
        context: int,
        held: int = 0,
    ) -> None:
        self.held = held
        self.count, self.dtype = micro_batches, torch.bfloat16 if precision == "bf16" else torch.float32
        self.pairs = gpt.random_batches(micro_batches, batch, context, seed=2)
        sizes, self.engine = gpt.SIZES[size], None
        own = layers(sizes, context)
        if schedule == "plain":
            self.model = nn.Sequential(*own).to(self.dtype)
            self.masters = [nn.Parameter(p.detach().float().clone()) for p in self.model.parameters()]
            self.optimizer = fused_adamw(nn.ParameterList(self.masters))
        elif schedule == "data":
            self._divide_data(own, precision, batch)
        else:
            self.engine = self._make_engine(schedule, sizes, own, precision, batch, context)
        self.losses = [self.step() for _ in range(3)]

    def _make_engine(
        self, schedule: str, size: gpt.GPTSize, own: list[nn.Module], precision: str, batch: int, context: int
    ) -> Any:
        import deepspeed
        from deepspeed.pipe import PipelineModule

        deepspeed.init_distributed("gloo")
        stages = dist.get_world_size()
        layout = LAYOUTS.get(schedule, {})
        bounds = bounds_by_work(size, context, stages * layout.get("chunks", 1))
        # Uniform runs: cuts are as wanted.
        runs = [nn.Sequential(*own[a:b]) for a, b in itertools.pairwise(bounds)]
        module = PipelineModule(
            runs, num_stages=stages, loss_fn=loss_fn, partition_method="uniform", **layout
        )
        config = engine_config(0, precision, batch, gradient_accumulation_steps=self.count)
        if schedule != "1f1b":
            config["pipeline"] = {"schedule": schedule, "max_held": self.held}
        config |= {"train_batch_size": batch * self.count}
        return deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)[
            0
        ]

    def _divide_data(self, own: list[nn.Module], precision: str, batch: int) -> None:
        import deepspeed

        deepspeed.init_distributed("gloo")
        ranks = dist.get_world_size()
        self.pairs = self.pairs[dist.get_rank() :: ranks]
        model = WithLoss(*own)
        config = engine_config(0, precision, batch, gradient_accumulation_steps=self.count // ranks)
        self.engine = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )[0]
        self.step = self._data_step

    def _data_step(self) -> float:
        assert self.engine is not None
        total = 0.0
        for pair in self.pairs:
            loss = self.engine(*pair)
            self.engine.backward(loss)
            self.engine.step()
            total += loss.item() / len(self.pairs)
        return total

    def step(self) -> float:
        return self._plain_step() if self.engine is None else self.engine.train_batch(self._data()).item()

    def _data(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self.pairs)

    def _plain_step(self) -> float:
        """Accumulation in fp32, clipping, AdamW on fp32 weights: what an engine does, on one rank."""
        total = 0.0
        for tokens, targets in self.pairs:
            loss = loss_fn(self.model(tokens), targets)
            (loss / self.count).backward()
            total += loss.item() / self.count
            if self.dtype != torch.float32:
                self._accumulate()
        if self.dtype == torch.float32:
            self._accumulate()
        nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(list(self.model.parameters()), [*self.masters])
        return total

    def _accumulate(self) -> None:
        for param, master in zip(self.model.parameters(), self.masters, strict=True):
            grad = param.grad.float()  # type: ignore[union-attr]
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            param.grad = None

    def describe(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def run(self, steps: int) -> float:
        """Seconds per step, all ranks starting together."""
        if self.engine is not None and int(os.environ["WORLD_SIZE"]) > 1:
            dist.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.step()
        self.cpu_seconds = (time.process_time() - cpu) / steps
        return (time.perf_counter() - begin) / steps

    def cpu(self) -> float:
        return self.cpu_seconds
