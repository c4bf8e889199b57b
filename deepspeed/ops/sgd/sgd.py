"""SGD with momentum, in the form of torch.optim.SGD."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.ops.multi_tensor import MultiTensorOptimizer
from deepspeed.ops.update import Group, Tensors


class SGD(MultiTensorOptimizer, torch.optim.SGD):
    """SGD with (Nesterov) momentum, dampening and L2; the first update copies the gradient into the momentum.

    Derives from ``torch.optim.SGD`` only so that scripts with ``"type": "SGD"`` get an instance of it; nothing is
    inherited."""

    kernel_name, kernel_factors = "ds_sgd", ("lr", "momentum", "dampening", "weight_decay")
    kernel_switches = ("nesterov",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"nesterov=True needs momentum > 0 and dampening = 0, not {momentum} and {dampening}"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults)

    def _names_for(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] != 0 else ()

    def _torch_update(
        self, group: Group, params: Tensors, grads: Tensors, states: list[Tensors], steps: list[int]
    ) -> None:
        momentum = group["momentum"]
        grads = list(torch._foreach_add(grads, torch._foreach_mul(params, group["weight_decay"])))
        directions = grads
        if momentum != 0:
            (buffers,) = states
            for buffer, grad, step in zip(buffers, grads, steps, strict=True):
                if step == 1:
                    buffer.copy_(grad)
                else:
                    buffer.mul_(momentum).add_(grad * (1.0 - group["dampening"]))
            directions = buffers
            if group["nesterov"]:
                directions = list(torch._foreach_add(grads, torch._foreach_mul(buffers, momentum)))
        torch._foreach_sub_(params, torch._foreach_mul(directions, float(group["lr"])))
