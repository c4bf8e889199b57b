"""The sizes that `growth.py` varies, and what is done at each: every axis is a function of a size and a meter."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import scale

if TYPE_CHECKING:
    from growth import Meter

WIDTH = 8
"""Elements of a parameter of the axis `tensors`."""
PER_BLOCK = 10
"""Its parameters in a block."""


class Scale(nn.Module):
    """One parameter, used once."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.mean()


class Stack(nn.Module):
    """``count`` parameters of ``numel`` elements, in blocks as a transformer has them; ``forward`` returns a loss."""

    def __init__(self, count: int, numel: int = WIDTH) -> None:
        super().__init__()
        sizes = [min(PER_BLOCK, count - start) for start in range(0, count, PER_BLOCK)]
        self.blocks = nn.ModuleList(nn.Sequential(*(Scale(numel) for _ in range(size))) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def config(stage: int, **more: Any) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "zero_optimization": zero,
        "steps_per_print": float("inf"), **more,
    }  # fmt: skip


def take_step(engine: Any, batch: torch.Tensor) -> None:
    engine.backward(engine(batch))
    engine.step()


def train(size: int, meter: Meter, stage: int, make: Callable[[], nn.Module], **more: Any) -> None:
    """Start, a step like all later ones, and a checkpoint there and back."""
    import deepspeed

    batch = torch.ones(2)
    with scale.one_of(1, 0), tempfile.TemporaryDirectory() as folder:

        def start() -> Any:
            return deepspeed.initialize(model=make(), config=config(stage, **more))[0]

        def step() -> None:
            take_step(engine, batch)

        engine = start()  # whatever is imported only now
        for _ in range(2):
            step()
        engine.destroy()
        engine = meter.again("initialize", start)
        step()
        step()
        for _ in range(3):
            meter.again("step", step)
        meter.again("save", lambda: engine.save_checkpoint(folder, tag="a"))
        meter.again("load", lambda: engine.load_checkpoint(folder, tag="a"))
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        engine.destroy()
        with meter.of("initialize"):
            engine = start()
        step()
        step()
        with meter.of("step"):
            step()
        with meter.of("save") as cost:
            engine.save_checkpoint(folder, tag="b")
        cost.counted |= {"files": len(files), "KB": sum(path.stat().st_size for path in files) / 1e3}
        with meter.of("load"):
            engine.load_checkpoint(folder, tag="b")
        engine.destroy()


def tensors(stage: int) -> Callable[[int, Meter], None]:
    return lambda size, meter: train(size, meter, stage, lambda: Stack(size))


def elements(stage: int) -> Callable[[int, Meter], None]:
    """Parameters of one model in 40 tensors: what the interpreter does must not depend on their size."""
    return lambda size, meter: train(size, meter, stage, lambda: Stack(40, size // 40))


def planned_elements(size: int, meter: Meter) -> None:
    """`ds plan` of a model without memory."""
    from deepspeed.planning.request import PlanRequest, answer

    with torch.device("meta"):
        module = Stack(400, size // 400)

    def plan() -> Any:
        return answer(PlanRequest(module=module, config=config(3), ranks=64, nodes=8))

    plan()
    meter.again("plan, stage 3", plan)
    with meter.of("plan, stage 3"):
        plan()


def planned_tensors(size: int, meter: Meter) -> None:
    from deepspeed.planning.request import PlanRequest, answer

    with torch.device("meta"):
        module = Stack(size)
    for stage in (2, 3):

        def plan(stage: int = stage) -> Any:
            return answer(PlanRequest(module=module, config=config(stage), ranks=64, nodes=8))

        plan()
        meter.again(f"plan, stage {stage}", plan)
        with meter.of(f"plan, stage {stage}"):
            plan()


def ranks(stage: int) -> Callable[[int, Meter], None]:
    """One rank of ``size``, on a process group that moves nothing; the traffic is what this rank sends."""

    def measure(size: int, meter: Meter) -> None:
        import deepspeed

        batch = torch.ones(2)
        with scale.one_of(size, 0), tempfile.TemporaryDirectory() as folder:

            def start() -> Any:
                return deepspeed.initialize(model=Stack(100, 640), config=config(stage))[0]

            engine = start()
            for _ in range(3):
                take_step(engine, batch)
            engine.destroy()
            engine = meter.again("initialize", start)
            for _ in range(3):
                take_step(engine, batch)
            meter.again("step", lambda: take_step(engine, batch))
            engine.destroy()
            with scale.traffic() as sent, meter.of("initialize") as cost:
                engine = start()
            cost.counted |= {"messages": sum(sent.calls.values()), "groups": scale.groups_made()}
            for _ in range(3):
                take_step(engine, batch)
            with scale.traffic() as sent, meter.of("step") as cost:
                take_step(engine, batch)
            cost.counted |= {"messages": sum(sent.calls.values()), "KB": scale.bytes_sent(sent.sent) / 1e3}
            with scale.messages() as told, meter.of("save") as cost:
                scale.saved(engine, Path(folder), 0)
            cost.counted |= {"messages": sum(told.calls.values())}
            engine.destroy()

    return measure


def tags(size: int, meter: Meter) -> None:
    """A checkpoint in a folder that holds ``size`` others, kept or the oldest removed."""
    import deepspeed

    with scale.one_of(1, 0), tempfile.TemporaryDirectory() as folder:
        for kept in (None, size + 4):
            name = "save" if kept is None else "save, keep_last"
            kwargs = {} if kept is None else {"checkpoint": {"keep_last": kept}}
            engine = deepspeed.initialize(model=Stack(10), config=config(1, **kwargs))[0]
            take_step(engine, torch.ones(2))
            if kept is None:
                for number in range(size):
                    engine.save_checkpoint(folder, tag=f"global_step{number}")
            engine.save_checkpoint(folder, tag=f"first {name}")
            meter.again(name, lambda: engine.save_checkpoint(folder, tag=f"timed {name}"))  # noqa: B023
            with meter.of(name):
                engine.save_checkpoint(folder, tag=f"counted {name}")
            engine.load_checkpoint(folder)
            meter.again("load the latest", lambda: engine.load_checkpoint(folder))  # noqa: B023
            if kept is None:
                with meter.of("load the latest"):
                    engine.load_checkpoint(folder)
            engine.destroy()


def scheduled(size: int, meter: Meter) -> None:
    """``size`` sequences that are served at once, and as many that wait while 16 are served."""
    from deepspeed.inference.cache.blocks import BlockManager, BlockPool
    from deepspeed.inference.scheduling.requests import Request, SamplingParams
    from deepspeed.inference.scheduling.scheduler import Scheduler

    def made(served: int) -> Scheduler:
        manager = BlockManager(BlockPool(8 * size + 1024), 16)
        return Scheduler(manager, token_budget=max(512, 2 * served), max_sequences=served)

    def forward(scheduler: Scheduler) -> None:
        chunks = scheduler.schedule()
        scheduler.complete(chunks, {chunk.request.id: 7 for chunk in chunks if chunk.is_last})

    def submit(scheduler: Scheduler, first: int = 0) -> list[Request]:
        params = SamplingParams(max_new_tokens=60)
        requests = [Request(first + i, [1, 2, first + i + 3, 4], params) for i in range(size)]
        for request in requests:
            scheduler.add(request)
        return requests

    for name, served in (("served at once", size), ("waiting for 16", 16)):

        def prepared(served: int = served) -> Scheduler:
            scheduler = made(served)
            submit(scheduler)
            for _ in range(8):
                forward(scheduler)
            return scheduler

        scheduler = prepared()
        for _ in range(3):
            meter.again(f"a forward, {name}", lambda scheduler=scheduler: forward(scheduler))
        with meter.of(f"a forward, {name}"):
            forward(scheduler)
    both: dict[str, Callable[[Scheduler], Any]] = {
        "all come": lambda scheduler: submit(scheduler, size),
        "all leave": lambda scheduler: [scheduler.cancel(request) for request in list(scheduler.waiting)],
    }
    for name, run in both.items():
        scheduler = prepared()
        meter.again(name, lambda run=run, scheduler=scheduler: run(scheduler))
        scheduler = prepared()
        with meter.of(name):
            run(scheduler)


def groups(size: int, meter: Meter) -> None:
    """Groups of parameters that the optimizer is given, one tensor each."""
    import deepspeed

    with scale.one_of(1, 0):
        module = Stack(size)

        def start() -> Any:
            given = [{"params": [param], "lr": 1e-3} for param in module.parameters()]
            return deepspeed.initialize(model=module, model_parameters=given, config=config(2))[0]

        engine = start()
        take_step(engine, torch.ones(2))
        take_step(engine, torch.ones(2))
        meter.again("step", lambda: take_step(engine, torch.ones(2)))
        engine.destroy()
        engine = meter.again("initialize", start)
        engine.destroy()
        with meter.of("initialize"):
            engine = start()
        take_step(engine, torch.ones(2))
        take_step(engine, torch.ones(2))
        with meter.of("step"):
            take_step(engine, torch.ones(2))
        engine.destroy()


def keys(size: int, meter: Meter) -> None:
    """A config with ``size`` keys that nobody knows, and one with as many groups of compressed layers."""
    from deepspeed.tools.config.command import check_config

    group = {"params": {"start_bits": 8, "target_bits": 8, "quantization_period": 0}, "modules": ["layer"]}
    shared = {"enabled": True, "quantizer_kernel": False, "schedule_offset": 0}
    known = {
        "train_batch_size": 8,
        "compression_training": {
            "weight_quantization": {
                "shared_parameters": shared, "different_groups": {f"group{i}": group for i in range(size)},
            }
        },
    }  # fmt: skip
    unknown = {"train_batch_size": 8, **{f"zero_optimizatoin_{i}": i for i in range(size)}}
    for name, given in (("check, known keys", known), ("check, unknown keys", unknown)):
        check_config(given)
        meter.again(name, lambda given=given: check_config(given))
        with meter.of(name):
            check_config(given)


@dataclass(frozen=True)
class Axis:
    unit: str
    sizes: tuple[int, ...]
    quick: tuple[int, ...]
    run: Callable[[int, Any], None]


QUICK, MANY = (40, 160, 640), (40, 160, 640, 2560, 10240)
AXES: dict[str, Axis] = {
    **{f"tensors, stage {stage}": Axis("tensors", MANY[:-1], QUICK, tensors(stage)) for stage in (0, 2, 3)},
    **{
        f"parameters, stage {stage}": Axis(
            "parameters", (1 << 18, 1 << 20, 1 << 22, 1 << 24), (1 << 10, 1 << 12, 1 << 14), elements(stage)
        )
        for stage in (2, 3)
    },
    "planned parameters": Axis(
        "parameters", (10**6, 10**7, 10**8, 10**9, 10**10), (10**6, 10**7, 10**8), planned_elements
    ),
    "planned tensors": Axis("tensors", MANY, QUICK, planned_tensors),
    **{
        f"ranks, stage {stage}": Axis("ranks", (4, 16, 64, 256, 1024, 4096), (16, 64, 256), ranks(stage))
        for stage in (1, 3)
    },
    "sequences": Axis("sequences", (4, 16, 64, 256, 1024, 4096), (64, 256, 1024), scheduled),
    "tags": Axis("tags", (4, 16, 64, 256, 1024), (4, 16, 64), tags),
    "optimizer groups": Axis("groups", (16, 64, 256, 1024), (16, 64, 256), groups),
    "config keys": Axis("keys", (16, 64, 256, 1024), (64, 256, 1024), keys),
}
