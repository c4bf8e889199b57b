"""Common base of FusedAdam and FusedLion: methods of an interface that predates `torch.optim`'s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.ops.multi_tensor import MultiTensorOptimizer, refuse


class FusedOptimizer(MultiTensorOptimizer):
    """Mixin, listed before the class that computes the update."""

    set_grad_none: bool
    """Default of `zero_grad`: drop gradients."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: Any = None,
        grad_norms: Any = None,
        grad_scaler: Any = None,
    ) -> Any:
        name = f"{type(self).__name__}.step"
        refuse(name, grads=grads, output_params=output_params, scale=scale, grad_norms=grad_norms)
        return super().step(closure)
