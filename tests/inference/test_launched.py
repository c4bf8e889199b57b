"""A decoder's forward as launches of GPU kernels, in Triton's interpreter, against the same model without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.inference.cache.pages import LayerShape, PagedCache, PagePiece
from deepspeed.inference.kernels import IntegerLinear
from deepspeed.inference.model.attention import AttentionTerms
from deepspeed.inference.model.decoder import Decoder, DecoderWatch, Layer, Norm
from deepspeed.ops.host_graph import Activation
from deepspeed.ops.small_product import QuantizedMatrix
from tests.ops.gpu.triton_kit import interpreted

WIDTH, HEADS, KV_HEADS, SIZE, INNER, WORDS = 32, 4, 2, 8, 40, 50


class Rotations(nn.Module):
    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * 10.0 ** -torch.arange(SIZE // 2)
        both = torch.cat([angles, angles], -1)
        return both.cos(), both.sin()


def _norm(size: int) -> Norm:
    module = nn.LayerNorm(size, bias=False)  # only its weight is used
    nn.init.uniform_(module.weight, 0.5, 1.5)
    return Norm(module, 1e-6)


def _layer(fused: bool, normed: bool) -> Layer:
    sizes = (HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE)
    projections = [nn.Linear(WIDTH, sum(sizes))] if fused else [nn.Linear(WIDTH, size) for size in sizes]
    gated = [nn.Linear(WIDTH, 2 * INNER)] if fused else [nn.Linear(WIDTH, INNER) for _ in range(2)]
    heads = (_norm(SIZE), _norm(SIZE)) if normed else (None, None)
    down: Any = nn.Linear(INNER, WIDTH)
    if fused:
        down = IntegerLinear(QuantizedMatrix.of(down.weight, 8), down.bias, torch.float32)
    shape = LayerShape(KV_HEADS, SIZE, SIZE, torch.float32, torch.device("cpu"))
    return Layer(
        _norm(WIDTH),
        tuple(projections),
        *heads,
        nn.Linear(HEADS * SIZE, WIDTH),
        _norm(WIDTH),
        tuple(gated),
        Activation.SILU,
        down,
        shape,
        AttentionTerms(SIZE**-0.5),
    )


def _root(norm: Norm | None, x: Tensor) -> Tensor:
    if norm is None:
        return x
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def _plain(decoder: Decoder, tokens: list[int]) -> Tensor:
    """Logits [tokens, words] of a whole sequence."""
    x = decoder.embedding(torch.tensor(tokens))
    cosines, sines = decoder.rotations(x, torch.arange(len(tokens)))
    for layer in decoder.layers:
        normed = _root(layer.before_attention, x)
        projected = torch.cat([each(normed) for each in layer.projections], -1)
        query, key, value = projected.unflatten(-1, (-1, SIZE)).split([HEADS, KV_HEADS, KV_HEADS], 1)
        turned = []
        for each, norm in ((query, layer.query_norm), (key, layer.key_norm)):
            each = _root(norm, each)
            first, second = each.chunk(2, -1)
            turned.append(each * cosines[:, None] + torch.cat([-second, first], -1) * sines[:, None])
        query, key = (each.transpose(0, 1) for each in turned)
        out = functional.scaled_dot_product_attention(
            query, key, value.transpose(0, 1), is_causal=True, enable_gqa=True
        )
        x = x + layer.output(out.transpose(0, 1).flatten(1))
        normed = _root(layer.before_mlp, x)
        gate, up = torch.cat([each(normed) for each in layer.gated], -1).chunk(2, -1)
        x = x + layer.down(functional.silu(gate) * up)
    return decoder.head(_root(decoder.norm, x))


@pytest.mark.parametrize("fused", [False, True])
@interpreted
def test_the_logits_of_the_model(fused: bool) -> None:
    from deepspeed.inference.model.launched import DecoderLaunches

    with torch.no_grad():
        decoder = Decoder(
            DecoderWatch(nn.Identity()),
            nn.Embedding(WORDS, WIDTH),
            Rotations(),
            tuple(_layer(fused, normed=not fused) for _ in range(2)),
            _norm(WIDTH),
            nn.Linear(WIDTH, WORDS),
        )
        launches = DecoderLaunches(decoder, torch.device("cpu"))
        cache = PagedCache({i: layer.shape for i, layer in enumerate(decoder.layers)}, 8, 4)
        cache.is_on_host = False  # the host's kernel would do the attention
        sequences = {0: [3, 9, 4, 4, 20, 31, 7], 1: [8, 8, 1, 40, 2]}
        blocks = {0: [5, 2], 1: [0, 7]}
        for step in ([(0, 0, 5), (1, 0, 3)], [(1, 3, 4)], [(0, 5, 7), (1, 4, 5)]):
            pieces = [PagePiece(sequences[i][start:stop], start, blocks[i]) for i, start, stop in step]
            for (i, _, stop), row in zip(step, launches.run(pieces, cache), strict=True):
                torch.testing.assert_close(row, _plain(decoder, sequences[i])[stop - 1], rtol=1e-4, atol=1e-5)


def test_a_model_on_the_host_has_the_other_layouts() -> None:
    from deepspeed.inference.model.info import LayoutError
    from deepspeed.inference.model.launched import LaunchedLayout

    layout = LaunchedLayout.__new__(LaunchedLayout)
    layout.module = nn.Linear(2, 2)
    with pytest.raises(LayoutError, match="not on one GPU"):
        layout.learn([], 2)
