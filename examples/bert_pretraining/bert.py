"""A small BERT: embeddings, encoder layers of the kernels or of torch, and the heads of pre-training."""

from __future__ import annotations

import argparse

import torch
from data import VOCABULARY
from torch import Tensor, nn
from torch.nn import functional

from deepspeed import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

MASK, CLS, SEP = range(VOCABULARY, VOCABULARY + 3)
IGNORED = -100


def torch_layer(width: int, heads: int, dropout: float) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu", 1e-12, batch_first=True)


def kernel_layer(given: nn.TransformerEncoderLayer, layers: int, dropout: float) -> DeepSpeedTransformerLayer:
    """The layer of the kernels with the same weights."""
    attention = given.self_attn
    parts = (attention.out_proj, given.norm1, given.linear1, given.linear2, given.norm2)
    sizes = DeepSpeedTransformerConfig(
        hidden_size=attention.embed_dim,
        intermediate_size=given.linear1.out_features,
        heads=attention.num_heads,
        attn_dropout_ratio=dropout,
        hidden_dropout_ratio=dropout,
        num_hidden_layers=layers,
        pre_layer_norm=False,
    )
    weights = [*attention.in_proj_weight.chunk(3), *(part.weight for part in parts)]
    biases = [*attention.in_proj_bias.chunk(3), *(part.bias for part in parts)]
    return DeepSpeedTransformerLayer(sizes, weights, biases)


class Bert(nn.Module):
    """BERT's encoder with both heads; forward returns the loss, and the two parts of it [2]."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        width = options.width
        self.words = nn.Embedding(VOCABULARY + 3, width)
        self.places = nn.Embedding(max(options.lengths), width)
        self.passages = nn.Embedding(2, width)
        for table in (self.words, self.places, self.passages):
            nn.init.normal_(table.weight, std=0.02)
        self.norm = nn.LayerNorm(width)
        layers = [torch_layer(width, options.heads, options.dropout) for _ in range(options.layers)]
        if options.layers_of == "deepspeed":
            layers = [kernel_layer(each, len(layers), options.dropout) for each in layers]
        self.layers = nn.ModuleList(layers)
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.bias = nn.Parameter(torch.zeros(VOCABULARY + 3))
        self.order = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))

    def hidden(self, ids: Tensor, segments: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the last layer makes of the tokens [batch, length, width]; ``mask`` [batch, 1, 1, length] is added to
        the scores."""
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.words(ids) + self.places(places) + self.passages(segments))
        for layer in self.layers:
            x = layer(x) if mask is None else layer(x, mask)
        return x

    def forward(
        self, ids: Tensor, segments: Tensor, labels: Tensor, follows: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = self.hidden(ids, segments)
        hidden = self.transform(x[labels != IGNORED])  # the head computes the masked tokens only
        logits = functional.linear(hidden, self.words.weight, self.bias)
        of_words = functional.cross_entropy(logits, labels[labels != IGNORED])
        of_order = functional.cross_entropy(self.order(x[:, 0]), follows)
        return of_words + of_order, torch.stack([of_words, of_order]).detach()
