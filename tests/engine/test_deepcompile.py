"""`compile.deepcompile`: schedules of passes, what they change, and that the numbers stay those of eager training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.config.sections.model import CompileConfig
from deepspeed.transforms.compile.backend import (
    BUILTIN_PASSES,
    GraphPassRunner,
    make_backend,
    opt_passes,
    register_compile_pass,
)
from deepspeed.transforms.compile.passes import offload_adam_states, prefetch, selective_gather, zero3_compile
from deepspeed.transforms.compile.passes.contract import (
    PassContract,
    PassContractError,
    get_pass_contract,
    register_pass_contract,
    validate_schedule,
)
from deepspeed.transforms.compile.schedule import WARMUP, default_schedule, read_schedule
from deepspeed.zero.gathering import sharded_model
from tests.pool import distributed

WIDTH, WORDS = 16, 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1)).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(x)))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def start(stage: int, *, deepcompile: bool = True, **sections: Any) -> Any:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "compile": {"deepcompile": deepcompile, **sections.pop("compile", {})},
        **sections,
    }
    engine, *_ = deepspeed.initialize(model=Gpt(), config=config)
    return engine


def steps(engine: Any, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        source = torch.Generator().manual_seed(97 * step + engine.global_rank)
        loss = engine(torch.randint(0, WORDS, (2, 8), generator=source))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@contextlib.contextmanager
def compiler() -> Iterator[Any]:
    """Its counters; what it leaves in the process is undone."""
    from torch._dynamo.utils import counters

    init = nn.Module.__init__
    torch.compiler.reset()
    counters.clear()
    try:
        yield counters
    finally:
        torch.compiler.reset()
        counters.clear()
        nn.Module.__init__ = init  # torch's compiler patches it for good


def eager(stage: int, count: int) -> list[float]:
    engine = start(stage, deepcompile=False)
    losses = steps(engine, 0, count)
    engine.destroy()
    return losses


@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
@distributed(world_size=2)
def test_trains_as_eager_and_compiles_once(stage: int) -> None:
    reference = eager(stage, WARMUP + 2)
    with compiler() as counters:
        engine = start(stage)
        assert engine.is_deepcompile_enabled() and not engine.is_deepcompile_active()
        engine.compile(backend="eager")
        assert engine.is_deepcompile_active() and engine.is_compiled
        losses = steps(engine, 0, 2)
        assert not counters["graph_break"]
        phases = [phase for phase, _, _, seconds in engine.get_compile_time() if seconds > 0]
        assert phases.count("fwd") == phases.count("bwd") == 1  # three blocks of stage 3 share their graphs
        counters.clear()
        losses += steps(engine, 2, WARMUP)
        assert not counters["frames"]
        engine.destroy()
    assert losses == pytest.approx(reference, rel=1e-5)


@pytest.mark.parametrize("collectives", [False, True])
@distributed(world_size=2)
def test_a_schedule_gathers_ahead_and_keeps_what_fits(collectives: bool) -> None:
    reference = eager(3, 8)
    chosen = sharded_model.prefers_collectives
    sharded_model.prefers_collectives = lambda device_type: collectives  # type: ignore[assignment]
    try:
        with compiler():
            engine = start(3)
            gathers = zero3_compile.add_z3_gather_release
            schedule = [
                (0, ["zero3_compile"]),
                (2, [gathers, prefetch.schedule_prefetch]),
                (4, [gathers, "prefetch", selective_gather.selective_gather]),
                (6, ["zero3_compile"]),
            ]
            engine.compile(backend="eager", schedule=schedule)
            sharded, names = engine.sharded, {}
            losses, hits = [], []
            for first in (0, 2, 4, 6):
                ahead = engine.zero_prefetch_bucket_size() if first in (2, 4) else 0
                assert sharded.prefetch_numel == ahead
                names[first] = [p.ds_persist for p in engine.module.parameters()]
                before = sharded.gatherer.counts.hits if collectives else 0
                losses += steps(engine, first, 2)
                hits.append(sharded.gatherer.counts.hits - before if collectives else 0)
            assert all(names[4]) and not any(names[0] + names[2] + names[6])
            if collectives:
                assert hits[0] == 0 and hits[1] > 0 and hits[2] == 0
            engine.destroy()
    finally:
        sharded_model.prefers_collectives = chosen
    assert losses == pytest.approx(reference, rel=1e-5)


@distributed(world_size=2)
def test_kept_parameters_fit_the_room_smallest_first() -> None:
    engine = start(3, deepcompile=False)
    sharded = engine.sharded
    steps(engine, 0, 1)
    sizes = sorted(bucket.nbytes for bucket in sharded.buckets)
    sharded.keep_gathered(sum(sizes[:2]))
    assert sorted(b.nbytes for b in sharded.buckets if b.persistent) == sizes[:2]
    losses = steps(engine, 1, 2)
    sharded.keep_gathered(0)
    assert not any(b.persistent for b in sharded.buckets)
    losses += steps(engine, 3, 1)
    engine.destroy()
    assert losses == eager(3, 4)[1:]


@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=2)
def test_optimizer_states_are_away_between_updates(stage: int, tmp_path: Any) -> None:
    reference = eager(stage, 4)
    with compiler():
        engine = start(stage, compile={"offload_opt_states": True})
        engine.compile(backend="eager")
        losses = steps(engine, 0, 2)
        assert {kind.value for kind in engine.optimizer.mover.offloaded} == {"optim_states", "hp_params"}
        engine.save_checkpoint(tmp_path)
        losses += steps(engine, 2, 2)
        engine.destroy()
    assert losses == pytest.approx(reference, rel=1e-5)


@distributed(world_size=1)
def test_passes_of_ones_own_change_the_graph_from_their_step_on() -> None:
    seen: list[tuple[bool, int, int]] = []

    def no_relu(
        gm, graph_id, graph_order, profiling_results, create_inputs_fn, mem_budget, param_manager, bwd
    ):  # type: ignore[no-untyped-def]
        found = [node for node in gm.graph.nodes if node.target is torch.ops.aten.relu.default]
        for node in found:
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        values = create_inputs_fn()
        assert len(values) == sum(node.op == "placeholder" for node in gm.graph.nodes)
        assert profiling_results[graph_id].needs_backward and (graph_id, True) in graph_order
        seen.append((bwd, graph_id, len(found)))
        return gm

    try:
        with compiler():
            engine = start(0)
            engine.register_compile_pass("no_relu", no_relu)
            engine.compile(backend="eager", schedule=[(0, []), (2, ["no_relu"])])
            steps(engine, 0, 2)
            assert not seen
            ids = torch.arange(8).view(1, 8)
            steps(engine, 2, 1)
            assert {bwd for bwd, *_ in seen} == {False, True}
            assert {(graph, found) for bwd, graph, found in seen if not bwd} == {(0, 3)}
            plain = Gpt()
            plain.load_state_dict(engine.module.state_dict())
            assert plain(ids).item() != pytest.approx(engine(ids).item())
            torch_relu, torch.relu = torch.relu, lambda x: x
            try:
                assert plain(ids).item() == pytest.approx(engine(ids).item(), rel=1e-5)
            finally:
                torch.relu = torch_relu
            engine.destroy()
    finally:
        opt_passes.pop("no_relu", None)


@distributed(world_size=1)
def test_what_is_no_schedule_is_refused() -> None:
    engine = start(1)
    for schedule, words in (
        ([(0, ["prefetsch"])], "unknown pass 'prefetsch'; the passes are .*prefetch"),
        ([(0, ["prefetch"])], "'prefetch' needs zero_optimization.stage 3"),
        ([(0, [3])], "a name or a function"),
        ([(0, "prefetch")], r"each entry must be \(step, \[passes\]\)"),
        ([(-1, [])], ">= 0"),
        ([(1, []), (1, [])], "must increase"),
        ("prefetch", "must be a list"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.compile(schedule=schedule)
    with pytest.raises(ValueError, match="'inductor', 'eager' and 'aot_eager', not 'tvm'"):
        engine.compile(backend="tvm")
    with pytest.raises(NotImplementedError, match="compiled_autograd_enabled"):
        engine.compile(compiled_autograd_enabled=True)
    assert not engine.is_compiled and not engine.is_deepcompile_active()
    engine.destroy()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"compile": {"passes": ["z3"]}}, "compile.passes"),
        ({"compile": {"offload_parameters": True}}, "zero_optimization.offload_param"),
        ({"compile": {"offload_activation": True}}, "activation_checkpointing"),
        (
            {
                "compile": {"offload_opt_states": True},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
            },
            "both offload the optimizer state",
        ),
    ],
)
@distributed(world_size=1)
def test_what_the_section_cannot_mean_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        start(1, **sections)


def test_default_schedules() -> None:
    plain, moving = CompileConfig(deepcompile=True), CompileConfig(deepcompile=True, offload_opt_states=True)
    for stage in range(4):
        periods = read_schedule(default_schedule(plain, stage), stage)
        assert [period.step for period in periods] == ([0, WARMUP] if stage == 3 else [0])
    assert offload_adam_states.NAME in read_schedule(default_schedule(moving, 2), 2)[0].settings
    assert {name for name, setting in BUILTIN_PASSES.items() if opt_passes[name] is setting.function} == set(
        BUILTIN_PASSES
    )


def test_contracts_are_about_one_step() -> None:
    names = [f"test_{i}" for i in range(3)]
    gives, takes, hates = names
    register_pass_contract(gives, PassContract(provides=frozenset({"thing"})))
    register_pass_contract(PassContract(takes, requires=frozenset({"thing"})))
    register_pass_contract(hates, PassContract(conflicts_with=frozenset({gives})))

    def function() -> None: ...

    try:
        validate_schedule([(0, [gives, takes]), (3, [gives, "without a contract", takes])])
        validate_schedule([(0, [gives, function])], {function: takes})
        validate_schedule([(0, [gives]), (1, [hates])])
        for schedule in ([(0, [takes, gives])], [(0, [gives]), (1, [takes])]):
            with pytest.raises(PassContractError, match="requires"):
                validate_schedule(schedule)
        for schedule in ([(0, [gives, hates])], [(0, [hates, gives])]):
            with pytest.raises(PassContractError, match="conflicts"):
                validate_schedule(schedule)
        with pytest.raises(PassContractError, match="multiple names"):
            validate_schedule([(0, [function])], [(function, gives), (function, takes)])
        with pytest.raises(ValueError, match="the contract belongs to"):
            register_compile_pass(hates, function, PassContract("another"))
        register_compile_pass(hates, function)
        assert get_pass_contract(hates) is None and opt_passes[hates] is function
    finally:
        for name in names:
            register_pass_contract(name, None)
            opt_passes.pop(name, None)


@distributed(world_size=1)
def test_a_backend_runs_passes_by_itself() -> None:
    phases: list[bool] = []

    def note(gm: Any, *facts: Any) -> None:
        phases.append(facts[-1])

    with compiler():
        backend = make_backend("eager", CompileConfig(), {}, GraphPassRunner((note,)))
        layer = nn.Linear(3, 2)
        x = torch.ones(4, 3)
        out = torch.compile(layer, backend=backend)(x)
        out.sum().backward()
    assert phases == [False, True] and torch.equal(out, layer(x))
    assert torch.equal(layer.weight.grad, torch.full((2, 3), 4.0))
