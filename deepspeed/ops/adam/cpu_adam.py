"""DeepSpeedCPUAdam: Adam on the host, for offloaded training."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from deepspeed.ops.adam.multi_tensor_adam import MultiTensorAdam, adam_defaults
from deepspeed.ops.multi_tensor import refuse, result_of
from deepspeed.ops.update import Group, corrections


class DeepSpeedCPUAdam(MultiTensorAdam):
    """Adam (`adamw_mode=False`) or AdamW in host memory, with fp32, bf16 or fp16 parameters and gradients.

    `fp32_optimizer_states=False` keeps the moments in the parameter's dtype, which halves their memory for
    16-bit parameters. `amsgrad` is in the signature but not available.
    """

    decoupled_key = "adamw_mode"
    _ids = itertools.count()

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse("DeepSpeedCPUAdam", amsgrad=amsgrad)
        defaults = adam_defaults(
            lr, bias_correction, betas, eps, weight_decay, adamw_mode, self.decoupled_key
        )
        extra = {"amsgrad": amsgrad, "fp32_optimizer_states": fp32_optimizer_states}
        super().__init__(model_params, {**defaults, **extra})
        self.adam_w_mode = adamw_mode
        self.opt_id = next(DeepSpeedCPUAdam._ids)

    @torch.no_grad()
    def step_subgroup(self, subgroup_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Step with the state under ``state[subgroup_id]``, whichever tensor the parameter is: for callers that put the
        sub-groups of a model into ``param_groups`` in turn.

        Raises:
            ValueError: several parameters have a gradient, which one state cannot serve.
        """
        loss = result_of(closure)
        states = self._state_by_id
        for group, param, grad in self._the_param_with_grad():
            states[param] = states[subgroup_id]
            try:
                self.multi_tensor_step(group, [param], [grad])
            finally:
                del states[param]
                self.forget_tables()  # they look up state by parameter
            torch.autograd.graph.increment_version([param])
        return loss

    @torch.no_grad()
    def rollback_subgroup(self, sub_group_id: int, closure: Callable[[], Any] | None = None) -> Any:
        """Undo the last ``step_subgroup`` of this id, up to rounding. Parameter, gradient and hyperparameters must be
        those of that update.

        Raises:
            RuntimeError: there is no update to undo.
            ValueError: as in ``step_subgroup``.
        """
        loss = result_of(closure)
        states = self._state_by_id
        state = states.get(sub_group_id)
        if not state:
            raise RuntimeError(
                f"Cannot rollback optimizer state for sub_group_id {sub_group_id}: "
                f"step_subgroup({sub_group_id}) has not been called"
            )
        if int(state["step"]) == 0:
            raise RuntimeError(f"Cannot rollback sub_group_id {sub_group_id}: step count is 0")
        for group, param, grad in self._the_param_with_grad():
            _undo(group, param, grad, state, decoupled=group[self.decoupled_key])
            state["step"] -= 1
        return loss

    @property
    def _state_by_id(self) -> dict[Any, Any]:
        """``state`` with ids as keys; torch declares the keys to be tensors."""
        return cast("dict[Any, Any]", self.state)

    def _the_param_with_grad(self) -> list[tuple[dict[str, Any], Tensor, Tensor]]:
        """Return group, parameter and gradient of the only parameter with a gradient, as a list; empty if none has."""
        found = []
        for group in self.param_groups:
            found += [(group, param, param.grad) for param in group["params"] if param.grad is not None]
        if len(found) > 1:
            raise ValueError(
                f"step_subgroup() updates one parameter, but {len(found)} have gradients: concatenate "
                "them, or use step()"
            )
        return found

    @functools.cached_property
    def ds_opt_adam(self) -> ModuleType:
        """Module of the op's functions, with an optimizer created under ``opt_id``, for custom updates."""
        group = self.defaults
        beta1, beta2 = group["betas"]
        decay, decoupled = group["weight_decay"], group["adamw_mode"]
        create_adam(self.opt_id, group["lr"], beta1, beta2, group["eps"], decay, decoupled)
        return sys.modules[__name__]


def _undo(group: Group, param: Tensor, grad: Tensor, state: dict[str, Any], *, decoupled: bool) -> None:
    """Invert Adam's update, in fp32."""
    lr, (beta1, beta2), decay = float(group["lr"]), group["betas"], group["weight_decay"]
    exp_avg, exp_avg_sq = state["exp_avg"].float(), state["exp_avg_sq"].float()
    step_size, inverse = corrections(group, int(state["step"]))
    before = param.float() + step_size * exp_avg / (exp_avg_sq.sqrt() * inverse + group["eps"])
    grad = grad.float()
    if decoupled:
        before /= 1.0 - lr * decay
    else:
        grad = grad + decay * before
    param.copy_(before)
    state["exp_avg"].copy_((exp_avg - (1.0 - beta1) * grad) / beta1)
    state["exp_avg_sq"].copy_(((exp_avg_sq - (1.0 - beta2) * grad * grad) / beta2).clamp_(min=0.0))


# ---- the op's documented functions, for callers without an optimizer object

_made: dict[int, DeepSpeedCPUAdam] = {}
"""Optimizers by the callers' ids. An optimizer is given the state for one call only."""


def create_adam(
    optimizer_id: int,
    alpha: float = 1e-3,
    betta1: float = 0.9,
    betta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0,
    adamw_mode: bool = True,
    should_log: bool = False,
) -> int:
    """Create AdamW or (``adamw_mode=False``) Adam under ``optimizer_id``; ``adam_update`` sets the other values."""
    made = DeepSpeedCPUAdam(
        [torch.empty(0)], alpha, True, (betta1, betta2), eps, weight_decay, False, adamw_mode
    )
    _made[optimizer_id] = made
    return 0


def destroy_adam(optimizer_id: int) -> int:
    """Delete the optimizer, if it exists. Returns 0."""
    _made.pop(optimizer_id, None)
    return 0


def adam_update(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    bias_correction: bool,
    params: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
) -> int:
    """Apply update number ``step`` (from 1) to ``params`` and both moments, in place. Returns 0.

    Raises:
        ValueError: there is no optimizer of this id.
    """
    lists = [params], [grads], [exp_avg], [exp_avg_sq]
    return adam_update_multi(
        optimizer_id, step, lr, beta1, beta2, epsilon, weight_decay, bias_correction, *lists, []
    )


def adam_update_multi(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    bias_correction: bool,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    stale_params: Sequence[Tensor],
    parallel: bool = True,
) -> int:
    """Apply `adam_update` to several tensors at once; ``stale_params``, if not empty, receive the new parameters.

    Raises:
        ValueError: there is no optimizer of this id, or the lists have different lengths.
    """
    optimizer = _made.get(optimizer_id)
    if optimizer is None:
        raise ValueError(f"adam_update: there is no optimizer {optimizer_id}; call create_adam first")
    lengths = {len(tensors) for tensors in (params, grads, exp_avgs, exp_avg_sqs)}
    if len(lengths) > 1:
        raise ValueError(
            f"parameters, gradients and states must be lists of equal length, not {sorted(lengths)}"
        )
    values = {"lr": lr, "betas": (beta1, beta2), "eps": epsilon, "weight_decay": weight_decay}
    group = optimizer.param_groups[0]
    group.update(values, bias_correction=bool(bias_correction))
    for param, first, second in zip(params, exp_avgs, exp_avg_sqs, strict=True):
        state = {"step": torch.tensor(float(step - 1)), "exp_avg": first, "exp_avg_sq": second}
        optimizer.state[param] = state
    try:
        with torch.no_grad():
            optimizer.multi_tensor_step(group, params, grads)
        torch.autograd.graph.increment_version(params)
    finally:
        optimizer.state.clear()
        optimizer.forget_tables()
    for stale, param in zip(stale_params, params, strict=bool(stale_params)):
        stale.copy_(param)
    return 0
