"""Loss after training in fewer bits against training in full: the demo's GPT, narrow, on two ranks.

Each pair trains the same model on the same text, in the same order, from the same seed: ZeRO-3 plain and with qwZ and
qgZ; Adam plain, 1-bit and 0/1; LAMB plain and 1-bit. The loss is that of held-out text after the last step; beside it
the mean of the last twentieth of the steps. What has been measured is kept under results, by run and seed, so that a
call that was ended is continued by the next.

    python benchmarks/compressed_loss.py --save cpu --seeds 1 2 3
    until python benchmarks/compressed_loss.py --save cpu --seconds 600; do :; done

With ``--seconds``, a call ends after about so long, in the middle of a run, and the next one resumes that from a
checkpoint, exactly.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs import FOLDER, Job, progress
from report import RESULTS, Report, common_arguments

sys.path.append(str(FOLDER.parent / "examples/pretrain_gpt"))

RANKS = 2
RATE = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
LASTING = {**RATE, "betas": [0.9, 0.999]}  # for variances that are frozen: 0.95 remembers 20 gradients
LAYERWISE = {**LASTING, "lr": 1e-2}  # LAMB: a rate is a share of the norm of each tensor
PLAIN = {"ZeRO-3, qwZ and qgZ": "ZeRO-3", "1-bit Adam": "Adam", "0/1 Adam": "Adam", "1-bit LAMB": "LAMB"}
GOALS = {"ZeRO-3, qwZ and qgZ": 0.5, "1-bit Adam": 1.0, "0/1 Adam": 1.0, "1-bit LAMB": 1.0}  # percent
RUNS = ("ZeRO-3", "ZeRO-3, qwZ and qgZ", "Adam", "1-bit Adam", "0/1 Adam", "LAMB", "1-bit LAMB")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Loss in fewer bits against loss in full.")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank and step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then go on in another call")
    parser.add_argument("--text", type=Path, default=FOLDER.parent / "examples/pretrain_gpt/out/text")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.seeds, arguments.steps, arguments.layers, arguments.width = [1], 20, 1, 32
    return arguments


def settings(run: str, steps: int, batch: int) -> dict[str, Any]:
    """The engine's config. Gradients are summed in full for a fifth of the steps. From then on the ranks of 1-bit Adam
    agree on a new variance after every tenth of the steps, and 0/1 Adam, whose variance stays, exchanges ever more
    seldom, at last every eighth step."""
    fifth = max(2, steps // 5)
    optimizer: dict[str, Any] = {"type": "AdamW", "params": RATE if run.startswith("ZeRO-3") else LASTING}
    if run == "1-bit Adam":
        optimizer = {
            "type": "OneBitAdam",
            "params": {**LASTING, "freeze_step": fifth, "variance_interval": fifth // 2},
        }
    if run == "0/1 Adam":
        intervals = {"var_freeze_step": fifth, "local_step_scaler": fifth, "local_step_clipper": 8}
        optimizer = {"type": "ZeroOneAdam", "params": {**LASTING, **intervals}}
    if run == "LAMB":
        optimizer = {"type": "Lamb", "params": LAYERWISE}
    if run == "1-bit LAMB":
        optimizer = {"type": "OneBitLamb", "params": {**LAYERWISE, "freeze_step": fifth}}
    zero: dict[str, Any] = {"stage": 3 if run.startswith("ZeRO-3") else 0}
    if "qwZ" in run:
        zero |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    schedule = {"total_num_steps": steps, "warmup_num_steps": max(2, steps // 20)}
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1.0,
        "optimizer": optimizer,
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
        "zero_optimization": zero,
        "steps_per_print": 1_000_000,
    }


class Learner:
    """One rank of a run; imported by ``worker.py``."""

    def __init__(self, run: str, seed: int, steps: int, shape: dict[str, int], text: str, kept: str) -> None:
        import torch
        from data import load
        from model import GPT, GPTConfig

        import deepspeed

        torch.manual_seed(seed)
        self.steps, self.seed, self.batch, self.context = steps, seed, shape["batch"], shape["context"]
        module = GPT(GPTConfig(4096, self.context, shape["layers"], shape["heads"], shape["width"]))
        self.parameters = sum(p.numel() for p in module.parameters())
        self.engine = deepspeed.initialize(model=module, config=settings(run, steps, self.batch))[0]
        self.text = load(Path(text))
        self.kept = Path(kept)

    def train(self, seconds: float | None) -> float | None:
        """The mean loss of the last twentieth of the steps, on this rank's batches. None: there was no time for all of
        them, and those made are kept."""
        begin, losses = time.monotonic(), self._resume()
        batches = self._batches(self.text.train).from_step(self.seed * self.steps + len(losses))
        while len(losses) < self.steps:
            loss = self.engine(*next(batches))
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.item())  # a kept tensor would pin the memory around it
            if seconds is not None and len(losses) % 20 == 0 and self._latest(begin) > seconds:
                self._keep(losses)
                return None
        last = losses[-max(1, self.steps // 20) :]
        return sum(last) / len(last)

    def _latest(self, begin: float) -> float:
        """Seconds since ``begin``, the same on all ranks."""
        import torch
        import torch.distributed as dist

        seconds = torch.tensor([time.monotonic() - begin])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return seconds.item()

    def _keep(self, losses: list[float]) -> None:
        import torch.distributed as dist

        self.engine.save_checkpoint(str(self.kept), tag=str(len(losses)))
        (self.kept / f"losses_{dist.get_rank()}.json").write_text(json.dumps(losses))

    def _resume(self) -> list[float]:
        import torch.distributed as dist

        path = self.kept / f"losses_{dist.get_rank()}.json"
        if not path.exists():
            return []
        losses = json.loads(path.read_text())
        self.engine.load_checkpoint(str(self.kept), tag=str(len(losses)))
        return losses

    def validate(self) -> float:
        """The mean loss of 64 batches of held-out text, the same ones for all runs."""
        import torch

        self.engine.eval()
        batches = self._batches(self.text.validation).from_step(0)
        with torch.no_grad():
            return sum(self.engine(*next(batches)).item() for _ in range(64)) / 64

    def size(self) -> int:
        return self.parameters

    def _batches(self, tokens: Any) -> Any:
        import torch.distributed as dist
        from data import Batches

        return Batches(
            tokens,
            self.context,
            global_batch=RANKS * self.batch,
            micro_batch=self.batch,
            rank=dist.get_rank(),
            ranks=RANKS,
        )


def measure(arguments: argparse.Namespace, run: str, seed: int, seconds: float) -> dict[str, float] | None:
    """None: there was no time for all steps."""
    shape = {name: getattr(arguments, name) for name in ("batch", "layers", "heads", "width", "context")}
    options = {
        "run": run,
        "seed": seed,
        "steps": arguments.steps,
        "shape": shape,
        "text": str(arguments.text.resolve()),
        "kept": str(kept_at(arguments, run, seed)),
    }
    with Job(run, "compressed_loss:Learner", options, ranks=RANKS, timeout=3600) as job:
        trained = job.call("train", seconds=None if math.isinf(seconds) else seconds)
        if None in trained:
            return None
        return {
            "trained": statistics.fmean(trained),
            "validation": statistics.fmean(job.call("validate")),
            "parameters": job.call("size")[0],
        }


def kept_at(arguments: argparse.Namespace, run: str, seed: int) -> Path:
    """The folder of a run that was ended."""
    return arguments.text.resolve().parent / f"compressed_loss_{arguments.save}_{run}_{seed}"


def kept(arguments: argparse.Namespace) -> dict[str, dict[str, dict[str, float]]]:
    """By run and seed, what earlier calls have saved."""
    path = RESULTS / f"compressed_loss_{arguments.save}.json"
    if arguments.save is None or not path.exists():
        return {}
    saved = json.loads(path.read_text())
    same = ("steps", "batch", "layers", "heads", "width", "context")
    if any(saved["arguments"][name] != getattr(arguments, name) for name in same):
        sys.exit(f"{path.name} has other sizes: give --save another name")
    return saved["found"]


def rows(found: dict[str, dict[str, dict[str, float]]]) -> list[list[str]]:
    table = []
    for run in (name for name in RUNS if name in found):
        plain = found.get(PLAIN.get(run, run), {})
        seeds = [seed for seed in found[run] if seed in plain]
        differences = [
            100 * (found[run][seed]["validation"] / plain[seed]["validation"] - 1) for seed in seeds
        ]
        several = len(differences) > 1
        mean = f"{statistics.fmean(differences):+.2f} %" if differences and run in PLAIN else ""
        worst = f"{max(differences):+.2f} %" if several and run in PLAIN else ""
        table.append(
            [
                run,
                str(len(found[run])),
                f"{statistics.fmean(one['validation'] for one in found[run].values()):.4f}",
                f"{statistics.fmean(one['trained'] for one in found[run].values()):.4f}",
                mean,
                worst,
                f"{GOALS[run]} %" if run in GOALS else "",
            ]
        )
    return table


def tell(arguments: argparse.Namespace, found: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print and save what there is so far."""
    report = Report("compressed_loss", arguments)
    parameters = next(one["parameters"] for by_seed in found.values() for one in by_seed.values())
    report.line(
        f"{parameters / 1e6:.1f}M parameters, {arguments.steps} steps of {RANKS} x {arguments.batch} sequences of "
        f"{arguments.context} tokens, fp32"
    )
    report.data["found"] = found
    report.table(
        "loss, nats per token; difference: of validation, to the plain run of the same seed",
        ["", "seeds", "validation", "last 5 % of training", "difference, mean", "worst", "at most"],
        rows(found),
    )
    report.save()


def main(argv: Sequence[str] | None = None) -> None:
    from data import make

    arguments = parse(argv)
    if not (arguments.text / "tokens.npz").exists():
        progress("making the text (once)")
        make(arguments.text)
    found, end = kept(arguments), time.monotonic() + arguments.seconds
    for seed in arguments.seeds:
        for run in arguments.runs:
            if str(seed) in found.get(run, {}):
                continue
            progress(f"{run}, seed {seed}")
            result = measure(arguments, run, seed, end - time.monotonic())
            if result is None:
                sys.exit("the time is over: call again")
            found.setdefault(run, {})[str(seed)] = result
            shutil.rmtree(kept_at(arguments, run, seed), ignore_errors=True)
            if arguments.save is not None:
                tell(arguments, found)
    if arguments.save is None:
        tell(arguments, found)


if __name__ == "__main__":
    main()
