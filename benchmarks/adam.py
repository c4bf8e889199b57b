"""AdamW on host memory: ours, torch's fused one, the peer's, and a stream that moves the same bytes.

fp32 parameters, gradients and moments in one flat tensor each; with "copy-out" the updated parameters are
also written in bf16 (ours in the same pass, torch by a second one). The stream reads and writes each array
once, as Adam has to (28 bytes per parameter, 30 with the copy), in three in-place vector operations: no
Adam can be faster than memory, and this is what memory gives from torch. How fast memory is depends on the pages that
a process happens to get (by some percent, for as long as it lives), so every contender is started several times.

    python benchmarks/adam.py --peer ../peer/bin/python --save cpu
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

from jobs import OURS, Contender, Spread, round_robin, started
from report import Report, common_arguments

HYPERPARAMETERS = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class Adam:
    """One process that holds the arrays of one contender."""

    def __init__(self, system: str, numel: int, copy_out: bool) -> None:
        import torch

        torch.manual_seed(1)
        self.param = torch.nn.Parameter(torch.randn(numel))
        self.grad = torch.randn(numel)
        self.low = torch.zeros(numel, dtype=torch.bfloat16) if copy_out else None
        self.param.grad = self.grad
        self.step: Callable[[], object] = getattr(self, f"_{system}")()
        for _ in range(2):
            self.run(1)

    def run(self, steps: int) -> float:
        """Seconds per step."""
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - begin) / steps

    def _ours(self) -> Callable[[], object]:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer = DeepSpeedCPUAdam([self.param], **HYPERPARAMETERS)
        group, params, grads = optimizer.param_groups[0], [self.param], [self.grad]
        low = None if self.low is None else [self.low]
        return lambda: optimizer.multi_tensor_step(group, params, grads, low_precision=low)

    def _torch(self) -> Callable[[], object]:
        import torch

        optimizer = torch.optim.AdamW([self.param], fused=True, **HYPERPARAMETERS)
        return self._with_copy(optimizer.step)

    def _plain(self) -> Callable[[], object]:
        """A loop over parameters, in separate operations: torch's only Adam when DeepSpeed's was measured."""
        import torch

        optimizer = torch.optim.AdamW([self.param], foreach=False, fused=False, **HYPERPARAMETERS)
        return self._with_copy(optimizer.step)

    def _peer(self) -> Callable[[], object]:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return self._with_copy(DeepSpeedCPUAdam([self.param], adamw_mode=True, **HYPERPARAMETERS).step)

    def _with_copy(self, step: Callable[[], object]) -> Callable[[], object]:
        low = self.low
        if low is None:
            return step

        def step_and_copy() -> None:
            step()
            low.copy_(self.param.detach())

        return step_and_copy

    def _stream(self) -> Callable[[], object]:
        import torch

        param, grad, low = self.param.detach(), self.grad, self.low
        first, second = torch.ones_like(param), torch.ones_like(param)

        def step() -> None:
            param.add_(grad)  # reads 2, writes 1
            first.mul_(1.0)  # reads 1, writes 1
            second.mul_(1.0)
            if low is not None:
                low.fill_(1.0)  # writes half of one

        return step


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Milliseconds of one AdamW step on host memory.")
    parser.add_argument("--millions", nargs="+", type=int, default=[100], help="parameters, in millions")
    parser.add_argument("--large", action="store_true", help="also 500 million (8 GiB for each contender)")
    parser.add_argument("--plain", action="store_true", help="also torch's AdamW that is not fused")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=3, help="times that each contender is started anew")
    arguments = parser.parse_args(argv)
    if arguments.large:
        arguments.millions = [*arguments.millions, 500]
    if arguments.quick:
        arguments.millions, arguments.threads, arguments.rounds, arguments.starts = [10], [1], 3, 1
    return arguments


def contenders(arguments: argparse.Namespace, millions: int, threads: int, copy_out: bool) -> list[Contender]:
    systems = [("ours", "ours", OURS), ("torch fused", "torch", OURS), ("stream", "stream", OURS)]
    if arguments.plain:
        systems.insert(2, ("torch, not fused", "plain", OURS))
    if arguments.peer:
        systems.append(("peer", "peer", arguments.peer))
    return [
        Contender(
            name,
            "adam:Adam",
            {"system": system, "numel": millions * 1_000_000, "copy_out": copy_out},
            python=python,
            ranks=1,
            threads=threads,
        )
        for name, system, python in systems
    ]


def measure(
    arguments: argparse.Namespace, millions: int, threads: int, copy_out: bool, report: Report
) -> None:
    steps = max(1, 200 // millions)
    rows = contenders(arguments, millions, threads, copy_out)
    # Two contenders of 500M would fill the memory of a small machine: those are measured one after another.
    runs = [rows] if millions < 300 else [[row] for row in rows]
    samples: dict[str, list[float]] = {row.name: [] for row in rows}
    for run in runs * arguments.starts:
        with started(run) as jobs:
            times = round_robin(jobs, arguments.rounds, lambda job: job.call("run", steps=steps)[0] * 1e3)
        for name, values in times.items():
            samples[name] += values
    stream = Spread.of(samples["stream"]).median
    gigabytes = millions * (30 if copy_out else 28) / 1e3
    cells = [
        [
            row.name,
            Spread.of(samples[row.name]).show("{:.1f}"),
            f"{Spread.of(samples[row.name]).median / stream:.2f}",
            f"{Spread.of(samples['ours']).median / Spread.of(samples[row.name]).median:.2f}",
            f"{gigabytes / Spread.of(samples[row.name]).median * 1e3:.1f}",
        ]
        for row in rows
    ]
    kind = "with bf16 copy-out" if copy_out else "fp32 only"
    report.table(
        f"{millions}M parameters, {threads} thread{'s' if threads > 1 else ''}, {kind}",
        ["", "ms/step, median [min .. max]", "of the stream", "ours / this", "GB/s"],
        cells,
    )
    report.data[f"{millions}M_{threads}_{'copy' if copy_out else 'plain'}"] = samples


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("adam", arguments)
    for millions in arguments.millions:
        for threads in arguments.threads:
            for copy_out in (False, True):
                measure(arguments, millions, threads, copy_out, report)
    report.save()


if __name__ == "__main__":
    main()
