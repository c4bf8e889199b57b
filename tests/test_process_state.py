"""State that a process has once, for all engines: every mutable module variable, with its reason.

An engine's own state hangs on the engine (tests/engine/test_two_engines.py). New process-wide state fails here until it
is listed with a reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "deepspeed"

STATE = {
    "tools/serve_options.py:_text_of_pipe()": "a pipe can be read once, and `ds` and the server both parse",
    # What deepspeed.comm must hold: process groups are torch's, one set per process.
    "comm/collectives.py:_transports": "transports of a process group: ranks attach to shared memory once",
    "comm/collectives.py:process_network": "settings and counters of the documented functions",
    "transforms/compile/backend.py:opt_passes": "documented: the passes by name, registered for the process",
    "transforms/compile/passes/contract.py:_pass_contracts": "what registered passes need, by name",
    "comm/functions.py:backend": "holds nothing",
    "comm/groups.py:_GroupCounts.numbers": "names of groups of the same ranks differ by their number",
    "comm/groups.py:_GroupCounts.world": "the default group since which they are counted",
    "comm/hangs/history.py:watch_callbacks": "what ends that thread, set when it is first imported",
    "comm/hangs/watch.py:_watch": "the thread that explains hangs, as long as an engine wants it",
    "comm/hangs/watch.py:_lock": "guards its start and end",
    "comm/transports/hosts.py:_random_identity()": "tells this process's host from others",
    "comm/logging.py:PROCESS_LOG": "log of the documented functions",
    "comm/logging.py:_newest": "which log the documented functions show",
    "comm/logging.py:comms_logger": "the documented name of the newest log; holds nothing",
    "comm/logging.py:_paused": "while one recorded call runs in another",
    "comm/pending.py:DONE": "a finished collective: nothing in it changes",
    "comm/pending.py:OrderedPending._lock": "guards the queue",
    "comm/pending.py:OrderedPending._queue": "collectives in flight finish in one order across groups and engines",
    "comm/pending.py:explanation": "what the last report about a hang said, while it lasts",
    "comm/hangs/stragglers.py:_visits": "how often all ranks met at a call, by name; belongs to the default group",
    "ops/update.py:ALONE": "a frozen value",
    "inference/model/low_rank.py:_numbers": "numbers of adapters, by which their keys and values are told apart",
    "inference/serving/tokenizers.py:BEGIN": "a frozen value",
    "config/optimizers.py:_tree()": "parsed source of the installed torch",
    "ops/formats/blockwise.py:CODE_DITHER": "a frozen value",
    "compat/runtime_comm/coalesced_collectives.py:_CODEC": "a frozen value",
    "tools/starter/files.py:TEMPLATES": "a path",
    "ops/formats/blockwise.py:PARAM_DITHER": "a frozen value",
    "ops/adam/multi_tensor_apply.py:multi_tensor_applier": "has a size and no state",
    "ops/formats/blockwise.py:SIGNED": "a frozen value",
    "ops/formats/blockwise.py:UNSIGNED": "a frozen value",
    "ops/update.py:FOREIGN": "a frozen value",
    "base/python_gc.py:python_gc_manager": "how many engines want the interpreter's collector off",
    "zero/gradients/bucket.py:_OWN_REFERENCES": "a constant of the interpreter",
    "ops/adam/cpu_adam.py:_made": "documented: optimizers of the op by the caller's numbers",
    "zero/gradients/backward.py:_NewestScale.scale": "what engines multiplied the loss of the newest backward by",
    "zero/gradients/backward.py:_NewestScale.task": "which backward that is: engines it reaches divide by the scale",
    "engine/observers/progress/start_report.py:slowdown()": "how much slower this processor multiplies in a dtype",
    "base/accelerator/select.py:ds_accelerator": "the accelerator of this process",
    # Which engine is the newest, for documented functions that name none; engines are not kept alive.
    "transforms/recompute/checkpointing.py:_state": "settings before any engine, and the newest engine's",
    "comm/groups.py:_GroupCounts.lock": "guards the count of groups, and a name of torch's that is replaced meanwhile",
    "comm/mesh.py:meshes": "the newest engine's mesh, and sizes set by hand",
    "comm/documented_groups.py:_registered": "groups made by hand, before there is an engine",
    "parallel/sequence/hf/parallel_state_sp.py:_state": "groups of a module that is a model-parallel unit",
    "parallel/pipeline/schedules/orders.py:EQUAL": "a frozen value",
    "parallel/pipeline/schedules/orders.py:TYPICAL": "a frozen value",
    "parallel/pipeline/messages/p2p.py:_state": "the grid of the documented functions, and their sends in flight",
    "compat/module_inject/tp_shard.py:_numbers": "documented: numbers of the model that scripts cut themselves",
    "compat/utils/debug.py:_names": "names of the model registered last, weakly",
    # Active only inside a with statement.
    "transforms/recompute/scope.py:PROCESS": "stands for the settings of the process",
    "transforms/recompute/scope.py:running": "whose forward runs, per thread",
    "transforms/recompute/offload_activations.py:_contexts": "open contexts, and the patch while there are",
    "inference/model/packed.py:_current": "the forward whose layers call our attention, per thread",
    "inference/serving/bodies.py:_parsing": "one long body at a time: they share the interpreter lock",
    "config/section.py:_notes": "collects notes while one config is read, per thread",
    "zero/active_contexts.py:active_contexts": "patches of an active zero.Init",
    # Resources of the process that end with it, or with their owner.
    "checkpoint/files/locks.py:_own": "locks that this process holds, weakly: a lock belongs to the process",
    "checkpoint/files/locks.py:_guard": "guards them: to close a file of one ends it",
    "checkpoint/files/flush.py:_pending": "files on their way to disk, in order: the process's end waits for them",
    "ops/aio/memory.py:_mappings": "addresses of page-locked memory that is in use",
    "zero/gathering/shard_server.py:_open": "open servers, weakly, for the end of the process",
    "ops/adam/cpu_adam.py:DeepSpeedCPUAdam._ids": "numbers of optimizers, so that none occurs twice",
    "zero/params.py:_ids": "numbers of parameters, so that none occurs twice",
    # The documented logger and its level.
    "tools/launcher/errors.py:logger": "the launcher's logger",
    "base/logging.py:logger": "the documented logger",
    "base/accelerator/pin_memory_tracker.py:_total": "documented: a count of the process, for the log",
    "base/logging.py:_once()": "what log_dist_once and warning_once have said",
    # Computed once from what does not change while the process runs.
    "comm/transports/shared_memory.py:_library()": "native library",
    "config/keys.py:paths_by_key()": "of a schema",
    "config/keys.py:keys_of()": "of a schema",
    "checkpoint/foreign/upstream_format.py:_unhashed()": "of a class",
    "planning/counted_activations.py:choose_recomputation()": "of fake tensors: advice asks again for each change",
    "planning/machine.py:_host_total()": "of the machine",
    "planning/step_time/calibration.py:UNLIMITED": "a frozen value",
    "tools/plan_time.py:LOCAL": "a frozen value",
    "ops/gpu/__init__.py:_has_triton()": "of the installation",
    "ops/gpu/__init__.py:_RUNS": "of the machine",
    "ops/aio/engine.py:library()": "native library",
    "ops/gds/cufile.py:library()": "native library",
    "ops/gds/gds.py:why_not()": "of the machine",
    "ops/native.py:library()": "native library",
    "ops/small_product.py:most_rows()": "of the machine",
    "compression/packed.py:sums_integers_exactly()": "of the machine",
    "config/section.py:_special_fields()": "of a schema",
    "parallel/tensor/layers.py:_joined_class()": "of classes",
    "parallel/tensor/random_numbers.py:_drawing_class()": "of a class",
    "parallel/tensor/replicated.py:_summing_class()": "of a class",
    "optim/scheduler_choice.py:_needs_argument()": "of a function",
    "optim/elementwise.py:_verdicts": "of an optimizer's class, weakly",
}

# Constructors of what cannot change.
FROZEN = re.compile(
    r"frozenset|re\.compile|Path|TypeVar|ParamSpec|struct\.Struct|range|Struct|partial|timedelta|timed_op|Allowed"
    r"|dict\.fromkeys|os\.getenv|str\.maketrans|torch\.device|Launcher|LazyTensor|LaunchEntry|Remedy|tl\.constexpr"
    r"|json\.JSONDecoder|ToolFormat|.*\.(format|join|split|lower|upper|startswith|device_name|or_list)|OptimizerProfile|_whole_from|_[a-z_]*from|tuple|int|str|bool|min|max",
    re.DOTALL,
)

CHANGING = ("deque", "threading.RLock", "threading.Lock", "itertools.count", "dict", "list", "set")


def test_state_of_the_process_is_listed() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in changing(ast.parse(path.read_text()))
    }
    new, gone = found - STATE.keys(), STATE.keys() - found
    assert not new, f"process-wide state without a reason here: {sorted(new)}"
    assert not gone, f"listed, and not there: {sorted(gone)}"


def changing(tree: ast.Module) -> Iterator[str]:
    """Variables of a module, and of its classes, that can change: rebound by a function, filled by one, or an object
    whose class is not known to be frozen. `name()`: the cache of a function."""
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    rebound = {
        name
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Global)
        for name in node.names
    }
    filled = {name for function in functions for name in _filled(function)}
    for name, value in _assigned(tree.body):
        constant = value is None or isinstance(value, ast.Constant)
        if name in rebound or name in filled or (not constant and _is_object(value)):
            yield name
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    yield from _of_classes(classes, functions, filled)
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
            if any(re.match(r"(functools\.)?(lru_)?cache\b", text) for text in decorators):
                yield f"{function.name}()"


def _of_classes(
    classes: Sequence[ast.ClassDef], functions: Sequence[ast.AST], filled: set[str]
) -> Iterator[str]:
    """Variables of classes: objects that change, containers that are filled, and what a function rebinds."""
    names = {node.name for node in classes}
    for node in (inner for function in functions for inner in ast.walk(function)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = node.value
            if isinstance(owner, ast.Name) and owner.id in names:
                yield f"{owner.id}.{node.attr}"
    for node in classes:
        for name, value in _assigned(node.body):
            called = isinstance(value, ast.Call) and ast.unparse(value.func) in CHANGING
            if called or (name in filled and isinstance(value, (ast.Dict, ast.List, ast.Set))):
                yield f"{node.name}.{name}"


def _assigned(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    for node in body:
        targets: Sequence[ast.expr] = []
        value = None
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign):
            targets, value = [node.target], node.value
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _assigned(node.body)
            yield from _assigned(getattr(node, "orelse", []))
        for target in targets:
            if isinstance(target, ast.Name) and not target.id.startswith("__"):
                yield target.id, value


def _is_object(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Call) and not FROZEN.fullmatch(ast.unparse(value.func))


def _filled(function: ast.AST) -> Iterator[str]:
    """Names that a function writes into: `name[...] = `, `name.append(...)`, `name.attribute = `."""
    local = {
        arg.arg
        for node in ast.walk(function)
        if isinstance(node, ast.arguments)
        for arg in node.args + node.kwonlyargs
    } | {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(function):
        owner: ast.AST | None = None
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            owner = node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr
            in ("append", "add", "pop", "popleft", "update", "setdefault", "clear", "extend", "insert")
        ):
            owner = node.func.value
        if (
            isinstance(owner, ast.Attribute)
            and isinstance(owner.value, ast.Name)
            and owner.value.id in ("self", "cls")
        ):
            yield owner.attr
        if isinstance(owner, ast.Name) and owner.id not in local:
            yield owner.id
