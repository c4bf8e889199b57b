"""Small models of the shapes that compression is made for, and sections of its config."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

HEADS, HIDDEN, INNER = 4, 16, 24


class SelfAttention(nn.Module):
    """Named as BERT's."""

    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads = HEADS
        self.all_head_size = HIDDEN
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.view(*x.shape[:2], self.num_attention_heads, -1).transpose(1, 2)

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return mixed.transpose(1, 2).reshape(*x.shape[:2], self.all_head_size)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self = SelfAttention()
        self.output = nn.ModuleDict({"dense": nn.Linear(HIDDEN, HIDDEN), "norm": nn.LayerNorm(HIDDEN)})

    def forward(self, x: Tensor) -> Tensor:
        return self.output["norm"](x + self.output["dense"](self.self(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(HIDDEN, INNER)})
        self.output = nn.ModuleDict({"dense": nn.Linear(INNER, HIDDEN), "norm": nn.LayerNorm(HIDDEN)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        inner = nn.functional.gelu(self.intermediate["dense"](x))
        return self.output["norm"](x + self.output["dense"](inner))


class Bert(nn.Module):
    """Classifies sequences [batch, length] of 32 tokens into 3 classes."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(32, HIDDEN)
        self.layer = nn.ModuleList(Layer() for _ in range(layers))
        self.classifier = nn.Linear(HIDDEN, 3)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        x = self.embeddings(tokens)
        for layer in self.layer:
            x = layer(x)
        logits = self.classifier(x.mean(dim=1))
        return logits if labels is None else nn.functional.cross_entropy(logits, labels)


class ConvNet(nn.Module):
    """A block of two convolutions named as ResNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.classifier = nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.bn1(self.conv1(images)).relu()
        return self.classifier(self.bn2(self.conv2(x)).relu().mean(dim=(2, 3)))


def technique(
    name: str, modules: list[str], params: dict[str, Any], related: Any = None, **shared: Any
) -> dict[str, Any]:
    """A section of ``compression_training`` with one group."""
    group = {"params": params, "modules": modules}
    if related is not None:
        group["related_modules"] = related
    shared = {"enabled": True, "schedule_offset": 0, **shared}
    return {name: {"shared_parameters": shared, "different_groups": {"g1": group}}}


def config(*techniques: dict[str, Any], **more: Any) -> dict[str, Any]:
    section: dict[str, Any] = {}
    for each in techniques:
        section |= each
    return {"train_micro_batch_size_per_gpu": 4, "compression_training": section, **more}


WEIGHTS = technique(
    "weight_quantization",
    ["attention.self", "intermediate"],
    {"start_bits": 8, "target_bits": 4, "quantization_period": 2},
    quantize_weight_in_forward=True,
    quantize_groups=4,
)
ACTIVATIONS = technique(
    "activation_quantization",
    ["layer"],
    {"bits": 8},
    quantization_type="asymmetric",
    range_calibration="dynamic",
)
SPARSE = technique("sparse_pruning", ["attention.self"], {"dense_ratio": 0.5}, method="l1", schedule_offset=1)
ROWS = technique(
    "row_pruning",
    ["intermediate.dense"],
    {"dense_ratio": 0.5},
    [["layer.\\w+.output.dense"]],
    method="topk",
)
HEADS_HALF = technique(
    "head_pruning",
    ["attention.output.dense"],
    {"dense_ratio": 0.5},
    [["self.query", "self.key", "self.value"]],
    method="topk",
    num_heads=HEADS,
)
SNIP: dict[str, Any] = {
    "sparse_pruning": {
        "shared_parameters": {
            "enabled": True,
            "schedule_offset": 1,
            "schedule_offset_end": 4,
            "schedule_offset_stride": 2,
            "method": "snip_momentum",
            "block_pattern": "1x4",
            "dense_ratio": 0.5,
            "excluded_modules": ["classifier", "pooler"],
        },
        "different_groups": {},
    }
}


def batch(seed: int, size: int = 4) -> tuple[Tensor, Tensor]:
    """Tokens [size, 6] and labels [size]."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 32, (size, 6), generator=generator),
        torch.randint(0, 3, (size,), generator=generator),
    )
