"""Contenders that train: the same model, batches, optimizer and clipping under each system.

Runs in this environment and in the peer's, so it needs torch only, and ``deepspeed`` where that is the
contender.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import gpt

LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0
Step = Callable[[tuple[Tensor, Tensor]], Tensor]


def fused_adamw(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        module.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )


def torch_step(module: nn.Module, precision: str, device: str) -> Step:
    """Forward, backward, clipping and fused AdamW in plain torch; bf16 is autocast over fp32 weights."""
    optimizer = fused_adamw(module)

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast(device, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext():
            loss = module(*batch)
        loss.backward()
        clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def ddp_step(module: nn.Module, precision: str, device: str) -> Step:
    return torch_step(nn.parallel.DistributedDataParallel(module), precision, device)


def compiled_ddp_step(module: nn.Module, precision: str, device: str) -> Step:
    """One call of ``torch.compile`` around DDP: torch cuts its graph where gradient buckets end."""
    replicas: Any = torch.compile(nn.parallel.DistributedDataParallel(module))
    return torch_step(replicas, precision, device)


def fsdp2_step(module: nn.Module, precision: str, device: str) -> Step:
    """Every block and the root sharded; bf16 by FSDP2's own mixed precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16) if precision == "bf16" else MixedPrecisionPolicy()
    )
    for block in getattr(module, "blocks", []):
        fully_shard(block, mp_policy=policy)
    fully_shard(module, mp_policy=policy)
    return torch_step(module, "fp32", device)


def engine_config(stage: int, precision: str, batch: int, **more: Any) -> dict[str, Any]:
    """The JSON that both ours and the peer get."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "betas": list(BETAS), "weight_decay": WEIGHT_DECAY},
        },
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage},
        "steps_per_print": 1_000_000,
        **more,
    }


def engine_step(engine: Any) -> Step:
    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss

    return step


TORCH_STEPS = {
    "compute": torch_step,
    "ddp": ddp_step,
    "compiled ddp": compiled_ddp_step,
    "fsdp2": fsdp2_step,
}


class MLP(nn.Module):
    """64-64-64 with a mean-square loss: so little arithmetic that a step is the price of the engine."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x), target)


class Trainer:
    """One rank of a contender.

    Args:
        system: "compute" (no communication), "ddp", "fsdp2" or "engine" (``deepspeed`` of this environment).
        model: a size of ``gpt.SIZES``, or "mlp".
        precision: "fp32" or "bf16" (autocast in plain torch, bf16 weights in an engine).
        stage: ZeRO stage of an engine.
        warmup: steps before the first measurement.
        config: more of the engine's JSON.
        shared_memory: False makes our collectives use gloo's sockets, as DDP does, also within one machine.
        compiled: ``engine.compile()`` before the first step.
    """

    def __init__(
        self,
        system: str,
        model: str,
        precision: str,
        stage: int = 0,
        batch: int = 1,
        context: int = 256,
        warmup: int = 3,
        device: str = "cpu",
        config: dict[str, Any] | None = None,
        shared_memory: bool = True,
        compiled: bool = False,
    ) -> None:
        if not shared_memory:
            os.environ["DS_SHM"] = "0"
        self.device = device
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        module, batches = self._material(model, batch, context, rank)
        self.batches = [(x.to(device), y.to(device)) for x, y in batches]
        module.to(device)
        self.parameters = sum(p.numel() for p in module.parameters())
        self.alone = system == "compute" or ranks == 1
        self.engine: Any = None
        if system == "engine":
            import deepspeed

            settings = engine_config(stage, precision, batch, **(config or {}))
            self.engine = deepspeed.initialize(
                model=module, model_parameters=module.parameters(), config=settings
            )[0]
            if compiled:
                self.engine.compile()
            self.step = engine_step(self.engine)
        else:
            if not self.alone or system != "compute":
                dist.init_process_group("nccl" if device == "cuda" else "gloo")
            self.step = TORCH_STEPS[system](module, precision, device)
        self.cpu_seconds = 0.0
        self.losses, self.graphs = [], []
        for i in range(warmup):
            self.losses.append(self.step(self.batches[i % len(self.batches)]).item())
            self.graphs.append(graphs_so_far())

    @staticmethod
    def _material(
        model: str, batch: int, context: int, rank: int
    ) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
        if model == "mlp":
            torch.manual_seed(2 + rank)
            return MLP(), [(torch.randn(batch, 64), torch.randn(batch, 64)) for _ in range(4)]
        return gpt.build(model, context), gpt.random_batches(4, batch, context, seed=2 + rank)

    def describe(self) -> dict[str, Any]:
        """Parameters, version and the losses of the warm-up (contenders must agree on them)."""
        version = "torch " + torch.__version__
        if self.engine is not None:
            import deepspeed

            version = f"deepspeed {deepspeed.__version__}"
        return {
            "parameters": self.parameters,
            "version": version,
            "losses": self.losses,
            "graphs": [*self.graphs, graphs_so_far()],
        }

    def run(self, steps: int) -> float:
        """Seconds per step over ``steps`` steps, all ranks starting together."""
        if not self.alone:
            dist.barrier()
        self._synchronize()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        for i in range(steps):
            self.step(self.batches[i % len(self.batches)])
        self._synchronize()
        self.cpu_seconds = (time.process_time() - cpu_begin) / steps
        return (time.perf_counter() - begin) / steps

    def cpu(self) -> float:
        """Processor seconds per step of the last ``run``, all threads; less moved by the neighbours' load."""
        return self.cpu_seconds

    def cpu_of_threads(self) -> dict[str, float]:
        """Processor seconds so far: of this rank's threads that live, by name (those that Python does not know:
        "other"), and of the whole "process"."""
        names = {each.native_id: each.name for each in threading.enumerate()}
        found = {"process": time.process_time()}
        for task in Path("/proc/self/task").iterdir():
            name = names.get(int(task.name), "other")
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
            found[name] = found.get(name, 0.0) + seconds
        return found

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak_memory(self) -> int:
        """Most bytes that this rank has held: resident on CPUs, allocated on a GPU."""
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated()
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def save(self, folder: str, tag: str) -> float:
        return self._timed(lambda: self.engine.save_checkpoint(folder, tag=tag))

    def settle(self) -> None:
        """Return when nothing that was saved is still on its way to the disk."""
        if (
            importlib.util.find_spec("deepspeed.checkpoint.files.flush") is not None
        ):  # the peer has no such thread
            importlib.import_module("deepspeed.checkpoint.files.flush").wait_for_flushes()
        os.sync()

    def load(self, folder: str, tag: str) -> float:
        return self._timed(lambda: self._load(folder, tag))

    def load_and_count(self, folder: str, tag: str) -> int:
        """Bytes of files that this rank reads, by read calls or as pages that it maps and touches."""
        with FileBytes() as count:
            self._load(folder, tag)
        return count.total

    def _load(self, folder: str, tag: str) -> None:
        path, _ = self.engine.load_checkpoint(folder, tag=tag)
        if path is None:
            raise RuntimeError("nothing was loaded")

    def _timed(self, action: Callable[[], Any]) -> float:
        if not self.alone:
            dist.barrier()
        begin = time.perf_counter()
        action()
        return time.perf_counter() - begin

    def profile(self, steps: int, rows: int = 40, sort: str = "tottime") -> str:
        """cProfile of ``steps`` steps as text."""
        import cProfile
        import io
        import pstats

        profiler = cProfile.Profile()
        with profiler:
            self.run(steps)
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats(sort).print_stats(rows)
        return text.getvalue()


def graphs_so_far() -> int:
    """Graphs that torch's compiler has traced in this process."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


class FileBytes:
    """Counts what this process reads from files while the context lasts (Linux; 0 elsewhere).

    Read calls are counted by the system (``rchar``). Pages of mapped files are seen as the growth of ``RssFile``,
    sampled by a thread, so what is mapped must stay mapped longer than a sample lasts.
    """

    PERIOD_S = 0.002

    def __enter__(self) -> FileBytes:
        self._stop = threading.Event()
        self._read_before = self._field("io", "rchar")
        self._mapped_before = self._mapped_most = self._field("status", "RssFile")
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(self.PERIOD_S):
            self._mapped_most = max(self._mapped_most, self._field("status", "RssFile"))

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        read = self._field("io", "rchar") - self._read_before
        self.total = read + 1024 * (self._mapped_most - self._mapped_before)  # RssFile is in KiB

    @staticmethod
    def _field(file: str, name: str) -> int:
        path = Path("/proc/self") / file
        if not path.exists():
            return 0
        return int(path.read_text().split(f"{name}:")[1].split()[0])
