"""The padded layout: for models with their own attention that keep keys and values in a Transformers cache.

Pieces of equal length form a batch. The model is given a cache whose layers store new keys and values in our pages and
return those of the whole sequences, gathered and left-padded, as in generation with left padding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.inference.cache.pages import LayerShape, PagedCache, PagePiece
from deepspeed.inference.model.info import LayoutError, ModelInfo
from deepspeed.inference.model.low_rank import adapted


class PaddedLayout:
    """Runs ``module``, a causal model of Transformers, over left-padded batches."""

    name = "padded"
    max_fused_tokens = 0

    def __init__(self, module: nn.Module, info: ModelInfo) -> None:
        self.module = module
        self.info = info

    def learn(self, pieces: Sequence[PagePiece], block_size: int) -> dict[int, LayerShape]:
        """Derive each layer's key and value shapes per token from a forward over a Transformers cache.

        LayoutError: the model keeps no cache, or one of fewer layers than it has.
        """
        from transformers import DynamicCache

        cache = DynamicCache()
        with torch.inference_mode():
            self.module(
                input_ids=torch.tensor([list(pieces[0].tokens)], device=self.info.device),
                past_key_values=cache,
                use_cache=True,
            )
        layers: list[Any] = cache.layers
        shapes = {
            index: LayerShape.of(layer.keys[0], layer.values[0])
            for index, layer in enumerate(layers)
            if getattr(layer, "keys", None) is not None and layer.keys.numel()
        }
        if len(shapes) != self.info.layers:
            raise LayoutError(f"{len(shapes)} of its {self.info.layers} layers keep keys and values")
        return shapes

    def release(self) -> None:
        """No-op: nothing of a cache is kept between forwards."""

    def forward(self, pieces: Sequence[PagePiece], cache: PagedCache, unchanged: bool = False) -> Tensor:
        """Return logits [wanted tokens of all pieces, vocabulary], with one model forward per piece length."""
        return self._by_length(pieces, cache, hidden=False)

    def hidden(self, pieces: Sequence[PagePiece], cache: PagedCache, unchanged: bool = False) -> Tensor:
        """Return the last hidden states [wanted tokens of all pieces, size], before the head."""
        return self._by_length(pieces, cache, hidden=True)

    def _by_length(self, pieces: Sequence[PagePiece], cache: PagedCache, *, hidden: bool) -> Tensor:
        by_length: dict[int, list[int]] = defaultdict(list)
        for index, piece in enumerate(pieces):
            by_length[piece.count].append(index)
        logits: list[Tensor | None] = [None] * len(pieces)
        for indices in by_length.values():
            for index, rows in zip(
                indices, self._batch([pieces[i] for i in indices], cache, hidden), strict=True
            ):
                logits[index] = rows[rows.shape[0] - pieces[index].wanted :]
        return torch.cat([rows for rows in logits if rows is not None])

    def _batch(self, pieces: Sequence[PagePiece], cache: PagedCache, hidden: bool) -> Tensor:
        from deepspeed.inference.model.padded_cache import cache_over

        batch, kept = PaddedBatch(pieces, cache, self.info.device), max(piece.wanted for piece in pieces)
        arguments: dict[str, Any] = {}
        if "position_ids" in self.info.arguments:
            arguments["position_ids"] = batch.positions
        if "logits_to_keep" in self.info.arguments and not hidden:
            arguments["logits_to_keep"] = kept
        module: Any = self.module.base_model if hidden else self.module
        with adapted(pieces, self.info.device), torch.inference_mode():
            found = module(
                input_ids=batch.tokens,
                attention_mask=batch.mask,
                past_key_values=cache_over(batch, self.info.layers),
                use_cache=True,
                **arguments,
            )
        return (found.last_hidden_state if hidden else found.logits)[:, -kept:]


class PaddedBatch:
    """Pieces of one length, left-padded to ``length``, the length of the longest sequence.

    ``tokens``, ``positions`` [pieces, count]; ``mask`` [pieces, length], 0 at padding.
    """

    def __init__(self, pieces: Sequence[PagePiece], cache: PagedCache, device: torch.device) -> None:
        self.cache = cache
        self.count = pieces[0].count
        self.length = max(piece.stop for piece in pieces)
        size = cache.block_size
        blocks, offsets, mask = [], [], []
        for piece in pieces:
            padding = self.length - piece.stop
            at = range(piece.stop)
            blocks.append([piece.blocks[0]] * padding + [piece.blocks[each // size] for each in at])
            offsets.append([0] * padding + [each % size for each in at])
            mask.append([0] * padding + [1] * piece.stop)
        made = torch.tensor([blocks, offsets, mask], device=device)
        self.blocks, self.offsets, self.mask = made[0], made[1], made[2]
        self.tokens = torch.tensor([list(piece.tokens) for piece in pieces], device=device)
        self.positions = torch.tensor(
            [list(range(piece.start, piece.stop)) for piece in pieces], device=device
        )

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values [pieces, heads, count, size]; return all, [pieces, heads, length, size]."""
        blocks, offsets = self.blocks[:, -self.count :], self.offsets[:, -self.count :]
        self.cache.write(layer, blocks, offsets, key.transpose(1, 2), value.transpose(1, 2))
        return self.cache.read_slots(layer, self.blocks, self.offsets)
