"""1-bit LAMB (C. Li et al. 2021: 1-bit LAMB: Communication efficient large-scale large-batch training with LAMB's
convergence speed)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops import native
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.multi_tensor import refuse
from deepspeed.ops.update import ALONE, Fragments, Group, UpdateContext, UpdateTraits, refresh_weights
from deepspeed.optim import one_bit
from deepspeed.optim.sign_exchange import FEEDBACK

FRESH = "exp_avg_sq_fresh"
"""State entry: a variance that follows the gradients reconstructed from momenta."""
RATIO, SCALE, FACTOR = "lamb_coeff_freeze", "scaling_coeff", "last_factor"
"""Scalars per tensor: its average trust ratio in warm-up, the multiplier of its momentum on the wire (0: not known
yet), and the last factor of its trust ratio."""


class OnebitLamb(one_bit.OneBitOptimizer, FusedLamb):
    """LAMB for ``freeze_step`` updates, with fully summed gradients. After that the ranks exchange signs of their
    momenta, and each tensor keeps the average trust ratio of warm-up, times a factor for the change of the variance
    since, as reconstructed from the momenta. Momenta of different tensors are brought to one magnitude, because they
    share scales on the wire.

    Args:
        params: iterable of parameters or of dicts that define groups.
        deepspeed: accepted without effect.
        freeze_step: updates before the exchange is compressed.
        max_coeff, min_coeff: bounds of the trust ratio in warm-up.
        coeff_beta: weight of the old average of trust ratios.
        factor_max, factor_min: bounds of the factor.
        factor_threshold: largest relative change of the factor in one update.
        cuda_aware, comm_backend_name: accepted; the engine's own communication is used on every device.
        amsgrad: in the signature but not available.

    With ZeRO 1 and 2, groups of ranks share a copy each (``mics_shard_size``), and sum the whole-tensor norms of the
    trust ratios. ValueError: an undocumented backend. RuntimeError: an option that is not available.
    """

    update_traits = UpdateTraits(
        elementwise=False,
        segment_sums=True,
        gradient_norm=True,
        own_communication=True,
        rank_state=(FEEDBACK,),
        script_keys=(one_bit.MASK,),
    )
    extra_state_names = (FEEDBACK, FRESH)

    def __init__(
        self,
        params: Any,
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int = 100000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        refuse("OnebitLamb", amsgrad=amsgrad)
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
        super().__init__(params, defaults, deepspeed, comm_backend_name)
        self._coefficients = []
        self.freeze_step = int(freeze_step)
        self.coeff_beta = float(coeff_beta)
        self.factor_max, self.factor_min = float(factor_max), float(factor_min)
        self.factor_threshold = float(factor_threshold)

    @property
    def lamb_freeze_key(self) -> bool:
        """Return whether variances and trust ratios are frozen."""
        return self.updates >= self.freeze_step

    def warms_up(self, update: int) -> bool:
        return update <= self.freeze_step

    def state_for(self, param: Tensor, group: Group) -> dict[str, Any]:
        state = super().state_for(param, group)
        for name, value in ((RATIO, 0.0), (SCALE, 0.0), (FACTOR, 1.0)):
            if name not in state:
                state[name] = torch.tensor(value)
        return state

    def step_fragments(
        self, fragments: Sequence[Fragments], *, grad_scale: float = 1.0, context: UpdateContext = ALONE
    ) -> None:
        self._coefficients = []
        super().step_fragments(fragments, grad_scale=grad_scale, context=context)

    def multi_tensor_step(self, group: Group, params: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        """Run an update of warm-up, and add its trust ratios to their averages."""
        before = len(self._coefficients)
        super().multi_tensor_step(group, params, *args, **kwargs)
        for param, ratio in zip(params, self._coefficients[before:], strict=True):
            average = self.state[param][RATIO]
            old = self.coeff_beta if float(average) else 0.0  # the first ratio is its own average
            average.mul_(old).add_((1.0 - old) * ratio)

    def update_after_warmup(
        self, number: int, group: Group, part: Fragments, grad_scale: float, context: UpdateContext
    ) -> None:
        masters = list(part.masters)
        states = [self.state_for(master, group) for master in masters]
        fresh = torch.tensor([float(sum(not float(state[SCALE]) for state in states))], dtype=torch.float64)
        if float(fresh if context.copy_sum is None else context.copy_sum(fresh)):
            self.fill_variances(number, part, grad_scale, context)
            self._start_frozen(masters, states, context)
        before = [state["exp_avg"].clone() for state in states]
        one_bit.ema_update([state["exp_avg"] for state in states], part.grads, grad_scale, group["betas"][0])
        if masters:
            self._exchange(number, masters, states, context)
        self._apply(masters, states, group, before, context)
        refresh_weights(masters, part.lows)

    def _exchange(
        self, number: int, masters: list[Tensor], states: list[dict[str, Any]], context: UpdateContext
    ) -> None:
        """Replace the momenta by their means over the ranks."""
        momenta = [state["exp_avg"] for state in states]
        scales = [float(state[SCALE]) for state in states]
        torch._foreach_mul_(momenta, scales)
        self.exchange_means(number, masters, momenta, context.holders)
        torch._foreach_div_(momenta, scales)

    @staticmethod
    def _start_frozen(masters: list[Tensor], states: list[dict[str, Any]], context: UpdateContext) -> None:
        """Start the first update after warm-up: set the scales that bring momenta to their mean magnitude, and the
        fresh variance to the frozen one."""
        new = [i for i, state in enumerate(states) if not float(state[SCALE])]
        chosen = [masters[i] for i in new]
        own = one_bit.numels_of(chosen)
        found = one_bit.whole_sums(chosen, [_squares_of([states[i]["exp_avg"] for i in new]), own], context)
        sizes, shares = (found[:, 0] / found[:, 1]).sqrt(), own / found[:, 1]  # fragments count a tensor once
        total = torch.stack([(sizes * shares).sum(), shares[sizes > 0].sum()])
        if context.copy_sum is not None:
            total = context.copy_sum(total)
        common = torch.full_like(sizes, float(total[0] / total[1]) if total[1] > 0 else 1.0)
        one_bit.mean_over_holders(common, chosen, context)  # ranks with other experts have another mean
        for i, size, mean in zip(new, sizes.tolist(), common.tolist(), strict=True):
            states[i][SCALE].fill_(mean / size if size > 0 else 1.0)
            states[i][FRESH].copy_(states[i]["exp_avg_sq"])

    def _apply(
        self,
        masters: list[Tensor],
        states: list[dict[str, Any]],
        group: Group,
        before: list[Tensor],
        context: UpdateContext,
    ) -> None:
        """Update the weights from the new momenta; ``before``: the old momenta, overwritten."""
        beta1, decay = group["betas"][0], group["weight_decay"]
        largest = []
        for state, old in zip(states, before, strict=True):
            state["step"] += 1
            gradient = old.mul_(-beta1).add_(state["exp_avg"]).div_(1.0 - beta1)  # reconstructed from momenta
            largest.append(self._direction(state, group, gradient, out=old))
        shares = [1.0] * len(masters)
        if decay:
            alone = _squares_of(before)
            for master, direction in zip(masters, before, strict=True):
                direction.add_(master, alpha=decay)
            norms = one_bit.whole_sums(masters, [alone, _squares_of(before)], context).sqrt_()
            shares = [min(1.0, one / max(both, 1e-12)) for one, both in norms.tolist()]
        change = torch.tensor(largest, dtype=torch.float64).view(-1, 1)
        if context.segment_largest is not None:
            change = context.segment_largest(masters, change)
        for master, state, direction, most, share in zip(
            masters, states, before, change[:, 0].tolist(), shares, strict=True
        ):
            ratio = float(state[RATIO]) * self._bounded(most * share + (1.0 - share), state[FACTOR])
            master.sub_(direction.mul_(group["lr"] * ratio).to(master.dtype))
            self._coefficients.append(ratio)

    def _direction(self, state: dict[str, Any], group: Group, gradient: Tensor, *, out: Tensor) -> float:
        """Set ``out`` to the momentum over the root of the frozen variance; return the largest ratio of frozen to
        fresh root. ``out`` may be ``gradient``."""
        beta1, beta2 = group["betas"]
        state[FRESH].mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        first = second = frozen = 1.0
        if group["bias_correction"]:
            step = float(state["step"])
            first, second = 1.0 - beta1**step, 1.0 - beta2**step
            frozen = 1.0 - beta2 ** one_bit.variance_steps(state)
        denominator = self._root(state["exp_avg_sq"] / frozen, group)
        torch.div(state["exp_avg"], first, out=out).div_(denominator)
        changes = denominator.div_(self._root(state[FRESH] / second, group))
        return float(changes.max()) if changes.numel() else 1.0

    def _bounded(self, factor: float, last: Tensor) -> float:
        factor = min(self.factor_max, max(self.factor_min, factor))
        before, change = float(last), self.factor_threshold
        factor = min(before * (1.0 + change), max(before * (1.0 - change), factor))
        last.fill_(factor)
        return factor

    @staticmethod
    def _root(variance: Tensor, group: Group) -> Tensor:
        if group["eps_inside_sqrt"]:
            return variance.add_(group["eps"]).sqrt_()
        return variance.sqrt_().add_(group["eps"])


def _squares_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sums of squares, [n] fp64."""
    return torch.tensor(native.sums_of_squares(tensors), dtype=torch.float64)
