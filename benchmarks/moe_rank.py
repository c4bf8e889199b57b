"""A mixture-of-experts layer, or a dense one of equal FLOPs, as a contender, here and in the peer's environment."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def mlp(hidden: int, wide: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(hidden, wide), nn.GELU(), nn.Linear(wide, hidden))


class LayerRank:
    """One rank of a contender.

    Args:
        k: experts per token; the dense layer is as many times as wide as one expert.
        moe: the layer with experts, spread over all ranks; nothing is dropped. Otherwise the dense one.
    """

    def __init__(self, k: int, moe: bool, tokens: int, hidden: int, wide: int, experts: int) -> None:
        import deepspeed

        deepspeed.init_distributed("gloo")
        ranks, self.rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        torch.manual_seed(self.rank)
        self.layer: nn.Module = mlp(hidden, k * wide)
        directions = torch.linalg.qr(torch.randn(hidden, hidden))[0][:experts]
        if moe:
            from deepspeed.moe.layer import MoE

            settings = {"k": k, "drop_tokens": False, "use_rts": False, "top2_2nd_expert_sampling": False}
            layer = MoE(hidden, mlp(hidden, wide), experts, ranks, **settings)
            layer.set_deepspeed_parallelism()
            with torch.no_grad():
                layer.deepspeed_moe.gate.wg.weight.copy_(directions)
            self.layer = layer
        self.inputs = self._balanced(tokens, directions).requires_grad_()
        self.gradient = torch.randn(tokens, hidden)
        self.cpu_seconds = 0.0
        self.run(2)

    @staticmethod
    def _balanced(tokens: int, directions: Tensor) -> Tensor:
        """Every expert is the first choice of as many tokens, and the second: ranks have equal work."""
        experts = len(directions)
        first = torch.arange(tokens) % experts
        second = (first + 1 + torch.arange(tokens) // experts % max(experts - 1, 1)) % experts
        noise = torch.randn(tokens, directions.shape[1])
        noise -= noise @ directions.T @ directions
        return noise + 3 * directions[first] + 2 * directions[second]

    def _step(self) -> None:
        output: Any = self.layer(self.inputs)
        if isinstance(output, tuple):
            output, l_aux, _ = output
            torch.autograd.backward([output, l_aux], [self.gradient, torch.tensor(0.01)])
        else:
            output.backward(self.gradient)
        self.layer.zero_grad()
        self.inputs.grad = None

    def run(self, steps: int) -> float:
        """Seconds per forward and backward, all ranks starting together."""
        dist.barrier()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self._step()
        self.cpu_seconds = (time.process_time() - cpu_begin) / steps
        return (time.perf_counter() - begin) / steps

    def cpu(self) -> float:
        """Processor seconds per step of the last ``run``, all threads."""
        return self.cpu_seconds
