"""The largest eigenvalue of the Hessian of each block, by power iteration (Yao et al.: PyHessian, 2020)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.logging import log_dist
from deepspeed.compression.helper import recursive_getattr

Sum = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(eq=False)
class Eigenvalue:
    """Measures the curvature of the loss with respect to the parameters of each block.

    Args:
        verbose: log each eigenvalue.
        max_iter: maximum iterations per block.
        tol: relative change of the eigenvalue at which iteration stops.
        stability: added to the norm by which vectors are divided.
        gas_boundary_resolution: optimizer steps between two measurements by an engine.
        layer_name: dotted name of the list of blocks, such as ``bert.encoder.layer``.
        layer_num: number of blocks.

    ValueError: no ``layer_name``, or ``layer_num`` below 1.
    """

    verbose: bool = False
    max_iter: int = 100
    tol: float = 0.01
    stability: float = 0
    gas_boundary_resolution: int = 1
    layer_name: str = ""
    layer_num: int = 0

    def __post_init__(self) -> None:
        if not self.layer_name or self.layer_num < 1:
            raise ValueError(
                f"eigenvalues are measured block by block: layer_name={self.layer_name!r} must name the "
                f"list of blocks, and layer_num={self.layer_num} their number"
            )

    def nan_to_num(self, x: Tensor) -> Tensor:
        """Replace non-finite elements of ``x`` with zeros."""
        return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)

    def normalize(self, v: Sequence[Tensor]) -> list[Tensor]:
        """Divide the vector, given in parts, by its norm (plus ``stability``)."""
        norm = self.inner_product(v, v).sqrt() + self.stability
        return [self.nan_to_num(each / norm) for each in v]

    def inner_product(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
        """Return the inner product of two vectors given in parts, a scalar in fp32."""
        return torch.stack([(x.float() * y.float()).sum() for x, y in zip(xs, ys, strict=True)]).sum()

    def get_layers(self, module: nn.Module) -> Any:
        """Return the list of blocks. AttributeError: ``layer_name`` does not exist."""
        return recursive_getattr(module, self.layer_name)

    def compute_eigenvalue(
        self, module: nn.Module, device: Any = None, scale: float = 1.0
    ) -> dict[int, tuple[float, int]]:
        """Return ``{id(parameter): (eigenvalue of its block divided by the largest, index of the block)}``.

        Call it after ``loss.backward(create_graph=True)``: it differentiates ``param.grad`` again. ``scale``: the
        loss scale. A block whose gradients cannot be differentiated counts as the largest.
        """
        blocks = [
            [
                param
                for param in layer.parameters()
                if param.grad is not None and param.grad.grad_fn is not None
            ]
            for layer in list(self.get_layers(module))[: self.layer_num]
        ]
        gradients = [[param.grad for param in block] for block in blocks]
        return self.of_blocks(blocks, gradients, scale=scale)  # type: ignore[arg-type]

    def of_blocks(
        self,
        blocks: Sequence[Sequence[Tensor]],
        gradients: Sequence[Sequence[Tensor]],
        *,
        scale: float = 1.0,
        summed: Sum | None = None,
    ) -> dict[int, tuple[float, int]]:
        """Like ``compute_eigenvalue``, for parameters and their gradients (with a graph) by block. ``summed``: takes
        the mean over ranks of a vector given in parts."""
        values = []
        for number, (params, slopes) in enumerate(zip(blocks, gradients, strict=True)):
            value = self._largest(params, slopes, number, summed) / scale if params else 0.0
            values.append(value)
            if self.verbose:
                log_dist(f"eigenvalue of block {number}: {value:.4g}", ranks=[0])
        relative = self.post_process(values)
        return {
            id(param): (value, number)
            for number, (params, value) in enumerate(zip(blocks, relative, strict=True))
            for param in params
        }

    def _largest(
        self, params: Sequence[Tensor], gradients: Sequence[Tensor], number: int, summed: Sum | None
    ) -> float:
        """Run power iteration: v <- Hv / |Hv|, value <- (v, Hv)."""
        generator = torch.Generator().manual_seed(number)  # the same start on every rank
        vector = self.normalize([torch.randn(param.shape, generator=generator).to(param) for param in params])
        value, before = 1.0, 0.0
        for _ in range(self.max_iter):
            if value == 0 or abs((value - before) / value) < self.tol:
                break
            product: Sequence[Tensor] = torch.autograd.grad(
                gradients,
                params,
                grad_outputs=vector,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            product = [self.nan_to_num(each) for each in (summed(product) if summed else product)]
            before, value = value, float(self.inner_product(product, vector))
            vector = self.normalize(product)
        return value

    def post_process(self, value_list: Sequence[float]) -> list[float]:
        """Divide absolute values by the largest; 1 for a block without a value."""
        largest = max(map(abs, value_list), default=0.0)
        return [abs(value) / largest if value != 0.0 else 1.0 for value in value_list]
