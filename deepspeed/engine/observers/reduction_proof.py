"""Proves that the gradients which an engine updates with are the sum of those that autograd computed.

A hook on a parameter sees each gradient before the engine does. Their sum over this rank's backwards, by a plain
all-reduce of torch in fp64, is what the engine's buckets, wire formats and shards must have arrived at, up to rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.base.logging import logger
from deepspeed.base.sharded import full_numel
from deepspeed.config.plan import Cadence
from deepspeed.zero.gradients.bucket import GradBucket
from deepspeed.zero.layout import UNUSED

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine


class ReductionProof:
    """Looks at ``buckets`` gradient buckets of each step, at others in the next. Every rank looks at the same ones."""

    def __init__(self, engine: Engine, buckets: int) -> None:
        self.engine = engine
        self.buckets = buckets if _applies(engine) else 0
        self.step = 0
        self._chosen: list[int] = []
        self._seen: dict[
            int, Tensor
        ] = {}  # by parameter: [2, numel], the sum of its gradients and of their sizes
        self._passes: dict[int, int] = {}
        self._handles: list[Any] = []

    def begin(self, step: int) -> None:
        self.forget()
        core = self.engine.core
        assert core is not None
        there = len(core.reducer.buckets)
        first = (step - 1) * self.buckets
        self._chosen = sorted({(first + i) % there for i in range(min(self.buckets, there))}) if there else []
        self.step = step
        for b in self._chosen:
            for index in _trained(core.reducer.buckets[b]):
                param = core.reducer.params[index]
                if param.requires_grad:
                    self._handles.append(param.register_hook(self._hook(index)))

    def _hook(self, index: int) -> Any:
        def see(grad: Tensor) -> None:
            dense = grad.detach()
            flat = (dense.to_dense() if dense.layout is not torch.strided else dense).reshape(-1).double()
            seen = torch.stack([flat, flat.abs()])
            known = self._seen.get(index)
            self._seen[index] = seen if known is None else known.add_(seen)
            self._passes[index] = self._passes.get(index, 0) + 1

        return see

    def check(self) -> list[dict[str, Any]]:
        """Return the findings by bucket, after all gradients are summed. Collective."""
        core = self.engine.core
        assert core is not None
        found = []
        if self._chosen and not self._any_late():
            found = [self._check(b, core.reducer.buckets[b]) for b in self._chosen]
        self.forget()
        return found

    def forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._seen, self._passes, self._chosen = [], {}, {}, []

    def _any_late(self) -> bool:
        """Return whether gradients arrived after their bucket was summed, on any rank: they are added later."""
        core = self.engine.core
        assert core is not None
        late = torch.tensor([float(core.reducer.has_late())], device=core.reducer.device)
        core.reducer.communicator.all_reduce(late).wait()
        return bool(late.item())

    def _check(self, b: int, bucket: GradBucket) -> dict[str, Any]:
        core = self.engine.core
        assert core is not None
        wrong, worst = [], 0.0
        for index in _trained(bucket):
            error = self._error(index, bucket, core.reducer.params[index])
            worst = max(worst, error)
            if not error <= 1.0:
                wrong.append(core.access.names[index])
        if wrong:
            logger.error(
                f"audit: in step {self.step} the sum of gradient bucket {b} is not that of the ranks' gradients: "
                f"{', '.join(wrong[:4])}{', ...' if len(wrong) > 4 else ''} differ by up to {worst:.3g} times what "
                "rounding explains"
            )
        return {"bucket": b, "equal": not wrong, "parameters": wrong, "error": worst}

    def _error(self, index: int, bucket: GradBucket, param: nn.Parameter) -> float:
        """The largest difference of an element, as a multiple of what rounding explains. Collective."""
        core = self.engine.core
        assert core is not None
        all_ranks = self.engine.replica_groups.of(param).all_ranks
        seen = self._seen.get(index)
        if seen is None:
            seen = torch.zeros(2, full_numel(param), dtype=torch.float64, device=self.engine.device)
        if all_ranks.size > 1:
            dist.all_reduce(seen, group=all_ranks.group)
        before, after = self.engine.facts.gradient_rule().factors(
            self.engine.replica_groups.of(param).divisor
        )
        expected, size = seen * (before * after)
        whole = core.access.full_gradient(param)
        if whole is None or not param.numel() and not full_numel(param):
            return 0.0
        terms = all_ranks.size + self._passes.get(index, 1) + 1
        rounding = max(torch.finfo(dtype).eps for dtype in (bucket.dtype, bucket.layout.wire_dtype))
        bound = size * (terms * rounding) + torch.finfo(bucket.layout.wire_dtype).tiny
        got = whole.reshape(-1).double()
        excess = (got - expected).abs() / bound
        finite = expected.isfinite() & got.isfinite()
        excess = torch.where(
            finite, excess, torch.where(expected.isfinite() == got.isfinite(), 0.0, torch.inf)
        )
        return float(excess.max()) if excess.numel() else 0.0


def _trained(bucket: GradBucket) -> list[int]:
    return [slot.param for slot in bucket.layout.slots if slot.param != UNUSED and slot.numel]


def _applies(engine: Engine) -> bool:
    """Return whether sums are plain ones: not where quantized payloads are sent, or nothing is."""
    core = engine.core
    return core is not None and not engine.plan.packing.loses and core.reducer.cadence is not Cadence.NEVER
