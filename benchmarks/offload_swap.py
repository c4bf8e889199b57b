"""Swapping inside the optimizer step against the raw handle: the same bytes, sizes and buffers, no arithmetic.

One rank. "step" is what the engine does around the update of every sub-group (read the next, write the previous, point
the tensors at the buffers), with an update that does nothing; "raw" hands the same transfers to ``aio_handle`` alone.

    python benchmarks/offload_swap.py --millions 100 --save cpu2
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jobs import Spread, ratios
from report import Report, common_arguments


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("Swap bandwidth inside the step.")
    parser.add_argument("--millions", type=int, default=100, help="parameters, 12 bytes of state each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", default=None, help="on the storage to measure; default: temporary files")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.millions, arguments.rounds = 10, 2
    return arguments


def make_engine(millions: int, folder: str) -> Any:
    import deepspeed

    width = 1000
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(millions)])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": folder}},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    loss = engine(torch.ones(1, width, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    return engine


def swap_seconds(engine: Any) -> float:
    core = engine.core
    lists = core.executor._gradient_lists()
    clock = time.perf_counter()
    core.store.tier.update(lists, lambda _: None)
    return time.perf_counter() - clock


class Raw:
    """The same transfers through ``aio_handle``: read the next piece and write the last one at a time."""

    def __init__(self, sizes: list[int], options: Any, folder: str) -> None:
        from deepspeed.ops.aio.async_io import aio_handle

        names = ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")
        settings = {name: getattr(options, name) for name in names}
        self.reader, self.writer = aio_handle(**settings), aio_handle(**settings)
        self.path = str(Path(folder) / "raw")
        self.sizes = sizes
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        example = torch.empty(0, dtype=torch.uint8)
        self.buffers: list[Tensor] = [
            self.reader.new_cpu_locked_tensor(max(sizes), example) for _ in range(3)
        ]
        for i in range(len(sizes)):
            self.writer.sync_pwrite(self._buffer(i), self.path, self.offsets[i])

    def _buffer(self, i: int) -> Tensor:
        return self.buffers[i % 3][: self.sizes[i]]

    def seconds(self) -> float:
        clock = time.perf_counter()
        self.reader.async_pread(self._buffer(0), self.path, self.offsets[0])
        for i in range(len(self.sizes)):
            self.reader.wait()
            if i + 1 < len(self.sizes):
                self.reader.async_pread(self._buffer(i + 1), self.path, self.offsets[i + 1])
            self.writer.wait()
            self.writer.async_pwrite(self._buffer(i), self.path, self.offsets[i])
        self.writer.wait()
        return time.perf_counter() - clock


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("offload_swap", arguments)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        engine = make_engine(arguments.millions, folder)
        engine.core.store.ensure_state()
        swap_seconds(engine)
        tier = engine.core.store.tier
        sizes = [sub_group.nbytes for sub_group in tier.sub_groups]
        raw = Raw(sizes, tier.plan.storage, folder)
        seconds: dict[str, list[float]] = {"raw handle": [], "in the step": []}
        for _ in range(arguments.rounds):
            seconds["raw handle"].append(raw.seconds())
            seconds["in the step"].append(swap_seconds(engine))
        moved = 2 * sum(sizes)
        report.table(
            f"{arguments.millions}M parameters, {moved / 2**30:.2f} GiB read and written per step in {len(sizes)} "
            f"pieces, {raw.reader.backend}",
            ["", "GB/s", "of the raw handle, median [min .. max]", "goal"],
            [
                [
                    name,
                    f"{moved / Spread.of(values).median / 1e9:.2f}",
                    ratios(seconds["raw handle"], values).show(),
                    ">= 0.90" if name == "in the step" else "",
                ]
                for name, values in seconds.items()
            ],
        )
        report.data["seconds"] = seconds
    report.save()


if __name__ == "__main__":
    main()
