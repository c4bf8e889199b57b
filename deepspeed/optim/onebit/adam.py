"""1-bit Adam (H. Tang et al. 2021: 1-bit Adam: Communication efficient large-scale training with Adam's convergence
speed)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepspeed.comm.collectives import Communicator
from deepspeed.ops.adam.multi_tensor_adam import MultiTensorAdam, adam_defaults
from deepspeed.ops.momentum import frozen_step
from deepspeed.ops.multi_tensor import refuse
from deepspeed.ops.update import Fragments, Group, UpdateContext, UpdateTraits
from deepspeed.optim.one_bit import (
    MASK,
    OneBitOptimizer,
    by_holders,
    check_backend,
    ema_update,
    pieces,
    round_into,
    variance_steps,
)
from deepspeed.optim.own_variance import OWN_VARIANCE, average_variances, continue_variances, share_of_mean
from deepspeed.optim.sign_exchange import FEEDBACK

AUTO = "auto"
STABLE = 0.96
"""The variance is stable once sums of variances 1 / (1 - beta2) updates apart have at least this ratio (sec. 7.1)."""


class OnebitAdam(OneBitOptimizer, MultiTensorAdam):
    """AdamW for ``freeze_step`` updates, with fully summed gradients. After that the variance is frozen, every rank
    adds its local gradient to the momentum, and the ranks exchange signs of their momenta: 1/32 of the bytes. Both
    the sender and the server of an exchange keep its error and add it to the next one.

    Args:
        params: iterable of parameters or of dicts that define groups.
        deepspeed: accepted without effect.
        freeze_step: updates before the exchange is compressed; "auto": until the variance is stable.
        variance_interval: 0: the variance stays frozen. Otherwise each rank updates its own with local gradients, and
            every so many updates the ranks average them, in 8 bits per element.
        cuda_aware, comm_backend_name: accepted; the engine's own communication is used on every device.
        eps_inside_sqrt, max_grad_norm, amsgrad: in the signature but not available (``gradient_clipping`` clips).

    With ZeRO 1 and 2, groups of ranks share a copy each (``mics_shard_size``). ValueError: an undocumented backend.
    RuntimeError: an option that is not available.
    """

    update_traits = UpdateTraits(
        elementwise=True, own_communication=True, rank_state=(FEEDBACK,), script_keys=(MASK,)
    )
    own_state_names = (FEEDBACK,)

    def __init__(
        self,
        params: Any,
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int | str = 100000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        variance_interval: int = 0,
    ) -> None:
        refuse(
            "OnebitAdam",
            amsgrad=amsgrad,
            eps_inside_sqrt=eps_inside_sqrt,
            max_grad_norm=max_grad_norm or None,
        )
        check_backend("OnebitAdam", comm_backend_name)
        if int(variance_interval) < 0:
            raise ValueError(
                f"OnebitAdam: variance_interval={variance_interval!r} must be 0 (keep the variance) or the "
                "number of updates between synchronizations of the variance"
            )
        super().__init__(params, adam_defaults(lr, bias_correction, betas, eps, weight_decay))
        self.deepspeed = deepspeed
        self.comm_backend_name = comm_backend_name
        self.chooses_freeze_step = freeze_step == AUTO
        self.freeze_step: float = float("inf") if self.chooses_freeze_step else int(freeze_step)
        self._sum_of_variances = 0.0
        self.variance_interval = int(variance_interval)
        self._shares: dict[tuple[int, int], float] = {}
        """Share of a rank's squared gradients that counts for the variance, by group and kind of weights."""
        if self.variance_interval:
            self.own_state_names = (FEEDBACK, OWN_VARIANCE)
            self.update_traits = replace(type(self).update_traits, rank_state=self.own_state_names)

    @property
    def adam_freeze_key(self) -> bool:
        """Return whether the variance is frozen."""
        return self.updates >= self.freeze_step

    def warms_up(self, update: int) -> bool:
        return update <= self.freeze_step

    def after_warmup_update(self, context: UpdateContext) -> None:
        """Freeze the variance once it is stable, for freeze_step "auto". At intervals of the variance's memory,
        compare its bias-corrected sum with the last one: uncorrected, the sum would grow for four intervals even with
        constant gradients."""
        group = self.param_groups[0]
        interval = round(1.0 / (1.0 - group["betas"][1]))
        if not self.chooses_freeze_step or self.updates % interval:
            return
        variances = [
            s["exp_avg_sq"].sum(dtype=torch.float64) for s in self.state.values() if "exp_avg_sq" in s
        ]
        total = torch.as_tensor(sum(variances), dtype=torch.float64).reshape(1).clone()
        if context.parts is not None:
            context.parts.all_reduce(total).wait()
        now = float(total) / corrections(group, self.updates, self.updates)[0]
        before = self._sum_of_variances
        self._sum_of_variances = now
        if before > 0 and STABLE <= now / before <= 1 / STABLE:
            self.freeze_step = self.updates + 1  # the ranks vote on it before the next update

    def update_own(
        self, number: int, group: Group, part: Fragments, grad_scale: float, context: UpdateContext
    ) -> None:
        masters = list(part.masters)
        states = [self.state_for(master, group) for master in masters]
        new = self.fill_variances(number, masters, part.grads, grad_scale, context, group["betas"][1])
        if self.variance_interval and masters:
            self._continue_variances(number, group, part, grad_scale, context, new)
        momenta = [state["exp_avg"] for state in states]
        ema_update(momenta, part.grads, grad_scale, group["betas"][0])
        self.exchange_means(number, masters, momenta, [state[FEEDBACK] for state in states], context.holders)
        decay = 1.0 - group["lr"] * group["weight_decay"]
        for master, state, low in zip(masters, states, part.lows, strict=True):
            state["step"] += 1
            step = float(state["step"])
            second, rate = corrections(group, step, variance_steps(state))
            scalars = {"variance_correction": second, "eps": group["eps"], "rate": rate, "decay": decay}
            if frozen_step(master, state["exp_avg"], state["exp_avg_sq"], low, **scalars):
                continue
            for piece in pieces(master, state["exp_avg"], state["exp_avg_sq"], low):
                plain_step(*piece, **scalars)

    def _continue_variances(
        self,
        number: int,
        group: Group,
        part: Fragments,
        grad_scale: float,
        context: UpdateContext,
        new: Sequence[Tensor],
    ) -> None:
        """Update each rank's own variances; average them every ``variance_interval``. ``new``: masters whose own
        variance, if empty, starts from the common one."""
        masters, since = list(part.masters), self.updates - int(self.freeze_step)
        own, variances = ([self.state[m][name] for m in masters] for name in (OWN_VARIANCE, "exp_avg_sq"))
        for master in new:
            state = self.state[master]
            if not state[OWN_VARIANCE].any():
                state[OWN_VARIANCE].copy_(state["exp_avg_sq"])
        scale, beta2 = grad_scale * grad_scale, group["betas"][1]
        # Without holders gradients are summed already, and there is nothing to average.
        kinds = list(by_holders(masters, context.holders)) or [
            (0, Communicator(None), list(range(len(masters))))
        ]
        for kind, ranks, positions in kinds:
            grads = [part.grads[i] for i in positions]
            if (number, kind) not in self._shares or (since - 1) % self.variance_interval == 0:
                self._shares[number, kind] = share_of_mean(grads, ranks, seed=self.updates)
            share = self._shares[number, kind]
            continue_variances([own[i] for i in positions], grads, scale * share, beta2)
        if since % self.variance_interval:
            return
        for _, ranks, positions in kinds:
            average_variances([own[i] for i in positions], [variances[i] for i in positions], ranks)
        for master, variance in zip(masters, variances, strict=True):
            step = float(self.state[master]["step"]) + 1
            used, now = (corrections(group, step, at)[0] for at in (variance_steps(self.state[master]), step))
            variance.mul_(used / now)  # updates divide by ``used``, as for a frozen variance

    def own_state(self) -> dict[str, Any]:
        mine: dict[str, Any] = {"freeze_step": self.freeze_step, "sum_of_variances": self._sum_of_variances}
        if self.variance_interval:
            mine["shares"] = dict(self._shares)
        return {**super().own_state(), **mine}

    def load_own_state(self, saved: Any, rank: int, ranks: int) -> None:
        super().load_own_state(saved, rank, ranks)
        self._shares = dict(saved[rank].get("shares", {})) if len(saved) == ranks else {}
        if len(saved) and self.chooses_freeze_step:
            self.freeze_step = saved[0].get("freeze_step", self.freeze_step)
            self._sum_of_variances = saved[0].get("sum_of_variances", 0.0)


def corrections(group: Group, step: float, var_steps: float) -> tuple[float, float]:
    """Return the bias-correction divisor of the variance, and the corrected learning rate; ``var_steps``:
    updates of the variance so far."""
    beta1, beta2 = group["betas"]
    first, second = 1.0, 1.0
    if group["bias_correction"]:
        first, second = 1.0 - beta1**step, 1.0 - beta2**var_steps
    return second, float(group["lr"]) / first


def root(variance: Tensor, second: float, eps: float) -> Tensor:
    """Return the denominator of an update."""
    return (variance / second).sqrt_().add_(eps)


def plain_step(
    param: Tensor,
    momentum: Tensor,
    variance: Tensor,
    low: Tensor | None,
    *,
    variance_correction: float,
    eps: float,
    rate: float,
    decay: float,
) -> None:
    """Compute ``frozen_step`` in PyTorch."""
    step = (momentum / root(variance, variance_correction, eps)).mul_(rate)
    param.mul_(decay).sub_(step.to(param.dtype))
    round_into(low, param)
