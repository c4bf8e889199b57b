"""How long a step waits for the host: plain offload, SuperOffload and ZenFlow; and ZenFlow's loss on text.

The device is a clock: forward and backward of each block sleep for a given time and need no core, as on an accelerator,
while the host updates all parameters with Adam and copies what crosses the link. What a step takes beyond the
device's time is exposed. What ZenFlow computes on the device itself (choosing columns, updating them, adding up the
gradients of the others) the host has to compute here: that time is shown apart and counts as the device's. Plain
offload is measured with gradients that arrive as early, so it differs only in when the host works. Bytes of ZenFlow
over the link are counted, per step, as a share of the weights' bytes in bf16.

    python benchmarks/offload_stalls.py --save cpu
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from report import Report, common_arguments
from text_loss import ADAM, compare, load_text, pretrained

sys.path.insert(0, str(Path(__file__).parents[1]))

FLOW = {"topk_ratio": 0.1, "update_interval": 4, "select_interval": 32, "overlap_step": True}
AT_ONCE = {**FLOW, "full_warm_up_rounds": 0}
"""Without the warm-up that lasts until the weights settle."""
OPTIONS: dict[str, dict[str, Any]] = {
    "plain offload": {"offload_optimizer": {"device": "cpu"}},
    "SuperOffload": {"offload_optimizer": {"device": "cpu", "super_offload": True}},
    "ZenFlow": {"offload_optimizer": {"device": "cpu"}, "zenflow": AT_ONCE},
}


class OnDevice(torch.autograd.Function):
    """A block that takes time, and no core."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, grad: Tensor, seconds: float) -> Tensor:
        ctx.grad, ctx.seconds = grad, seconds
        time.sleep(seconds / 3)
        return x + weight.view(-1)[:1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(ctx.seconds * 2 / 3)
        return grads[0], ctx.grad, None, None


class Model(nn.Module):
    """``blocks`` matrices; ``seconds``: of forward and backward of all."""

    def __init__(self, millions: float, blocks: int, seconds: float) -> None:
        super().__init__()
        rows = int(millions * 1e6 / blocks / 1024)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(rows, 1024)) for _ in range(blocks))
        self.grads = [torch.randn(rows, 1024).bfloat16() for _ in range(blocks)]
        self.seconds = seconds / blocks

    def forward(self, x: Tensor) -> Tensor:
        for weight, grad in zip(self.weights, self.grads, strict=True):
            x = OnDevice.apply(x, weight, grad, self.seconds)
        return x.sum()


class Watch:
    """Adds up the seconds that methods of an object take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, subject: Any, *names: str) -> None:
        for name in names:
            setattr(subject, name, self._timed(getattr(subject, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = method(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            return result

        return timed


class Subject:
    """One engine; ``run`` is called in turn with those of the others."""

    def __init__(self, arguments: argparse.Namespace, seconds: float, zero: dict[str, Any]) -> None:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 5_000_000, **zero},
            "bf16": {"enabled": True},
            "steps_per_print": 1_000_000,
        }
        model = Model(arguments.millions, arguments.blocks, seconds)
        self.size = 2 * sum(p.numel() for p in model.parameters())
        self.engine = deepspeed.initialize(model=model, config=config)[0]
        self.flow = getattr(self.engine.core.executor, "zenflow", None)
        self.on_device = Watch()
        if self.flow is not None:
            self.on_device.watch(self.flow, "_choose", "_update_chosen", "_defer", "_mean")
        self.x = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)

    def run(self, steps: int) -> dict[str, float]:
        """Seconds of a step, and of its part before ``engine.step``; of ZenFlow those that a device would spend, and
        the share of the weights' bytes that it sends. Means of ``steps``."""
        before, device, link = 0.0, self.on_device.seconds, self._link_bytes()
        start = time.perf_counter()
        for _ in range(steps):
            begin = time.perf_counter()
            self.engine.backward(self.engine(self.x))
            before += time.perf_counter() - begin
            self.engine.step()
        whole = time.perf_counter() - start
        return {
            "step": whole / steps,
            "before": before / steps,
            "on_device": (self.on_device.seconds - device) / steps,
            "share": (self._link_bytes() - link) / steps / self.size,
        }

    def _link_bytes(self) -> int:
        return 0 if self.flow is None else self.flow.bytes_to_host + self.flow.bytes_to_device


def stalls(arguments: argparse.Namespace, report: Report) -> None:
    from tests.zero.test_offload import pretend_device

    for seconds in arguments.seconds:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in OPTIONS}
        with pretend_device():
            subjects = {name: Subject(arguments, seconds, zero) for name, zero in OPTIONS.items()}
            for number in range(arguments.rounds + 1):
                for name, subject in subjects.items():
                    found = subject.run(arguments.steps)
                    if number:  # memory and choices of columns are new in the first
                        rounds[name].append(found)
            for subject in subjects.values():
                subject.engine.destroy()
        report.data[f"{seconds} s"] = rounds
        report.table(
            f"{arguments.millions:g}M parameters, the device takes {seconds:g} s, medians of {arguments.rounds} "
            f"rounds of {arguments.steps} steps",
            [
                "",
                "step ms",
                "of the device ms",
                "exposed ms",
                "of the step",
                "x plain",
                "link bytes / weights",
            ],
            [row(name, rounds) for name in OPTIONS],
        )


def row(name: str, rounds: dict[str, list[dict[str, float]]]) -> list[str]:
    """Exposed is what a step takes longer than plain offload's forward and backward in the same round."""
    mine, plain = rounds[name], rounds["plain offload"]
    exposed = [
        one["step"] - other["before"] - one["on_device"] for one, other in zip(mine, plain, strict=True)
    ]
    stalled = median(other["step"] - other["before"] for other in plain)
    step, device, share = (median(one[key] for one in mine) for key in ("step", "on_device", "share"))
    return [
        name,
        f"{step * 1e3:.0f}",
        f"{device * 1e3:.0f}" if device else "",
        f"{median(exposed) * 1e3:.0f} [{min(exposed) * 1e3:.0f} .. {max(exposed) * 1e3:.0f}]",
        f"{median(exposed) / step:.1%}",
        f"{median(exposed) / stalled:.2f}",
        f"{share:.2f}" if share else "",
    ]


def main() -> None:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--millions", type=float, default=48)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.3, 0.6], help="of the device")
    parser.add_argument("--steps", type=int, default=32, help="of a round: one choice of columns")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--text-steps", type=int, default=600, help="the demo's most")
    parser.add_argument("--lr", type=float, default=ADAM["lr"], help="of the loss on text")
    parser.add_argument(
        "--tuning", type=int, default=0, help="steps of plain training that come before, on other text"
    )
    parser.add_argument("--only", choices=["stalls", "loss"])
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.millions, arguments.seconds, arguments.steps, arguments.rounds = 4.0, [0.05], 8, 1
        arguments.seeds, arguments.text_steps = 1, 30
    torch.set_num_threads(min(2, torch.get_num_threads()))
    report = Report("offload_stalls", arguments)
    if arguments.only != "loss":
        stalls(arguments, report)
    if arguments.only != "stalls":
        others = {
            name: {"config": {"zero_optimization": {"stage": 1, **OPTIONS["ZenFlow"], "zenflow": flow}}}
            for name, flow in (("ZenFlow", FLOW), ("no warm-up", AT_ONCE))
        }
        shared = {"adam": {"lr": arguments.lr}}
        if arguments.tuning:
            shared["weights"] = pretrained(arguments.tuning, load_text())
        compare(report, arguments.seeds, arguments.text_steps, "plain", others, shared)
    report.save()


if __name__ == "__main__":
    main()
