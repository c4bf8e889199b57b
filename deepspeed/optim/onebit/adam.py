"""1-bit Adam (H. Tang et al. 2021: 1-bit Adam: Communication efficient large-scale training with Adam's convergence
speed)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from deepspeed.comm.collectives import Communicator
from deepspeed.comm.compressed import Concatenated, compressed_mean, part_numel
from deepspeed.ops.adam.multi_tensor_adam import MultiTensorAdam, adam_defaults
from deepspeed.ops.formats.codecs import RootCodec
from deepspeed.ops.momentum import frozen_step
from deepspeed.ops.multi_tensor import refuse
from deepspeed.ops.update import Fragments, Group, UpdateContext, UpdateTraits
from deepspeed.optim import one_bit
from deepspeed.optim.sign_exchange import FEEDBACK

LOCAL_VARIANCE = "own_variance"
"""State entry of a tensor: its variance, continued with this rank's gradients."""
SUMS = 4096
"""Length of the sketch: runs of this many elements are added up, each run with one random sign."""
AUTO = "auto"
STABLE = 0.96
"""The variance is stable once sums of variances 1 / (1 - beta2) updates apart have at least this ratio (sec. 7.1)."""


class OnebitAdam(one_bit.OneBitOptimizer, MultiTensorAdam):
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
        elementwise=True, own_communication=True, rank_state=(FEEDBACK,), script_keys=(one_bit.MASK,)
    )
    extra_state_names = (FEEDBACK,)

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
        if int(variance_interval) < 0:
            raise ValueError(
                f"OnebitAdam: variance_interval={variance_interval!r} must be 0 (keep the variance) or the "
                "number of updates between synchronizations of the variance"
            )
        defaults = adam_defaults(lr, bias_correction, betas, eps, weight_decay)
        super().__init__(params, defaults, deepspeed, comm_backend_name)
        self.chooses_freeze_step = freeze_step == AUTO
        self.freeze_step: float = float("inf") if self.chooses_freeze_step else int(freeze_step)
        self._sum_of_variances = 0.0
        self.variance_interval = int(variance_interval)
        self._shares: dict[tuple[int, int], float] = {}
        """Share of a rank's squared gradients that counts for the variance, by group and kind of weights."""
        if self.variance_interval:
            self.extra_state_names = (FEEDBACK, LOCAL_VARIANCE)
            self.update_traits = replace(type(self).update_traits, rank_state=self.extra_state_names)

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
        now = float(total) / divisor_and_rate(group, self.updates, self.updates)[0]
        before = self._sum_of_variances
        self._sum_of_variances = now
        if before > 0 and STABLE <= now / before <= 1 / STABLE:
            self.freeze_step = self.updates + 1  # the ranks vote on it before the next update

    def update_after_warmup(
        self, number: int, group: Group, part: Fragments, grad_scale: float, context: UpdateContext
    ) -> None:
        masters = list(part.masters)
        states = [self.state_for(master, group) for master in masters]
        new = self.fill_variances(number, part, grad_scale, context)
        if self.variance_interval and masters:
            self._continue_variances(number, group, part, grad_scale, context, new)
        momenta = [state["exp_avg"] for state in states]
        one_bit.ema_update(momenta, part.grads, grad_scale, group["betas"][0])
        self.exchange_means(number, masters, momenta, context.holders)
        decay = 1.0 - group["lr"] * group["weight_decay"]
        for master, state, low in zip(masters, states, part.lows, strict=True):
            state["step"] += 1
            step = float(state["step"])
            divisor, rate = divisor_and_rate(group, step, one_bit.variance_steps(state))
            scalars = {"variance_correction": divisor, "eps": group["eps"], "rate": rate, "decay": decay}
            if frozen_step(master, state["exp_avg"], state["exp_avg_sq"], low, **scalars):
                continue
            for piece in one_bit.pieces(master, state["exp_avg"], state["exp_avg_sq"], low):
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
        own, variances = ([self.state[m][name] for m in masters] for name in (LOCAL_VARIANCE, "exp_avg_sq"))
        for master in new:
            state = self.state[master]
            if not state[LOCAL_VARIANCE].any():
                state[LOCAL_VARIANCE].copy_(state["exp_avg_sq"])
        scale, beta2 = grad_scale * grad_scale, group["betas"][1]
        # Without holders gradients are summed already, and there is nothing to average.
        kinds = list(one_bit.by_holders(masters, context.holders)) or [
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
            used, now = (
                divisor_and_rate(group, step, at)[0]
                for at in (one_bit.variance_steps(self.state[master]), step)
            )
            variance.mul_(used / now)  # updates divide by ``used``, as for a frozen variance

    def rank_state_dict(self) -> dict[str, Any]:
        mine: dict[str, Any] = {"freeze_step": self.freeze_step, "sum_of_variances": self._sum_of_variances}
        if self.variance_interval:
            mine["shares"] = dict(self._shares)
        return {**super().rank_state_dict(), **mine}

    def load_rank_state_dict(self, saved: Any, rank: int, ranks: int) -> None:
        super().load_rank_state_dict(saved, rank, ranks)
        self._shares = dict(saved[rank].get("shares", {})) if len(saved) == ranks else {}
        if len(saved) and self.chooses_freeze_step:
            self.freeze_step = saved[0].get("freeze_step", self.freeze_step)
            self._sum_of_variances = saved[0].get("sum_of_variances", 0.0)


def divisor_and_rate(group: Group, step: float, var_steps: float) -> tuple[float, float]:
    """Return Adam's bias corrections: the divisor of the variance, and the corrected learning rate. ``var_steps``:
    updates of the variance so far."""
    beta1, beta2 = group["betas"]
    first, second = 1.0, 1.0
    if group["bias_correction"]:
        first, second = 1.0 - beta1**step, 1.0 - beta2**var_steps
    return second, float(group["lr"]) / first


def denominator(variance: Tensor, divisor: float, eps: float) -> Tensor:
    """Return sqrt(variance / divisor) + eps."""
    return (variance / divisor).sqrt_().add_(eps)


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
    step = (momentum / denominator(variance, variance_correction, eps)).mul_(rate)
    param.mul_(decay).sub_(step.to(param.dtype))
    one_bit.round_into(low, param)


# ---- variances that each rank continues with its local gradients (``variance_interval``), averaged rarely
#
# The local gradient is the mean gradient plus noise, so its squares are too large: by nearly the same factor
# everywhere, and by exactly that factor where a gradient is mostly noise. The factor is estimated from sums with random
# signs.


def share_of_mean(grads: Sequence[Tensor], ranks: Communicator, seed: int) -> float:
    """Estimate the squared norm of the mean gradient of ``ranks``, divided by the mean of their squared norms. At
    most 1; the same on all of ``ranks``. Collective."""
    if ranks.size == 1:
        return 1.0
    own = random_sums(grads, seed).double()
    square = own.square().sum().reshape(1)
    found = torch.cat([own, square])
    ranks.all_reduce(found, scale=1.0 / ranks.size).wait()
    of_mean, mean = float(found[:-1].square().sum()), float(found[-1])
    return min(max(of_mean / mean, 0.5 / ranks.size), 1.0) if mean > 0 else 1.0


def random_sums(grads: Sequence[Tensor], seed: int) -> Tensor:
    """Return a linear sketch of ``grads``, fp32 [SUMS], whose expected squared norm over seeds is theirs."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros(SUMS, device=grads[0].device)
    for grad in grads:
        flat = grad.detach().reshape(-1)
        runs = -(-flat.numel() // SUMS)
        signs = (
            torch.randint(0, 2, (runs,), generator=generator).mul_(2).sub_(1).to(flat.device, torch.float32)
        )
        whole = flat.numel() // SUMS
        for first in range(0, whole, SUMS):
            rows = flat[first * SUMS : min(first + SUMS, whole) * SUMS].view(-1, SUMS).float()
            total += signs[first : first + len(rows)] @ rows
        if rest := flat.numel() % SUMS:
            total[:rest] += signs[-1] * flat[-rest:].float()
    return total


def continue_variances(own: Sequence[Tensor], grads: Sequence[Tensor], scale: float, beta2: float) -> None:
    """Compute ``own`` = beta2 * own + (1 - beta2) * scale * grads^2 in place."""
    for whole, whole_grad in zip(own, grads, strict=True):
        for variance, grad in one_bit.pieces(whole, whole_grad):
            wide = grad.float()
            variance.mul_(beta2).addcmul_(wide, wide, value=(1.0 - beta2) * scale)


def average_variances(own: Sequence[Tensor], variances: Sequence[Tensor], ranks: Communicator) -> None:
    """Set ``variances`` to the mean of ``own`` over ``ranks``, the same on all of them. Collective."""
    torch._foreach_copy_(list(variances), list(own))
    if ranks.size == 1:
        return
    flat = [variance.contiguous() for variance in variances]
    ends = list(accumulate(variance.numel() for variance in flat))
    part = part_numel(ends[-1], ranks.size)
    compressed_mean(Concatenated(flat, [0, *ends[:-1]]), None, None, part, ranks, RootCodec())
    for variance, copy in zip(variances, flat, strict=True):
        if copy is not variance:
            variance.copy_(copy)
