"""Progressive layer dropping against all layers: held-out loss and counted work of the demo's GPT, on bytes of text.

    python benchmarks/layer_dropping.py --save many_passes
    python benchmarks/layer_dropping.py --save some_passes --text 20000
    python benchmarks/layer_dropping.py --save fewer_passes --text 30000 --seeds 1

Three runs from the same seed, with the same settings: all layers in every step; the same for as many steps as cost the
work that dropping takes; and with layers dropped. How often the text is passed over decides who wins: dropping takes
capacity away, which a model feels that has not yet learned the text, and it regularises, which helps one that begins to
know it by heart. What has been measured is kept under results, by run and seed, so that a call that was ended is
continued by the next.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from jobs import FOLDER, progress
from report import RESULTS, Report, common_arguments

sys.path[:0] = [str(FOLDER.parent), str(FOLDER.parent / "examples/pretrain_gpt")]

from model import GPT, GPTConfig  # noqa: E402

import deepspeed  # noqa: E402

WHOLE, SHORTER, DROPPING = "all layers", "all layers, fewer steps", "layers dropped"
RUNS = (WHOLE, DROPPING, SHORTER)
SIZES = ("text", "layers", "heads", "width", "context", "batch", "steps", "rate", "decay", "theta")
BYTES, LOOKS = 256, 10
Found = dict[str, dict[str, dict[str, Any]]]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--text", type=int, default=12_000, help="bytes to train on")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2e-3, help="of learning, at its peak")
    parser.add_argument("--decay", type=float, default=0.1, help="of weights")
    parser.add_argument("--theta", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.seeds, arguments.steps, arguments.layers, arguments.width = [1], 30, 4, 32
    return arguments


# Text ---------------------------------------------------------------------------------------------------------------


def read_text(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the standard library's source: ``size`` to train on, taken evenly from all of it, and 50,000 to test,
    from other files."""
    import data

    texts = data.read_sources()
    parts = []
    for held_out, wanted in ((False, size), (True, 50_000)):
        files = [text.encode() for name, text in texts.items() if data.is_validation(name) == held_out]
        share = wanted / sum(map(len, files))
        cut = b"".join(text[: int(len(text) * share) + 1] for text in files)
        parts.append(np.frombuffer(cut[:wanted], dtype=np.uint8).astype(np.uint16))
    return parts[0], parts[1]


def batches(tokens: np.ndarray, arguments: argparse.Namespace, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    import data

    size = arguments.batch
    rows = data.Batches(tokens, arguments.context, global_batch=size, micro_batch=size, rank=0, ranks=1)
    return rows.from_step(step)


# Work ---------------------------------------------------------------------------------------------------------------


def made(arguments: argparse.Namespace, layers: int) -> GPT:
    return GPT(GPTConfig(BYTES, arguments.context, layers, arguments.heads, arguments.width))


def work_of(arguments: argparse.Namespace) -> tuple[int, int]:
    """(of a block, of everything else) in one step, forward and backward: operations in matrix products."""
    counted = []
    ids = torch.zeros(arguments.batch, arguments.context, dtype=torch.int64)
    for layers in (1, 2):
        model = made(arguments, layers)
        with FlopCounterMode(display=False) as counter:
            model(ids, ids).backward()
        counted.append(counter.get_total_flops())
    block = counted[1] - counted[0]
    return block, counted[0] - block


class Calls:
    """How often the blocks of a model ran: skipped ones do not reach their parts."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        self.count = 0
        for block in blocks:
            block.get_submodule("up").register_forward_hook(self._add)

    def _add(self, module: nn.Module, *_: Any) -> None:
        self.count += module.training


# Runs ---------------------------------------------------------------------------------------------------------------


def settings(arguments: argparse.Namespace, run: str, steps: int) -> dict[str, Any]:
    """The engine's config. Gamma is the paper's: theta is near its end after the first twentieth of the steps."""
    rates = {"total_num_steps": steps, "warmup_num_steps": max(2, steps // 20), "cos_min_ratio": 0.05}
    adam = {"lr": arguments.rate, "betas": [0.9, 0.95], "weight_decay": arguments.decay}
    config = {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": adam},
        "scheduler": {"type": "WarmupCosineLR", "params": rates},
        "steps_per_print": 1_000_000,
    }
    if run == DROPPING:
        dropping = {"enabled": True, "theta": arguments.theta, "gamma": 100 / steps}
        config["progressive_layer_drop"] = dropping
    return config


def measure(arguments: argparse.Namespace, run: str, seed: int, share: float) -> dict[str, Any]:
    """Held-out loss ten times on the way, loss of the last twentieth of the steps, and the work. ``share`` of the
    steps, for the run that has fewer."""
    steps = round(arguments.steps * share) if run == SHORTER else arguments.steps
    train, held_out = read_text(arguments.text)
    torch.manual_seed(seed)
    model = made(arguments, arguments.layers)
    calls = Calls(model.blocks)
    engine, *_ = deepspeed.initialize(model=model, config=settings(arguments, run, steps))
    own = batches(train, arguments, seed * 100_000)
    losses, seen = [], []
    for step in range(1, steps + 1):
        loss = engine(*next(own))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step * LOOKS // steps > len(seen):
            seen.append(validate(engine, batches(held_out, arguments, 0), arguments, last=step == steps))
            progress(f"{run}, seed {seed}: step {step}, {losses[-1]:.3f}, held out {seen[-1]:.4f}")
    engine.destroy()
    block, rest = work_of(arguments)
    work = calls.count * block + steps * rest
    whole = arguments.steps * (arguments.layers * block + rest)
    return {
        "steps": steps,
        "held_out": seen[-1],
        "on_the_way": seen,
        "trained": statistics.fmean(losses[-max(1, steps // 20) :]),
        "work": work,
        "share": work / whole,
    }


@torch.no_grad()
def validate(
    engine: Callable[..., Tensor], data: Iterator[Any], arguments: argparse.Namespace, *, last: bool
) -> float:
    """On 8,000 bytes, at the end on 50,000."""
    model: Any = engine
    model.eval()
    count = (50_000 if last else 8_000) // (arguments.batch * arguments.context)
    found = statistics.fmean(engine(*next(data)).item() for _ in range(count))
    model.train()
    return found


# What it prints -----------------------------------------------------------------------------------------------------


def kept(arguments: argparse.Namespace) -> Found:
    """By run and seed, what earlier calls have saved."""
    path = RESULTS / f"layer_dropping_{arguments.save}.json"
    if arguments.save is None or not path.exists():
        return {}
    saved = json.loads(path.read_text())
    if any(saved["arguments"][name] != getattr(arguments, name) for name in SIZES):
        sys.exit(f"{path.name} has other sizes: give --save another name")
    return saved["found"]


def rows(found: Found) -> list[list[str]]:
    table = []
    for run in (name for name in RUNS if name in found):
        own = found[run]
        pairs = [(own[seed], found[WHOLE][seed]) for seed in own if seed in found.get(WHOLE, {})]
        apart = [100 * (one["held_out"] / whole["held_out"] - 1) for one, whole in pairs]
        compared = run != WHOLE and bool(apart)
        table.append(
            [
                run,
                str(len(own)),
                str(next(iter(own.values()))["steps"]),
                f"{100 * mean(own, 'share'):.1f} %",
                f"{mean(own, 'held_out'):.4f}",
                f"{mean(own, 'trained'):.4f}",
                f"{statistics.fmean(apart):+.2f} %" if compared else "",
                f"{max(apart):+.2f} %" if compared else "",
            ]
        )
    return table


def mean(by_seed: dict[str, dict[str, Any]], name: str) -> float:
    return statistics.fmean(one[name] for one in by_seed.values())


def tell(arguments: argparse.Namespace, found: Found) -> None:
    """Print and save what there is so far."""
    report = Report("layer_dropping", arguments)
    parameters = sum(param.numel() for param in made(arguments, arguments.layers).parameters())
    times = arguments.steps * arguments.batch * arguments.context / arguments.text
    report.line(
        f"{arguments.layers} layers of {arguments.width}, {parameters / 1e6:.2f}M parameters; {arguments.steps} steps "
        f"of {arguments.batch} x {arguments.context} bytes, {times:.1f} times over {arguments.text:,} bytes; theta "
        f"{arguments.theta}, fp32"
    )
    report.data["found"] = found
    report.table(
        "loss, nats per byte, at the end; difference: of the held-out loss, to all layers with the same seed",
        ["", "seeds", "steps", "work", "held out", "trained", "difference", "worst"],
        rows(found),
    )
    looks = [
        [
            run,
            *(f"{statistics.fmean(one['on_the_way'][i] for one in own.values()):.3f}" for i in range(LOOKS)),
        ]
        for run, own in found.items()
    ]
    report.table(
        "held-out loss on the way (on 8,000 bytes; at the end on 50,000)",
        ["", *(f"{10 * (i + 1)} %" for i in range(LOOKS))],
        looks,
    )
    report.save()


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    torch.set_num_threads(arguments.threads)
    os.environ["DEEPSPEED_PROGRESS"] = "0"
    deepspeed.init_distributed(auto_mpi_discovery=False)
    found = kept(arguments)
    for seed in arguments.seeds:
        for run in arguments.runs:
            if str(seed) in found.get(run, {}):
                continue
            share = found[DROPPING][str(seed)]["share"] if run == SHORTER and DROPPING in found else 1.0
            progress(f"{run}, seed {seed}")
            found.setdefault(run, {})[str(seed)] = measure(arguments, run, seed, share)
            if arguments.save is not None:
                tell(arguments, found)
    if arguments.save is None:
        tell(arguments, found)


if __name__ == "__main__":
    main()
