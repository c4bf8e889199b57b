"""The main use, from text to a trained model, in a few minutes on two CPU cores.

Two ranks train the GPT with ZeRO-2 and stop; one rank loads their checkpoint at stage 1 and continues: the same
loss curve, on a different number of ranks and at a different stage, with nothing to convert. Then the weights are
exported, the model writes some text, and the loss must be below the unigram entropy, which no model without
context can beat.

    python demo.py               about four minutes: it is limited by time as well as by steps
    python demo.py --minutes 2   or as long as you like
    python demo.py --short       a smaller model and fewer steps
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import data
import torch
from model import GPT, GPTConfig

HERE = Path(__file__).resolve().parent
MINUTES = 4.0
AROUND_S = 25.0  # outside the steps of a run: start-up, validation, checkpoint or export, and the sample
MIN_STEPS = 100  # of both runs together; fewer would prove nothing, so they run even if the time is up
MAX_STEPS = 600
RESUME_TOLERANCE = 0.01  # nats per token between the validation losses on either side of the checkpoint


@dataclass(frozen=True)
class Plan:
    """The training that this machine is to do."""

    model: GPTConfig
    precision: str  # "fp32" or "bf16"
    first_steps: int  # on two ranks, ZeRO-2
    all_steps: int  # the rest on one rank, ZeRO-1
    learning_rate: float
    one_thread: bool = False  # for the single rank, where threads that wait for each other are slower

    @property
    def evaluate_every(self) -> int:
        return max(10, self.all_steps // 20)


class Clock:
    """The time budget of the demo, and when it does what."""

    def __init__(self, minutes: float) -> None:
        self.start, self.seconds = time.perf_counter(), 60 * minutes

    def left(self) -> float:
        """Seconds left."""
        return self.seconds - (time.perf_counter() - self.start)

    def say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self.start:4.0f} s] {text}", flush=True)


def seconds_per_micro_batch(config: GPTConfig, dtype: torch.dtype, threads: int, sequences: int = 4) -> float:
    """Forward and backward, the better of two after one warm-up."""
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


def make_plan(short: bool, clock: Clock) -> Plan:
    """Chooses the faster precision on this machine, and the largest model for which there is time."""
    small = GPTConfig(layers=2, heads=4, width=128, context=128)
    if short:
        return Plan(small, "fp32", 72, 120, 2e-3)
    for config in (GPTConfig(), GPTConfig(layers=4, heads=4, width=192, context=128), small):
        seconds = {"fp32": seconds_per_micro_batch(config, torch.float32, 1)}
        if config != small and steps_within(clock, seconds["fp32"]) < MIN_STEPS:
            continue  # however fast the rest of this machine is
        seconds["bf16"] = seconds_per_micro_batch(config, torch.bfloat16, 1)
        precision = min(seconds, key=seconds.__getitem__)
        cores = torch.get_num_threads()
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        on_all = seconds_per_micro_batch(config, dtype, cores)
        # A step is one micro-batch on each of two cores, or two on all cores.
        steps = steps_within(clock, 0.6 * seconds[precision] + 0.4 * 2 * min(seconds[precision], on_all))
        if steps >= 2 * MIN_STEPS:
            break
    said = ", ".join(f"{name} {1000 * value:.0f} ms" for name, value in seconds.items())
    clock.say(
        f"time of one micro-batch (4 sequences, forward and backward) on one core: {said}; "
        f"on all {cores} cores: {precision} {1000 * on_all:.0f} ms"
    )
    steps = max(MIN_STEPS, min(MAX_STEPS, steps)) // 20 * 20
    rate = 1e-3 if config == GPTConfig() else 2e-3
    return Plan(config, precision, steps * 3 // 5, steps, rate, one_thread=seconds[precision] < on_all)


def steps_within(clock: Clock, seconds: float) -> int:
    """Steps that there is time for, with a third on top of ``seconds`` for optimizer, communication and validation."""
    return int((clock.left() - 2 * AROUND_S) / (1.33 * seconds))


def plan_the_rest(plan: Plan, rows: list[dict[str, float]], least: int, clock: Clock) -> Plan:
    """After the first run: at which step the second continues, and how far it will get at the first one's pace."""
    steps = [row for row in rows if "train_loss" in row]
    done = int(steps[-1]["step"])
    pace = (steps[-1]["seconds"] - steps[0]["seconds"]) / max(1, done - 1)
    # one rank does the work of two, at half the speed at worst
    possible = done + max(least, int((clock.left() - AROUND_S) / max(1e-3, 2 * pace)))
    return replace(plan, first_steps=done, all_steps=max(done + 1, min(plan.all_steps, possible)))


def write_config(plan: Plan, stage: int, out: Path) -> Path:
    """A copy of one of the configs next to this file, with the length and height of the learning-rate schedule
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
    """The lines of metrics.csv; empty cells are left out of a line's dictionary."""
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
    """The checks that the run failed."""
    held_out = [row for row in rows if "validation_loss" in row]
    saved, resumed = (row["validation_loss"] for row in held_out if row["step"] == plan.first_steps)
    last, end = held_out[-1]["validation_loss"], held_out[-1]["step"]
    print("\nloss on held-out text, in nats per token (lower is better):")
    print(f"  {saved:.4f}  when 2 ranks saved it at stage 2, after step {plan.first_steps}")
    print(f"  {resumed:.4f}  when 1 rank had loaded it at stage 1")
    print(f"  {last:.4f}  at the end, after step {end:.0f}")
    print(f"  {entropy:.4f}  unigram entropy of that text, the best that a model without context can do")
    broken = []
    if abs(saved - resumed) > RESUME_TOLERANCE:
        broken.append("the resumed run does not start where the first one stopped")
    if end <= plan.first_steps:
        broken.append("the resumed run took no step")
    if last >= entropy:
        broken.append("the model does not beat the unigram entropy")
    return broken


def prepare_text(folder: Path, clock: Clock) -> data.Text:
    """The tokens, generated by the first demo on this machine."""
    if not (folder / "tokens.npz").exists():
        clock.say(
            "reading the source of Python's standard library; training a tokenizer on it (once; seconds)"
        )
        data.make(folder)
    text = data.load(folder)
    counts = f"{len(text.train):,} tokens to train on, {len(text.validation):,} held out"
    clock.say(f"text: {counts}, {data.VOCABULARY} different ones")
    return text


def train(plan: Plan, entropy: float, out: Path, clock: Clock) -> Plan:
    """Both runs, within the time; returns the plan as it was carried out."""
    clock.say("run 1 of 2: two ranks at ZeRO stage 2")
    share = 0.55 * (clock.left() - 2 * AROUND_S)
    limits = ("--steps", plan.first_steps, "--seconds", max(0, round(share)), "--at_least", MIN_STEPS // 2)
    launch(2, 2, plan, out, *limits, "--save", out / "checkpoint")
    rows = read_metrics(out / "metrics.csv")
    is_proven = rows[-1]["validation_loss"] < entropy - 0.1
    least = MIN_STEPS // (10 if is_proven else 2)
    plan = plan_the_rest(plan, rows, least, clock)
    print(flush=True)
    clock.say(f"run 2 of 2: one rank at stage 1 goes on from their checkpoint, step {plan.first_steps}")
    left = max(0, round(clock.left() - AROUND_S))
    limits = ("--steps", plan.all_steps, "--seconds", left, "--at_least", least)
    results = ("--export", out / "model", "--sample", 120)
    launch(1, 1, plan, out, *limits, "--load", out / "checkpoint", *results)
    return plan


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="a smaller model and fewer steps")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time for everything (default: 4)")
    parser.add_argument(
        "--out", type=Path, default=HERE / "out", help="folder for everything that is written"
    )
    args = parser.parse_args()
    clock = Clock(args.minutes)
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.csv").unlink(missing_ok=True)
    shutil.rmtree(out / "checkpoint", ignore_errors=True)

    text = prepare_text(out / "text", clock)
    plan = make_plan(args.short, clock)
    parameters = sum(p.numel() for p in GPT(plan.model).parameters())
    clock.say(
        f"model: {parameters / 1e6:.1f} million parameters, {plan.precision}; up to {plan.all_steps} steps, "
        f"{max(0, clock.left()):.0f} s left"
    )
    entropy = text.unigram_entropy()
    plan = train(plan, entropy, out, clock)

    rows = read_metrics(out / "metrics.csv")
    plot(rows, plan, entropy, out / "loss.png")
    broken = check(rows, plan, entropy)
    clock.say(f"done; written to {out}: loss.png, metrics.csv, model/model.safetensors, checkpoint/")
    if broken:
        sys.exit("FAILED: " + "; ".join(broken))


if __name__ == "__main__":
    main()
