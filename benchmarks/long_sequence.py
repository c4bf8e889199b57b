"""The longest sequence that trains in a fixed memory on one rank: plain, and with what `docs/long_sequences.md` offers.

A Llama shape of 4 layers and 32k tokens of vocabulary, batch 1, fp32 with AdamW. Memory is counted exactly on tensors
without values: weights, gradients, two states of the optimizer (16 bytes per parameter, none of them offloaded), and
everything that a forward and backward allocates, operator by operator. What is inside an operator does not count;
attention is one of the flash kind in every row. Host memory that inputs of layers and chunks go to is counted apart.

``--run`` trains two steps at the limit of the row that needs no second memory, in a process that the kernel allows no
more than what it had before the model, the budget, and ``--slack-mib`` for buffers of the engine and of libraries;
and shows that the plain model does not get as far as a little above its own limit.

    python benchmarks/long_sequence.py --hidden 4096 --memory-gib 40
    python benchmarks/long_sequence.py --hidden 128 --memory-gib 0.192 --slack-mib 160 --run
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload_budget import Peak, private_bytes
from report import Report, common_arguments

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.meta_memory import MetaMemory

LAYERS, VOCAB, SIZE = 4, 32_000, 64
MIB = 2**20


@dataclass(frozen=True)
class Way:
    """``chunk``: tokens of a chunk of attention, 0: whole."""

    name: str
    checkpointed: bool = False
    tiled: bool = False
    offloaded: bool = False
    chunk: int = 0


def ways(chunk: int) -> list[Way]:
    return [
        Way("plain"),
        Way("layers computed again", True),
        Way("and tiles", True, True),
        Way("and inputs in host memory", True, True, True),
        Way("and attention in chunks", True, True, True, chunk),
    ]


class Attention(nn.Module):
    """[1, tokens, hidden] -> the same, causal, with rotary positions."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = hidden // SIZE
        self.qkv, self.out = (
            nn.Linear(hidden, 3 * hidden, bias=False),
            nn.Linear(hidden, hidden, bias=False),
        )

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        from deepspeed.sequence.layer import apply_rotary_pos_emb

        cosines, sines = (each.view(1, 1, -1, SIZE) for each in tables)
        q, k, v = (
            each.unflatten(-1, (self.heads, SIZE)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1)
        )
        q, k = apply_rotary_pos_emb(q, cosines, sines), apply_rotary_pos_emb(k, cosines, sines)
        # What scaled_dot_product_attention calls on a CPU; by its name it has shapes on meta, too.
        attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
        return self.out(attended.transpose(1, 2).flatten(2))


class InChunks(nn.Module):
    """The same attention by ``FPDT_Attention``."""

    def __init__(self, hidden: int, chunk: int, offload: bool) -> None:
        super().__init__()
        from deepspeed.sequence.fpdt_layer import FPDT_Attention

        shape = SimpleNamespace(num_attention_heads=hidden // SIZE, kv_channels=SIZE)
        first, second = (nn.Parameter(torch.empty(n * hidden, hidden).normal_(std=0.02)) for n in (3, 1))
        self.attention = FPDT_Attention(
            shape, first, None, second, None, None, chunk_size=chunk, enable_offloading=offload
        )

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        return self.attention(x.transpose(0, 1), None, None, tables)[0].transpose(0, 1)


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        wide = 64 * round(hidden * 8 / 3 / 64)
        self.gate_proj, self.up_proj = (nn.Linear(hidden, wide, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, hidden: int, way: Way) -> None:
        super().__init__()
        self.gradient_checkpointing = way.checkpointed
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.attention = InChunks(hidden, way.chunk, way.offloaded) if way.chunk else Attention(hidden)
        self.mlp = MLP(hidden)

    def block(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norms[0](x), tables)
        return x + self.mlp(self.norms[1](x))

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Any:
        if self.gradient_checkpointing:
            return checkpoint(self.block, x, tables, use_reentrant=False)
        return self.block(x, tables)


class Llama(nn.Module):
    """Tokens [1, length] -> the loss of predicting each from those before it."""

    def __init__(self, hidden: int, way: Way) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, hidden)
        self.layers = nn.ModuleList(Layer(hidden, way) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, VOCAB, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        steps = torch.outer(torch.arange(ids.shape[1], device=ids.device), self.frequencies(ids.device))
        angles = torch.cat((steps, steps), -1)[:, None, None]
        tables = (angles.cos(), angles.sin())
        for layer in self.layers:
            x = layer(x, tables)
        logits = self.head(self.norm(x))
        labels = nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
        return nn.functional.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))

    def frequencies(self, device: torch.device) -> Tensor:
        return 10_000 ** (-torch.arange(0, SIZE, 2, device=device) / SIZE)


class Quiet:
    def report(self, text: str) -> None:
        """What a transform reports goes nowhere."""


class Counter:
    """Counts one way of training at any length, on meta."""

    def __init__(self, hidden: int, way: Way) -> None:
        from deepspeed.comm.collectives import communicator_of
        from deepspeed.config.sections.model import TiledComputeConfig
        from deepspeed.parallel.sequence.tiled.model_transform import TiledModel
        from deepspeed.transforms.recompute.checkpointing import keep_inputs_of_layers
        from deepspeed.transforms.recompute.kept_inputs import KeptInputs

        with torch.device("meta"):
            self.model = Llama(hidden, way)
            for parameter in self.model.parameters():
                parameter.grad = torch.empty_like(parameter)
        if way.tiled:
            TiledModel(TiledComputeConfig(enabled=True)).apply(self.model, Quiet())
        if way.offloaded:
            keeper = KeptInputs(communicator_of(None), offload=True, arena=None)
            keep_inputs_of_layers(
                self.model, lambda: torch.autograd.graph.saved_tensors_hooks(keeper.pack, keeper.unpack)
            )
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.counts: dict[int, tuple[int, int]] = {}

    def __call__(self, length: int) -> int:
        """Bytes on the device."""
        if length not in self.counts:
            memory = MetaMemory()
            ids = torch.empty(1, length, dtype=torch.int64, device="meta")
            with memory:
                memory.adopt(*self.model.parameters())
                held = memory.now
                self.model(ids).backward()
            self.counts[length] = (memory.peak - held + 16 * self.parameters, memory.host_peak)
        return self.counts[length][0]


def longest(count: Callable[[int], int], budget: int, precision: float) -> int:
    """The longest sequence that fits, up to ``precision`` of it; 0: none. Memory is nearly affine in the length, so
    that each try lies where the line through two counts meets the budget."""
    fits, over = 64, 0
    counts = {64: count(64)}
    if counts[64] > budget:
        return 0
    at = 1024
    while not over or over - fits > max(1, precision * fits):
        counts[at] = count(at)
        if counts[at] <= budget:
            fits = max(fits, at)
        else:
            over = min(over or at, at)
        low, high = (fits, over) if over else sorted(counts)[-2:]
        line = low + (budget - counts[low]) * (high - low) / max(1, counts[high] - counts[low])
        if over:  # a little below the line, then a little above it
            step = int(line * (1 - precision / 3 if line > fits * (1 + precision) else 1 + precision / 3))
            at = min(max(step, fits + 1), over - 1)
        else:
            at = min(max(int(line), fits + math.ceil(precision * fits)), 8 * fits)
    return fits


def main(argv: Sequence[str] | None = None) -> None:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--hidden", type=int, default=4096, help="a multiple of 64")
    parser.add_argument("--memory-gib", type=float, default=40.0, help="of the device")
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a chunk of attention; 0: 16 x hidden")
    parser.add_argument("--run", action="store_true", help="also train at the limit, under the kernel's eyes")
    parser.add_argument("--slack-mib", type=int, default=256)
    parser.add_argument("--train", metavar="JSON", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.train:
        train(**json.loads(arguments.train))
        return
    if arguments.quick:
        arguments.hidden, arguments.memory_gib = 128, 0.2
    hidden, budget = arguments.hidden, int(arguments.memory_gib * 2**30)
    report = Report("long_sequence", arguments)
    limits, rows = {}, []
    for way in ways(arguments.chunk or 16 * hidden):
        count = Counter(hidden, way)
        limits[way.name] = limit = longest(count, budget, 0.05 if arguments.quick else 0.01)
        report.data[way.name] = {"longest": limit, "bytes, bytes in host memory": count.counts}
        rows.append([way.name, *_row(count, limit, limits["plain"])])
    report.table(
        f"hidden {hidden}, {count.parameters / 1e6:.0f}M parameters, {arguments.memory_gib} GiB",
        ["", "KiB per token", "longest", "x plain", "host MiB"],
        rows,
    )
    if arguments.run:
        real(report, hidden, limits, budget, arguments.slack_mib)
    report.save()


def _row(count: Counter, limit: int, plain: int) -> list[str]:
    if not limit:
        return ["", "does not fit", "", ""]
    per_token = (count.counts[limit][0] - count.counts[64][0]) / max(1, limit - 64) / 1024
    ratio = f"{limit / plain:.1f}" if plain else ""
    return [f"{per_token:.1f}", f"{limit:,}", ratio, f"{count.counts[limit][1] / MIB:.0f}"]


def real(report: Report, hidden: int, limits: dict[str, int], budget: int, slack: int) -> None:
    rows = []
    for name, length, options in (
        ("and tiles", limits["and tiles"], {"tiled": True}),
        ("plain", int(1.05 * limits["plain"]) + slack * MIB // (12 * VOCAB), {"tiled": False}),
    ):
        given = {"hidden": hidden, "length": length, "budget": budget + slack * MIB, **options}
        done = subprocess.run(
            [sys.executable, __file__, "--train", json.dumps(given)],
            capture_output=True,
            text=True,
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB)},
        )
        line = done.stdout.strip().splitlines()[-1] if done.returncode == 0 else _last(done.stderr)
        rows.append([f"{name}, {length:,} tokens", line])
    report.table(f"trained in {budget / MIB:.0f} + {slack} MiB", ["", ""], rows)
    report.data["trained"] = rows


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["died"])[-1][:100]


def train(hidden: int, length: int, budget: int, tiled: bool) -> None:
    """Two steps by the engine, in a process that may take ``budget`` more bytes than it has now."""
    import deepspeed

    deepspeed.init_distributed()
    two_steps(64, 64, tiled)  # threads, buffers of libraries and modules are there
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = private_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (before + budget, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    peak, began = Peak(), time.perf_counter()
    losses = two_steps(hidden, length, tiled, peak.look)
    seconds = (time.perf_counter() - began) / 2
    told = ", ".join(f"{loss:.3f}" for loss in losses)
    print(f"loss {told}; {seconds:.0f} s a step; resident {peak.gib * 1024:.0f} MiB at most")


def two_steps(
    hidden: int, length: int, tiled: bool, look: Callable[..., None] = lambda *_: None
) -> list[float]:
    """The losses. ``look`` is called where much memory may be in use."""
    import deepspeed

    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "tiled_compute": {"enabled": tiled},
        "steps_per_print": 1_000_000,
    }
    model = Llama(hidden, Way("", tiled, tiled))
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
    engine = deepspeed.initialize(model=model, config=config)[0]
    for module in model.modules():
        if not isinstance(module, (nn.Linear, nn.RMSNorm)):
            module.register_forward_hook(look)
    ids = torch.randint(VOCAB, (1, length))
    losses = []
    for _ in range(2):
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        look()
        losses.append(loss.item())
    engine.destroy()
    return losses


if __name__ == "__main__":
    main()
