"""Tiled execution of a function as a single autograd node.

(Bekman et al., *Arctic Long Sequence Training*, 2025: tiled compute.)

[Note: one node] Forward saves only the inputs; backward recomputes each tile and differentiates it immediately. Every
tensor that the function uses is an input of the node, including discovered weights: autograd, and hence the gradient
reducer, gets each weight's gradient once per backward, when the sum over all tiles is complete.

[Note: finding the weights] The first tile is computed with a graph whose saved tensors are dropped immediately; the
leaves of that graph are the tensors that the function uses. A node older than the call belongs to a tensor computed
outside; such a tensor must be an argument, or it would get no gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deepspeed.base.tracing import untraced
from deepspeed.parallel.sequence.tiled.token_losses import TileLosses
from deepspeed.parallel.tensor.cuts import even_sizes
from deepspeed.transforms.recompute.checkpointing import get_cuda_rng_tracker
from deepspeed.zero.gathering.gathered_parameters import KeepGathered


def tile_lengths(length: int, tiles: int) -> list[int]:
    """Split ``length`` into ``tiles`` lengths that differ by at most one; fewer if ``length`` is smaller."""
    if tiles < 1:
        raise ValueError(f"shards={tiles}: must be at least 1")
    return list(even_sizes(length, max(1, min(tiles, length))))


@dataclass(eq=False)
class TiledCall:
    """A call of ``compute(tensors)`` for each tile of its inputs.

    ``split_dims``: dim along which each input is split; None: every tile gets all of it. ``lengths``: of the tiles.
    ``join_dim``: dim along which results are concatenated. ``reduction``: "mean" or "sum" of results that are losses;
    ``weights``: weights of the tiles in it; a tile of weight 0 is not computed.
    """

    compute: Callable[[list[Any]], Any]
    split_dims: Sequence[int | None]
    lengths: Sequence[int]
    join_dim: int = 1
    reduction: str | None = None
    weights: Sequence[float] = ()

    def __post_init__(self) -> None:
        self.starts = [sum(self.lengths[:i]) for i in range(len(self.lengths))]
        self.order = [i for i in range(len(self.lengths)) if self.reduction is None or self.weights[i]]
        self.losses: TileLosses | None = None
        if self.reduction is not None:
            self.join_dim = -1
            weights = [self.weights[i] for i in self.order]
            self.losses = TileLosses(self.reduction, weights, [self.starts[i] for i in self.order])

    def tile(self, tensor: Tensor, dim: int | None, index: int) -> Tensor:
        """Return one tile of an input, contiguous and detached."""
        whole = tensor.detach()
        return (
            whole if dim is None else whole.narrow(dim, self.starts[index], self.lengths[index]).contiguous()
        )

    def tiles(self, inputs: Sequence[Any], index: int, needed: Sequence[bool]) -> list[Any]:
        """Return the inputs of one tile; ``needed``: which of them require a gradient."""
        return [
            self.tile(each, dim, index).requires_grad_(need) if isinstance(each, Tensor) else each
            for each, dim, need in zip(inputs, self.split_dims, needed, strict=True)
        ]

    def result(self, inputs: list[Any]) -> Tensor:
        with self.losses or contextlib.nullcontext():
            found = self.compute(inputs)
        if not isinstance(found, Tensor):
            raise TypeError(f"a tiled function must return one tensor, not {type(found).__name__}")
        if self.losses is not None:
            cut, dim = next((i, dim) for i, dim in enumerate(self.split_dims) if dim is not None)
            return self.losses.of_tile(found, inputs[cut].shape[: dim + 1])
        return found if found.dim() else found.view(1)


@untraced
def run_tiles(call: TiledCall, inputs: Sequence[Any]) -> Tensor:
    """Run ``call`` over ``inputs``, as one autograd node if grad mode is enabled.

    RuntimeError: it uses a tensor with a graph that is not an input (Note: finding the weights).
    """
    if not call.order:
        return _zero_loss(inputs)
    run = _TiledForward(call, inputs)
    if torch.is_grad_enabled():
        run.start()
        joined: Tensor = TiledFunction.apply(run, *inputs, *run.leaves)  # pyright: ignore[reportAssignmentType]
    else:
        joined = run.join(run.results(call.order))
    return joined if call.losses is None else call.losses.of_sequence(joined)


def _zero_loss(inputs: Sequence[Any]) -> Tensor:
    """Return the loss over no tokens: 0, with zero gradients."""
    first = next(each for each in inputs if isinstance(each, Tensor) and each.is_floating_point())
    return first.flatten()[:1].sum().float() * 0.0


class _TiledForward:
    """State of one forward of a ``TiledCall``, for its backward."""

    def __init__(self, call: TiledCall, inputs: Sequence[Any]) -> None:
        self.call = call
        self.inputs: Sequence[Any] = inputs
        self.needed = [isinstance(each, Tensor) and each.requires_grad for each in inputs]
        self.leaves: list[Tensor] = []
        self.first: list[Tensor] = []

    def start(self) -> None:
        """Compute the first tile and discover the leaves that the function uses (Note: finding the weights)."""
        device = next(each.device for each in self.inputs if isinstance(each, Tensor))
        self.context = RecomputeContext(device)
        tiles = self.call.tiles(self.inputs, self.call.order[0], self.needed)
        begin = _next_sequence_number()
        with self.context.of_forward(), torch.autograd.graph.saved_tensors_hooks(_drop, _lost):
            result = self.call.result(tiles)
        self.leaves, self._nodes = _leaves(result, tiles, begin)
        self.versions = [leaf._version for leaf in self.leaves]
        self.first = [result.detach()]

    def results(self, order: Sequence[int]) -> Iterator[Tensor]:
        never = [False] * len(self.inputs)
        for index in order:
            yield self.call.result(self.call.tiles(self.inputs, index, never))

    def all_results(self) -> Iterator[Tensor]:
        """Yield the results of all tiles; the first one was computed by ``start``."""
        yield self.first.pop()
        yield from self.results(self.call.order[1:])

    def join(self, results: Iterator[Tensor]) -> Tensor:
        """Concatenate the results of all tiles, and set ``places``: (start, length) of each along ``join_dim``."""
        call = self.call
        first, dim = next(results), call.join_dim
        if first.shape[dim] != call.lengths[call.order[0]]:  # not one result per position
            parts = [first, *results]
            sizes = [part.shape[dim] for part in parts]
            self.places = list(zip(accumulate(sizes, initial=0), sizes, strict=False))
            return torch.cat(parts, dim)
        self.places = [(call.starts[i], call.lengths[i]) for i in call.order]
        shape = list(first.shape)
        shape[dim] = sum(call.lengths)
        every = len(call.order) == len(call.lengths)
        whole = (first.new_empty if every else first.new_zeros)(shape)
        for place, result in zip(self.places, chain((first,), results), strict=True):
            whole.narrow(dim, *place).copy_(result)
        return whole

    def forget_inputs(self) -> None:
        """Drop the tensors, which autograd saves, and the leaves' accumulators, which the node keeps alive."""
        self.inputs = [_SavedTensor if isinstance(each, Tensor) else each for each in self.inputs]
        self._nodes = []


class TiledFunction(torch.autograd.Function):
    """The autograd node. ``forward`` gets the run, its inputs and the leaves that ``run_tiles`` discovered."""

    @staticmethod
    def forward(ctx: Any, run: _TiledForward, *tensors: Any) -> Tensor:
        with KeepGathered(run.leaves), run.context.of_forward():
            output = run.join(run.all_results())
        ctx.run = run
        ctx.save_for_backward(*(each for each in tensors[: len(run.inputs)] if isinstance(each, Tensor)))
        run.forget_inputs()
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        run: _TiledForward = ctx.run
        _check_versions(run)
        saved = iter(ctx.saved_tensors)
        inputs = [next(saved) if each is _SavedTensor else each for each in run.inputs]
        gradients = _Gradients(run, inputs)
        with run.context.replay(), KeepGathered(run.leaves) as whole:
            for place, index in zip(run.places, run.call.order, strict=True):
                tiles = run.call.tiles(inputs, index, run.needed)
                with torch.enable_grad():
                    result = run.call.result(tiles)
                whole.take()
                gradients.add(index, tiles, result, grads[0].narrow(run.call.join_dim, *place))
                del tiles, result
        return None, *gradients.finish()


class _SavedTensor:
    """Placeholder for a tensor that autograd saves."""


def _check_versions(run: _TiledForward) -> None:
    for leaf, version in zip(run.leaves, run.versions, strict=True):
        if leaf._version != version:
            raise RuntimeError(
                "a weight that a tiled function uses was modified by an inplace operation (such as an optimizer step) "
                "after its forward: run the forward again before this backward"
            )


class _Gradients:
    """Gradients of a run's inputs and leaves, accumulated tile by tile."""

    def __init__(self, run: _TiledForward, inputs: Sequence[Any]) -> None:
        self.run = run
        needed = zip(inputs, run.needed, strict=True)
        self.input_grads = [torch.zeros_like(each) if need else None for each, need in needed]
        self.leaf_grads: list[Tensor | None] = [None] * len(run.leaves)

    def add(self, index: int, tiles: Sequence[Any], result: Tensor, grad: Tensor) -> None:
        """Differentiate one tile and accumulate."""
        if not result.requires_grad:
            return
        call = self.run.call
        wanted = [tile for tile, need in zip(tiles, self.run.needed, strict=True) if need]
        found = iter(torch.autograd.grad(result, [*wanted, *self.run.leaves], grad, allow_unused=True))
        for dim, total in zip(call.split_dims, self.input_grads, strict=True):
            if total is not None and (part := next(found)) is not None:
                own = total if dim is None else total.narrow(dim, call.starts[index], call.lengths[index])
                own += part
        for position, part in enumerate(found):
            if part is not None:
                self.leaf_grads[position] = _sum(self.leaf_grads[position], part, len(call.order))

    def finish(self) -> tuple[Tensor | None, ...]:
        leaves = zip(self.run.leaves, self.leaf_grads, strict=True)
        leaf_grads = [None if total is None else total.to(leaf.dtype) for leaf, total in leaves]
        return (*self.input_grads, *leaf_grads)


def _sum(total: Tensor | None, part: Tensor, terms: int) -> Tensor:
    """Add ``part`` to ``total``. Sums of 16-bit gradients are in fp32 and rounded once, as inside a single GEMM."""
    if total is None:
        return part.float() if part.dtype in (torch.float16, torch.bfloat16) and terms > 1 else part
    if total.layout is not torch.strided or part.layout is not torch.strided:
        return total + part
    return total.add_(part)


def _drop(_: Tensor) -> None:
    return None


def _lost(_: None) -> Tensor:
    raise RuntimeError("the first pass over a tile has no backward")


def _next_sequence_number() -> int:
    with torch.enable_grad():
        node = torch.empty(0, requires_grad=True).view(0).grad_fn
    assert node is not None
    return node._sequence_nr()


def _leaves(result: Tensor, own: Sequence[Any], begin: int) -> tuple[list[Tensor], list[Any]]:
    """Return the leaves that ``result`` depends on, except ``own``, and their AccumulateGrad nodes.

    RuntimeError: it depends on a tensor that was computed before node number ``begin``.
    """
    mine = {id(each) for each in own}
    leaves: list[Tensor] = []
    nodes, seen, waiting = [], set(), [result.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name().endswith("AccumulateGrad"):
            if id(node.variable) not in mine:
                leaves.append(node.variable)
                nodes.append(node)
        elif node._sequence_nr() < begin:
            raise RuntimeError(
                f"a tiled function uses a tensor that was computed outside of it ({node.name()}) and is not "
                "one of its arguments, so it would get no gradient: pass it in kwargs_to_pass "
                "(kwargs_to_shard if it has a sequence dimension), or detach() it"
            )
        else:
            waiting.extend(following for following, _ in node.next_functions)
    return leaves, nodes


# State that recomputation must restore: RNG states and autocast.


class RecomputeContext:
    """RNG and autocast state at the start of a forward. Autocast caching is off: a cached cast of a weight would
    outlive its tile's graph."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.casts = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
        self.dtype = torch.get_autocast_dtype(device.type) if self.casts else None
        self.devices = [] if device.type in ("cpu", "meta") else [device]
        self.random = torch.get_rng_state()
        self.device_states = [torch.get_device_module(each).get_rng_state(each) for each in self.devices]
        self.tracker = get_cuda_rng_tracker()
        self.named = self.tracker.get_states()

    def of_forward(self) -> contextlib.AbstractContextManager[Any]:
        if not self.casts:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype, cache_enabled=False)

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """Replay the forward's RNG and autocast state; afterwards the RNG continues as if nothing had been drawn."""
        kind = self.device.type if self.devices else "cuda"
        with torch.random.fork_rng(self.devices, device_type=kind):
            torch.set_rng_state(self.random)
            for device, state in zip(self.devices, self.device_states, strict=True):
                torch.get_device_module(device).set_rng_state(state, device)
            with self.tracker.replay(self.named), self.of_forward():
                yield
