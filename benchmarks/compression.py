"""Compressed models: quality against size, speed of clean models, cost of quantization-aware training, work that layer
dropping saves.

    python benchmarks/compression.py
    python benchmarks/compression.py --only speed training --threads 2

- quality: a classifier in the shape of BERT, trained on the text of the standard library (`examples/compression`), and
  what is left of its accuracy in smaller forms.
- speed: the forward of a larger one, dense and clean, in turns; the factor is that of each turn, its median and range.
- training: a step of an engine with weights and activations quantized in forward, against a plain one.
- layers: the work of a training with `progressive_layer_drop`, counted by operation, against what the schedule says.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from report import Report, common_arguments

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "compression")]

import task  # noqa: E402
import xtc  # noqa: E402

import deepspeed  # noqa: E402
from deepspeed.compression.compress import init_compression, redundancy_clean  # noqa: E402

PARTS = ("quality", "speed", "training", "layers")
HALF = {"dense_ratio": 0.5}


def technique(
    modules: list[str], params: dict[str, Any], related: Any = None, **shared: Any
) -> dict[str, Any]:
    group = {"params": params, "modules": modules}
    if related is not None:
        group["related_modules"] = related
    return {
        "shared_parameters": {"enabled": True, "schedule_offset": 0, **shared},
        "different_groups": {"all": group},
    }


def eight_bits(groups: int) -> dict[str, Any]:
    bits = {"start_bits": 8, "target_bits": 8}
    in_forward = {"quantize_groups": groups, "quantize_weight_in_forward": True}
    dynamic = {"quantization_type": "symmetric", "range_calibration": "dynamic"}
    return {
        "weight_quantization": technique(["layer", "embeddings"], bits, **in_forward),
        "activation_quantization": technique(["layer"], {"bits": 8}, **dynamic),
    }


def half_heads(heads: int) -> dict[str, Any]:
    related = [["self.query", "self.key", "self.value"]]
    shared = {"method": "topk", "num_heads": heads}
    return {"head_pruning": technique(["attention.output.dense"], HALF, related, **shared)}


def half_rows() -> dict[str, Any]:
    related = [["layer.\\d+.output.dense"]]
    return {"row_pruning": technique(["intermediate.dense"], HALF, related, method="topk")}


def half_layers(layers: int) -> dict[str, Any]:
    return {"layer_reduction": xtc.compression(1, list(range(1, layers, 2)))["layer_reduction"]}


# Quality ----------------------------------------------------------------------------------------------------


def quality(arguments: argparse.Namespace, report: Report) -> None:
    sizes = task.Sizes(hidden=64, inner=256) if arguments.quick else task.Sizes()
    steps, batch = (20, 32) if arguments.quick else (arguments.steps, 64)
    data = task.Snippets(sizes.length)
    teacher = task.trained_teacher(sizes, data, steps, batch, 3e-3)
    forms: dict[str, tuple[dict[str, Any], str]] = {
        "8-bit weights and activations": (eight_bits(32), ">= 0.99"),
        "half of the weights": ({"sparse_pruning": technique(["layer"], HALF, method="l1")}, ">= 0.99"),
        "half of the heads": (half_heads(sizes.heads), ">= 0.98"),
        "half of the layers": (half_layers(sizes.layers), ">= 0.97"),
        "half of the layers, binary": (xtc.compression(1, [*range(1, sizes.layers, 2)]), ">= 0.95, <= 1/30"),
    }
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        whole, size = task.accuracy(teacher, data), task.saved(teacher, Path(folder, "model.pt"))
        rows.append({"model": "teacher", "accuracy": whole, "bytes": size, "goal": ""})
        for name, (section, goal) in forms.items():
            taught = 2 * steps if "binary" in name else steps
            config = task.settings(taught, 3e-3 if "binary" in name else 1e-3, compression_training=section)
            student = task.student_of(teacher, sizes, config, data, taught, batch)
            measured = {
                "accuracy": task.accuracy(student, data),
                "bytes": task.saved(student, Path(folder, "model.pt")),
            }
            rows.append({"model": name, **measured, "goal": goal})
    report.data["quality"] = rows
    report.table(
        f"accuracy on 2,000 snippets of {len(task.MODULES)} modules, students taught {steps} steps, binary ones "
        f"{2 * steps}",
        ["model", "accuracy", "of teacher", "goal", "bytes", "smaller"],
        [
            [
                row["model"],
                f"{row['accuracy']:.3f}",
                f"{row['accuracy'] / whole:.3f}",
                row["goal"],
                f"{row['bytes']:,}",
                f"{size / row['bytes']:.1f}x",
            ]
            for row in rows
        ],
    )


# Speed ------------------------------------------------------------------------------------------------------


def in_turns(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each in each round, after one that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        names = list(contenders)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.perf_counter()
            contenders[name]()
            if number:
                found[name].append(time.perf_counter() - start)
    return found


def factor_rows(seconds: dict[str, list[float]], against: dict[str, str], goals: dict[str, str]) -> list[Any]:
    """Median and range of (baseline / contender) within the rounds."""
    rows = []
    for name, base in against.items():
        factors = [b / c for b, c in zip(seconds[base], seconds[name], strict=True)]
        rows.append(
            {
                "form": name,
                "ms": 1000 * statistics.median(seconds[name]),
                "factor": statistics.median(factors),
                "least": min(factors),
                "most": max(factors),
                "goal": goals[name],
            }
        )
    return rows


def cleaned(model: nn.Module, section: dict[str, Any], teacher: nn.Module | None = None) -> Any:
    """As after training: what counts here are the shapes."""
    config = {"train_micro_batch_size_per_gpu": 1, "compression_training": section}
    prepared = init_compression(copy.deepcopy(model), config, teacher_model=teacher)
    return redundancy_clean(prepared, config, packed=True).eval()


def speed(arguments: argparse.Namespace, report: Report) -> None:
    hidden = 128 if arguments.quick else arguments.hidden
    sizes = task.Sizes(hidden=hidden, heads=max(hidden // 64, 2), inner=4 * hidden, layers=4, length=128)
    torch.manual_seed(0)
    model = task.Classifier(sizes).eval()
    pair = model.layer[0]
    ffn = nn.ModuleDict({"layer": nn.ModuleList([pair])})
    narrow = cleaned(ffn, half_rows())["layer"][0]
    forms = {
        "half of the rows and heads": cleaned(model, half_rows() | half_heads(sizes.heads)),
        "half of the layers": cleaned(model, half_layers(4), model),
        "8 bits": cleaned(model, eight_bits(16)),
    }
    tokens = torch.randint(0, task.VOCABULARY, (arguments.batch, sizes.length))
    x = torch.randn(arguments.batch, sizes.length, hidden)

    def inner(layer: Any) -> Callable[[], object]:
        return lambda: layer.output.dense(layer.intermediate(x))

    contenders: dict[str, Callable[[], object]] = {
        "dense": lambda: model(tokens),
        **{name: (lambda form=form: form(tokens)) for name, form in forms.items()},
        "dense layer between": inner(pair),
        "half of the rows of the layer between": inner(narrow),
    }
    with torch.inference_mode():
        seconds = in_turns(contenders, 2 if arguments.quick else arguments.rounds)
    against = dict.fromkeys(forms, "dense") | {"half of the rows of the layer between": "dense layer between"}
    goals: dict[str, str] = dict(zip(against, ("", ">= 1.9", ">= 1.8", ">= 1.6"), strict=True))
    rows = factor_rows(seconds, against, goals)
    report.data["speed"] = {"seconds": seconds, "rows": rows}
    report.table(
        f"forward of {sizes.layers} layers of {hidden}, {arguments.batch} x {sizes.length} tokens, fp32, threads: "
        f"{arguments.threads}; dense {1000 * statistics.median(seconds['dense']):.0f} ms",
        ["form", "ms", "x as fast", "least", "most", "goal"],
        [
            [
                row["form"],
                f"{row['ms']:.1f}",
                f"{row['factor']:.2f}",
                f"{row['least']:.2f}",
                f"{row['most']:.2f}",
                row["goal"],
            ]
            for row in rows
        ],
    )


# Training ---------------------------------------------------------------------------------------------------


def training(arguments: argparse.Namespace, report: Report) -> None:
    hidden = 128 if arguments.quick else arguments.hidden
    sizes = task.Sizes(hidden=hidden, heads=max(hidden // 64, 2), inner=4 * hidden, layers=2, length=128)
    weights = {"weight_quantization": eight_bits(16)["weight_quantization"]}
    sections = {"plain": {}, "8-bit weights": weights, "8-bit weights and activations": eight_bits(16)}
    steps = {}
    tokens = torch.randint(0, task.VOCABULARY, (arguments.batch, sizes.length))
    classes = torch.randint(0, len(task.MODULES), (arguments.batch,))
    for name, section in sections.items():
        torch.manual_seed(0)
        config = task.settings(100, 1e-4)
        model: nn.Module = task.Classifier(sizes)
        if section:
            config["compression_training"] = section
            model = init_compression(model, config)
        engine, *_ = deepspeed.initialize(model=model, config=config)

        def step(engine: Any = engine) -> None:
            engine.backward(task.from_labels(engine(tokens), tokens, classes))
            engine.step()

        steps[name] = step
    seconds = in_turns(steps, 2 if arguments.quick else arguments.rounds)
    rows = factor_rows(seconds, dict.fromkeys(sections, "plain"), dict.fromkeys(sections, ""))
    report.data["training"] = {"seconds": seconds, "rows": rows}
    report.table(
        f"a training step of {sizes.layers} layers of {hidden}, {arguments.batch} x {sizes.length} tokens, threads: "
        f"{arguments.threads} (goal: <= 1.25 x plain)",
        ["step", "ms", "x plain", "least", "most"],
        [
            [
                row["form"],
                f"{row['ms']:.0f}",
                f"{1 / row['factor']:.2f}",
                f"{1 / row['most']:.2f}",
                f"{1 / row['least']:.2f}",
            ]
            for row in rows
        ],
    )


# Layer dropping ---------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.down(self.up(self.norm(hidden_states)).relu())


class Stack(nn.Module):
    def __init__(self, layers: int, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x).square().mean()


def layers(arguments: argparse.Namespace, report: Report) -> None:
    count, steps, theta, gamma = 12, 100 if arguments.quick else 2000, 0.5, 0.01
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "progressive_layer_drop": {"enabled": True, "theta": theta, "gamma": gamma},
    }
    x = torch.randn(4, 8)
    torch.manual_seed(0)
    plain = Stack(count)
    with FlopCounterMode(display=False) as counter:
        plain(x).backward()
    whole = counter.get_total_flops()
    engine, *_ = deepspeed.initialize(model=Stack(count), config=config)
    with FlopCounterMode(display=False) as counter:
        for _ in range(steps):
            engine.backward(engine(x))
            engine.step()
    counted = counter.get_total_flops() / (whole * steps)
    thetas = [(1 - theta) * math.exp(-gamma * step) + theta for step in range(steps)]
    expected = statistics.fmean(1 - i / count * (1 - now) for now in thetas for i in range(1, count + 1))
    report.data["layers"] = {"counted": counted, "expected": expected, "steps": steps}
    report.table(
        f"work of {steps} steps with theta {theta}, gamma {gamma}, {count} layers, of that without dropping",
        ["", "counted", "schedule", "difference", "goal"],
        [
            [
                "matrix products",
                f"{counted:.4f}",
                f"{expected:.4f}",
                f"{100 * (counted / expected - 1):+.2f} %",
                "+-1 %",
            ]
        ],
    )


def main() -> None:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--steps", type=int, default=150, help="of teacher and students (quality)")
    parser.add_argument("--hidden", type=int, default=768, help="width (speed, training)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 128 tokens (speed, training)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    deepspeed.init_distributed(auto_mpi_discovery=False)
    report = Report("compression", arguments)
    measure = {"quality": quality, "speed": speed, "training": training, "layers": layers}
    for part in arguments.only:
        measure[part](arguments, report)
    report.save()


if __name__ == "__main__":
    main()
