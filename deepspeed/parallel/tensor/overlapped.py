"""Column-parallel product whose backward overlaps communicating the input's gradient with computing the weight's.

(Narayanan et al.: Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, 2021.) Sums and
their order are those of ``copy_to`` or ``gather_sequence`` before the product, so results are bit-identical.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.base.tracing import untraced
from deepspeed.comm.collectives import Communicator
from deepspeed.parallel.tensor.mappings import begin_reduce_scatter
from deepspeed.parallel.tensor.sequence_regions import SequenceRegion


@untraced
def column_product(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, group: Communicator, sequence: SequenceRegion | None
) -> Tensor:
    """Multiply ``inputs`` [.., in] by ``weight`` [own outputs, in], which may be a transposed view. ``inputs`` are
    equal on all ranks, or shards of ``sequence`` to be gathered."""
    return _ColumnProduct.apply(inputs, weight, bias, group, sequence)


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: Communicator,
        sequence: SequenceRegion | None,
    ) -> Tensor:
        whole = inputs if sequence is None else sequence.gather(inputs)
        ctx.save_for_backward(whole, weight)
        ctx.group, ctx.sequence = group, sequence
        output = torch.nn.functional.linear(whole, weight, bias)
        return torch.ops.aten._unsafe_view(
            output, output.shape
        )  # not marked as a view, so that an activation may work in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        own = pending = grad_weight = grad_bias = None
        if needs_input:
            own = grad @ weight
            if ctx.sequence is None:
                pending = ctx.group.all_reduce(own)
            else:
                pending = begin_reduce_scatter(own, ctx.group, ctx.sequence.dim)
                own = pending.own
        rows = grad.flatten(0, -2)
        if needs_weight:
            grad_weight = rows.t() @ inputs.flatten(0, -2)
        if needs_bias:
            grad_bias = rows.sum(0)
        if pending is not None:
            pending.wait()
        return own, grad_weight, grad_bias, None, None
