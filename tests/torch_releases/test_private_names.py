"""Every private name of torch that this package uses, with what it is used for.

A release may drop or change them without notice. This file runs with the installed torch in every run of the tests, and
in every supported release with `make torch-releases`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext

PACKAGE = Path(__file__).parents[2] / "deepspeed"

# name -> the first arguments of its signature; None: not a Python function, or not called
NAMES: dict[str, str | None] = {
    "torch.Tensor._make_wrapper_subclass": None,  # its first argument is the class
    "torch._C.DisableTorchFunctionSubclass": None,
    "torch._C._are_functorch_transforms_active": None,  # base/tracing.py, called below
    "torch._C._autograd._get_sequence_nr": None,  # numbers of autograd's nodes: observe/flops/counting.py
    "torch._C._current_autograd_node": None,
    "torch._C._current_graph_task_id": None,  # which backward runs: called below
    "torch._C._will_engine_execute_node": None,  # which gradients will arrive: zero/gradients/reducer.py
    "torch._dynamo.backends.common.aot_autograd": "",
    "torch._dynamo.config.ignore_logger_methods": None,
    "torch._dynamo.list_backends": "exclude_tags",
    "torch._dynamo.mark_dynamic": "t index",
    "torch._foreach_add": None,
    "torch._foreach_add_": None,
    "torch._foreach_copy_": None,
    "torch._foreach_div_": None,
    "torch._foreach_mul": None,
    "torch._foreach_mul_": None,
    "torch._foreach_sqrt": None,
    "torch._foreach_sub_": None,
    "torch._functorch.config.enable_autograd_cache": None,
    "torch._functorch.config.patch": None,  # a context manager: transforms/compile/backend.py
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack": "",
    "torch._inductor.compile_fx.compile_fx": "model_ example_inputs_ inner_compile config_patches",
    "torch._inductor.compile_fx.compile_fx_inner": "gm example_inputs",
    "torch._inductor.list_mode_options": "mode",
    "torch._int_mm": None,
    "torch._scaled_mm": None,  # products of 8-bit floats: ops/float8.py
    "torch._subclasses.fake_tensor.FakeTensorMode": None,  # a context manager: planning/counted_activations.py
    "torch._subclasses.fake_tensor.unset_fake_temporarily": "",
    "torch._utils._flatten_dense_tensors": "tensors",
    "torch._utils._rebuild_parameter": "data requires_grad backward_hooks",
    "torch._utils._unflatten_dense_tensors": "flat tensors",
    "torch._weights_only_unpickler.load": "file",
    "torch.autograd.Variable._execution_engine.queue_callback": None,  # called below
    "torch.autograd._profiler_enabled": "",
    "torch.autograd.graph._get_grad_fn_or_grad_acc": "t",
    "torch.cuda._lazy_call": "callable",
    "torch.distributed._symmetric_memory.enable_symm_mem_for_group": "group_name",
    "torch.distributed.distributed_c10d._get_default_store": "",
    "torch.distributed.distributed_c10d._hash_ranks_to_str": "ranks",  # replaced while a group is made: comm/groups.py
    "torch.distributed.distributed_c10d._world.pg_map": None,
    "torch.distributed.tensor.placement_types._StridedShard": None,  # told apart; its split_factor is read
    "torch.nn.Module._load_from_state_dict": "self state_dict prefix local_metadata strict",
    "torch.ops.aten._unsafe_view": None,  # an operator: (tensor, shape) -> what is no view for autograd
    "torch.utils._python_dispatch.TorchDispatchMode": None,
    "torch.utils._python_dispatch._disable_current_modes": "",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "",
    "torch.utils._pytree.keystr": "kp",
    "torch.utils._pytree.tree_flatten": "tree",
    "torch.utils._pytree.tree_flatten_with_path": "tree",
    "torch.utils._pytree.tree_leaves": "tree",
    "torch.utils._pytree.tree_map": "func tree",
    "torch.utils._pytree.tree_map_only": None,  # many overloads; called with (type, function, tree)
    "torch.utils._pytree.tree_unflatten": None,  # its arguments changed places in 2.2, and keep the old order
}
# Used if they are there; base/tracing.py has another way.
OPTIONAL = ("torch._C._dynamo.eval_frame",)
# Methods of torch's classes that a class of ours overrides: (ours, the method) -> (the base, the method's arguments).
OVERRIDDEN: dict[tuple[str, str], tuple[type, str]] = {
    ("ElasticSupervisor", "_monitor_workers"): (LocalElasticAgent, "self worker_group"),
    ("ElasticSupervisor", "_restart_workers"): (LocalElasticAgent, "self worker_group"),
    ("IntegerLinear", "_apply"): (nn.Module, "self fn recurse"),
    ("NumberedModules", "_get_abs_string_index"): (nn.ModuleList, "self idx"),
    ("NumberedModules", "_load_from_state_dict"): (
        nn.ModuleList,
        "self state_dict prefix local_metadata strict missing_keys unexpected_keys error_msgs",
    ),
    ("PackedWeight", "_apply"): (nn.Module, "self fn recurse"),
    ("RandomLayerTokenDrop", "_load_from_state_dict"): (
        nn.Module,
        "self state_dict prefix local_metadata strict missing_keys unexpected_keys error_msgs",
    ),
    ("Supervisor", "_start_workers"): (LocalElasticAgent, "self worker_group"),
}


def test_the_table_is_complete() -> None:
    found = {name for path in PACKAGE.rglob("*.py") for name in private_names(ast.parse(path.read_text()))}
    inner = {name for name in found for longer in found if longer.startswith(f"{name}.")}
    assert {name for name in found - inner if not name.startswith(OPTIONAL)} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_there_and_takes_what_we_pass(name: str) -> None:
    found, expected = resolve(name), NAMES[name]
    if expected is None or not callable(found):
        return
    try:
        signature = inspect.signature(found)
    except ValueError:  # native
        return
    assert list(signature.parameters)[: len(expected.split())] == expected.split()
    others = list(signature.parameters.values())[len(expected.split()) :]
    # Wrapped, and called with the arguments that it was given.
    if name != "torch.nn.Module._load_from_state_dict":
        assert all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in others)


def test_overridden_methods_are_those_listed() -> None:
    assert set(overridden_private_methods()) == set(OVERRIDDEN)
    for (_, method), (base, arguments) in OVERRIDDEN.items():
        assert " ".join(inspect.signature(getattr(base, method)).parameters) == arguments


def test_the_agent_closes_its_processes_as_we_expect() -> None:
    """tools/launcher/agent.py replaces the function `close` of the object that `_start_workers` stores in
    `_pcontext`."""
    close = inspect.signature(PContext.close)
    assert list(close.parameters) == ["self", "death_sig", "timeout"]
    assert close.parameters["timeout"].default == 30
    source = inspect.getsource(LocalElasticAgent)
    assert "self._pcontext = start_processes(" in source and "self._pcontext.close(" in source
    poll = inspect.getsource(SubprocessContext._poll)
    assert poll.index("self.close()") < poll.index("failures=self._failures")
    assert "self.subprocess_handlers" in inspect.getsource(SubprocessContext)


def test_the_backward_that_runs_and_its_end() -> None:
    """Nested numbers of backwards, callbacks at their end, and that a failed one calls none."""
    current = torch._C._current_graph_task_id
    seen: list[Any] = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.append(current())
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: seen.append("end"))
            if fails:
                raise KeyError
            return grad * 2

    leaf = torch.ones(2, requires_grad=True)
    assert current() == -1
    fails = False
    Noted.apply(leaf).sum().backward()
    first, end = seen
    assert first >= 0 and end == "end" and current() == -1
    fails = True
    with pytest.raises(KeyError):
        Noted.apply(leaf).sum().backward()
    assert len(seen) == 3 and seen[2] != first


def test_inside_a_transform() -> None:
    from deepspeed.base.tracing import inside_transform

    said: list[bool] = []
    torch.func.grad(lambda x: said.append(inside_transform()) or x.sum())(torch.ones(2))
    assert said == [True] and not inside_transform()


def test_what_schedulers_check_and_hooks_are_told() -> None:
    """`optimizer._opt_called` (zero/step.py) is what a schedule warns about; hooks take the arguments used here."""
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer._opt_called = True  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context():
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            schedule.step()
    assert {"prepend", "with_kwargs", "always_call"} <= set(
        inspect.signature(nn.Module.register_forward_hook).parameters
    )
    assert isinstance(layer._parameters, dict) and isinstance(layer._buffers, dict)


def test_a_group_tells_its_timeout_and_its_store() -> None:
    """comm/groups.py, comm/transports/gloo.py and comm/hangs/stragglers.py."""
    from deepspeed.comm.groups import timeout_of
    from deepspeed.comm.transports.choice import is_gloo

    if dist.is_initialized():
        pytest.skip("another group is in the way")
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=77)
    )
    try:
        world = dist.group.WORLD
        assert world is not None and timeout_of(world) == timedelta(seconds=77) and is_gloo(world)
        backend: Any = world._get_backend(torch.device("cpu"))
        assert callable(backend.send) and callable(backend.recv)
        store: Any = dist.distributed_c10d._get_default_store()
        assert isinstance(store._underlying_non_prefix_store, dist.Store)
        assert {"ranks", "timeout", "use_local_synchronization"} <= set(
            inspect.signature(dist.new_group).parameters
        )
    finally:
        dist.destroy_process_group()


def resolve(name: str) -> Any:
    """The object behind a dotted name, importing modules on the way. AttributeError: it is gone."""
    found: Any = torch
    path = "torch"
    for part in name.split(".")[1:]:
        path += f".{part}"
        if not hasattr(found, part):
            try:
                importlib.import_module(path)
            except ImportError as error:
                raise AttributeError(f"torch {torch.__version__} has no {path}") from error
        found = getattr(found, part)
    return found


def private_names(tree: ast.Module) -> Iterator[str]:
    """Full names in torch with a part that begins with one underscore, as a file imports or reads them."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            known.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    used = set(known.values())
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in known:
            used.add(".".join([known[inner.id], *reversed(parts)]))
    for name in used:
        if any(part.startswith("_") and not part.startswith("__") for part in name.split(".")):
            yield name


def overridden_private_methods() -> Iterator[tuple[str, str]]:
    """(class, method) of every class of this package that overrides a private method of one of torch."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        classes = [
            node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef) and node.bases
        ]
        if "torch" not in text or not any(_private_methods(node) for node in classes):
            continue
        module = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
        for node in classes:
            ours = getattr(module, node.name, None)
            bases = [
                base for base in getattr(ours, "__mro__", ()) if base.__module__.split(".")[0] == "torch"
            ]
            for name in _private_methods(node):
                if any(name in vars(base) for base in bases):
                    yield node.name, name


def _private_methods(node: ast.ClassDef) -> list[str]:
    return [
        item.name
        for item in node.body
        if isinstance(item, ast.FunctionDef) and item.name.startswith("_") and not item.name.startswith("__")
    ]
