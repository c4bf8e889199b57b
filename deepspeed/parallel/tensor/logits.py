"""Vocabulary-parallel logits that stand in for the whole ones.

The head of an unmodified model returns them in training. To the model's code they have the shape of the whole logits:
casts, scaling, capping, views and slices of positions work on the local part, and cross-entropy reduces over ranks
(`deepspeed.parallel.vocab_parallel`). Any other operation gathers the whole logits, which is a collective: all ranks
must do the same with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from deepspeed.comm.collectives import Communicator
from deepspeed.parallel.sequence.tiled.lazy_logits import METADATA, POINTWISE, is_plain, picks_positions
from deepspeed.parallel.sequence.tiled.token_losses import loss_arguments
from deepspeed.parallel.tensor.cuts import Cut
from deepspeed.parallel.tensor.mappings import gather_from
from deepspeed.parallel.vocab_parallel import VocabularyPart, cross_entropy


@dataclass(slots=True)
class _State:
    """``whole``: gathered logits, with their ``version`` at that time. ``part_written``: the part was written in
    place."""

    whole: Tensor | None = None
    version: int = 0
    part_written: bool = False

    @property
    def whole_written(self) -> bool:
        return self.whole is not None and self.whole._version != self.version


class VocabParallelLogits(torch.Tensor):
    """Wraps ``local`` [.., this rank's vocabulary], cut by ``cut`` along the last dim; has the shape of the whole.

    It is connected to ``local`` in autograd too, so that code that bypasses ``__torch_function__`` (a client's autograd
    function) gets the right values and gradients.
    """

    local: Tensor
    group: Communicator
    cut: Cut
    state: _State

    @staticmethod
    def of(local: Tensor, group: Communicator, cut: Cut) -> VocabParallelLogits:
        return _GlobalView.apply(local, group, cut.along(-1))

    def like(self, local: Tensor) -> VocabParallelLogits:
        """Wrap another local part with the same cut."""
        return VocabParallelLogits.of(local, self.group, self.cut)

    def whole(self) -> Tensor:
        """Gather the logits, and cache them if they have the graph that later readers may need. Collective."""
        if self.state.whole is not None:
            return self.state.whole
        whole = gather_from(self.local, self.group, self.cut)
        if torch.is_grad_enabled() or not self.local.requires_grad:
            self.state.whole, self.state.version = whole, whole._version
        return whole

    def values(self) -> Tensor:
        """Gather the logits without a graph. Collective."""
        whole = self.state.whole
        return gather_from(self.local.detach(), self.group, self.cut) if whole is None else whole.detach()

    def __repr__(self, **_: Any) -> str:  # not collective: one rank may print
        with torch._C.DisableTorchFunctionSubclass():
            return f"VocabParallelLogits(shape={tuple(self.shape)}, local={tuple(self.local.shape)})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, VocabParallelLogits):
            with torch._C.DisableTorchFunctionSubclass():
                if func in METADATA:
                    return func(*args, **kwargs)
                if func in _OF_THE_PART:
                    return func(first.local, *args[1:], **kwargs)
            found = _locally(first, func, args[1:], kwargs) if not first.state.whole_written else None
            if found is not None:
                return found
        # A reentrant checkpoint calls backward of its recomputed outputs with grad mode off.
        with torch.set_grad_enabled(torch.is_grad_enabled() or func is torch.autograd.backward):
            args, kwargs = tree_map_only(VocabParallelLogits, VocabParallelLogits.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(VocabParallelLogits, VocabParallelLogits.values, (args, kwargs or {}))
        return func(*args, **kwargs)


class _GlobalView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Communicator, cut: Cut) -> VocabParallelLogits:
        ctx.rank, ctx.cut = group.rank, cut
        shape = (*local.shape[:-1], cut.size)
        made: Any = torch.Tensor._make_wrapper_subclass(
            VocabParallelLogits, shape, dtype=local.dtype, device=local.device
        )
        made.local, made.group, made.cut = local, group, cut
        made.state = ctx.state = _State()
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if ctx.state.part_written or ctx.state.whole_written:
            raise RuntimeError(
                "logits were written in place and then read by an autograd function, where their gradient "
                "is not known; pass it a copy: logits.clone()"
            )
        return ctx.cut.take(grad, ctx.rank), None, None


_OF_THE_PART = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in ("grad_fn", "requires_grad", "is_leaf", "grad")),
        torch.Tensor.register_hook,
        torch.Tensor.retain_grad,
    }
)
"""Autograd attributes and hooks, forwarded to the local part."""

_IN_PLACE = frozenset(
    getattr(torch.Tensor, name)
    for name in "mul_ div_ add_ sub_ tanh_ clamp_ __imul__ __itruediv__ __iadd__ __isub__".split()
)
_ELEMENTWISE = POINTWISE | _IN_PLACE | {torch.Tensor.detach, torch.Tensor.clone, torch.clone, torch.neg}


def _locally(logits: VocabParallelLogits, func: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of ``func`` on the local parts, or None if it needs the whole logits."""
    if func in _ELEMENTWISE:
        if not all(_is_plain(value) for value in (*rest, *kwargs.values())):
            return None
        changed = func(logits.local, *rest, **kwargs)
        if func not in _IN_PLACE:
            return logits.like(changed)
        logits.local, logits.state.whole, logits.state.part_written = changed, None, True
        return logits
    if func in _SHAPES:
        return _viewed(logits, func, rest, kwargs)
    if func is torch.Tensor.__getitem__ and picks_positions(rest[0], logits.local.ndim, (slice, int)):
        return logits.like(logits.local[rest[0]])
    if func is nn.functional.cross_entropy:
        return _cross_entropy(logits, loss_arguments(func, (logits, *rest), kwargs))
    return None


def _is_plain(value: Any) -> bool:
    """Return whether ``value`` is a scalar-like operand, including 0-dim tensors."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and not isinstance(value, VocabParallelLogits)
    return is_plain(value)


_SHAPES: frozenset[Callable[..., Tensor]] = frozenset(
    {torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.flatten, torch.flatten, torch.Tensor.unsqueeze}
)


def _viewed(logits: VocabParallelLogits, func: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reshape, if the last dim remains the vocabulary; else None."""
    if rest and isinstance(rest[0], torch.dtype):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        before = tuple(logits.shape)
    after = tuple(func(torch.empty(before, device="meta"), *rest, **kwargs).shape)
    width = before[-1]
    if not after or after[-1] != width or math.prod(after[:-1]) != math.prod(before[:-1]):
        return None
    return logits.like(logits.local.reshape(*after[:-1], logits.local.shape[-1]))


def _cross_entropy(logits: VocabParallelLogits, given: dict[str, Any] | None) -> Tensor | None:
    """Compute cross-entropy of ``logits`` [tokens, vocabulary]; None if the call is not supported."""
    if given is None or given["weight"] is not None or logits.local.ndim != 2 or given["target"].ndim != 1:
        return None
    part = VocabularyPart.of_cut(logits.cut, logits.group)
    options = {name: given[name] for name in ("ignore_index", "label_smoothing", "reduction")}
    return cross_entropy(logits.local, given["target"], part, **options).to(logits.local.dtype)
