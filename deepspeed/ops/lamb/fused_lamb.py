"""FusedLamb (Y. You et al.: Large Batch Optimization for Deep Learning, ICLR 2020).

A tensor's step is scaled by its trust ratio |parameter| / |update|, so norms of whole tensors are needed in the middle
of the update: one pass updates the moments and computes both sums of squares, a second updates the parameters. Sums are
fp64; if tensors are sharded over ranks, `UpdateContext.segment_sum` sums them over ranks between the passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops import native
from deepspeed.ops.multi_tensor import MultiTensorOptimizer, Table, TensorBatch, foreach_sqrt, refuse
from deepspeed.ops.update import ALONE, Group, UpdateContext, UpdateTraits


class FusedLamb(MultiTensorOptimizer):
    """LAMB with bias-corrected moments and weight decay inside the update, as in algorithm 2 of the paper.

    The trust ratio is clamped to [min_coeff, max_coeff], and is 1 if either norm is 0. `max_grad_norm` > 0 clips the
    gradients of its group by the norm of the whole gradient (of all groups, on all ranks). `amsgrad` is in the
    signature but not available.
    """

    update_traits = UpdateTraits(elementwise=False, segment_sums=True, gradient_norm=True)
    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        refuse("FusedLamb", amsgrad=amsgrad)
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)
        self._coefficients: list[float] = []

    def get_lamb_coeffs(self) -> list[float]:
        """Return the trust ratios of the last step, one per updated parameter."""
        return self._coefficients

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float = 1.0,
        grad_norms: Any = None,
    ) -> Any:
        refuse("FusedLamb.step", grads=grads, output_params=output_params, grad_norms=grad_norms)
        if scale != 1.0:
            raise RuntimeError(
                f"FusedLamb.step does not support scale={scale!r}: unscale the gradients first"
            )
        self._coefficients = []
        return super().step(closure)

    def _own_context(self) -> UpdateContext:
        if not any(group["max_grad_norm"] > 0 for group in self.param_groups):
            return ALONE
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return UpdateContext(gradient_norm=math.sqrt(native.sum_of_squares(grads)))

    def multi_tensor_step(
        self,
        group: Group,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        *,
        context: UpdateContext = ALONE,
        **options: Any,
    ) -> None:
        if not params and context.segment_sum is not None:  # collective: other ranks may own fragments
            context.segment_sum([], torch.zeros(0, 2, dtype=torch.float64))
        super().multi_tensor_step(group, params, grads, context=context, **options)

    @torch.no_grad()
    def _update(self, table: Table, group: Group, grad_scale: float, context: UpdateContext) -> None:
        if group["max_grad_norm"] > 0:
            norm = context.gradient_norm
            if norm is None:
                norm = math.sqrt(native.sum_of_squares(table.grads)) * grad_scale
            grad_scale *= min(1.0, group["max_grad_norm"] / (norm + 1e-6))
        sums = torch.zeros(len(table.params), 2, dtype=torch.float64)
        lib: Any = native.library()  # not None where there are launches
        factors = (*group["betas"], group["eps"], group["weight_decay"])
        switches, threads = (group["bias_correction"], group["eps_inside_sqrt"]), torch.get_num_threads()
        for launch in table.launches:
            found = torch.empty(len(launch.indices), 2, dtype=torch.float64)
            rest = (grad_scale, *switches, found.data_ptr(), threads)
            lib.ds_lamb_moments(*launch.arguments(), *factors, *rest)
            sums[launch.indices] = found
        others = _TorchLamb(table, self.state_names, group, grad_scale) if table.others else None
        if others is not None:
            sums[table.others] = others.sums().cpu()
        if context.segment_sum is not None:
            sums = context.segment_sum(list(table.params), sums)
        ratios = self._trust_ratios(sums, group)
        self._coefficients.extend(ratios.tolist())
        for launch in table.launches:
            chosen = ratios[launch.indices]
            rest = (*switches, chosen.data_ptr(), threads)
            lib.ds_lamb_apply(*launch.arguments(), float(group["lr"]), *factors, *rest)
        if others is not None:
            others.apply(ratios[table.others].tolist())

    @staticmethod
    def _trust_ratios(sums: Tensor, group: Group) -> Tensor:
        param_norm, update_norm = sums.sqrt().unbind(1)
        ratio = (param_norm / update_norm).clamp(group["min_coeff"], group["max_coeff"])
        return torch.where((param_norm > 0) & (update_norm > 0), ratio, torch.ones_like(ratio))


class _TorchLamb:
    """Both passes in PyTorch, for tensors that no kernel supports; keeps the update in between."""

    def __init__(self, table: Table, names: tuple[str, ...], group: Group, grad_scale: float) -> None:
        steps = table.count_steps(table.others)
        self.group = group
        self.batch = TensorBatch(states=[[] for _ in names])
        for i, step in zip(table.others, steps, strict=True):
            low = None if table.low_precision is None else table.low_precision[i]
            states = [table.states[i][name] for name in names]
            self.batch.add(table.params[i], table.grads[i], states, low, step)
        self.wide = self.batch.widen(grad_scale)
        self.updates = self._updates()

    def _updates(self) -> list[Tensor]:
        beta1, beta2 = self.group["betas"]
        grads, (exp_avgs, exp_avg_sqs) = self.wide.grads, self.wide.states
        torch._foreach_mul_(exp_avgs, beta1)
        torch._foreach_add_(exp_avgs, torch._foreach_mul(grads, 1.0 - beta1))
        torch._foreach_mul_(exp_avg_sqs, beta2)
        squares = torch._foreach_mul(grads, 1.0 - beta2)
        torch._foreach_mul_(squares, grads)
        torch._foreach_add_(exp_avg_sqs, squares)
        # Compute the update from the stored moments: the kernel's second pass sees nothing else.
        for values, states in zip((exp_avgs, exp_avg_sqs), self.batch.states, strict=True):
            for value, state in zip(values, states, strict=True):
                if state.dtype is not value.dtype:
                    value.copy_(value.to(state.dtype))
        corrections1, corrections2 = (
            [
                1.0 - math.pow(beta, step) if self.group["bias_correction"] else 1.0
                for step in self.batch.steps
            ]
            for beta in (beta1, beta2)
        )
        if self.group["eps_inside_sqrt"]:
            corrected = torch._foreach_mul(exp_avg_sqs, [1.0 / c for c in corrections2])
            denominators = foreach_sqrt(list(torch._foreach_add(corrected, self.group["eps"])))
        else:
            denominators = foreach_sqrt(exp_avg_sqs)
            torch._foreach_mul_(denominators, [1.0 / math.sqrt(c) for c in corrections2])
            torch._foreach_add_(denominators, self.group["eps"])
        updates = list(torch._foreach_mul(exp_avgs, [1.0 / c for c in corrections1]))
        torch._foreach_div_(updates, denominators)
        torch._foreach_add_(updates, torch._foreach_mul(self.wide.params, self.group["weight_decay"]))
        return updates

    def sums(self) -> Tensor:
        """Return the sums of squares of parameter and update, fp64 [n, 2]."""
        squares = [native.sums_of_squares(tensors) for tensors in (self.wide.params, self.updates)]
        return torch.tensor(squares, dtype=torch.float64).t()

    def apply(self, ratios: list[float]) -> None:
        rates = [float(self.group["lr"]) * ratio for ratio in ratios]
        torch._foreach_sub_(self.wide.params, torch._foreach_mul(self.updates, rates))
        self.batch.round_back(self.wide)
