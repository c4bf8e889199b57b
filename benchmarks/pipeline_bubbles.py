"""How long stages wait in each order, by a simulated clock with durations that are measured here.

    python benchmarks/pipeline_bubbles.py --save cpu

One block of the GPT is run as a stage runs it: forward, the gradients of inputs, those of weights, and one copy of its
outputs, which is what a message to a rank of the same host costs. A stage has eight such blocks, in 1 to 8 chunks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

import gpt
from deepspeed.parallel.pipeline.schedules.orders import (
    Durations,
    Order,
    interleaved,
    one_forward_one_backward,
    simulate,
)
from deepspeed.parallel.pipeline.schedules.zero_bubble import zero_bubble
from deepspeed.parallel.pipeline.split_backward import WeightQueue, split_layers
from report import Report, common_arguments

GOAL = 0.03


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Waiting of pipeline stages, by measured durations.")
    parser.add_argument("--size", default="50M", help="of the GPT that the block is of")
    parser.add_argument("--context", type=int, default=256, help="tokens per micro-batch")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=8, help="per stage")
    parser.add_argument("--repeats", type=int, default=40)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.size, arguments.context, arguments.repeats, arguments.blocks = "tiny", 64, 5, 4
    return arguments


def measured(arguments: argparse.Namespace, dtype: torch.dtype) -> Durations:
    """Of one block, in seconds: medians."""
    size = gpt.SIZES[arguments.size]
    torch.manual_seed(0)
    block = gpt.Block(size).to(dtype)
    params = list(block.parameters())
    sums = [torch.zeros_like(param) for param in params]
    queue = WeightQueue(lambda number, grad: sums[number].add_(grad))
    split_layers(block, {id(param): number for number, param in enumerate(params)}, queue)
    queue.active, queue.part = True, (0, 0)
    outputs = torch.empty(())
    inputs = torch.randn(1, arguments.context, size.width, dtype=dtype, requires_grad=True)
    grad, place = torch.randn_like(inputs), torch.empty_like(inputs)

    def forward() -> None:
        nonlocal outputs
        outputs = block(inputs)

    def copied() -> None:
        place.copy_(outputs.detach())

    steps = (forward, lambda: outputs.backward(grad), lambda: queue.compute((0, 0)), copied)
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(arguments.repeats + 3):
        for kept, step in zip(seconds, steps, strict=True):
            kept.append(timed(step))
    return Durations(*(median(kept[3:]) for kept in seconds))


def timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    with torch.enable_grad():
        step()
    return time.perf_counter() - start


def of_chunk(block: Durations, blocks: float) -> Durations:
    """A message does not grow with the number of blocks."""
    return Durations(block.forward * blocks, block.backward * blocks, block.weights * blocks, block.send)


def orders(arguments: argparse.Namespace, block: Durations) -> list[tuple[str, Order, Durations, bool]]:
    """Name, order, durations of its chunks, and whether the goal is of it."""
    stages, count, blocks = arguments.stages, arguments.micro_batches, arguments.blocks
    whole = of_chunk(block, blocks)
    found = [
        ("1f1b", one_forward_one_backward(stages, count), whole, False),
        ("zero-bubble", zero_bubble(stages, count, durations=whole), whole, False),
    ]
    chunks = [number for number in (2, 4, 8) if number <= blocks]
    for number in chunks:
        each = of_chunk(block, blocks / number)
        found.append((f"interleaved, {number} chunks", interleaved(stages, count, number), each, False))
    for number in chunks:
        each = of_chunk(block, blocks / number)
        order = zero_bubble(stages, count, number, zigzag=True, durations=each)
        found.append((f"zero-bubble-v, {number} chunks", order, each, number == chunks[-1]))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    torch.set_num_threads(1)
    report = Report("pipeline_bubbles", arguments)
    for dtype in (torch.float32, torch.bfloat16):
        block = measured(arguments, dtype)
        rows = []
        for name, order, durations, has_goal in orders(arguments, block):
            held = max(map(order.held, range(arguments.stages))) / order.chunks
            bubble = simulate(order, durations).bubble
            rows.append([name, f"{bubble:.1%}", f"{held:.2g}", f"<= {GOAL:.0%}" if has_goal else ""])
        parts = ", ".join(
            f"{name} {seconds * 1e3:.3f} ms"
            for name, seconds in zip(
                ("F", "B", "W", "message"),
                (block.forward, block.backward, block.weights, block.send),
                strict=True,
            )
        )
        report.table(
            f"{arguments.stages} stages of {arguments.blocks} blocks ({arguments.size} GPT, {str(dtype)[6:]}, "
            f"{arguments.context} tokens; a block: {parts}), {arguments.micro_batches} micro-batches",
            ["", "waiting", "micro-batches held", "goal"],
            rows,
        )
        report.data[str(dtype)] = {"durations": parts, "rows": rows}
    report.save()


if __name__ == "__main__":
    main()
