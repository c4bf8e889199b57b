"""One rank of a calibration: times a few steps at each stage, and collectives of several sizes.

Started by ``calibrate.py``; rank 0 writes the results to the given file.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import deepspeed
from deepspeed.base.accelerator import get_accelerator
from deepspeed.comm.collectives import Communicator, communicator, use_shared_memory
from deepspeed.planning.planned_model import hooked_modules
from deepspeed.planning.step_time.shapes import build_shape, call_of, is_shape, loss_of, random_batch

SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
"""Bytes per rank in the timed collectives."""
ROUNDS = 3
MAX_STEPS = 60

Parts = tuple[float, float, float]
"""Seconds of a step: forward, backward, update."""


class TimedModel:
    """The model ``name`` under an engine with ``config``; ``step`` trains and times one step."""

    def __init__(
        self, name: str, batch: str | None, config: dict[str, Any], micro: int, sequence: int
    ) -> None:
        device = self.device = torch.device(get_accelerator().current_device_name())
        torch.manual_seed(1)
        if is_shape(name):
            self.module: nn.Module = build_shape(name)
            vocabulary = int(self.module.config.vocab_size)  # type: ignore[union-attr,arg-type]
            rank = dist.get_rank() if dist.is_initialized() else 0
            self.batch: Any = random_batch(vocabulary, micro, sequence, device, seed=rank)
        else:
            self.module = call_of(name)()
            self.batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), call_of(batch or "")())
        self.engine = deepspeed.initialize(
            model=self.module, model_parameters=self.module.parameters(), config=config
        )[0]

    def step(self) -> Parts:
        """Train one step; return the seconds of forward, backward and update."""
        begin = _now()
        loss = loss_of(self.engine, self.batch)
        forward = _now()
        self.engine.backward(loss)
        backward = _now()
        self.engine.step()
        return forward - begin, backward - forward, _now() - backward

    def close(self) -> None:
        self.engine.destroy()


def _now() -> float:
    get_accelerator().synchronize()
    return time.perf_counter()


def timed(trained: TimedModel, steps: int, warmup: int, seconds: float, world: Communicator) -> list[Parts]:
    """Time at least ``steps`` steps, or, if those are short, as many as take ``seconds`` (at most ``MAX_STEPS``): short
    steps vary."""
    taken = [sum(trained.step()) for _ in range(warmup)]
    slowest = torch.tensor([taken[-1] if taken else seconds], device=trained.device)
    world.all_reduce_max(slowest).wait()
    count = max(steps, min(MAX_STEPS, int(seconds / max(1e-9, float(slowest)))))
    return [trained.step() for _ in range(count)]


def medians(rows: Sequence[Parts]) -> dict[str, float]:
    """Return the medians of the rows, as fields of ``calibration.Steps``."""
    whole = [sum(row) for row in rows]
    forward, backward, update = (statistics.median(row[i] for row in rows) for i in range(3))
    step = statistics.median(whole)
    return {
        "step": step,
        "forward": forward,
        "backward": backward,
        "update": update,
        "spread": (max(whole) - min(whole)) / step,
    }


class CallTimes:
    """Seconds of forward and backward of each call that stage 3 would gather for. Work between two calls counts towards
    the earlier one."""

    def __init__(self, module: nn.Module) -> None:
        owners = [owner for owner, _ in hooked_modules(module)]
        self.forward, self.backward = [0.0] * len(owners), [0.0] * len(owners)
        self._running: tuple[list[float], int] | None = None
        self._since = 0.0
        self._handles: list[Any] = []
        for number, owner in enumerate(owners):
            self._handles.append(
                owner.register_forward_pre_hook(lambda *_, n=number: self.begin(self.forward, n))
            )
            self._handles.append(owner.register_forward_hook(partial(self._watch, number)))

    def begin(self, times: list[float], number: int) -> None:
        """Attribute the time from now on to this call."""
        now = _now()
        if self._running is not None:
            running, last = self._running
            running[last] += now - self._since
        self._running, self._since = (times, number), now

    def _watch(self, number: int, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda grad: self.begin(self.backward, number))

    def measure(self, trained: TimedModel) -> None:
        """Time one forward and backward."""
        self._running = None
        loss = loss_of(trained.engine, trained.batch)
        self.begin(self.backward, len(self.backward) - 1)
        trained.engine.backward(loss)
        self.begin(self.backward, 0)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def shares_of(trained: TimedModel, repeats: int = 4) -> tuple[list[float], list[float]]:
    """Return each call's share of the forward time, and of the backward time."""
    times = CallTimes(trained.module)
    for _ in range(repeats):
        times.measure(trained)
        trained.engine.step()
    times.close()
    return _shares(times.forward), _shares(times.backward)


def _shares(values: Sequence[float]) -> list[float]:
    total = sum(values)
    return [each / total if total else 1.0 / len(values) for each in values]


# Collectives -------------------------------------------------------------------------------------------------


def lines(world: Communicator, device: torch.device) -> dict[str, dict[str, float]]:
    """Fit, for each operation, a line through its times over the bytes per rank."""
    least = {
        (name, size): math.inf for name in ("all_gather", "reduce_scatter", "all_reduce") for size in SIZES
    }
    for _ in range(ROUNDS):  # the minimum over rounds: a slow moment in one round is not the collective's
        for name, size in least:
            least[name, size] = min(least[name, size], _seconds(_collective(world, name, size, device)))
    names = dict.fromkeys(name for name, _ in least)
    return {name: _line([(size, least[name, size]) for size in SIZES]) for name in names}


def _collective(world: Communicator, name: str, nbytes: int, device: torch.device) -> Callable[[], Any]:
    own = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)
    whole = own.new_zeros(own.numel() * world.size)
    calls: dict[str, Callable[[], Any]] = {
        "all_gather": lambda: world.all_gather(whole, own).wait(),
        "reduce_scatter": lambda: world.reduce_scatter(own, whole).wait(),
        "all_reduce": lambda: world.all_reduce(whole).wait(),
    }
    return calls[name]


def _seconds(act: Callable[[], Any], repeats: int = 21) -> float:
    for _ in range(5):  # warm-up: the first calls connect
        act()
    taken = []
    for _ in range(repeats):
        begin = _now()
        act()
        taken.append(_now() - begin)
    return statistics.median(taken)


def _line(points: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Fit the line: seconds per byte from the two largest sizes, the start-up time from the smallest."""
    (small, least), (first, low), (last, high) = points[0], points[-2], points[-1]
    byte = max(0.0, (high - low) / (last - first))
    return {"start": max(0.0, least - byte * small), "byte": byte}


def fetch_line(gather: dict[str, float], trained: TimedModel) -> dict[str, float]:
    """Fit the line of stage 3's shard fetches between CPU ranks, timed over their own sockets; return ``gather`` where
    shards are not served that way."""
    sharded = trained.engine.sharded
    servers = getattr(getattr(sharded, "gatherer", None), "server", None)
    if servers is None or not servers.servers:
        return gather
    points = []
    for index, bucket in enumerate(sharded.buckets):
        full = torch.empty(bucket.layout.padded_numel, dtype=bucket.layout.dtype)
        server = servers.servers[bucket.layout.replica_group]
        slot = servers._slot[index]
        dist.barrier()
        points.append((full.nbytes // server.communicator.size, _seconds(lambda: server.fetch(slot, full))))  # noqa: B023
    dist.barrier()
    small, large = min(points), max(points)
    byte = (large[1] - small[1]) / max(1, large[0] - small[0])
    byte = byte if byte > 0 else gather["byte"]
    return {"start": max(0.0, small[1] - byte * small[0]), "byte": byte}


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    deepspeed.init_distributed(get_accelerator().communication_backend_name())
    use_shared_memory(False)
    world = communicator()
    found: dict[str, Any] = {}
    device = torch.device(get_accelerator().current_device_name())
    if world.size > 1:
        found["lines"] = lines(world, device)
    rows: dict[int, list[Parts]] = {stage: [] for stage in given["stages"]}
    # Up and down through the stages: if other jobs share the machine, a slow moment is spread over the stages.
    for stage in (*rows, *reversed(rows)):
        config = {**given["config"], "zero_optimization": {**given["zero"], "stage": stage}}
        trained = TimedModel(given["model"], given["batch"], config, given["micro"], given["sequence"])
        first = not rows[stage]
        rows[stage] += timed(trained, -(-given["steps"] // 2), given["warmup"], given["seconds"] / 2, world)
        if first and stage == 0 and world.size == 1:
            found["shares"] = shares_of(trained)
        if first and stage == 3 and world.size > 1:
            found["lines"]["fetch"] = fetch_line(found["lines"]["all_gather"], trained)
        trained.close()
        if world.rank == 0:
            with Path(sys.argv[1]).with_name("progress").open("a") as file:
                file.write(f"  stage {stage}: {medians(rows[stage])['step'] * 1e3:.1f} ms per step\n")
    found["steps"] = {f"{world.size}/{stage}": medians(taken) for stage, taken in rows.items()}
    if world.rank == 0:
        Path(given["result"]).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()


if __name__ == "__main__":
    main()
