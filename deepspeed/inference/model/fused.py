"""The fused layout: for common decoder architectures on the host, a forward is one call of the native library, which
runs a program of kernels over the model's own weights.

A decode step reads each weight once and computes little, so the model's Python code and operator dispatch would cost as
much as the weights. Here a step costs one call. Between products, values are fp32 whatever the dtype of the model.
Forwards of more tokens than ``PROGRAM_ROWS`` use the packed layout, with torch's products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.inference.cache.pages import LayerShape, PagedCache, PagePiece
from deepspeed.inference.model.decoder import DTYPES, Decoder, Layer, decoder_of, matrix_of
from deepspeed.inference.model.info import LayoutError, ModelInfo
from deepspeed.inference.model.packed import PackedLayout
from deepspeed.ops.host_graph import GraphStep, HostGraph, bind
from deepspeed.ops.native import isa, library
from deepspeed.ops.paged_attention import PagedPieces
from deepspeed.ops.small_product import PROGRAM_ROWS, PROGRAM_ROWS_OF_FLOATS

FIRST_POSITIONS, FIRST_ROWS = 512, 64
"""Initial sizes of the rotary tables and of the buffers, which double as sequences and forwards grow."""


_Streams = tuple[Tensor, Tensor]


class FusedLayout(PackedLayout):
    """Runs ``module``, a causal model of Transformers; what the program does not support, as the packed layout does."""

    name = "fused"

    def __init__(self, module: nn.Module, info: ModelInfo) -> None:
        super().__init__(module, info)
        self._decoder: Decoder | None = None
        self._program: DecoderProgram | None = None

    def learn(self, pieces: Sequence[PagePiece], block_size: int) -> dict[int, LayerShape]:
        """Learn the shapes as the packed layout does. LayoutError: an unsupported architecture, or no native
        library."""
        if library() is None:
            raise LayoutError("the native library is not available")
        shapes = super().learn(pieces, block_size)
        self._decoder = decoder_of(self.module, shapes, self.terms)
        slow = self._decoder.dtype == torch.float32 and isa() != "avx512"
        self.max_fused_tokens = PROGRAM_ROWS_OF_FLOATS if slow else PROGRAM_ROWS
        return shapes

    def release(self) -> None:
        """Drop the cache of the last forward."""
        self._program = None

    def supports(self, tokens: int) -> bool:
        """Return whether a forward of this many tokens is one call; never while modules have hooks."""
        decoder = self._decoder
        if decoder is None or decoder.dtype not in DTYPES or decoder.watch.is_disturbed():
            return False  # weights may have been cast since they were learned
        return tokens <= self.max_fused_tokens

    def forward(self, pieces: Sequence[PagePiece], cache: PagedCache, unchanged: bool = False) -> Tensor:
        """Return logits [wanted tokens of all pieces, vocabulary]."""
        decoder = self._decoder
        assert decoder is not None, "call learn() first"
        if any(piece.adapter is not None for piece in pieces):
            return super().forward(pieces, cache)
        rows, last = 0, []
        for piece in pieces:
            rows += piece.count
            last += range(rows - piece.wanted, rows)
        if self._program is not None and not unchanged and not self._program.is_current():
            self._program = None
        longest, program = max(piece.stop for piece in pieces), self._program
        if program is None or not program.supports(cache, rows, longest):
            if not (self.supports(rows) and cache.is_on_host):
                return super().forward(pieces, cache)
            most = 1 << (max(rows, FIRST_ROWS if program is None else program.rows) - 1).bit_length()
            positions = max(FIRST_POSITIONS, 2 * longest)
            program = self._program = DecoderProgram(decoder, cache, most, positions)
        return program.run(pieces, rows, last)


class DecoderProgram:
    """The program of a decoder over one cache.

    Args:
        rows: maximum tokens per forward.
        positions: maximum sequence length.
    """

    def __init__(self, decoder: Decoder, cache: PagedCache, rows: int, positions: int) -> None:
        self.decoder, self.cache, self.rows, self.positions = decoder, cache, rows, positions
        self._addresses = decoder.watch.addresses()
        self._program = HostGraph()
        self._rotations = rotations_of(decoder.rotations, positions)
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._logits = self._build()

    def supports(self, cache: PagedCache, rows: int, positions: int) -> bool:
        """Return whether the program can run such a forward."""
        return cache is self.cache and rows <= self.rows and positions <= self.positions

    def is_current(self) -> bool:
        """Return whether weights and modules are unchanged since the decoder was built."""
        watch = self.decoder.watch
        return not watch.is_disturbed() and watch.addresses() == self._addresses

    def run(self, pieces: Sequence[PagePiece], rows: int, last: Sequence[int]) -> Tensor:
        """Return the logits [last, vocabulary] after the rows ``last``.

        IndexError: a token is outside the vocabulary.
        """
        described = PagedPieces(
            [(each.blocks, each.start, each.count) for each in pieces], [True] * len(pieces)
        )
        tokens = [token for piece in pieces for token in piece.tokens]
        known = self.decoder.embedding.num_embeddings
        wrong = [token for token in (min(tokens), max(tokens)) if not 0 <= token < known]
        if wrong:  # the native library reads the embedding's memory without a check
            raise IndexError(f"token {wrong[0]} is outside the vocabulary, 0 to {known - 1}")
        positions = [at for piece in pieces for at in range(piece.start, piece.stop)]
        logits = torch.empty(len(last), self.decoder.head.out_features, dtype=self.decoder.dtype)  # type: ignore[arg-type]
        self._logits.output = logits.data_ptr()
        self._program.run(GraphStep(rows, tokens, positions, last, described.array))
        return logits

    def _buffer(self, name: str, width: int) -> Tensor:
        """Return an fp32 buffer [rows, width], shared by all layers."""
        known = self._buffers.get((name, width))
        if known is None:
            known = self._buffers[name, width] = torch.zeros(self.rows, width)
        return known

    def _build(self) -> Any:
        """Build the program. Returns the product that computes the logits."""
        decoder, program = self.decoder, self._program
        width = decoder.embedding.embedding_dim
        streams = self._buffer("stream", width), self._buffer("other stream", width)
        normed = self._buffer("normed", width)
        program.embedding(decoder.embedding.weight.detach(), streams[0])
        delta = None
        for index, layer in enumerate(decoder.layers):
            streams, delta = self._add_layer(layer, index, streams, normed, delta)
        # the residual sum covers all rows, the norm only the selected ones
        eps = decoder.norm.eps
        program.norm(
            streams[0], normed, decoder.norm.weight, delta=delta, sum=streams[1], eps=eps, on_last=True
        )
        head = matrix_of(decoder.head)
        logits = torch.empty(1, head.outputs, dtype=decoder.dtype)
        return program.product(normed, logits, [head], on_last=True)

    def _add_layer(
        self, layer: Layer, index: int, streams: _Streams, normed: Tensor, delta: Tensor | None
    ) -> tuple[_Streams, Tensor]:
        """Add a layer. ``streams``: the residual stream so far, and the buffer for the next sum. Returns both for the
        next layer, and what the next layer must add to the first."""
        program = self._program
        added = self._buffer("added", normed.shape[1])
        norm = layer.before_attention
        program.norm(streams[0], normed, norm.weight, delta=delta, sum=streams[1], eps=norm.eps)
        if delta is not None:
            streams = streams[1], streams[0]
        self._add_attention(layer, index, normed, added)
        norm = layer.before_mlp
        program.norm(streams[0], normed, norm.weight, delta=added, sum=streams[1], eps=norm.eps)
        self._add_mlp(layer, normed, added)
        return (streams[1], streams[0]), added

    def _add_attention(self, layer: Layer, index: int, normed: Tensor, added: Tensor) -> None:
        """Add the attention, which reads ``normed`` and writes ``added``."""
        program, shape, terms = self._program, layer.shape, layer.terms
        projections, output = [matrix_of(one) for one in layer.projections], matrix_of(layer.output)
        sizes: dict[str, Any] = {
            "heads": output.columns // shape.value_size,
            "kv_heads": shape.heads,
            "key_size": shape.key_size,
            "value_size": shape.value_size,
        }
        projected = self._buffer("projected", sum(each.outputs for each in projections))
        attended = self._buffer("attended", output.columns)
        program.product(normed, projected, projections)
        query_norm, key_norm = layer.query_norm, layer.key_norm
        rotary = program.rotary(
            projected,
            *self._rotations,
            **sizes,
            query_weight=None if query_norm is None else query_norm.weight,
            key_weight=None if key_norm is None else key_norm.weight,
            eps=query_norm.eps if query_norm is not None else 1e-6,
        )
        attention = program.attention(
            projected,
            attended,
            **sizes,
            scale=terms.scale,
            window=terms.window or 0,
            softcap=terms.softcap or 0.0,
        )
        for made in (rotary, attention):
            bind(made, self.cache.pages(index))
        program.product(attended, added, [output])

    def _add_mlp(self, layer: Layer, normed: Tensor, added: Tensor) -> None:
        """Add the feed-forward part, which reads ``normed`` and writes ``added``."""
        program, down = self._program, matrix_of(layer.down)
        hidden = self._buffer("hidden", 2 * down.columns)
        gates = self._buffer("gates", down.columns)
        program.product(normed, hidden, [matrix_of(one) for one in layer.gated])
        program.gate(hidden[:, : down.columns], hidden[:, down.columns :], gates, layer.activation)
        program.product(gates, added, [down])


def rotations_of(
    module: nn.Module, positions: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [positions, pairs], computed by the model's own module. LayoutError: the two elements of
    a pair have different ones."""
    with torch.no_grad():
        made = module(torch.zeros(1, 1, 1, device=device), torch.arange(positions, device=device)[None])
    tables = []
    for table in made:
        first, second = table[0].float().chunk(2, dim=-1)
        if not torch.equal(first, second):
            raise LayoutError("the two numbers of a pair have different rotations")
        tables.append(first.contiguous())
    return tables[0], tables[1]
