"""0/1 Adam (Y. Lu et al. 2022: Maximizing communication efficiency for large-scale training via 0/1 Adam)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.logging import warning_once
from deepspeed.ops.adam.multi_tensor_adam import MultiTensorAdam, adam_defaults
from deepspeed.ops.momentum import frozen_step
from deepspeed.ops.multi_tensor import refuse
from deepspeed.ops.update import ALONE, Fragments, Group, HoldersOf, UpdateContext, UpdateTraits
from deepspeed.optim import one_bit
from deepspeed.optim.onebit.adam import denominator, divisor_and_rate, plain_step
from deepspeed.optim.sign_exchange import FEEDBACK

LOCAL, SYNCED, RATES = "local_update", "synced", "rate_sum"
"""State entries: the sum of this rank's steps since the last exchange, the common weights after it, and the sum of the
learning rates since then, in which weights differ that were unused or frozen for a while."""


def _write(master: Tensor, low: Tensor | None, value: Tensor) -> None:
    master.copy_(value)
    one_bit.round_into(low, master)


def _corrected(group: Group, step: float, seen: float) -> Group:
    """Return a group without bias correction that gives the updates of ``group`` with it, since for a variance divided
    by c, rate m / (sqrt(v / c) + eps) = (rate sqrt(c)) m / (sqrt(v) + eps sqrt(c))."""
    divisor, rate = divisor_and_rate(group, step, seen)
    factor, lr = math.sqrt(divisor), float(group["lr"])
    decay = group["weight_decay"] / (rate * factor) * lr if rate else 0.0
    given = {"lr": rate * factor, "eps": group["eps"] * factor, "weight_decay": decay}
    return {**group, **given, "bias_correction": False}


def is_variance_update(update: int, scaler: int) -> bool:
    """Return whether update ``update`` (from 1) changes the variance: every one, for ``scaler`` variance updates;
    then every second, for as many; then every fourth, and so on."""
    end, interval = 0, 1
    while True:
        first = (end // interval + 1) * interval
        end = first + (scaler - 1) * interval
        if update <= end:
            return update >= first and update % interval == 0
        interval *= 2


def local_interval(update: int, freeze: int, scaler: int, clipper: int) -> int:
    """Return the number of updates between exchanges: 1 after ``freeze``, doubled every ``scaler`` updates, at most
    ``clipper``."""
    doublings = (update - freeze - 1) // scaler
    return min(clipper, 2 ** min(doublings, clipper.bit_length()))


class ZeroOneAdam(one_bit.OneBitOptimizer, MultiTensorAdam):
    """AdamW with three kinds of updates. *Variance* updates use fully summed gradients; they become rarer, and stop
    after ``var_freeze_step``. In between, the ranks exchange signs of their momenta, as in 1-bit Adam. After
    ``var_freeze_step`` they exchange the sum of their steps every few updates (1 bit), and nothing in the others (0
    bits), where each rank moves its own weights along its own momentum. Where ranks that compute one batch hold copies
    (tied weights of a pipeline, sequences divided over ranks), they exchange at every update.

    Args:
        params: iterable of parameters or of dicts that define groups.
        deepspeed: accepted without effect.
        var_freeze_step: the last update that may change the variance.
        var_update_scaler: variance updates after which the interval between them doubles.
        local_step_scaler: updates after which the interval between exchanges doubles.
        local_step_clipper: the largest interval between exchanges.
        cuda_aware, comm_backend_name: accepted; the engine's own communication is used on every device.
        eps_inside_sqrt, max_grad_norm, amsgrad: in the signature but not available (``gradient_clipping`` clips).

    With ZeRO 1 and 2, groups of ranks share a copy each (``mics_shard_size``). Between exchanges copies differ; a
    checkpoint has the first one, and the state from which the others are restored. ValueError: an undocumented
    backend, or an interval below 1. RuntimeError: an option that is not available.
    """

    update_traits = UpdateTraits(
        elementwise=True,
        own_communication=True,
        rank_state=(FEEDBACK, LOCAL, "exp_avg"),
        script_keys=(one_bit.MASK,),
    )
    extra_state_names = (FEEDBACK, LOCAL, SYNCED)

    def __init__(
        self,
        params: Any,
        deepspeed: Any = None,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        var_freeze_step: int = 100000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> None:
        refuse(
            "ZeroOneAdam",
            amsgrad=amsgrad,
            eps_inside_sqrt=eps_inside_sqrt,
            max_grad_norm=max_grad_norm or None,
        )
        for name, value in (
            ("var_update_scaler", var_update_scaler),
            ("local_step_scaler", local_step_scaler),
            ("local_step_clipper", local_step_clipper),
        ):
            if int(value) < 1:
                raise ValueError(f"ZeroOneAdam: {name}={value!r} must be at least 1")
        defaults = adam_defaults(lr, bias_correction, betas, eps, weight_decay)
        super().__init__(params, defaults, deepspeed, comm_backend_name)
        self.var_freeze_step = int(var_freeze_step)
        self.var_update_scaler = int(var_update_scaler)
        self.local_step_scaler = int(local_step_scaler)
        self.local_step_clipper = int(local_step_clipper)
        self.variance_updates = 0
        self.exchanges = 0
        """Number of sign exchanges."""

    @property
    def freeze_key(self) -> bool:
        """Return whether the variance is frozen."""
        return self.updates >= self.var_freeze_step

    def state_for(self, param: Tensor, group: Group) -> dict[str, Any]:
        state = super().state_for(param, group)
        state.setdefault(RATES, torch.tensor(0.0))
        return state

    def warms_up(self, update: int) -> bool:
        return update <= self.var_freeze_step and is_variance_update(update, self.var_update_scaler)

    def multi_tensor_step(
        self,
        group: Group,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        *,
        grad_scale: float = 1.0,
        low_precision: Sequence[Tensor | None] | None = None,
        context: UpdateContext = ALONE,
    ) -> None:
        """Run a variance update. Adam's kernel would correct the variance by the number of all updates, not of
        variance updates; so it runs without bias correction, which is folded into rate and eps."""
        lows = low_precision or [None] * len(params)
        states = [self.state_for(param, group) for param in params]
        counts = [(float(state["step"]), float(state[one_bit.VAR_STEPS])) for state in states]
        for step, seen in sorted(set(counts)):
            chosen = [i for i, each in enumerate(counts) if each == (step, seen)]
            super().multi_tensor_step(
                _corrected(group, step + 1, seen + 1),
                *([column[i] for i in chosen] for column in (params, grads)),
                grad_scale=grad_scale,
                low_precision=[lows[i] for i in chosen],
                context=context,
            )

    def after_warmup_update(self, context: UpdateContext) -> None:
        self.variance_updates += 1

    def exchanges_at(self, update: int, context: UpdateContext = ALONE) -> bool:
        """Return whether the ranks exchange signs in an update that is no variance update."""
        frozen = self.var_freeze_step
        if update <= frozen:
            return True
        interval = local_interval(update, frozen, self.local_step_scaler, self.local_step_clipper)
        if interval > 1 and context.copies_of_one_batch:
            warning_once(
                "ZeroOneAdam exchanges momenta at every update instead of every few: ranks that compute one "
                "batch hold copies of weights (tied over pipeline stages, divided sequences, experts that divide "
                "tokens), which local steps would change apart. local_step_clipper = 1 asks for it without this warning"
            )
            return True
        return update % interval == 0

    def update_after_warmup(
        self, number: int, group: Group, part: Fragments, grad_scale: float, context: UpdateContext
    ) -> None:
        masters = list(part.masters)
        states = [self.state_for(master, group) for master in masters]
        self.fill_variances(number, part, grad_scale, context)
        one_bit.ema_update([state["exp_avg"] for state in states], part.grads, grad_scale, group["betas"][0])
        for state in states:
            state["step"] += 1
        if self.updates <= self.var_freeze_step:
            self._update_compressed(number, group, part, states, context.holders)
        else:
            self._update_local(number, group, part, states, context)
        if number == 0:
            self.exchanges += self.exchanges_at(self.updates, context)

    def _update_compressed(
        self, number: int, group: Group, part: Fragments, states: list[Any], holders: HoldersOf | None
    ) -> None:
        """Run an update of 1-bit Adam, before the variance is frozen. Rate times momentum travels, as later, so that
        the kept errors stay valid."""
        prepared = [self._divisor_and_rate(state, group) for state in states]
        sums = [state["exp_avg"] * (rate or 1.0) for state, (_, rate) in zip(states, prepared, strict=True)]
        self.exchange_means(number, part.masters, sums, holders)
        decay = 1.0 - group["lr"] * group["weight_decay"]
        for master, state, total, low, (divisor, rate) in zip(
            part.masters, states, sums, part.lows, prepared, strict=True
        ):
            scalars = {"variance_correction": divisor, "eps": group["eps"], "rate": rate, "decay": decay}
            cut = one_bit.pieces(master, state["exp_avg"], state["exp_avg_sq"], total, low)
            for w, m, v, mean, rounded in cut:
                torch.div(mean, rate or 1.0, out=m)
                plain_step(w, m, v, rounded, **scalars)

    def _update_local(
        self, number: int, group: Group, part: Fragments, states: list[Any], context: UpdateContext
    ) -> None:
        """Run a local update after the variance is frozen, and every few updates the exchange of their sum."""
        exchanges = self.exchanges_at(self.updates, context)
        decay = 1.0 - group["lr"] * group["weight_decay"]
        for master, state, low in zip(part.masters, states, part.lows, strict=True):
            divisor, rate = self._divisor_and_rate(state, group)
            if not state[RATES]:
                state[SYNCED].copy_(master)
            state[RATES] += rate
            scalars = {"variance_correction": divisor, "eps": group["eps"], "rate": rate, "decay": decay}
            own, sums = (master, state["exp_avg"], state["exp_avg_sq"]), (state[SYNCED], state[LOCAL])
            if frozen_step(*own, low, **scalars, local=sums, keeps_param=exchanges):
                continue
            for w, m, v, synced, local, rounded in one_bit.pieces(*own, *sums, low):
                synced.mul_(decay)
                local.add_((m / denominator(v, divisor, group["eps"])).mul_(rate))
                if not exchanges:
                    _write(w, rounded, synced - local)
        if exchanges:
            self._exchange_steps(number, group, part, states, context.holders)

    def _exchange_steps(
        self, number: int, group: Group, part: Fragments, states: list[Any], holders: HoldersOf | None
    ) -> None:
        """Exchange the ranks' steps as sums of rate times momentum, whose mean gives the momentum."""
        divisors = [self._divisor_and_rate(state, group)[0] for state in states]
        sums = [torch.empty_like(state[LOCAL]) for state in states]
        for state, divisor, whole in zip(states, divisors, sums, strict=True):
            for v, local, total in one_bit.pieces(state["exp_avg_sq"], state[LOCAL], whole):
                torch.mul(local, denominator(v, divisor, group["eps"]), out=total)
        self.exchange_means(number, part.masters, sums, holders)
        for master, state, divisor, whole, low in zip(
            part.masters, states, divisors, sums, part.lows, strict=True
        ):
            own = (master, state["exp_avg"], state["exp_avg_sq"], state[SYNCED], state[LOCAL], whole, low)
            for w, m, v, synced, local, total, rounded in one_bit.pieces(*own):
                _write(w, rounded, synced - total / denominator(v, divisor, group["eps"]))
                torch.div(total, float(state[RATES]) or 1.0, out=m)
                local.zero_()
            state[RATES].zero_()

    @staticmethod
    def _divisor_and_rate(state: dict[str, Any], group: Group) -> tuple[float, float]:
        return divisor_and_rate(group, float(state["step"]), one_bit.variance_steps(state))

    # Checkpoints ----------------------------------------------------------------------------------------------

    def rank_state_dict(self) -> dict[str, Any]:
        mine = {"variance_updates": self.variance_updates, "exchanges": self.exchanges}
        return {**super().rank_state_dict(), **mine}

    @torch.no_grad()
    def load_rank_state_dict(self, saved: Any, rank: int, ranks: int) -> None:
        super().load_rank_state_dict(saved, rank, ranks)
        found = saved[0] if len(saved) else {}
        self.variance_updates = int(found.get("variance_updates", self.updates))
        self.exchanges = int(found.get("exchanges", 0))
        for master, state in self.state.items():
            if state.get(RATES, 0) > 0:  # the saved weights are the first rank's
                master.copy_(state[SYNCED] - state[LOCAL])
