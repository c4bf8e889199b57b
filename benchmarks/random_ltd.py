"""What a layer costs that keeps half of its tokens: one GPT or Llama block, forward and backward, on one process.

Gathering and scattering are counted in, and so are drawing the tokens and cutting masks and positions.

    python benchmarks/random_ltd.py
    python benchmarks/random_ltd.py --width 1024 --length 2048 --share 0.5 0.25
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from report import Report, common_arguments

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples/pretrain_gpt"))

from model import Block, GPTConfig, rotation_table

from deepspeed.accelerator import get_accelerator
from deepspeed.data.data_routing.sampling import TokenPositions, TokenSampler
from deepspeed.runtime.data_pipeline.data_routing.basic_layer import RandomLayerTokenDrop
from deepspeed.runtime.data_pipeline.data_routing.scheduler import RandomLTDScheduler


def dropping(layer: nn.Module, kept: int, length: int, mask: str | None) -> RandomLayerTokenDrop:
    section: dict[str, Any] = {
        "total_layer_num": 1,
        "random_ltd_layer_num": 1,
        "global_batch_size": 1,
        "model_mask_name": mask,
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": kept,
            "max_value": length,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": 1, "seq_per_step": 1},
        },
    }
    scheduler = RandomLTDScheduler(section)
    steps = iter(range(10**9))
    scheduler.sampler = TokenSampler(1, 0, lambda: TokenPositions(next(steps), 0))  # never the same tokens
    wrapped = RandomLayerTokenDrop(layer)
    wrapped.init_config(section, scheduler, 0)
    return wrapped


def gpt(
    arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, dict[str, Any]]:
    """The block of the demo; its rotation table has no batch, so all rows keep the same tokens."""
    sizes = GPTConfig(heads=arguments.heads, width=arguments.width, context=arguments.length)
    x = torch.empty(0, device=device, dtype=dtype)
    table = rotation_table(arguments.length, arguments.width // arguments.heads, x)
    return Block(sizes).to(device, dtype), {"rotation": table}


def llama(
    arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, dict[str, Any]]:
    """A layer of Transformers, with a causal mask [batch, 1, tokens, tokens] and positions for each row."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    sizes = LlamaConfig(
        hidden_size=arguments.width,
        intermediate_size=arguments.width * 8 // 3 // 64 * 64,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.heads,
        attn_implementation="sdpa",
    )
    positions = torch.arange(arguments.length, device=device)[None]
    x = torch.empty(0, device=device, dtype=dtype)
    tables = LlamaRotaryEmbedding(sizes).to(device)(x, positions)
    causal = torch.ones(arguments.length, arguments.length, dtype=torch.bool, device=device).tril()
    mask = causal.expand(arguments.batch, 1, -1, -1)
    return LlamaDecoderLayer(sizes, 0).to(device, dtype), {
        "attention_mask": mask,
        "position_ids": positions,
        "position_embeddings": tables,
    }


def seconds(layer: Callable[..., Tensor], x: Tensor, rest: dict[str, Any], rounds: int) -> float:
    """The median of some rounds, after two that are not counted."""
    grad, found = torch.randn_like(x), []
    for _ in range(rounds + 2):
        get_accelerator().synchronize()
        start = time.perf_counter()
        layer(x, **rest).backward(grad)
        get_accelerator().synchronize()
        found.append(time.perf_counter() - start)
    return sorted(found[2:])[rounds // 2]


def measure(arguments: argparse.Namespace, kind: str, rounds: int) -> list[dict[str, Any]]:
    device = torch.device(get_accelerator().device_name())
    make = {"gpt": gpt, "llama": llama}[kind]
    torch.manual_seed(0)
    layer, rest = make(arguments, device, getattr(torch, arguments.dtype))
    like = next(layer.parameters())
    x = torch.randn(
        arguments.batch,
        arguments.length,
        arguments.width,
        device=device,
        dtype=like.dtype,
        requires_grad=True,
    )
    rows, full = [], math.nan
    for share in [1.0, *arguments.share]:
        kept = int(arguments.length * share)
        mask = "attention_mask" if kind == "llama" else None
        taken = seconds(dropping(layer, kept, arguments.length, mask), x, rest, rounds)
        full = taken if share == 1.0 else full
        rows.append({"layer": kind, "kept": kept, "seconds": taken, "of_full": taken / full})
    return rows


def main() -> None:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--layers", nargs="+", default=["gpt", "llama"], choices=["gpt", "llama"])
    parser.add_argument("--share", type=float, nargs="+", default=[0.5], help="of the tokens that are kept")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024, help="tokens")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.quick:
        arguments.length, arguments.width, arguments.heads = 256, 192, 3
    report = Report("random_ltd", arguments)
    rows = [row for kind in arguments.layers for row in measure(arguments, kind, 3 if arguments.quick else 5)]
    report.data["rows"] = rows
    report.table(
        f"forward and backward of one layer, {arguments.batch} x {arguments.length} tokens, width {arguments.width}, "
        f"{arguments.dtype}, threads: {arguments.threads}",
        ["layer", "tokens kept", "ms", "of full"],
        [
            [row["layer"], str(row["kept"]), f"{1e3 * row['seconds']:.2f}", f"{row['of_full']:.3f}"]
            for row in rows
        ],
    )
    report.save()


if __name__ == "__main__":
    main()
