"""1-bit Adam (H. Tang et al. 2021: 1-bit Adam: Communication efficient large-scale training with Adam's convergence
speed)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.adam.multi_tensor_adam import MultiTensorAdam
from deepspeed.ops.momentum import frozen_step
from deepspeed.ops.multi_tensor import refuse
from deepspeed.ops.update import Fragments, UpdateContext, UpdateTraits
from deepspeed.runtime.optim.one_bit import MASK, OneBitOptimizer, check_backend, follow, pieces, round_into
from deepspeed.runtime.optim.sign_exchange import FEEDBACK

AUTO = "auto"
STABLE = 0.96
"""Ratio of the sums of variances, 1 / (1 - beta2) updates apart, from which on the variance is stable (sec. 7.1)."""


class OnebitAdam(OneBitOptimizer, MultiTensorAdam):
    """AdamW for ``freeze_step`` updates, with gradients summed as always. From then on the variance stays as it is,
    every rank adds its own gradient to the momentum, and the ranks exchange signs of their momenta: 1/32 of the bytes.

    Both the sender and the server of an exchange keep what it took away and add it to the next one.

    Args:
        params: iterable of parameters or of dicts that define groups.
        deepspeed: accepted; the engine needs no introduction.
        freeze_step: updates before the exchange is compressed; "auto": until the variance is stable.
        cuda_aware, comm_backend_name: accepted; the engine's own communication serves on every device.
        eps_inside_sqrt, max_grad_norm, amsgrad: in the signature but not available (``gradient_clipping`` clips).

    With ZeRO 1 and 2, groups of ranks share a copy each (``mics_shard_size``). Raises ``ValueError`` for another
    backend than the documented ones, and ``RuntimeError`` for what is not available.
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
    ) -> None:
        refuse(
            "OnebitAdam",
            amsgrad=amsgrad,
            eps_inside_sqrt=eps_inside_sqrt,
            max_grad_norm=max_grad_norm or None,
        )
        check_backend("OnebitAdam", comm_backend_name)
        super().__init__(params, adam_defaults(lr, bias_correction, betas, eps, weight_decay))
        self.deepspeed = deepspeed
        self.comm_backend_name = comm_backend_name
        self.chooses_freeze_step = freeze_step == AUTO
        self.freeze_step: float = float("inf") if self.chooses_freeze_step else int(freeze_step)
        self._sum_of_variances = 0.0

    @property
    def adam_freeze_key(self) -> bool:
        """Whether the variance is frozen."""
        return self.updates >= self.freeze_step

    def warms_up(self, update: int) -> bool:
        return update <= self.freeze_step

    def warmed_up(self, context: UpdateContext) -> None:
        """ "auto": at intervals as long as the variance remembers, compare its sum with the last one, both as updates
        use them: without a correction the sum of gradients that do not change grows for four intervals."""
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
            self.freeze_step = self.updates + 1  # the ranks ask each other before the next update

    def update_own(
        self,
        number: int,
        group: dict[str, Any],
        part: Fragments,
        grad_scale: float,
        context: UpdateContext,
    ) -> None:
        masters = list(part.masters)
        states = [self.state_for(master, group) for master in masters]
        self.fill_variances(masters, part.grads, grad_scale, context, group["betas"][1])
        momenta = [state["exp_avg"] for state in states]
        follow(momenta, part.grads, grad_scale, group["betas"][0])
        self.exchange_means(number, masters, momenta, [state[FEEDBACK] for state in states], context.holders)
        decay = 1.0 - group["lr"] * group["weight_decay"]
        for master, state, low in zip(masters, states, part.lows, strict=True):
            state["step"] += 1
            step = float(state["step"])
            second, rate = corrections(group, step, min(step, self.freeze_step))
            scalars = {"variance_correction": second, "eps": group["eps"], "rate": rate, "decay": decay}
            if frozen_step(master, state["exp_avg"], state["exp_avg_sq"], low, **scalars):
                continue
            for piece in pieces(master, state["exp_avg"], state["exp_avg_sq"], low):
                plain_step(*piece, **scalars)

    def own_state(self) -> dict[str, Any]:
        mine = {"freeze_step": self.freeze_step, "sum_of_variances": self._sum_of_variances}
        return {**super().own_state(), **mine}

    def load_own_state(self, saved: Any, rank: int, ranks: int) -> None:
        super().load_own_state(saved, rank, ranks)
        if len(saved) and self.chooses_freeze_step:
            self.freeze_step = saved[0].get("freeze_step", self.freeze_step)
            self._sum_of_variances = saved[0].get("sum_of_variances", 0.0)


def adam_defaults(
    lr: float, bias_correction: bool, betas: tuple[float, float], eps: float, weight_decay: float
) -> dict[str, Any]:
    return {
        "lr": lr,
        "bias_correction": bias_correction,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "adam_w_mode": True,
    }


def corrections(group: dict[str, Any], step: float, variance_steps: float) -> tuple[float, float]:
    """What the variance is divided by, and the learning rate; ``variance_steps``: updates of the variance so far."""
    beta1, beta2 = group["betas"]
    first, second = 1.0, 1.0
    if group["bias_correction"]:
        first, second = 1.0 - beta1**step, 1.0 - beta2**variance_steps
    return second, float(group["lr"]) / first


def root(variance: Tensor, second: float, eps: float) -> Tensor:
    """The denominator of an update."""
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
    """What ``frozen_step`` does, by PyTorch."""
    step = (momentum / root(variance, variance_correction, eps)).mul_(rate)
    param.mul_(decay).sub_(step.to(param.dtype))
    round_into(low, param)
