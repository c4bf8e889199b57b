"""Loss against time over a slow link: the demo's GPT on two hosts, plain, with ZeRO++ and with 0/1 Adam.

    python examples/slow_links/train.py                                # 100 Mbit/s
    python examples/slow_links/train.py --mbits 20 --runs Adam "0/1 Adam"
    python examples/slow_links/train.py --mbits 20 --runs ZeRO++ --add # to the picture of that
    python examples/slow_links/train.py --no_limit                     # where namespaces are not allowed

Model and text are those of examples/pretrain_gpt. The hosts are network namespaces of this machine, joined by a link of
that rate (benchmarks/links.py: Linux, iproute2). Every run takes the same steps on the same data; what differs is what
travels. Writes measurements of each run, and the picture, to examples/slow_links/out.
"""

from __future__ import annotations

import argparse
import csv
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent / "pretrain_gpt"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from data import Batches, load, make  # noqa: E402
from links import Links, LinksError  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402

import deepspeed  # noqa: E402

RUNS = ("Adam", "0/1 Adam", "ZeRO-3", "ZeRO++")
RANKS = 2


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbits", type=float, default=100.0, help="rate of the link, each way")
    parser.add_argument("--no_limit", action="store_true", help="two ranks on this host, without namespaces")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--add", action="store_true", help="draw the runs that are in the folder as well")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank and step")
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument(
        "--text", type=Path, default=HERE.parent / "pretrain_gpt/out/text", help="made if missing"
    )
    parser.add_argument("--out", type=Path, default=HERE / "out")
    parser.add_argument("--rank_of", choices=RUNS, help=argparse.SUPPRESS)  # what each rank is started with
    return parser.parse_args(argv)


def settings(options: argparse.Namespace, run: str) -> dict[str, Any]:
    """The engine's config. 0/1 Adam freezes its variance after a fifth of the steps; from then on ranks exchange ever
    more seldom, at last every eighth step."""
    rates = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
    optimizer: dict[str, Any] = {"type": "AdamW", "params": rates}
    if run == "0/1 Adam":
        tenth = max(1, options.steps // 10)
        intervals = {"var_freeze_step": 2 * tenth, "local_step_scaler": tenth, "local_step_clipper": 8}
        optimizer = {"type": "ZeroOneAdam", "params": {**rates, **intervals}}
    zero: dict[str, Any] = {"stage": 3 if run in ("ZeRO-3", "ZeRO++") else 0}
    if run == "ZeRO++":
        zero |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    return {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_clipping": 1.0,
        "optimizer": optimizer,
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": options.steps, "warmup_num_steps": max(2, options.steps // 20)},
        },
        "bf16": {"enabled": options.precision == "bf16"},
        "zero_optimization": zero,
        "steps_per_print": 1_000_000,
    }


def train(options: argparse.Namespace, run: str) -> None:
    """One rank. The first writes the time since the start of training and the mean loss of the ranks' batches."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(4096, options.context, options.layers, options.heads, options.width))
    engine = deepspeed.initialize(model=model, config=settings(options, run))[0]
    rank = torch.distributed.get_rank()
    batches = Batches(
        load(options.text).train,
        options.context,
        global_batch=RANKS * options.batch,
        micro_batch=options.batch,
        rank=rank,
        ranks=RANKS,
    ).from_step(0)
    rows: list[tuple[int, float, float]] = []
    torch.distributed.barrier()
    start = time.perf_counter()
    for step in range(1, options.steps + 1):
        loss = engine(*next(batches))
        engine.backward(loss)
        engine.step()
        rows.append((step, time.perf_counter() - start, loss.item()))
    losses = torch.tensor([loss for _, _, loss in rows])
    torch.distributed.all_reduce(losses)
    if rank == 0:
        with open(measurements(options, run), "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("step", "seconds", "loss"))
            writer.writerows((s, t, m) for (s, t, _), m in zip(rows, (losses / RANKS).tolist(), strict=True))
    torch.distributed.barrier()
    engine.destroy()


def measurements(options: argparse.Namespace, run: str) -> Path:
    return options.out / f"{run.replace('/', '')}.csv"


def read(path: Path) -> list[dict[str, float]]:
    with open(path, newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def start_ranks(command: list[str], links: Links | None) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if links is not None:
        status = links.run(command, env=environment)
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            subprocess.Popen(command, env={**environment, **common, "RANK": str(i), "LOCAL_RANK": str(i)})
            for i in range(RANKS)
        ]
        status = max(rank.wait() for rank in ranks)
    if status:
        sys.exit(f"A rank failed (exit status {status}).")


def draw(options: argparse.Namespace, runs: dict[str, list[dict[str, float]]]) -> None:
    """Loss against time, each point the mean of a twentieth of the steps before it."""
    try:
        import matplotlib
    except ImportError:
        print("No picture: it needs matplotlib (pip install matplotlib).")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=110, layout="constrained")
    for run, rows in runs.items():
        width = max(1, len(rows) // 20)
        means = [
            sum(row["loss"] for row in rows[i : i + width]) / width for i in range(len(rows) - width + 1)
        ]
        axes.plot([row["seconds"] for row in rows[width - 1 :]], means, label=run)
    link = "no limit" if options.no_limit else f"{options.mbits:g} Mbit/s"
    axes.set(
        xlabel="seconds", ylabel="loss (nats per token)", title=f"Two hosts, {link}, {options.steps} steps"
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(options.out / "loss.png")


def main(argv: Sequence[str] | None = None) -> dict[str, list[dict[str, float]]]:
    argv = list(sys.argv[1:] if argv is None else argv)
    options = parse_arguments(argv)
    if options.rank_of:
        train(options, options.rank_of)
        return {}
    try:
        links = None if options.no_limit else Links(RANKS, options.mbits)
    except LinksError as error:
        sys.exit(
            f"No namespaces can be made on this machine, so there is no link to limit: {error}\n"
            "--no_limit trains two ranks without them: the losses are the same, the times are not."
        )
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        if not (options.text / "tokens.npz").exists():
            print("making the text (once)", flush=True)
            make(options.text)
        runs: dict[str, list[dict[str, float]]] = {}
        for run in options.runs:
            start_ranks([sys.executable, str(Path(__file__).resolve()), *argv, "--rank_of", run], links)
            rows = runs[run] = read(measurements(options, run))
            last = rows[-max(1, len(rows) // 20) :]
            mean = sum(row["loss"] for row in last) / len(last)
            print(f"{run:10} {rows[-1]['seconds']:7.1f} s  loss {mean:.3f}", flush=True)
    finally:
        if links is not None:
            links.close()
    earlier = [run for run in RUNS if run not in runs and measurements(options, run).exists()]
    shown = {**runs, **{run: read(measurements(options, run)) for run in earlier if options.add}}
    draw(options, {run: shown[run] for run in RUNS if run in shown})
    return runs


if __name__ == "__main__":
    main()
