"""Two halves of a batch alternate through the same sublayers: the all-reduce of one half overlaps computing the other.

G. Wang et al.: Domino: Eliminating Communication in LLM Training via Generic Tensor Slicing and Overlapping (2024).

[Note: pieces] A tensor-parallel sublayer is a norm, a computation with this rank's parts of the weights, and a sum over
ranks; its backward sums the gradient of the computation's input. Autograd runs backward in reverse order of
computation, and would wait for each sum immediately. So the computation of one half between two sums is a piece with a
separate graph, and backward runs the pieces sublayer by sublayer, last to first, alternating between the halves as in
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.base.tracing import untraced
from deepspeed.comm.collectives import Communicator
from deepspeed.comm.pending import Pending


@dataclass(frozen=True, slots=True)
class Sublayer:
    """One sublayer. ``compute(normed, half)`` returns this rank's term of the output and an extra argument for ``add``;
    ``add(output, extra, residual)`` returns the next hidden states, [sequence, batch, hidden]."""

    norm: Callable[[Tensor], Tensor]
    compute: Callable[[Tensor, int], tuple[Tensor, Any]]
    add: Callable[[Tensor, Any, Tensor], Tensor]
    residual_is_normed: bool = False


@untraced
def run_sublayers(
    sublayers: Sequence[Sublayer],
    group: Communicator,
    halves: Sequence[Tensor],
    last: Callable[[Tensor], Tensor],
    weights: Iterable[Tensor],
) -> tuple[Tensor, ...]:
    """Run both halves through the sublayers and return ``last`` of each. ``weights``: all weights used."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in (*halves, *weights)):
        anchor = torch.empty((), requires_grad=True)  # the node needs an input: it gets no weights
        return _Halves.apply(sublayers, group, last, anchor, *halves)
    runs = [_Half(sublayers, group, number, half, False) for number, half in enumerate(halves)]
    return _forward(runs, len(sublayers), last)


def _forward(runs: Sequence[_Half], sublayers: int, last: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    for number in range(sublayers):
        for run in runs:
            run.enter(number)
            run.compute(number)
    return tuple(run.finish(last) for run in runs)


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        sublayers: Sequence[Sublayer],
        group: Communicator,
        last: Callable[[Tensor], Tensor],
        anchor: Tensor,
        *halves: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.count = len(sublayers)
        ctx.runs = [_Half(sublayers, group, number, half, True) for number, half in enumerate(halves)]
        return tuple(output.detach() for output in _forward(ctx.runs, ctx.count, last))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        runs, ctx.runs = ctx.runs, None
        if runs is None:
            raise RuntimeError(
                "second backward through a Domino transformer: the first one freed its graph, even with "
                "retain_graph=True; run its forward again"
            )
        for run, grad in zip(runs, grads, strict=True):
            run.begin_backward(grad)
        for number in reversed(range(ctx.count)):
            for run in runs:
                run.backward(number)
        return None, None, None, None, *(run.end_backward() for run in runs)


class _Piece:
    """Computation of one half between two sums; with ``records``, a separate graph from leaves to outputs."""

    def __init__(
        self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], records: bool
    ) -> None:
        self.leaves = list(inputs)
        if records:
            self.leaves = [each.detach().requires_grad_() for each in inputs]
        with torch.set_grad_enabled(records):
            self.outputs = function(*self.leaves)

    def backward(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Compute the gradients of the inputs from those of the outputs. Can be called once."""
        torch.autograd.backward(self.outputs, list(grads))
        found = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves]
        del self.leaves, self.outputs
        return found


class _Half:
    """Forward and backward of one half. ``state``: inputs of the next piece; an all-reduce of one of them may be in
    flight."""

    def __init__(
        self, sublayers: Sequence[Sublayer], group: Communicator, number: int, hidden: Tensor, records: bool
    ) -> None:
        self.sublayers, self.group, self.number, self.records = sublayers, group, number, records
        self.state: tuple[Tensor, ...] = (hidden,)
        self.extra: Any = None  # the last sublayer's extra argument for ``add``
        self.pending: Pending | None = None
        self.entered: list[_Piece] = []
        self.computed: list[_Piece] = []

    def enter(self, number: int) -> None:
        """Run the previous sublayer's ``add`` and this sublayer's norm."""
        sublayer, add = self.sublayers[number], self._pending_add(number)

        def norm(*state: Tensor) -> tuple[Tensor, Tensor]:
            hidden = add(*state)
            normed = sublayer.norm(hidden)
            return (normed if sublayer.residual_is_normed else hidden), normed

        self.state = self._run(norm, self.entered)

    def compute(self, number: int) -> None:
        """Run a sublayer's computation and start the all-reduce of its output."""
        residual, normed = self.state

        def own_share(normed: Tensor) -> tuple[Tensor]:
            share, self.extra = self.sublayers[number].compute(normed, self.number)
            return (share,)

        self.state = (normed,)
        (share,) = self._run(own_share, self.computed)
        share = share.detach().contiguous()
        self.pending = self.group.all_reduce(share)
        self.state = (share, residual)

    def finish(self, last: Callable[[Tensor], Tensor]) -> Tensor:
        add = self._pending_add(len(self.sublayers))
        (output,) = self._run(lambda *state: (last(add(*state)),), self.entered)
        return output

    def _pending_add(self, number: int) -> Callable[..., Tensor]:
        if number == 0:
            return lambda hidden: hidden
        add, extra = self.sublayers[number - 1].add, self.extra
        return lambda output, residual: add(output, extra, residual)

    def _run(self, function: Callable[..., tuple[Tensor, ...]], pieces: list[_Piece]) -> tuple[Tensor, ...]:
        self._wait()
        piece = _Piece(function, self.state, self.records)
        if self.records:
            pieces.append(piece)
        return piece.outputs

    def begin_backward(self, grad: Tensor) -> None:
        self.state = (grad,)

    def backward(self, number: int) -> None:
        """Run backward of the norm after a sublayer and of its computation, and start the all-reduce of the gradient
        of the computation's input."""
        self._wait()
        share, residual = self.entered.pop().backward(self.state)
        (normed,) = self.computed.pop().backward((share,))
        normed = normed.contiguous()
        self.pending = self.group.all_reduce(normed)
        self.state = (residual, normed)

    def end_backward(self) -> Tensor:
        self._wait()
        (hidden,) = self.entered.pop().backward(self.state)
        return hidden

    def _wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
