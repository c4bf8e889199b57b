"""What one rank of many does: groups, collectives, bytes, seconds and files, by the number of ranks.

One process is one rank of a job of N on torch's `fake` process group, whose collectives return at once and move
nothing. Everything else is real: the engine, its buckets and optimizer, the checkpoint's files. So what is counted is
what a rank of a real job does, and the seconds are the work that it does itself, without the time on the network. At
stage 3 the gathers are collectives, as on devices.

    python benchmarks/scale.py --save cpu2
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from report import Report, common_arguments

CONTEXT = 64
MICS_SHARD = 8
STEPS = 3
OPERATIONS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_reduce_max",
    "broadcast",
    "reduce",
    "all_to_all",
)
TORCH_FUNCTIONS = ("all_reduce", "broadcast", "all_gather_object", "gather_object", "all_gather", "barrier")


@contextmanager
def one_of(world: int, rank: int) -> Iterator[None]:
    """This process is rank ``rank`` of ``world`` inside the block."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import deepspeed.comm
    from deepspeed.zero.gathering import sharded_model
    from deepspeed.zero.gathering.shard_server import ShardServer

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    with (
        mock.patch.object(sharded_model, "prefers_collectives", lambda device_type: True),
        mock.patch.object(ShardServer, "retire", ShardServer.close),  # nobody else is there to wait for
        mock.patch.object(ShardServer, "fetch", fetch_nothing),
        mock.patch("deepspeed.comm.hangs.stragglers.store_of_default_group", lambda: None),
        mock.patch("deepspeed.comm.hangs.watch.store_of_default_group", lambda: None),
    ):
        try:
            yield
        finally:
            deepspeed.comm.destroy_process_group()


def fetch_nothing(server: Any, bucket: int, full: torch.Tensor) -> None:
    """A bucket as if every rank had this one's shard."""
    full.view(server.communicator.size, -1).copy_(server.shards[bucket])
    server.fetches += 1


def fetches(engine: Any) -> int:
    """How often a bucket was fetched shard by shard, outside collectives: at stage 3 before their order is known."""
    return engine.sharded.gatherer.server.fetches if engine.sharded is not None else 0


class Traffic:
    """Collectives and bytes sent by this rank, by kind."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.sent: dict[str, int] = {}

    def add(self, kind: str, sent: int = 0) -> None:
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.sent[kind] = self.sent.get(kind, 0) + sent


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Counts what goes through the engine's communicators."""
    from deepspeed.comm.collectives import Communicator

    found = Traffic()

    def counting(kind: str) -> Callable[..., Any]:
        original = getattr(Communicator, kind)

        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            before = self.collectives[kind], self.bytes_sent
            result = original(self, *arguments, **options)
            if self.collectives[kind] > before[0]:
                found.add(kind, self.bytes_sent - before[1])
            return result

        return call

    with ExitStack() as stack:
        for kind in OPERATIONS:
            stack.enter_context(mock.patch.object(Communicator, kind, counting(kind)))
        yield found


@contextmanager
def messages() -> Iterator[Traffic]:
    """Counts calls of torch.distributed, as checkpoints use it."""
    found = Traffic()

    def counting(kind: str) -> Callable[..., Any]:
        original = getattr(torch.distributed, kind)

        def call(*arguments: Any, **options: Any) -> Any:
            found.add(kind)
            return original(*arguments, **options)

        return call

    with ExitStack() as stack:
        for kind in TORCH_FUNCTIONS:
            stack.enter_context(mock.patch.object(torch.distributed, kind, counting(kind)))
        yield found


def engine_config(stage: int, mics: bool) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:  # parameters are gathered and released around every use
        zero |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    if mics:
        zero["mics_shard_size"] = MICS_SHARD
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
    }


def make_engine(size: str, stage: int, mics: bool) -> Any:
    import deepspeed
    import gpt

    module = gpt.build(size, CONTEXT)
    config = engine_config(stage, mics)
    return deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)[0]


def take_step(engine: Any) -> None:
    import gpt

    (batch,) = gpt.random_batches(1, 1, CONTEXT, seed=0)
    engine.backward(engine(*batch))
    engine.step()


def state_bytes(engine: Any) -> int:
    """Bytes of weights between uses, masters and optimizer state, each memory once."""
    held: dict[int, int] = {}

    def add(tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()

    store = engine.core.store
    for param in engine.module.parameters():
        add(param)
    for bucket in store.param_buckets:
        add(bucket.shard)
    for owned in store.fragments:
        add(owned.master)
        for value in store.state_of(owned).values():
            add(value)
    return sum(held.values())


def gradient_bytes(engine: Any) -> int:
    """Bytes of reduced gradients that are kept until the update."""
    buckets = engine.core.reducer.buckets
    return sum(bucket.reduced.nbytes for bucket in buckets if bucket.reduced is not None)


@contextmanager
def into(folder: Path) -> Iterator[None]:
    """Ranks other than rank 0 write into a folder that rank 0 has made and committed."""
    staged = mock.Mock(staging=folder, final=folder)
    with (
        mock.patch("deepspeed.checkpoint.save.StagedFolder", lambda *_: staged),
        mock.patch("deepspeed.checkpoint.save.flush_later"),
    ):
        yield


def files_in(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()} if folder.exists() else {}


def saved(engine: Any, folder: Path, rank: int) -> dict[str, Any]:
    """Seconds, messages and files of one rank's save; its data is the same whichever rank has saved before."""
    final = folder / "t"
    before = files_in(final)
    with ExitStack() as stack:
        if rank:
            stack.enter_context(into(final))
        stack.enter_context(
            mock.patch("deepspeed.checkpoint.contents.new_id", lambda: 5)
        )  # ranks agree on one
        sent = stack.enter_context(messages())
        begin = time.perf_counter()
        engine.save_checkpoint(str(folder), tag="t")
        seconds = time.perf_counter() - begin
    written = {name: size for name, size in files_in(final).items() if name not in before}
    return {"save_s": seconds, "save_messages": sent.calls, "written": written}


def loaded(engine: Any, folder: Path) -> dict[str, Any]:
    """Seconds of one rank's load, the files that it opened and what it read of them."""
    from deepspeed.checkpoint.files import archive_reader

    opened: dict[str, Any] = {}

    open_archive = archive_reader.open_archive

    def opening(path: Path) -> Any:
        opened[path.name] = open_archive(path)
        return opened[path.name]

    with ExitStack() as stack:
        for reader in ("reader", "files.archive_reader"):
            stack.enter_context(mock.patch(f"deepspeed.checkpoint.{reader}.open_archive", opening))
        sent = stack.enter_context(messages())
        begin = time.perf_counter()
        engine.load_checkpoint(str(folder), tag="t")
        seconds = time.perf_counter() - begin
    read = sum(file.bytes_read for file in opened.values())
    return {"load_s": seconds, "load_messages": sent.calls, "opened": sorted(opened), "read": read}


def groups_made() -> int:
    return len(torch.distributed.distributed_c10d._world.pg_map)


def write_as(world: int, rank: int, size: str, stage: int, mics: bool, folder: Path) -> None:
    """A rank that others depend on writes its files after one step."""
    with one_of(world, rank):
        engine = make_engine(size, stage, mics)
        take_step(engine)
        saved(engine, folder, rank)


def first_rank(world: int, size: str, stage: int, mics: bool, folder: Path, steps: int) -> dict[str, Any]:
    """Start, steps and save of rank 0, to whose broadcasts the others listen: here nobody else could speak."""
    with one_of(world, 0):
        with traffic() as start:
            begin = time.perf_counter()
            engine = make_engine(size, stage, mics)
            initialized = time.perf_counter() - begin
        take_step(engine)
        fetched = fetches(engine)
        seconds: list[float] = []
        for _ in range(steps):
            with traffic() as step:
                begin = time.perf_counter()
                take_step(engine)
                seconds.append(time.perf_counter() - begin)
        later = fetches(engine) - fetched
        done = saved(engine, folder, 0)
        return {
            "groups": groups_made(),
            "initialize_s": initialized,
            "start_collectives": start.calls,
            "start_sent": start.sent,
            "step_s": min(seconds),
            "collectives": step.calls,
            "sent": step.sent,
            "first_step_fetches": fetched,
            "later_fetches": later,
            "rank_0_save_s": done["save_s"],
            "rank_0_messages": done["save_messages"],
            "rank_0_written": done["written"],
        }


def measure(world: int, stage: int, size: str, *, mics: bool = False, steps: int = STEPS) -> dict[str, Any]:
    """Steps of rank 0 of ``world``, and the state and files of a rank in the middle."""
    rank = min(world // 2 + 1, world - 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = first_rank(world, size, stage, mics, folder, steps)
        if mics and rank >= MICS_SHARD:  # who writes the shard of which this rank has a replica
            write_as(world, rank % MICS_SHARD, size, stage, mics, folder)
        with one_of(world, rank):
            engine = make_engine(size, stage, mics)
            result = {
                "gradient_bytes": kept_gradients(engine),
                "state_bytes": state_bytes(engine),
                **saved(engine, folder, rank),
                **loaded(engine, folder),
            }
    head = next(name for name in first["rank_0_written"] if name.endswith("model_states.pt"))
    place = {"ranks": world, "stage": stage, "mics": mics, "first_file_bytes": first["rank_0_written"][head]}
    return {**place, **first, **result}


def bytes_sent(sent: dict[str, int]) -> int:
    """Without broadcasts: there the counter of the source stands for all ranks, which pass the bytes on."""
    return sum(count for kind, count in sent.items() if kind != "broadcast")


def kept_gradients(engine: Any) -> int:
    import gpt

    (batch,) = gpt.random_batches(1, 1, CONTEXT, seed=0)
    engine.backward(engine(*batch))
    kept = gradient_bytes(engine)
    engine.step()
    return kept


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments("One rank of many on a fake process group.")
    parser.add_argument("--model", default="10M", choices=["tiny", "10M", "50M"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 512, 1024])
    parser.add_argument("--stages", nargs="+", default=["0", "1", "2", "3", "mics"])
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.model, arguments.ranks, arguments.stages = "tiny", [8, 64], ["2", "3"]
    return arguments


STEP_HEADER = (
    "ranks",
    "groups",
    "initialize, s",
    "step, s",
    "collectives per step",
    "MB sent per step",
    "state, MB",
)
FILE_HEADER = (
    "ranks",
    "messages of a save",
    "save, s",
    "files",
    "MB written",
    "rank 0's save, s",
    "first file, KB",
    "load, s",
    "files opened",
    "MB read",
)


def step_row(found: dict[str, Any]) -> list[str]:
    calls = ", ".join(f"{count} {kind}" for kind, count in sorted(found["collectives"].items()))
    state = found["state_bytes"] + found["gradient_bytes"]
    return [
        str(found["ranks"]),
        str(found["groups"]),
        f"{found['initialize_s']:.2f}",
        f"{found['step_s']:.3f}",
        calls,
        f"{bytes_sent(found['sent']) / 1e6:.2f}",
        f"{state / 1e6:.2f}",
    ]


def file_row(found: dict[str, Any]) -> list[str]:
    return [
        str(found["ranks"]),
        str(sum(found["save_messages"].values())),
        f"{found['save_s']:.3f}",
        str(len(found["written"])),
        f"{sum(found['written'].values()) / 1e6:.3f}",
        f"{found['rank_0_save_s']:.3f}",
        f"{found['first_file_bytes'] / 1e3:.0f}",
        f"{found['load_s']:.3f}",
        str(len(found["opened"])),
        f"{found['read'] / 1e6:.3f}",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    report = Report("scale", arguments)
    report.data["rows"] = []
    torch.set_num_threads(1)
    measure(2, 0, "tiny")  # what the first engine of a process loads
    for stage in arguments.stages:
        mics = stage == "mics"
        rows = [
            measure(world, 3 if mics else int(stage), arguments.model, mics=mics) for world in arguments.ranks
        ]
        report.data["rows"] += rows
        name = f"stage 3, MiCS in groups of {MICS_SHARD}" if mics else f"stage {stage}"
        title = f"{name}, {arguments.model} GPT, fp32, one rank"
        report.table(title, STEP_HEADER, [step_row(row) for row in rows])
        report.table(f"{name}: its checkpoint", FILE_HEADER, [file_row(row) for row in rows])
    report.save()


if __name__ == "__main__":
    main()
