"""``snip_momentum``: pruning during training by weight-times-gradient scores, in blocks or N:M.

The score of a weight is S <- 0.9 S + |w dL/dw| (SNIP, Lee et al. 2019, with momentum). At step t of a schedule from a
to b the share 1 - (1 - (t - a) / (b - a))**3 of the final sparsity is pruned (Zhu and Gupta 2017). Pruned weights never
come back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.compression.techniques import SCORES, Compressible
from deepspeed.compression.utils import top_mask

MOMENTUM = 0.9
MASK = "sparse_pruning_mask"
Reader = Callable[[nn.Parameter], Tensor | None]
Choice = Callable[[Mapping[str, Tensor], float], Sequence[Tensor]]
"""(flat scores by module, share to keep) -> a mask for each module."""


def largest(parts: Mapping[str, Tensor], share: float) -> Sequence[Tensor]:
    """Return masks of the largest ``share`` of the scores of all modules together."""
    return top_mask(torch.cat(list(parts.values())), share).split([part.numel() for part in parts.values()])


def parse_pattern(text: str) -> tuple[int, int, bool]:
    """Parse "4x1" (blocks of 4 output by 1 input features) or "2:4" (keep 2 of 4 consecutive input features) into (N,
    M, whether it is N:M). ValueError: anything else."""
    found = re.fullmatch(r"(\d+)([x:])(\d+)", text.strip().lower())
    if found is None or int(found[1]) < 1 or int(found[3]) < 1:
        raise ValueError(f"sparse_pruning.block_pattern={text!r} is neither NxM (4x1) nor N:M (2:4)")
    n, m, kept = int(found[1]), int(found[3]), found[2] == ":"
    if kept and n >= m:
        raise ValueError(f"sparse_pruning.block_pattern={text!r} keeps {n} of {m}: nothing is pruned")
    return n, m, kept


def share_at(step: int, begin: int, end: int) -> float:
    """Return the share of the final sparsity at a step."""
    if step >= end:
        return 1.0
    return 1.0 - (1.0 - max(step - begin, 0) / (end - begin)) ** 3


class SnipMomentum:
    """Prunes ``modules`` (by name, prepared with ``enable_sparse_pruning(..., "snip_momentum")``) jointly, until
    ``dense_ratio`` of all their weights is left. ``step``: optimizer steps done."""

    def __init__(
        self,
        modules: Mapping[str, Compressible],
        *,
        begin: int,
        end: int,
        stride: int,
        pattern: str,
        dense_ratio: float,
    ) -> None:
        self.n, self.m, self.keeps_n_of_m = parse_pattern(pattern)
        self.modules = dict(modules)
        self.begin, self.end, self.stride = begin, max(begin, end), stride
        self.dense_ratio = dense_ratio
        self.step = 0
        self.choose: Choice = largest
        """Selects the scores to keep; replaced if the modules are spread over pipeline stages."""

    def fits(self, weight: Tensor) -> bool:
        """Return whether a weight divides into whole blocks."""
        rows, columns = weight.shape[0], weight[0].numel()
        return columns % self.m == 0 and (self.keeps_n_of_m or rows % self.n == 0)

    @property
    def active(self) -> bool:
        """Return whether weights are scored in this step."""
        return self.begin <= self.step <= self.end

    @torch.no_grad()
    def on_before_optimizer_step(
        self, weight: Reader = lambda param: param, gradient: Reader = lambda param: param.grad
    ) -> None:
        """Update the scores with the gradients of this step. ``weight`` and ``gradient`` may be collective."""
        if not self.active:
            return
        for module in self.modules.values():
            value, slope = weight(module.weight), gradient(module.weight)
            if value is None or slope is None:
                continue
            product = module.whole(value.detach().float().mul(slope.float()).abs_())
            if not bool(product.isfinite().all()):
                continue  # overflow: the step is skipped
            scores_of(module).mul_(MOMENTUM).add_(product.view(scores_of(module).shape))

    @torch.no_grad()
    def on_after_optimizer_step(self) -> None:
        """Prune if the schedule says so, and count the step."""
        if self.active and ((self.step - self.begin) % self.stride == 0 or self.step == self.end):
            self._prune((1.0 - self.dense_ratio) * share_at(self.step, self.begin, self.end))
        self.step += 1

    def _prune(self, sparsity: float) -> None:
        if sparsity <= 0.0:
            return
        scores = {name: scores_of(module) * mask_of(module) for name, module in self.modules.items()}
        parts = {name: self._importance(score) for name, score in scores.items()}
        if self.keeps_n_of_m:
            sparsity = min(sparsity / (1 - self.n / self.m), 1.0)
        flat = {name: part.reshape(-1) for name, part in parts.items()}
        kept = self.choose(flat, 1.0 - sparsity)
        for (name, part), dense in zip(parts.items(), kept, strict=True):
            mask = self._mask(dense.view(part.shape), scores[name])
            buffer = mask_of(self.modules[name])
            buffer.copy_((mask & buffer.view(mask.shape)).view(buffer.shape))

    def _importance(self, score: Tensor) -> Tensor:
        """Return the mean score of each block; with N:M, the sum of the scores that each group of M would lose."""
        flat = score.flatten(1)
        rows, columns = flat.shape
        if not self.keeps_n_of_m:
            return flat.view(rows // self.n, self.n, columns // self.m, self.m).mean(dim=(1, 3))
        return flat.view(rows, columns // self.m, self.m).sort(dim=-1).values[..., : self.m - self.n].sum(-1)

    def _mask(self, dense: Tensor, score: Tensor) -> Tensor:
        """Expand ``dense``, the kept blocks (or with N:M the groups of M left dense), to a boolean [rows, columns]."""
        flat = score.flatten(1)
        if not self.keeps_n_of_m:
            return dense.repeat_interleave(self.n, 0).repeat_interleave(self.m, 1)
        groups = flat.view(flat.shape[0], -1, self.m)
        best = groups.sort(dim=-1, descending=True, stable=True).indices[..., : self.n]
        kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, best, True)
        return (kept | dense.unsqueeze(-1)).view(flat.shape)


def scores_of(module: Compressible) -> Tensor:
    """Return the scores of a module's weight as a writable fp32 view."""
    held: Any = module._buffers[SCORES]
    return held.view(torch.float32)


def mask_of(module: Compressible) -> Tensor:
    """Return the boolean buffer of a module's kept weights."""
    held: Any = module._buffers[MASK]
    return held
