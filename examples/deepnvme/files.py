r"""Tensors and files: write and read one in blocks, try settings, and train from shards that are read ahead.

    python files.py --folder /local_nvme --mebibytes 1024

Without `--folder` the files are in a temporary folder, and deleted at the end.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepspeed
from deepspeed.ops.op_builder import AsyncIOBuilder

FEATURES, ROWS = 32, 1024  # of a shard


def make_handle(block_size: int = 1 << 20, queue_depth: int = 32, workers: int = 1) -> Any:
    return (
        AsyncIOBuilder()
        .load()
        .aio_handle(
            block_size=block_size,
            queue_depth=queue_depth,
            single_submit=False,
            overlap_events=True,
            intra_op_parallelism=workers,
        )
    )


def store_and_load(folder: Path, nbytes: int) -> bool:
    """Whether the tensor that comes back is the one that went: blocking, non-blocking, from an offset, and locked."""
    handle, file = make_handle(), str(folder / "tensor.bin")
    tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    handle.sync_pwrite(tensor, file)

    # The process is free until `wait`. A locked tensor needs no copy on its way.
    read = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    handle.async_pread(read, file)
    busy = tensor.sum()
    same = handle.wait() == 1 and torch.equal(read, tensor) and bool(busy == read.sum())
    handle.free_cpu_locked_tensor(read)

    # Two parts of one file at once.
    halves = tensor.chunk(2)
    for offset, half in zip((0, len(halves[0])), reversed(halves), strict=True):
        handle.async_pwrite(half, file, offset)
    same &= handle.wait() == 2
    end = torch.empty_like(halves[0])
    handle.sync_pread(end, file, len(halves[1]))
    return same and torch.equal(end, halves[0])


def tune(folder: Path, nbytes: int) -> list[tuple[float, float, dict]]:
    """(GB/s read, GB/s written, settings) of a few settings, the fastest first."""
    tensor, file = torch.empty(nbytes, dtype=torch.uint8).random_(), str(folder / "tune.bin")
    results = []
    for block_size, queue_depth, workers in itertools.product((1 << 18, 1 << 20), (8, 32), (1, 2)):
        settings = {"block_size": block_size, "queue_depth": queue_depth, "workers": workers}
        handle = make_handle(**settings)
        seconds = []
        for call in (handle.sync_pwrite, handle.sync_pread):
            begin = time.perf_counter()
            call(tensor, file)
            seconds.append(time.perf_counter() - begin)
        results.append((nbytes / seconds[1] / 1e9, nbytes / seconds[0] / 1e9, settings))
    return sorted(results, key=lambda result: 1 / result[0] + 1 / result[1])


def write_shards(folder: Path, count: int) -> Tensor:
    """Files of rows [ROWS, FEATURES + 1] whose last column is a linear function of the others: its weights."""
    torch.manual_seed(0)
    weights, handle = torch.randn(FEATURES), make_handle()
    for shard in range(count):
        inputs = torch.randn(ROWS, FEATURES)
        rows = torch.cat((inputs, (inputs @ weights)[:, None]), 1)
        handle.sync_pwrite(rows, str(folder / f"shard{shard}.bin"))
    return weights


def read_ahead(files: Sequence[Path], batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches (inputs, targets). While one shard is used, the next is on its way into the other buffer."""
    handle = make_handle()
    like = torch.empty(0)
    buffers = [handle.new_cpu_locked_tensor(ROWS * (FEATURES + 1), like).view(ROWS, -1) for _ in range(2)]
    handle.async_pread(buffers[0], str(files[0]))
    for index in range(len(files)):
        handle.wait()
        if index + 1 < len(files):
            handle.async_pread(buffers[(index + 1) % 2], str(files[index + 1]))
        for rows in buffers[index % 2].split(batch):
            yield rows[:, :-1].clone(), rows[:, -1].clone()
    for buffer in buffers:
        handle.free_cpu_locked_tensor(buffer)


def train(files: Sequence[Path]) -> tuple[float, float]:
    config = {
        "train_batch_size": 64,
        "optimizer": {"type": "Adam", "params": {"lr": 0.02}},
    }
    engine, *_ = deepspeed.initialize(model=nn.Linear(FEATURES, 1), config=config)
    losses = []
    for inputs, targets in read_ahead(files, 64):
        loss = F.mse_loss(engine(inputs.to(engine.device))[:, 0], targets.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="on the disk to try")
    parser.add_argument("--mebibytes", type=int, default=64, help="size of the tensor")
    parser.add_argument("--shards", type=int, default=12)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder, nbytes = Path(name), options.mebibytes << 20
        assert store_and_load(folder, nbytes), "what came back differs"
        print(f"{options.mebibytes} MiB came back as they were written")
        for read, written, settings in tune(folder, nbytes)[:3]:
            print(f"read {read:.2f} GB/s, written {written:.2f} GB/s: {settings}")
        write_shards(folder, options.shards)
        first, last = train([folder / f"shard{shard}.bin" for shard in range(options.shards)])
        print(f"trained from {options.shards} files: loss {first:.3f} -> {last:.5f}")
    return first, last


if __name__ == "__main__":
    main()
