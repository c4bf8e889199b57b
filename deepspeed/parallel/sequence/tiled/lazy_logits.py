"""Lazy logits: computed when read, and in tiles if only a cross-entropy reads them.

A model's forward ends with ``logits = head(hidden)`` and ``loss = cross_entropy(f(logits), labels)``. Under
``tiled_compute`` the head returns ``LazyLogits``, which record ``f`` (casts, scaling, capping, views, slices of
positions) until the cross-entropy: then head, ``f`` and loss run tile by tile. Any other operation gets the whole
logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from deepspeed.parallel.sequence.tiled.tiles import TiledCall, run_tiles, tile_lengths
from deepspeed.parallel.sequence.tiled.token_losses import loss_arguments, reduced

Step = Callable[[Tensor], Tensor]

POINTWISE = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "float half bfloat16 double to type mul __mul__ __rmul__ div __truediv__ true_divide add __add__ __radd__ sub "
        "__sub__ tanh clamp neg __neg__ contiguous"
    ).split()
) | {torch.tanh, torch.mul, torch.div, torch.add, torch.sub, torch.clamp}
"""Elementwise functions of the logits and numbers."""

_METADATA = ("shape", "dtype", "device", "ndim", "layout", "is_sparse", "is_meta", "is_cuda", "is_quantized")
METADATA = frozenset(
    {getattr(torch.Tensor, name).__get__ for name in _METADATA}
    | {
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.is_floating_point,
        torch.Tensor.__len__,
    }
)
"""Operations that need no values."""


class LazyLogits(torch.Tensor):
    """A deferred ``steps(head(hidden))``. ``hidden`` [..., hidden size], ``head`` a function of it; ``shards``: number
    of tiles of the loss."""

    hidden: Tensor
    head: Step
    steps: tuple[Step, ...]
    shards: int
    _whole: Tensor | None

    @staticmethod
    def of(
        hidden: Tensor, head: Step, width: int, shards: int, dtype: torch.dtype, steps: tuple[Step, ...] = ()
    ) -> LazyLogits:
        shape = (*hidden.shape[:-1], width)
        made: Any = torch.Tensor._make_wrapper_subclass(LazyLogits, shape, dtype=dtype, device=hidden.device)
        made.hidden, made.head, made.steps, made.shards, made._whole = hidden, head, steps, shards, None
        return made

    def changed(self, hidden: Tensor, steps: tuple[Step, ...], dtype: torch.dtype) -> LazyLogits:
        return LazyLogits.of(hidden, self.head, _width(self), self.shards, dtype, steps)

    def tile(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        for step in self.steps:
            logits = step(logits)
        return logits

    def whole(self) -> Tensor:
        """Return the logits, computed once; with a graph if grad mode is enabled."""
        if self._whole is None:
            self._whole = self.tile(self.hidden)
        return self._whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyLogits):
            with torch._C.DisableTorchFunctionSubclass():
                if func in METADATA:
                    return func(*args, **kwargs)
                if func in _GRAPH:
                    return _GRAPH[func](first)
                if first._whole is None and (later := _deferred(first, func, args[1:], kwargs)) is not None:
                    return later
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


_GRAPH: dict[Any, Callable[[LazyLogits], Any]] = {
    torch.Tensor.grad_fn.__get__: lambda logits: None,  # type: ignore[attr-defined]
    torch.Tensor.requires_grad.__get__: lambda logits: logits.hidden.requires_grad,  # type: ignore[attr-defined]
    torch.Tensor.is_leaf.__get__: lambda logits: False,  # type: ignore[attr-defined]
}
"""Autograd attributes, answered without computing the logits."""


def _width(logits: LazyLogits) -> int:
    return Tensor.size(logits, -1)


def _deferred(logits: LazyLogits, func: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of ``func`` without materializing the logits, or None if it needs them."""
    if func in POINTWISE:
        if not all(is_plain(value) for value in (*rest, *kwargs.values())):
            return None

        def step(values: Tensor) -> Tensor:
            return func(values, *rest, **kwargs)

        probe = step(torch.empty(0, dtype=logits.dtype, device=logits.device))
        if probe.device != logits.device:
            return None
        return logits.changed(logits.hidden, (*logits.steps, step), probe.dtype)
    if func in (torch.Tensor.view, torch.Tensor.reshape) and _flattens(logits, func, rest, kwargs):
        return logits.changed(logits.hidden.reshape(-1, logits.hidden.shape[-1]), logits.steps, logits.dtype)
    if func is torch.Tensor.__getitem__ and picks_positions(rest[0], Tensor.dim(logits), (slice,)):
        return logits.changed(logits.hidden[rest[0]], logits.steps, logits.dtype)
    if func is nn.functional.cross_entropy:
        return _cross_entropy(logits, loss_arguments(func, (logits, *rest), kwargs))
    return None


def is_plain(value: Any) -> bool:
    """Return whether ``value`` is a scalar-like operand, which treats every element of the logits alike."""
    return value is None or isinstance(
        value, (int, float, torch.dtype, torch.device, str, torch.memory_format)
    )


def _flattens(logits: LazyLogits, func: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether this is ``view(-1, vocabulary)`` or an equivalent."""
    if rest and isinstance(rest[0], torch.dtype):
        return False
    after = func(torch.empty(Tensor.size(logits), device="meta"), *rest, **kwargs).shape
    return len(after) == 2 and after[1] == _width(logits)


def picks_positions(index: Any, dims: int, kinds: tuple[type, ...]) -> bool:
    """Return whether an index of a tensor with ``dims`` dims has only parts of ``kinds`` and keeps the last dim
    whole."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(not (isinstance(part, kinds) or part is Ellipsis) for part in parts):
        return False
    full = slice(None)
    if Ellipsis in parts:
        after = parts[parts.index(Ellipsis) + 1 :]
        return bool(after) and after[-1] == full
    return len(parts) < dims or parts[-1] == full


def _cross_entropy(logits: LazyLogits, given: dict[str, Any] | None) -> Tensor | None:
    """Compute cross-entropy of ``logits`` [tokens, vocabulary] in tiles; None if the call is not supported."""
    rows = logits.hidden.shape[0]
    if given is None or given["weight"] is not None or rows < 2 or logits.shards < 2:
        return None
    target, ignored = given["target"], given["ignore_index"]
    if logits.hidden.dim() != 2 or target.shape != (rows,):
        return None
    options = {"ignore_index": ignored, "label_smoothing": given["label_smoothing"]}

    def compute(tiles: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(logits.tile(tiles[0]), tiles[1], reduction="none", **options)

    call = TiledCall(compute, [0, 0], tile_lengths(rows, logits.shards), join_dim=0)
    losses = run_tiles(call, [logits.hidden, target])
    if given["reduction"] == "none":
        return losses
    return reduced(torch.stack([losses, (target != ignored).to(losses.dtype)]), given["reduction"])


class LazyHead:
    """Replacement ``forward`` of an output layer: returns ``LazyLogits`` in training, else the plain result."""

    def __init__(self, module: nn.Module, shards: int | None) -> None:
        self.module = module
        self.shards = shards
        self._plain = 0

    def __call__(self, hidden: Tensor) -> Tensor:
        forward = type(self.module).forward
        weight: Any = self.module.weight
        width, size = self.module.out_features, self.module.in_features  # type: ignore[attr-defined]
        shards = self.shards or math.ceil(width / size)  # type: ignore[operator]
        lazy = self.module.training and torch.is_grad_enabled() and not self._plain and shards > 1
        if not lazy or torch.compiler.is_compiling():
            return forward(self.module, hidden)
        device = hidden.device.type
        cast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if cast else weight.dtype
        return LazyLogits.of(hidden, self.compute, int(width), shards, dtype)  # type: ignore[call-overload]

    def compute(self, hidden: Tensor) -> Tensor:
        """Compute the logits by calling the module, with its hooks."""
        self._plain += 1
        try:
            return self.module(hidden)
        finally:
            self._plain -= 1
