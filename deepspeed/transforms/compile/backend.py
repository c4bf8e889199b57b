"""Registry of graph passes, and the compiler backend that runs them over a model's graphs.

Importing this module does not import torch's compiler.

[Note: settings, not rewriting] The original DeepSpeed's passes insert communication into a model's graph. Here
parameters are gathered and released around compiled blocks, and states move between steps, so the built-in passes name
*settings* of that machinery, which the engine applies when a schedule reaches them. As graph functions they return the
graph unchanged; custom passes (``register_compile_pass``) do rewrite it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from deepspeed.base.logging import log_dist
from deepspeed.config.sections.model import CompileConfig
from deepspeed.transforms.compile.passes import (
    offload_adam_states,
    prefetch,
    selective_gather,
    zero3_compile,
    zero_1_and_2_compile,
)
from deepspeed.transforms.compile.passes.contract import (
    CAP_Z3_GATHER_RELEASE,
    PassContract,
    register_pass_contract,
)
from deepspeed.transforms.compile.profilers import ProfilingResult

GraphPass = Callable[..., Any]
"""``(gm, graph_id, graph_order, profiling_results, create_inputs_fn, mem_budget, param_manager, bwd)`` -> the changed
``gm``, or None if there is nothing to change."""

_NOTHING: frozenset[str] = frozenset()
_GATHERS = frozenset({CAP_Z3_GATHER_RELEASE})


@dataclass(frozen=True)
class BuiltinPass:
    """A built-in pass: its documented function, the ZeRO stages it applies to, and the terms of its contract."""

    name: str
    function: GraphPass
    stages: tuple[int, ...]
    provides: frozenset[str] = _NOTHING
    requires: frozenset[str] = _NOTHING


BUILTIN_PASSES: dict[str, BuiltinPass] = {
    each.name: each
    for each in (
        BuiltinPass(zero3_compile.NAME, zero3_compile.add_z3_gather_release, (3,), provides=_GATHERS),
        BuiltinPass(zero_1_and_2_compile.NAME, zero_1_and_2_compile.add_z1_reduce, (1,)),
        BuiltinPass(zero_1_and_2_compile.NAME_Z2, zero_1_and_2_compile.add_z2_reduce, (2,)),
        BuiltinPass(prefetch.NAME, prefetch.schedule_prefetch, (3,), requires=_GATHERS),
        BuiltinPass(selective_gather.NAME, selective_gather.selective_gather, (3,), requires=_GATHERS),
        BuiltinPass(offload_adam_states.NAME, offload_adam_states.move_opt_states, (1, 2, 3)),
        BuiltinPass(offload_adam_states.NAME_SYNC, offload_adam_states.move_opt_states_sync, (1, 2, 3)),
        BuiltinPass(
            offload_adam_states.NAME_INIT, offload_adam_states.offload_adam_states_for_init, (1, 2, 3)
        ),
    )
}
"""The built-in passes by name."""

opt_passes: dict[str, GraphPass] = {name: each.function for name, each in BUILTIN_PASSES.items()}
"""All passes that a schedule may name."""

for _each in BUILTIN_PASSES.values():
    register_pass_contract(_each.name, PassContract(_each.name, _each.provides, _each.requires))


def register_compile_pass(name: str, opt_pass_fn: GraphPass, contract: PassContract | None = None) -> None:
    """Register ``opt_pass_fn`` under ``name`` for schedules, replacing any pass of this name.

    It is called when each graph is compiled, forward (``bwd=False``) and backward, and returns the changed ``gm`` (or
    None). ``create_inputs_fn()`` returns inputs of the graph: ones, of the right shapes.
    """
    if not callable(opt_pass_fn):
        raise ValueError(f"register_compile_pass({name!r}): {opt_pass_fn!r} is not callable")
    if contract is not None and contract.name not in ("", name):
        raise ValueError(f"register_compile_pass({name!r}): the contract belongs to {contract.name!r}")
    opt_passes[name] = opt_pass_fn
    register_pass_contract(name, contract)


@dataclass
class GraphPassRunner:
    """The passes that one engine's compilation runs over each graph, and their compile times.

    ``times``: ``(phase, index, graph_id, seconds)`` of each graph; phase is "fwd" or "bwd".
    """

    passes: tuple[GraphPass, ...] = ()
    debug_log: bool = False
    times: list[tuple[str, int, int, float]] = field(default_factory=list)
    profiling_results: dict[int, ProfilingResult] = field(default_factory=dict)

    def begin(self, inputs: Sequence[Any]) -> int:
        """Register a traced function and return its graph id."""
        graph_id = len(self.profiling_results)
        needs = any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)
        self.profiling_results[graph_id] = ProfilingResult(needs_backward=needs)
        return graph_id

    def restart(self, passes: tuple[GraphPass, ...]) -> None:
        """Start over: every graph will be recompiled with these passes."""
        self.passes = passes
        self.profiling_results.clear()

    @property
    def graph_order(self) -> list[tuple[int, bool]]:
        return [(graph_id, result.needs_backward) for graph_id, result in self.profiling_results.items()]

    def run(self, gm: Any, inputs: Sequence[Any], graph_id: int, *, bwd: bool) -> Any:
        """Run all passes over ``gm`` and return the result."""
        for run_pass in self.passes:
            changed = run_pass(
                gm,
                graph_id,
                self.graph_order,
                self.profiling_results,
                partial(_ones_like, inputs),
                0.0,
                {},
                bwd,
            )
            if changed is not None:
                gm = changed
            gm.graph.lint()
            gm.recompile()
        result = self.profiling_results[graph_id]
        if bwd:
            result.bwd_graph = gm.graph
        else:
            result.fwd_graph = gm.graph
        return gm

    def timed(self, compile_graph: Callable[[], Any], graph_id: int, *, bwd: bool) -> Any:
        began = time.perf_counter()
        compiled = compile_graph()
        phase, seconds = "bwd" if bwd else "fwd", time.perf_counter() - began
        self.times.append((phase, graph_id, graph_id, seconds))
        if self.debug_log:
            log_dist(
                f"compile: {phase} graph {graph_id}, {len(self.passes)} passes, {seconds:.2f} s", ranks=[0]
            )
        return compiled


def make_backend(
    backend: str,
    compile_config: CompileConfig,
    compile_kwargs: Mapping[str, Any] = {},
    owned_frames: GraphPassRunner | None = None,
) -> Callable[[Any, Sequence[Any]], Any]:
    """Make a backend for ``torch.compile`` that runs passes over the graphs of forward and backward.

    Args:
        backend: "inductor"; or "eager" or "aot_eager", which run graphs op by op.
        compile_kwargs: of ``torch.compile``. ``mode`` and ``options`` are passed to inductor.
        owned_frames: the passes to run; default: none.

    ValueError: another backend, whose graphs are not accessible.
    """
    work = owned_frames if owned_frames is not None else GraphPassRunner(debug_log=compile_config.debug_log)
    if backend in ("eager", "aot_eager"):
        return partial(_run_eagerly, work)
    if backend == "inductor":
        return partial(_run_inductor, work, _inductor_options(compile_kwargs))
    raise ValueError(
        f"compile.deepcompile works with the backends 'inductor', 'eager' and 'aot_eager', not {backend!r}"
    )


def _run_eagerly(work: GraphPassRunner, gm: Any, inputs: Sequence[Any]) -> Any:
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graph_id = work.begin(inputs)

    def compiler(bwd: bool) -> Callable[[Any, Sequence[Any]], Any]:
        def compile_graph(graph: Any, values: Sequence[Any]) -> Any:
            return work.timed(
                lambda: make_boxed_func(work.run(graph, values, graph_id, bwd=bwd).forward), graph_id, bwd=bwd
            )

        return compile_graph

    make = aot_autograd(
        fw_compiler=compiler(False),
        bw_compiler=compiler(True),
        partition_fn=min_cut_rematerialization_partition,
    )
    return make(gm, inputs)


def _run_inductor(work: GraphPassRunner, options: dict[str, Any], gm: Any, inputs: Sequence[Any]) -> Any:
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    graph_id = work.begin(inputs)

    def compile_graph(graph: Any, values: Sequence[Any], **facts: Any) -> Any:
        bwd = bool(facts.get("is_backward"))
        return work.timed(
            lambda: compile_fx_inner(work.run(graph, values, graph_id, bwd=bwd), values, **facts),
            graph_id,
            bwd=bwd,
        )

    # The cache is keyed by the graph before the passes, so a hit would skip them.
    with functorch_config.patch(
        enable_autograd_cache=functorch_config.enable_autograd_cache and not work.passes
    ):
        return compile_fx(gm, list(inputs), inner_compile=compile_graph, config_patches=options or None)


def _inductor_options(compile_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(compile_kwargs.get("options") or {})
    if mode := compile_kwargs.get("mode"):
        options = {**torch._inductor.list_mode_options(mode), **options}
    return options


def _ones_like(inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Return values for the inputs of a graph, which are only fake tensors at compile time."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    def value(described: Any) -> Any:
        if isinstance(described, torch.SymInt):
            return int(described)
        if not isinstance(described, torch.Tensor):
            return described
        shape, stride = [int(n) for n in described.shape], [int(n) for n in described.stride()]
        made = torch.empty_strided(shape, stride, dtype=described.dtype, device=described.device)
        return made.fill_(1)

    with unset_fake_temporarily():
        return tuple(value(described) for described in inputs)
