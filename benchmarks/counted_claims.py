"""What the documents' headlines say of sizes, counted without training their models.

Bytes: what a rank sends in a step of LAMB and of 1-bit LAMB, in its warm-up and behind it, on ranks of this host; and
over a run whose warm-up has the paper's share (C. Li et al. 2021: 1,000 of 5,993 steps). Parameters: models in the
shapes of Rajbhandari et al. 2022 (DeepSpeed-MoE), built of this package's layers on the meta device: all of them, and
those that a token passes.

    python benchmarks/counted_claims.py --save cpu
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from report import Report, common_arguments
from scale import CONTEXT, take_step

RANKS = 4
WARM_UP, STEPS = 1000, 5993
VOCABULARY, POSITIONS = 50257, 2048


def rank_of(rank: int, size: str, store: str, found: str) -> None:
    """Write what rank 0 sends in the last step of each kind to the file ``found``."""
    import deepspeed
    import gpt

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    sent: dict[str, list[int]] = {}
    for name, more in (("Lamb", {}), ("OneBitLamb", {"freeze_step": 2})):
        optimizer = {"type": name, "params": {"lr": 1e-3, **more}}
        config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": optimizer}
        engine = deepspeed.initialize(model=gpt.build(size, CONTEXT), config=config)[0]
        link, sent[name] = engine.replica_groups.all_ranks, []
        for _ in range(4):
            before = link.bytes_sent
            take_step(engine)
            sent[name].append(link.bytes_sent - before)
        engine.destroy()
    if rank == 0:
        Path(found).write_text(json.dumps(sent))
    torch.distributed.barrier()


def traffic(report: Report, size: str) -> None:
    """The table of bytes."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found.json")
        arguments = (size, f"{folder}/store", str(found))
        torch.multiprocessing.spawn(rank_of, arguments, nprocs=RANKS)
        sent = json.loads(found.read_text())
    plain, early, late = sent["Lamb"][-1], sent["OneBitLamb"][0], sent["OneBitLamb"][-1]
    share = WARM_UP / STEPS
    run = share * early + (1 - share) * late
    rows = {
        "LAMB": plain,
        "1-bit LAMB, warm-up": early,
        "1-bit LAMB, behind it": late,
        "1-bit LAMB, a run": run,
    }
    report.data["bytes"] = rows
    report.table(
        f"bytes that one of {RANKS} ranks sends in a step, {size} GPT, bf16",
        ("optimizer", "MB", "fewer"),
        [(name, f"{each / 1e6:.3f}", f"{plain / each:.2f} x") for name, each in rows.items()],
    )


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    experts: tuple[int, ...] = ()
    """Of every second layer; empty for a dense model."""
    residual: bool = False


def pyramid(layers: int, few: int) -> tuple[int, ...]:
    """As many experts in the layers, and twice as many in the last two."""
    return (few,) * (layers // 2 - 2) + (2 * few,) * 2


SHAPES = {
    "350M + MoE-128": Shape(24, 1024, (128,) * 12),
    "350M + PR-MoE-32/64": Shape(24, 1024, pyramid(24, 32), True),
    "350M + PR-MoE-32/64, 21 layers (MoS)": Shape(21, 1024, pyramid(21, 32), True),
    "1.3B + MoE-128": Shape(24, 2048, (128,) * 12),
    "1.3B + PR-MoE-64/128": Shape(24, 2048, pyramid(24, 64), True),
    "1.3B + PR-MoE-64/128, 21 layers (MoS)": Shape(21, 2048, pyramid(21, 64), True),
    "dense 6.7B": Shape(32, 4096),
}


def numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def parameters(shape: Shape) -> tuple[int, int]:
    """All, and those of a token with one expert in each layer that has some."""
    from deepspeed.moe.layer import MoE

    hidden = shape.hidden
    with torch.device("meta"):
        feed_forward = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        attention = numel(nn.Linear(hidden, 3 * hidden)) + numel(nn.Linear(hidden, hidden)) + 4 * hidden
        total = shape.layers * attention + (VOCABULARY + POSITIONS + 2) * hidden
        total += (shape.layers - len(shape.experts)) * numel(feed_forward)
        idle = 0
        for count in shape.experts:
            layer = MoE(hidden, feed_forward, count, k=1, use_residual=shape.residual)
            total += numel(layer)
            idle += (count - 1) * numel(feed_forward)
    return total, total - idle


def sizes(report: Report, names: Sequence[str]) -> None:
    """The table of parameters, against the mixture of the same width."""
    rows, whole = [], 0
    for name in names:
        total, used = parameters(SHAPES[name])
        whole = total if "+ MoE" in name else whole
        smaller = "" if name.startswith("dense") else f"{whole / total:.2f} x"
        rows.append((name, f"{total / 1e9:.2f}", smaller, f"{used / 1e9:.2f}"))
    report.data["parameters"] = rows
    report.table(
        "parameters in billions, one expert for each token",
        ("model", "all", "fewer", "of a token"),
        rows,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = common_arguments("What the documents' headlines say of sizes, counted.")
    arguments = parser.parse_args(argv)
    report = Report("counted_claims", arguments)
    traffic(report, "tiny" if arguments.quick else "10M")
    sizes(report, list(SHAPES)[:3] if arguments.quick else list(SHAPES))
    report.save()


if __name__ == "__main__":
    main()
