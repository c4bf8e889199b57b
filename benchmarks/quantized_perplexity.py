"""What integer weights cost: perplexity of a model trained here, on text that it has not seen.

    python benchmarks/quantized_perplexity.py [--steps 600]

A byte-level Llama learns the source of Python's standard library; other files of it are the held-out text, and 64 runs
of the training text calibrate. "GPTQ as published" is a plain version of the paper's algorithm with the same groups
(columns in their order, the largest value decides the scale), for comparison.
"""

from __future__ import annotations

import argparse
import copy
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from deepspeed.inference.calibration import input_moments, linears_of, quantize_calibrated
from deepspeed.inference.kernels import quantize_linears
from deepspeed.runtime.zero.units import blocks_of

LENGTH, GROUP = 128, 128


def text(pattern: str) -> torch.Tensor:
    folder = Path(sysconfig.get_path("stdlib"))
    return torch.tensor(list(b"".join(path.read_bytes() for path in sorted(folder.glob(pattern)))))


def batch(data: torch.Tensor, rows: int, source: torch.Generator) -> torch.Tensor:
    starts = torch.randint(0, len(data) - LENGTH, (rows,), generator=source)
    return torch.stack([data[start : start + LENGTH] for start in starts.tolist()])


def train(data: torch.Tensor, steps: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
    )
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    source = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = batch(data, 12, source)
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def perplexity(model: Any, data: torch.Tensor) -> float:
    losses = [model(input_ids=rows, labels=rows).loss.item() for rows in data.split(32)]
    return math.exp(sum(losses) / len(losses))


def published(weight: torch.Tensor, second: torch.Tensor, bits: int) -> torch.Tensor:
    """GPTQ without our choices of scales and of an order: the values."""
    most = 2 ** (bits - 1) - 1
    hessian = second.double()
    hessian.diagonal().add_(0.01 * float(hessian.diagonal().mean()) + 1e-12)
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    left, made = weight.double().clone(), torch.empty_like(weight, dtype=torch.float64)
    scale = left[:, :1]
    for column in range(weight.shape[1]):
        if column % GROUP == 0:
            scale = left[:, column : column + GROUP].abs().amax(1) / most
        made[:, column] = (left[:, column] / scale).round().clamp(-most, most) * scale
        error = (left[:, column] - made[:, column]) / upper[column, column]
        left[:, column:] -= torch.outer(error, upper[column, column:])
    return made.float()


@torch.no_grad()
def as_published(model: Any, calibration: list[torch.Tensor], bits: int) -> None:
    for block in blocks_of(model):
        layers = {id(layer): layer for _, _, layer in linears_of(block)}
        moments = input_moments(model, block, layers, calibration)
        for key, layer in layers.items():
            layer.weight.copy_(published(layer.weight, moments[key].second, bits))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    began = time.perf_counter()
    data, unseen = text("[a-p]*.py"), text("[q-z]*.py")
    model = train(data, args.steps)
    size = sum(param.numel() for param in model.parameters())
    held_out = batch(unseen, 192, torch.Generator().manual_seed(2))
    calibration = list(batch(data, 64, torch.Generator().manual_seed(3)).split(16))
    plain = perplexity(model, held_out)
    took = time.perf_counter() - began
    print(f"Llama of {size / 1e6:.1f}M parameters, {args.steps} steps, {took:.0f} s; byte perplexity on")
    print(f"{held_out.numel()} held-out bytes; linear layers of the blocks quantized in groups of {GROUP}\n")
    print(f"{'weights':32} {'perplexity':>10} {'change':>8}")
    print(f"{'fp32':32} {plain:10.4f}")

    def show(name: str, changed: Any) -> None:
        found = perplexity(changed, held_out)
        print(f"{name:32} {found:10.4f} {found / plain - 1:+8.3%}", flush=True)

    whole = copy.deepcopy(model)
    quantize_linears(whole, 8, 1, torch.float32)
    show("int8, init_inference(dtype=int8)", whole)
    for bits in (8, 4):
        for method in ("nearest", "awq", "gptq"):
            changed = copy.deepcopy(model)
            quantize_calibrated(changed, calibration, bits=bits, group_size=GROUP, method=method)  # type: ignore[arg-type]
            show(f"int{bits} {method}", changed)
        changed = copy.deepcopy(model)
        as_published(changed, calibration, bits)
        show(f"int{bits} GPTQ as published", changed)


if __name__ == "__main__":
    main()
