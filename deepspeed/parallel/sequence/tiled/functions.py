"""The documented functions of tiled compute, implemented by ``tiles.py``.

Each class is an autograd function with the documented signature of ``apply``. Tiles split the sequence, dim 1 (dim 0 of
a tensor [tokens, hidden]); their lengths differ by at most one. Weights are discovered automatically:
``compute_params`` may be omitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed.parallel.sequence.tiled.tiles import TiledCall, TiledFunction, run_tiles, tile_lengths

IGNORED = -100
"""Label that losses of torch and Transformers ignore."""
REDUCTIONS = (None, "mean", "sum")


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Any],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Iterable[Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> Tensor:
    """Compute ``fn(**kwargs_to_shard, **kwargs_to_pass)`` in ``shards`` tiles of the sequence.

    Activations inside ``fn`` exist for one tile at a time: backward recomputes each tile. Loss and gradients are those
    of the plain call, for every tensor argument and every weight that ``fn`` uses.

    Args:
        fn: returns one tensor; must not depend on which tile it gets.
        seqlen: length of dim 1 of everything in ``kwargs_to_shard``.
        shards: number of tiles. Must be equal on ranks that share a sequence or gather weights together (stage 3).
        kwargs_to_shard: tensors [batch, seqlen, ...], or None.
        kwargs_to_pass: arguments passed whole to every tile.
        grad_requiring_tensor_key: one of ``kwargs_to_shard``; every tensor that requires a gradient gets one anyway.
        compute_params: ignored; the weights that ``fn`` uses are discovered automatically.
        output_unshard_dimension: dim along which results are concatenated: 1 for hidden states, 0 for one number per
            tile.
        output_reduction: None concatenates the results. "sum" adds one number per tile. "mean" averages them, weighted
            by the tokens of each tile: those whose label is not -100 if ``kwargs_to_shard`` has integer ``labels`` or
            ``shift_labels`` (or ``y``, ``target``), else all. A tile without such tokens is not computed.

    Raises:
        ValueError: an argument has another length, or an unknown ``output_reduction``.
        RuntimeError: ``fn`` uses a tensor with a graph that is not among its arguments.
    """
    return SequenceTiledCompute.apply(
        fn,
        seqlen,
        shards,
        list(kwargs_to_shard),
        list(kwargs_to_pass),
        grad_requiring_tensor_key,
        compute_params,
        output_unshard_dimension,
        output_reduction,
        *kwargs_to_shard.values(),
        *kwargs_to_pass.values(),
    )


class SequenceTiledCompute(TiledFunction):
    """``sequence_tiled_compute`` with the values of both dicts in ``args``."""

    @classmethod
    def apply(  # type: ignore[override]
        cls,
        fn: Callable[..., Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Iterable[Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> Tensor:
        if grad_requiring_tensor_key not in keys_to_shard:
            raise ValueError(
                f"grad_requiring_tensor_key={grad_requiring_tensor_key!r} is not one of {', '.join(keys_to_shard)}"
            )
        sharded = dict(zip(keys_to_shard, args, strict=False))
        for key, value in sharded.items():
            if isinstance(value, Tensor) and (value.dim() < 2 or value.shape[1] != seqlen):
                raise ValueError(
                    f"{key} of shape {tuple(value.shape)} has no dimension 1 of length seqlen={seqlen}"
                )
        passed = dict(zip(keys_to_pass, args[len(keys_to_shard) :], strict=True))
        # Leaves are discovered like weights; a tensor with a graph must be an input to get its gradient.
        whole = {k: v for k, v in passed.items() if isinstance(v, Tensor) and v.grad_fn is not None}
        names = [*keys_to_shard, *whole]

        def compute(tensors: list[Any]) -> Any:
            return fn(**{**passed, **dict(zip(names, tensors, strict=True))})

        labels = next((sharded[key] for key in LABELS if _integers(sharded.get(key))), None)
        lengths = tile_lengths(seqlen, shards)
        call = TiledCall(
            compute,
            [1 if isinstance(value, Tensor) else None for value in sharded.values()] + [None] * len(whole),
            lengths,
            join_dim=output_unshard_dimension,
            reduction=output_reduction,
            weights=_weights(output_reduction, lengths, labels, None, 1),
        )
        return run_tiles(call, [*sharded.values(), *whole.values()])


LABELS = ("shift_labels", "labels", "y", "target", "targets")


class TiledMLP(TiledFunction):
    """``TiledMLP.apply(fn, self, x, shards, compute_params)``: ``fn(self, x)`` in tiles of ``x``.

    ``x`` [batch, sequence, hidden] (or [tokens, hidden]) and what ``fn`` returns have the same leading dimensions.
    """

    @classmethod
    def apply(  # type: ignore[override]
        cls,
        fn: Callable[[Any, Tensor], Tensor],
        self: Any,
        x: Tensor,
        shards: int,
        compute_params: Iterable[Tensor] | None = None,
    ) -> Tensor:
        dim = _sequence_dim(x)
        call = TiledCall(
            lambda tensors: fn(self, *tensors), [dim], tile_lengths(x.shape[dim], shards), join_dim=dim
        )
        return run_tiles(call, [x])


class AutogradComputeMLP(TiledFunction):
    """``AutogradComputeMLP.apply(fn, self, x)``: ``fn(self, x)`` in one tile, recomputed in backward."""

    @classmethod
    def apply(cls, fn: Callable[[Any, Tensor], Tensor], self: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return TiledMLP.apply(fn, self, x, 1)


class TiledFusedLogitsLoss(TiledFunction):
    """``TiledFusedLogitsLoss.apply(fn, self, x, y, mask, shards, compute_params, output_reduction)``: the loss
    ``fn(self, x, y)``, or ``fn(self, x, y, mask)`` given a mask, in tiles: logits exist for one tile at a time.

    ``x`` [batch, sequence, hidden]; ``y`` and ``mask`` [batch, sequence]. With ``output_reduction`` "mean", ``fn``
    returns the mean over its tile's tokens; the result is the mean over all tokens whose label is not -100 and whose
    mask is not 0. With "sum" it is the sum of the results of ``fn``.
    """

    @classmethod
    def apply(  # type: ignore[override]
        cls,
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Iterable[Tensor] | None = None,
        output_reduction: str = "mean",
    ) -> Tensor:
        if output_reduction is None:
            raise ValueError('output_reduction=None: a loss must be reduced by "mean" or "sum"')
        dim = 0 if y.dim() == 1 else 1
        for name, each in (("y", y), ("mask", mask)):
            if each is not None and each.shape[: dim + 1] != x.shape[: dim + 1]:
                raise ValueError(
                    f"{name} of shape {tuple(each.shape)} does not match x of shape {tuple(x.shape)}: both "
                    "must start with [batch, sequence]"
                )
        inputs = [x, y] if mask is None else [x, y, mask]
        lengths = tile_lengths(x.shape[dim], shards)
        call = TiledCall(
            lambda tensors: fn(self, *tensors),
            [dim] * len(inputs),
            lengths,
            reduction=output_reduction,
            weights=_weights(output_reduction, lengths, y if _integers(y) else None, mask, dim),
        )
        return run_tiles(call, inputs)


class TiledLoss(TiledFunction):
    """``TiledLoss.apply(loss_fn, logits, vocab_size, shift_labels, shards)``: the mean loss of ``logits``
    [batch, sequence, vocabulary] in tiles: copies of the logits (fp32, softmax, gradient) exist for one tile at a time.

    ``loss_fn(logits=, labels=None, vocab_size=, shift_labels=)`` has the signature of Transformers' loss functions;
    ``shift_labels`` [batch, sequence] are already shifted, -100 is ignored.
    """

    @classmethod
    def apply(  # type: ignore[override]
        cls,
        loss_fn: Callable[..., Tensor],
        logits: Tensor,
        vocab_size: int,
        shift_labels: Tensor,
        shards: int,
    ) -> Tensor:
        def one(_: Any, logits: Tensor, shift_labels: Tensor) -> Tensor:
            return loss_fn(logits=logits, labels=None, vocab_size=vocab_size, shift_labels=shift_labels)

        return TiledFusedLogitsLoss.apply(one, None, logits, shift_labels, None, shards)


def _sequence_dim(x: Tensor) -> int:
    if x.dim() < 2:
        raise ValueError(f"x of shape {tuple(x.shape)} must be [batch, sequence, hidden]")
    return 0 if x.dim() == 2 else 1


def _integers(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()


def _weights(
    reduction: str | None, lengths: Sequence[int], labels: Tensor | None, mask: Tensor | None, dim: int
) -> list[float]:
    """Return the weight of each tile's loss: 1 for sums, its share of the counted tokens for means."""
    if reduction not in REDUCTIONS:
        raise ValueError(f'output_reduction={reduction!r}: must be "mean", "sum" or None')
    if reduction != "mean":
        return [1.0] * len(lengths)
    masks = [each != none for each, none in ((labels, IGNORED), (mask, 0)) if each is not None]
    counts: list[float] = list(lengths)
    if masks and masks[0].device.type != "meta":
        tiles = torch.stack(masks).all(0).split(list(lengths), dim)
        counts = torch.stack([tile.sum() for tile in tiles]).tolist()
    total = math.fsum(counts)
    return [count / total if total else 0.0 for count in counts]
