"""The launched layout: for standard decoders on a GPU, a forward launches kernels directly over the model's weights.

A layer is two norms fused with the residual add, its products, one rotary embedding fused with the store to the cache,
attention, and one gated activation, without the roughly thirty small operations that a model's own code launches in
between. Products go through the model's linear layers, whatever form their weights have.

As with every layout, it is used only if a trial run reproduces the plain model's logits; a kernel that does not compile
or computes something else on some machine costs speed there, not correctness.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepspeed.inference.cache.pages import LayerShape, PagedCache, PagePiece
from deepspeed.inference.model.attention import PackedBatch, paged_attention
from deepspeed.inference.model.decoder import Decoder, Layer, decoder_of
from deepspeed.inference.model.fused import FIRST_POSITIONS, rotations_of
from deepspeed.inference.model.info import LayoutError, ModelInfo
from deepspeed.inference.model.packed import PackedLayout
from deepspeed.ops import gpu

_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class LaunchedLayout(PackedLayout):
    """Runs ``module``, a causal model of Transformers, by kernel launches."""

    name = "launched"

    def __init__(self, module: nn.Module, info: ModelInfo) -> None:
        super().__init__(module, info)
        self._launcher: DecoderLaunches | None = None

    def learn(self, pieces: Sequence[PagePiece], block_size: int) -> dict[int, LayerShape]:
        """See ``PackedLayout.learn``. LayoutError: the model has another structure, or is not on one GPU."""
        if not gpu.usable(*self.module.parameters()):
            raise LayoutError("its weights are not on one GPU that Triton compiles kernels for")
        shapes = super().learn(pieces, block_size)
        decoder = decoder_of(self.module, shapes, self.terms, on_host=False)
        if decoder.dtype not in _TYPES:
            raise LayoutError(f"no kernels for weights of {decoder.dtype}")
        self._launcher = DecoderLaunches(decoder, self.info.device)
        return shapes

    def forward(self, pieces: Sequence[PagePiece], cache: PagedCache, unchanged: bool = False) -> Tensor:
        """Return logits [wanted tokens of all pieces, vocabulary]."""
        launcher = self._launcher
        assert launcher is not None, "call learn() first"
        if any(piece.adapter is not None for piece in pieces):
            return super().forward(pieces, cache)
        if not unchanged and launcher.decoder.watch.is_disturbed():
            return super().forward(pieces, cache)
        return launcher.run(pieces, cache)


class DecoderLaunches:
    """The kernel launches of a decoder's forward."""

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        self.decoder, self.device = decoder, device
        self._positions = 0
        self._tables: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    @torch.inference_mode()
    def run(self, pieces: Sequence[PagePiece], cache: PagedCache) -> Tensor:
        """Return logits [wanted tokens of all pieces, vocabulary]."""
        from deepspeed.ops.gpu import norms  # imports Triton

        self._reach(max(piece.stop for piece in pieces))
        batch = PackedBatch(pieces, cache, self.device)
        stream: Tensor = self.decoder.embedding(batch.tokens[0])
        delta = None
        for index, layer in enumerate(self.decoder.layers):
            stream, delta = self._layer(index, layer, batch, stream, delta)
        last = stream[batch.last]
        if delta is not None:
            last = last + delta[batch.last]
        norm = self.decoder.norm
        return self.decoder.head(norms.norm(last, norm.weight, eps=norm.eps)[1])

    def _layer(
        self, index: int, layer: Layer, batch: PackedBatch, stream: Tensor, delta: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run one layer. Return the residual stream including ``delta``, and the next delta to add to it."""
        from deepspeed.ops.gpu import gates, norms  # imports Triton

        norm = layer.before_attention
        stream, normed = norms.norm(
            stream if delta is None else delta,
            norm.weight,
            residual=None if delta is None else stream,
            eps=norm.eps,
        )
        attended = self._attention(index, layer, batch, _joined(layer.projections, normed))
        norm = layer.before_mlp
        stream, normed = norms.norm(layer.output(attended), norm.weight, residual=stream, eps=norm.eps)
        if len(layer.gated) == 1:
            gate, up = layer.gated[0](normed).chunk(2, dim=-1)
        else:
            gate, up = (each(normed) for each in layer.gated)
        return stream, layer.down(gates.gated(gate, up, layer.activation))

    def _attention(self, index: int, layer: Layer, batch: PackedBatch, projected: Tensor) -> Tensor:
        """Return [rows, heads * value size]. ``projected``: queries, keys and values of each row."""
        from deepspeed.ops.gpu import rotary  # imports Triton

        shape, rows = layer.shape, len(projected)
        key_width, value_width = shape.heads * shape.key_size, shape.heads * shape.value_size
        heads = (projected.shape[1] - key_width - value_width) // shape.key_size
        query_norm, key_norm = layer.query_norm, layer.key_norm
        weights = None if query_norm is None or key_norm is None else (query_norm.weight, key_norm.weight)
        rotary.rotate_and_store(
            projected,
            self._tables,
            batch.positions[0],
            (batch.blocks, batch.offsets),
            batch.cache.pages(index),
            heads=heads,
            weights=weights,
            eps=1e-6 if query_norm is None else query_norm.eps,
        )
        parts = projected.split([heads * shape.key_size, key_width, value_width], dim=1)
        sizes = (shape.key_size, shape.key_size, shape.value_size)
        query, key, value = (
            part.view(rows, -1, size).transpose(0, 1) for part, size in zip(parts, sizes, strict=True)
        )
        out = paged_attention(query, key, value, batch, index, layer.terms, stored=True)
        return out.reshape(rows, -1)

    def _reach(self, positions: int) -> None:
        """Extend the rotary tables to ``positions``, doubling, so that growing sequences rarely rebuild them."""
        if positions > self._positions:
            self._positions = max(FIRST_POSITIONS, 2 * positions)
            self._tables = rotations_of(self.decoder.rotations, self._positions, self.device)


def _joined(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    return modules[0](x) if len(modules) == 1 else torch.cat([each(x) for each in modules], dim=-1)
