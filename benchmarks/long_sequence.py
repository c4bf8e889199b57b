"""Longest sequence that trains in a fixed memory on one rank, with and without tiles and kept inputs elsewhere.

A Llama shape of 4 layers and 32k tokens of vocabulary, batch 1, fp32. Counted are the bytes that a forward and backward
allocate beyond weights and their gradients, at lengths that approach ``--memory-mib``: every count is that of a real
run, also the one at the limit. Inputs of layers that ``cpu_checkpointing`` moves to host memory would leave a device;
where the host is the device they stay, and are counted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from report import Report, common_arguments

sys.path.insert(0, str(Path(__file__).parents[1]))

import deepspeed
from tests.allocations import counted

LAYERS, VOCAB = 4, 32_000
WAYS = {
    "plain": {},
    "checkpointed layers": {"checkpointed": True},
    "and tiles": {"checkpointed": True, "tiled": True},
}


class Layer(nn.Module):
    """Attention and a gated feed-forward layer, each behind a norm."""

    def __init__(self, hidden: int, checkpointed: bool) -> None:
        super().__init__()
        self.heads, self.gradient_checkpointing = hidden // 64, checkpointed
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.qkv, self.out = (
            nn.Linear(hidden, 3 * hidden, bias=False),
            nn.Linear(hidden, hidden, bias=False),
        )
        self.mlp = MLP(hidden)

    def block(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, 64)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))

    def forward(self, x: Tensor) -> Any:
        return (
            checkpoint(self.block, x, use_reentrant=False) if self.gradient_checkpointing else self.block(x)
        )


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        wide = 64 * round(hidden * 8 / 3 / 64)
        self.gate_proj, self.up_proj = (nn.Linear(hidden, wide, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Llama(nn.Module):
    """Tokens [1, length] -> the loss of predicting each from those before it."""

    def __init__(self, hidden: int, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, hidden)
        self.layers = nn.ModuleList(Layer(hidden, checkpointed) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, VOCAB, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        labels = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        return nn.functional.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))


def start(hidden: int, *, checkpointed: bool = False, tiled: bool = False) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "activation_checkpointing": {"cpu_checkpointing": tiled},
        "tiled_compute": {"enabled": tiled},
        "steps_per_print": float("inf"),
        "log_level": "warning",
    }
    return deepspeed.initialize(model=Llama(hidden, checkpointed), config=config)[0]


def peak(engine: Any, length: int) -> tuple[int, float]:
    """Bytes beyond weights and gradients of a forward and backward, and the loss. The first step makes buffers."""
    ids = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(length))
    with counted() as found:
        loss = engine(ids)
        engine.backward(loss)
    engine.zero_grad()
    return found.peak, loss.item()


def longest(engine: Any, budget: int) -> tuple[int, dict[int, int]]:
    """The longest sequence found whose count fits, to a few percent, and all counts by length: each try extends the
    line through the last two."""
    counts = {length: peak(engine, length)[0] for length in (128, 256)}
    for _ in range(TRIES):
        (low, less), (high, more) = sorted(counts.items())[-2:]
        slope = (more - less) / (high - low)
        best = max(length for length, used in counts.items() if used <= budget)
        length = min(int(0.98 * (high + (budget - more) / slope)), 4 * best)
        if length in counts or abs(length - best) < 0.02 * best:
            break
        counts[length] = peak(engine, length)[0]
    return max(length for length, used in counts.items() if used <= budget), counts


TRIES = 6


def main() -> None:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--memory-mib", type=int, default=768, help="for activations and temporary tensors")
    arguments = parser.parse_args()
    hidden, budget = arguments.hidden, arguments.memory_mib * 2**20
    if arguments.quick:
        hidden, budget = 128, 128 * 2**20
    report = Report("long_sequence", arguments)
    rows, limits = [], {}
    for way, options in WAYS.items():
        engine = start(hidden, **options)
        peak(engine, 64)  # makes buffers
        limits[way], counts = longest(engine, budget)
        per_token = (counts[limits[way]] - counts[128]) / (limits[way] - 128) / 1024
        rows.append([way, f"{per_token:.0f}", f"{limits[way]:,}", f"{limits[way] / limits['plain']:.1f}"])
        report.data[way] = counts
        if way == "and tiles":
            used, loss = peak(engine, limits[way])
            report.data["real run"] = {"length": limits[way], "bytes": used, "loss": loss}
        engine.destroy()
    report.table(f"hidden {hidden}, {budget >> 20} MiB", ["way", "KiB per token", "longest", "x plain"], rows)
    real = report.data["real run"]
    report.line()
    report.line(f"run at {real['length']:,} tokens: {real['bytes'] / 2**20:.0f} MiB, loss {real['loss']:.3f}")
    report.data["longest"] = limits
    report.save()


if __name__ == "__main__":
    main()
