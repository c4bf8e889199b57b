"""Trains the GPT of `model.py` on the text of `data.py`: one script for every ZeRO stage, precision and
number of ranks.

    deepspeed --num_gpus 2 train.py --deepspeed_config configs/zero2_bf16.json --steps 360 --save out/checkpoint
    deepspeed --num_gpus 1 train.py --deepspeed_config configs/zero1_bf16.json --steps 600 --load out/checkpoint

What the ranks do is in the JSON file; nothing here depends on a stage or a dtype. It also runs under `torchrun`
and, as a single rank, under plain `python`.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from data import Batches, Text, load, make
from model import GPT, GPTConfig, generate
from tqdm import tqdm

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator

OUT = Path(__file__).parent / "out"
COLUMNS = (
    "step",
    "ranks",
    "zero_stage",
    "train_loss",
    "validation_loss",
    "tokens_per_s",
    "memory_mb",
    "seconds",
)
VALIDATION_WINDOWS = 64


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    sizes = GPTConfig()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", type=int, default=600, help="optimizer steps at which to stop, counted from the first run"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="time after which to stop, if that comes before --steps",
    )
    parser.add_argument(
        "--at_least", type=int, default=1, metavar="STEPS", help="steps to take however long they need"
    )
    parser.add_argument("--load", type=Path, help="checkpoint folder to go on from")
    parser.add_argument("--save", type=Path, help="checkpoint folder to write at the end")
    parser.add_argument("--export", type=Path, help="folder for the final weights as model.safetensors")
    parser.add_argument(
        "--text", type=Path, default=OUT / "text", help="folder with the tokens; made if missing"
    )
    parser.add_argument(
        "--metrics", type=Path, default=OUT / "metrics.csv", help="file to which measurements are added"
    )
    parser.add_argument("--evaluate_every", type=int, default=25, metavar="STEPS")
    parser.add_argument(
        "--sample", type=int, default=0, metavar="TOKENS", help="print this much generated text at the end"
    )
    parser.add_argument("--layers", type=int, default=sizes.layers)
    parser.add_argument("--heads", type=int, default=sizes.heads)
    parser.add_argument("--width", type=int, default=sizes.width)
    parser.add_argument("--context", type=int, default=sizes.context)
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    return deepspeed.add_config_arguments(parser).parse_args(argv)


def shared_text(folder: Path) -> Text:
    """The tokens; if there are none yet, rank 0 generates them while the others wait."""
    if dist.get_rank() == 0 and not (folder / "tokens.npz").exists():
        make(folder)
    dist.barrier()
    return load(folder)


class Run:
    """An engine, its data, and what is measured along the way."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, text: Text, args: argparse.Namespace) -> None:
        self.engine, self.text, self.args = engine, text, args
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        micro_batch = engine.train_micro_batch_size_per_gpu()
        mine = {"micro_batch": micro_batch, "rank": self.rank, "ranks": self.ranks}
        self.batches = Batches(text.train, args.context, global_batch=engine.train_batch_size(), **mine)
        self.held_out = Batches(text.validation, args.context, global_batch=micro_batch * self.ranks, **mine)
        self.tokens_per_step = engine.train_batch_size() * args.context
        self.started = time.perf_counter()
        self.late = False  # whether the time of --seconds is up, as rank 0 told all ranks

    def train(self) -> None:
        """Steps until ``--steps`` or ``--seconds``, measuring every step and validating at intervals, at the end, and
        right after a resume."""
        engine, args = self.engine, self.args
        first = engine.global_steps
        if args.load is not None:
            self.record(None, self.validate())
        batches = self.batches.from_step(engine.global_steps)
        look = {
            "disable": self.rank != 0,
            "unit": "step",
            "mininterval": 0.1 if sys.stderr.isatty() else 10.0,
        }
        with tqdm(total=args.steps, initial=engine.global_steps, **look) as bar:
            is_over = engine.global_steps >= args.steps
            while not is_over:
                start = time.perf_counter()
                loss = self.step(batches)
                speed = self.tokens_per_step / (time.perf_counter() - start)
                loss, memory_mb = self.gather(loss)
                step = engine.global_steps
                is_over = step >= args.steps or (self.late and step - first >= args.at_least)
                is_due = step % args.evaluate_every == 0 or is_over
                self.record(loss, self.validate() if is_due else None, speed, memory_mb)
                memory = "+".join(map(str, memory_mb))
                facts = (
                    f"training loss {loss:.3f}, {speed:,.0f} tokens/s, {memory} MB on {self.ranks} rank(s)"
                )
                bar.set_postfix_str(facts, refresh=False)
                bar.update()

    def step(self, batches: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """One optimizer step: as many micro-batches as the config accumulates. Returns this rank's mean
        loss."""
        engine, losses = self.engine, []
        for _ in range(engine.gradient_accumulation_steps()):
            ids, targets = (tensor.to(engine.device) for tensor in next(batches))
            loss = engine(ids, targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach().float())
        return torch.stack(losses).mean()

    def gather(self, loss: torch.Tensor) -> tuple[float, list[int]]:
        """Mean loss over the ranks, and the memory of each rank in MB, with a single all-reduce. It also tells them
        whether rank 0's time is up, so that all stop at the same step."""
        facts = torch.zeros(2 + self.ranks, device=self.engine.device)
        facts[0] = loss / self.ranks
        facts[1] = self.rank == 0 and time.perf_counter() - self.started >= self.args.seconds
        facts[2 + self.rank] = get_accelerator().memory_allocated() / 2**20
        dist.all_reduce(facts)
        self.late = bool(facts[1])
        return facts[0].item(), [round(megabytes) for megabytes in facts[2:].tolist()]

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss in nats per token on the same held-out windows every time."""
        engine = self.engine
        engine.eval()
        losses, batches = [], self.held_out.from_step(0)
        for _ in range(max(1, VALIDATION_WINDOWS // self.held_out.global_batch)):
            ids, targets = (tensor.to(engine.device) for tensor in next(batches))
            losses.append(engine(ids, targets).float())
        engine.train()
        return self.gather(torch.stack(losses).mean())[0]

    def record(
        self,
        loss: float | None,
        validation: float | None,
        speed: float | None = None,
        memory_mb: Iterable[int] = (),
    ) -> None:
        """Adds a row to the table of measurements (rank 0); what was not measured stays empty."""
        if self.rank != 0:
            return
        self.args.metrics.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self.args.metrics.exists()
        with open(self.args.metrics, "a", newline="") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow(COLUMNS)
            seconds, stage = time.perf_counter() - self.started, self.engine.zero_optimization_stage()
            losses = [None if value is None else round(value, 5) for value in (loss, validation)]
            measured = (*losses, speed and round(speed), "+".join(map(str, memory_mb)), round(seconds, 2))
            writer.writerow((self.engine.global_steps, self.ranks, stage, *measured))

    def sample(self, prompt: str = "def ") -> str:
        """Text that the model writes. Every rank runs the model: at stage 3 each holds only a part of it."""
        self.engine.eval()
        ids = torch.tensor([self.text.tokenizer.encode(prompt).ids], device=self.engine.device)
        ids = generate(self.engine, ids, self.args.sample, self.args.context)
        self.engine.train()
        return self.text.tokenizer.decode(ids[0].tolist())


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    deepspeed.init_distributed()
    text = shared_text(args.text)
    torch.manual_seed(0)  # the same initial weights on every rank
    config = GPTConfig(context=args.context, layers=args.layers, heads=args.heads, width=args.width)
    model = GPT(config)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    if args.load is not None:
        path, _ = engine.load_checkpoint(str(args.load))
        if path is None:
            raise SystemExit(f"there is no checkpoint in {args.load}")
    run = Run(engine, text, args)
    run.train()
    if args.save is not None:
        engine.save_checkpoint(str(args.save))
    if args.export is not None and not engine.save_16bit_model(str(args.export), "model.safetensors"):
        raise SystemExit(f"{args.export}/model.safetensors is not written")
    if args.sample:
        written = run.sample()
        if run.rank == 0:
            print(f"\n----- sampled -----\n{written}\n-------------------", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
