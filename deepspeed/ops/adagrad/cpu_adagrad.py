"""Adagrad (J. Duchi, E. Hazan, Y. Singer: Adaptive Subgradient Methods, JMLR 2011)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.multi_tensor import Launch, MultiTensorOptimizer, foreach_sqrt, refuse
from deepspeed.ops.update import Group, Tensors


class Adagrad(MultiTensorOptimizer):
    """Adagrad with the arguments and results of torch.optim.Adagrad."""

    state_names = ("sum",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        super().__init__(params, defaults)

    def _initial_value(self, name: str, group: Group) -> float:
        return group.get("initial_accumulator_value", 0.0)

    def _native_update(self, lib: ctypes.CDLL, launch: Launch, group: Group, grad_scale: float) -> None:
        lib.ds_adagrad(
            *launch.arguments(),
            float(group["lr"]),
            group.get("lr_decay", 0.0),
            group["eps"],
            group["weight_decay"],
            grad_scale,
            torch.get_num_threads(),
        )

    def _torch_update(
        self, group: Group, params: Tensors, grads: Tensors, states: list[Tensors], steps: list[int]
    ) -> None:
        (sums,) = states
        lr, lr_decay = float(group["lr"]), group.get("lr_decay", 0.0)
        grads = list(torch._foreach_add(grads, torch._foreach_mul(params, group["weight_decay"])))
        torch._foreach_add_(sums, torch._foreach_mul(grads, grads))
        denominators = foreach_sqrt(sums)
        torch._foreach_add_(denominators, group["eps"])
        torch._foreach_mul_(grads, [lr / (1.0 + (step - 1) * lr_decay) for step in steps])
        torch._foreach_div_(grads, denominators)
        torch._foreach_sub_(params, grads)

    def _sparse_update(self, group: Group, param: Tensor, grad: Tensor) -> None:
        """Update the rows in the gradient, as torch.optim.Adagrad does; all other rows are unchanged."""
        if group["weight_decay"] != 0:
            raise RuntimeError(
                f"{type(self).__name__}: weight_decay={group['weight_decay']} cannot be combined with sparse "
                "gradients, which hold only a few rows: set weight_decay to 0, or make the embedding with sparse=False."
            )
        state = self.state_for(param, group)
        state["step"] += 1
        grad = grad.coalesce()  # sums the gradients of a row that occurs several times
        rows, values = tuple(grad.indices()), grad.values().float()
        kept = state[self.state_names[0]]
        sums = kept[rows].float() + values * values
        kept[rows] = sums.to(kept.dtype)
        lr = float(group["lr"]) / (1.0 + (float(state["step"]) - 1) * group.get("lr_decay", 0.0))
        updated = param[rows].float() - lr * values / (sums.sqrt() + group["eps"])
        param[rows] = updated.to(param.dtype)


class DeepSpeedCPUAdagrad(Adagrad):
    """Adagrad on host memory; `fp32_optimizer_states=False` keeps the sums in the parameter's dtype.
    `amsgrad` is in the signature but has no meaning for Adagrad. The sums are called `exp_avg_sq`, as in
    release 0.19."""

    state_names = ("exp_avg_sq",)

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        refuse("DeepSpeedCPUAdagrad", amsgrad=amsgrad)
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
        for group in self.param_groups:
            group.setdefault("fp32_optimizer_states", fp32_optimizer_states)
        self.defaults["fp32_optimizer_states"] = fp32_optimizer_states

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, also one of torch.optim.Adagrad, where the sums are called `sum`."""
        states = {
            key: {"exp_avg_sq" if name == "sum" else name: value for name, value in state.items()}
            for key, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": states})
