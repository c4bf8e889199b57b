"""What integer weights cost: perplexity of a model trained here, on text that it has not seen.

    python benchmarks/quantized_perplexity.py --save WHAT

A byte-level Llama learns the source of Python's standard library; other files of it are the held-out text, and 64 runs
of the training text calibrate. "GPTQ as published" is a plain version of the paper's algorithm with the same groups
(columns in their order, the largest value decides the scale), for comparison. With --folder FOLDER the training is
kept there, and a second call goes on from it.
"""

from __future__ import annotations

import copy
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from deepspeed.inference.kernels import quantize_linears
from deepspeed.inference.quantized.calibration import METHODS, input_moments, linears_of, quantize_calibrated
from deepspeed.zero.partitioning import blocks_of
from jobs import progress
from report import Report, common_arguments

LENGTH, GROUP = 128, 128


def text(pattern: str) -> torch.Tensor:
    folder = Path(sysconfig.get_path("stdlib"))
    return torch.tensor(list(b"".join(path.read_bytes() for path in sorted(folder.glob(pattern)))))


def batch(data: torch.Tensor, rows: int, source: torch.Generator) -> torch.Tensor:
    starts = torch.randint(0, len(data) - LENGTH, (rows,), generator=source)
    return torch.stack([data[start : start + LENGTH] for start in starts.tolist()])


def train(data: torch.Tensor, steps: int, kept: Path | None) -> tuple[Any, float]:
    """The model and the seconds that its training took. ``kept``: a file that has every fiftieth step."""
    from transformers import AutoModelForCausalLM, LlamaConfig

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
    done, took = 0, 0.0
    if kept is not None and kept.exists():
        done, took, states = torch.load(kept)
        for part, state in zip((model, optimizer, schedule), states, strict=False):
            part.load_state_dict(state)
        source.set_state(states[-1])
    for step in range(done, steps):
        began = time.perf_counter()
        tokens = batch(data, 12, source)
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        took += time.perf_counter() - began
        if kept is not None and (step + 1) % 50 in (0, steps % 50):
            states = [each.state_dict() for each in (model, optimizer, schedule)]
            torch.save((step + 1, took, [*states, source.get_state()]), kept)
    return model.eval(), took


@torch.no_grad()
def losses_of(model: Any, data: torch.Tensor) -> torch.Tensor:
    """The mean of each row."""
    means = []
    for rows in data.split(32):
        scores = model(input_ids=rows).logits[:, :-1].float()
        means.append(functional.cross_entropy(scores.mT, rows[:, 1:], reduction="none").mean(1))
    return torch.cat(means).double()


def change(losses: torch.Tensor, plain: torch.Tensor) -> tuple[float, float]:
    """Of the perplexity, of the same rows, with its standard error."""
    more = losses - plain
    return math.expm1(float(more.mean())), float(more.std()) / math.sqrt(len(more))


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
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--folder", help="where the training is kept")
    args = parser.parse_args()
    steps = 4 if args.quick else args.steps
    report = Report("quantized_perplexity", args)
    data, unseen = text("[a-p]*.py"), text("[q-z]*.py")
    model, took = train(data, steps, Path(args.folder) / "trained.pt" if args.folder else None)
    size = sum(param.numel() for param in model.parameters())
    rows = 32 if args.quick else 512
    held_out = batch(unseen, rows, torch.Generator().manual_seed(2))
    calibration = list(batch(data, 64, torch.Generator().manual_seed(3)).split(16))
    plain = losses_of(model, held_out)
    found: dict[str, torch.Tensor] = {}

    def show(name: str, changed: Any) -> None:
        found[name] = losses_of(changed, held_out)
        progress(f"{name}: {shown(found[name])}")

    def shown(losses: torch.Tensor) -> str:
        return f"{math.exp(float(losses.mean())):.4f}"

    whole = copy.deepcopy(model)
    quantize_linears(whole, 8, 1, torch.float32)
    show("int8, init_inference", whole)
    for bits in (8, 4):
        for method in METHODS:
            changed = copy.deepcopy(model)
            quantize_calibrated(changed, calibration, bits=bits, group_size=GROUP, method=method)
            show(f"int{bits}, {method}", changed)
        changed = copy.deepcopy(model)
        as_published(changed, calibration, bits)
        show(f"int{bits}, GPTQ as published", changed)
    report.data.update(fp32=plain.tolist(), losses={name: each.tolist() for name, each in found.items()})
    lines = []
    for name, each in found.items():
        more, error = change(each, plain)
        lines.append([name, shown(each), f"{more:+.4%}", f"{error:.4%}"])
    report.table(
        f"byte perplexity on {held_out.numel():,} held-out bytes; Llama of {size / 1e6:.1f}M parameters, {steps} steps "
        f"in {took:.0f} s, linear layers of blocks in groups of {GROUP}",
        ["weights", "perplexity", "change", "its standard error"],
        [["fp32", shown(plain), "", ""], *lines],
    )
    report.save()


if __name__ == "__main__":
    main()
