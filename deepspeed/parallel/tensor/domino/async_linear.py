"""Linear layers of which a tensor-parallel rank holds a part, without the sums over ranks that they need.

``DominoTransformer`` does these sums at the times that suit it. Weights are drawn whole, and each rank keeps its part:
any number of ranks begins with the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional

from deepspeed.base.accelerator import get_accelerator
from deepspeed.comm.collectives import Communicator
from deepspeed.parallel.tensor.overlapped import begin_gradients
from deepspeed.parallel.tensor.ranks import communicator_of


class DominoAsyncColumnParallelLinearImpl(torch.autograd.Function):
    """A product whose backward begins to sum the input's gradient and leaves what to wait for under ``h_id`` in
    ``handle_dic`` (``NoOper`` waits); the weight's gradient is computed meanwhile."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        handle_dic: dict[str, Any],
        h_id: str,
        group: Communicator | None = None,
    ) -> Tensor:
        ctx.save_for_backward(inp, weight)
        ctx.handles, ctx.half, ctx.group = handle_dic, h_id, communicator_of(group)
        return functional.linear(inp, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.handles[ctx.half] = begin_gradients(ctx, grad_output, ctx.group)
        return *gradients, None, None, None


class DominoAsyncColumnParallelLinear(nn.Module):
    """This rank's ``output_size`` outputs of a linear layer. ``blocks``: the whole weight is so many blocks of rows one
    after the other, of each of which a rank holds its part (2: gate and value of a gated unit)."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        _tp_group: ProcessGroup | None,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool = True,
        skip_bias_add: bool = False,
        blocks: int = 1,
    ) -> None:
        super().__init__()
        self.skip_bias_add = skip_bias_add
        self.group = communicator_of(_tp_group)
        whole = (blocks, output_size * self.group.size // blocks, input_size)
        self.weight = _weight(whole, 1, self.group, config, init_method)
        self.bias = _zeros(output_size, config) if bias else None
        if self.bias is not None:
            _mark(self.bias, 0, blocks)

    def forward(
        self, input_: Tensor, handle_dic: dict[str, Any] | None = None, h_id: str = ""
    ) -> tuple[Tensor, nn.Parameter | None]:
        """[..., own outputs], and the bias if it is left to the caller. Without ``handle_dic`` the sum of the input's
        gradient is the caller's, too."""
        bias = None if self.skip_bias_add else self.bias
        if handle_dic is None:
            output = functional.linear(input_, self.weight, bias)
        else:
            output = DominoAsyncColumnParallelLinearImpl.apply(
                input_, self.weight, bias, handle_dic, h_id, self.group
            )
        return output, self.bias if self.skip_bias_add else None


class RowParallelLinearNoComm(nn.Module):
    """All ``output_size`` outputs from this rank's ``input_size`` inputs. Their sum over ranks, which is the caller's,
    is the layer's output; a bias added here is in it once per rank (``skip_bias_add`` leaves it to the caller)."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool = True,
        stride: int = 1,
        skip_bias_add: bool = False,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if stride != 1:
            raise ValueError(f"stride={stride}: rows are divided in one piece per rank; leave it at 1")
        self.skip_bias_add = skip_bias_add
        group = communicator_of(tp_group)
        whole = (1, output_size, input_size * group.size)
        self.weight = _weight(whole, 2, group, config, init_method)
        self.bias = _zeros(output_size, config) if bias else None

    def forward(self, input_: Tensor) -> tuple[Tensor, nn.Parameter | None]:
        """[..., outputs], and the bias if it is left to the caller."""
        if self.skip_bias_add:
            return functional.linear(input_, self.weight), self.bias
        return functional.linear(input_, self.weight, self.bias), None


def _weight(
    shape: tuple[int, int, int],
    dim: int,
    group: Communicator,
    config: Any,
    init_method: Callable[[Tensor], Any],
) -> nn.Parameter:
    """This rank's part along ``dim`` of blocks [blocks, rows, columns], as a matrix."""
    blocks, rows, columns = shape
    whole = torch.empty(blocks * rows, columns, device=_device(), dtype=config.params_dtype)
    if config.perform_initialization:
        with torch.no_grad():
            init_method(whole)
    own = whole.view(shape).chunk(group.size, dim)[group.rank]
    weight = nn.Parameter(own.reshape(-1, own.shape[2]).clone() if group.size > 1 else whole)
    return _mark(weight, dim - 1, blocks)


def _zeros(size: int, config: Any) -> nn.Parameter:
    return nn.Parameter(torch.zeros(size, device=_device(), dtype=config.params_dtype))


def _mark(param: nn.Parameter, dim: int, blocks: int) -> nn.Parameter:
    """As Megatron-LM marks what differs between tensor-parallel ranks: norms of gradients count it on each, checkpoints
    hold it whole."""
    marked: Any = param
    marked.tensor_model_parallel, marked.partition_dim, marked.partition_stride = True, dim, blocks
    return param


def _device() -> str:
    return get_accelerator().current_device_name()
