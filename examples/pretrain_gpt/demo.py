"""The main job, from text to a trained model, in a few minutes on two CPU cores.

Two ranks train the GPT with ZeRO-2 and stop; one rank loads their checkpoint at stage 1 and goes on: the same
loss curve, on another number of ranks and another stage, with nothing to convert. Then the weights are
exported, the model writes some text, and the loss must be below the unigram entropy, which no model without
context can beat.

    python demo.py            about four minutes on two cores
    python demo.py --short    a smaller model for half a minute
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import data
import torch
from model import GPT, GPTConfig

HERE = Path(__file__).resolve().parent
TRAINING_BUDGET_S = 210
RESUME_TOLERANCE = 0.01  # nats per token between the validation losses on either side of the checkpoint


@dataclass(frozen=True)
class Plan:
    """What this machine is given to do."""

    model: GPTConfig
    precision: str  # "fp32" or "bf16"
    first_steps: int  # on two ranks, ZeRO-2
    all_steps: int  # the rest on one rank, ZeRO-1
    evaluate_every: int
    learning_rate: float
    one_thread: bool = False  # for the single rank, where threads that wait for each other are slower


def seconds_per_micro_batch(config: GPTConfig, dtype: torch.dtype, threads: int, sequences: int = 4) -> float:
    """Forward and backward, the better of two after one to warm up."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    model = GPT(config).to(dtype)
    ids = torch.randint(config.vocabulary, (sequences, config.context))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        model(ids, ids).backward()
        times.append(time.perf_counter() - start)
    torch.set_num_threads(before)
    return min(times[1:])


def make_plan(short: bool) -> Plan:
    """Chooses the faster precision of this machine and as many steps as fit into the time."""
    if short:
        return Plan(GPTConfig(layers=2, heads=4, width=128, context=128), "fp32", 80, 120, 20, 2e-3)
    config = GPTConfig()
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    seconds = {name: seconds_per_micro_batch(config, dtype, 1) for name, dtype in dtypes.items()}
    precision = min(seconds, key=seconds.__getitem__)
    cores = torch.get_num_threads()
    on_all = seconds_per_micro_batch(config, dtypes[precision], cores)
    said = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in seconds.items())
    print(f"one micro-batch on one core: {said}; on {cores}: {precision} {1000 * on_all:.0f} ms")
    # A step is one micro-batch on each of two cores, or two on all cores; a third on top for optimizer, exchange and
    # validation.
    step = 0.6 * seconds[precision] + 0.4 * 2 * min(seconds[precision], on_all)
    steps = max(100, min(600, int(TRAINING_BUDGET_S / (1.33 * step)))) // 20 * 20
    one_thread = seconds[precision] < on_all
    return Plan(config, precision, steps * 3 // 5, steps, steps // 20, 1e-3, one_thread)


def write_config(plan: Plan, stage: int, out: Path) -> Path:
    """A copy of one of the configs beside this file, with the length and height of the learning-rate schedule
    filled in."""
    config = json.loads((HERE / "configs" / f"zero{stage}_{plan.precision}.json").read_text())
    config["scheduler"]["params"] |= {
        "total_num_steps": plan.all_steps,
        "warmup_num_steps": plan.all_steps // 15,
    }
    config["optimizer"]["params"]["lr"] = plan.learning_rate
    path = out / f"zero{stage}_{plan.precision}.json"
    path.write_text(json.dumps(config, indent=2))
    return path


def launch(ranks: int, stage: int, plan: Plan, out: Path, *options: object) -> None:
    """Runs train.py through the `deepspeed` command; ends this program with its exit code if it fails."""
    sizes = {name: value for name, value in asdict(plan.model).items() if name != "vocabulary"}
    given = [
        "--deepspeed_config",
        write_config(plan, stage, out),
        *options,
        "--evaluate_every",
        plan.evaluate_every,
    ]
    given += [item for name, value in sizes.items() for item in (f"--{name}", value)]
    given += ["--text", out / "text", "--metrics", out / "metrics.csv"]
    arguments = ["--num_gpus", str(ranks), str(HERE / "train.py"), *map(str, given)]
    shown = shlex.join(arguments).replace(f"{Path.cwd()}{os.sep}", "")  # paths as one would type them here
    print(f"\n$ deepspeed {shown}", flush=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if ranks == 1 and plan.one_thread else None
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *arguments]
    code = subprocess.run(command, env=environment).returncode
    if code != 0:
        sys.exit(code)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of metrics.csv; what a line does not hold is left out of its dictionary."""
    numbers = ("step", "ranks", "zero_stage", "train_loss", "validation_loss", "tokens_per_s", "seconds")
    with open(path, newline="") as file:
        return [{name: float(row[name]) for name in numbers if row[name]} for row in csv.DictReader(file)]


def plot(rows: list[dict[str, float]], plan: Plan, entropy: float, path: Path) -> None:
    """Training and validation loss over the steps, with the change of ranks and stage marked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5), dpi=110, layout="constrained")
    for ranks, stage, colour in ((2, 2, "#1f6f8b"), (1, 1, "#c8553d")):
        part = [row for row in rows if row["ranks"] == ranks]
        label = f"training, {ranks} rank{'s' if ranks > 1 else ''}, ZeRO-{stage}, {plan.precision}"
        points = [(row["step"], row["train_loss"]) for row in part if "train_loss" in row]
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.2, alpha=0.75, label=label)
    held_out = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    axes.plot(
        *zip(*held_out, strict=True), "o-", color="#222222", markersize=3.5, linewidth=1, label="validation"
    )
    axes.axhline(entropy, color="#888888", linestyle=":", label="unigram entropy of the text")
    axes.axvline(plan.first_steps, color="#555555", linestyle="--", linewidth=1)
    axes.annotate(
        "saved by 2 ranks at stage 2,\nresumed by 1 rank at stage 1", (plan.first_steps, axes.get_ylim()[1]),
        xytext=(8, -8), textcoords="offset points", va="top", fontsize=9,
    )  # fmt: skip
    axes.set(
        xlabel="optimizer step", ylabel="loss (nats per token)", title="GPT on the source of Python's library"
    )
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.9))
    figure.savefig(path)


def check(rows: list[dict[str, float]], plan: Plan, entropy: float) -> list[str]:
    """What the run promised and did not keep."""
    held_out = [row for row in rows if "validation_loss" in row]
    saved, resumed = (row["validation_loss"] for row in held_out if row["step"] == plan.first_steps)
    last = held_out[-1]["validation_loss"]
    print(f"\nvalidation loss when saved by 2 ranks {saved:.4f}, when loaded by 1 rank {resumed:.4f}")
    print(f"validation loss at the end {last:.3f} nats per token, unigram entropy of the text {entropy:.3f}")
    broken = []
    if abs(saved - resumed) > RESUME_TOLERANCE:
        broken.append("the resumed run does not start where the first one stopped")
    if held_out[-1]["step"] != plan.all_steps:
        broken.append(f"the run ended at step {held_out[-1]['step']:.0f} and not at {plan.all_steps}")
    if last >= entropy:
        broken.append("the model does not beat the unigram entropy")
    return broken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="a smaller model and fewer steps")
    parser.add_argument(
        "--out", type=Path, default=HERE / "out", help="folder for everything that is written"
    )
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.csv").unlink(missing_ok=True)
    shutil.rmtree(out / "checkpoint", ignore_errors=True)

    if not (out / "text" / "tokens.npz").exists():
        print("reading the standard library's source and training the tokenizer on it")
        data.make(out / "text")
    text = data.load(out / "text")
    entropy = text.unigram_entropy()
    print(
        f"text: {len(text.train):,} training and {len(text.validation):,} validation tokens of {data.VOCABULARY} kinds"
    )

    plan = make_plan(args.short)
    parameters = sum(p.numel() for p in GPT(plan.model).parameters())
    print(f"model: {parameters / 1e6:.1f} million parameters, {plan.precision}, {plan.all_steps} steps")
    start = time.perf_counter()
    launch(2, 2, plan, out, "--steps", plan.first_steps, "--save", out / "checkpoint")
    resume = ("--load", out / "checkpoint", "--export", out / "model", "--sample", 120)
    launch(1, 1, plan, out, "--steps", plan.all_steps, *resume)

    rows = read_metrics(out / "metrics.csv")
    plot(rows, plan, entropy, out / "loss.png")
    broken = check(rows, plan, entropy)
    print(f"training took {time.perf_counter() - start:.0f} s")
    print(f"written to {out}: loss.png, metrics.csv, model/model.safetensors, checkpoint/")
    if broken:
        sys.exit("FAILED: " + "; ".join(broken))


if __name__ == "__main__":
    main()
