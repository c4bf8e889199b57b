"""Validation of a split before it is applied: a stand-in of the model runs a few tokens, whole and then split.

The stand-in is the module that was planned (one block for all identical ones), with random weights: the user's module
is not run, and weights that are missing, partitioned, or zero at the start of training hide no errors.
Ranks do not communicate during the trial: where they would, at row-parallel layers, split embeddings and gathered
outputs, the split run continues with the whole run's value. So each layer is judged separately, rounding does not
accumulate, experts are chosen equally, and a failing rank leaves no other waiting; then they agree on the verdict.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.module_utils import clear_hooks
from deepspeed.comm.collectives import Communicator
from deepspeed.comm.pending import DONE, Pending
from deepspeed.parallel.tensor.apply import apply_plan
from deepspeed.parallel.tensor.cuts import Cut
from deepspeed.parallel.tensor.planning.plan import Example, PlanError, TensorParallelPlan

_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Maximum relative difference (2-norm) attributed to rounding. A wrong split causes differences of order 1."""
_TF32 = 2e-2
_OUTPUT = "the output of "

Observe = Callable[[str, Tensor], Tensor]
"""(name of the tensor, its value in this run) -> its value in the whole run."""


def try_split(plan: TensorParallelPlan, group: Communicator) -> str:
    """Compare a split stand-in with the whole one, and return the outcome as text for the report. Collective.

    PlanError, on all ranks: the results differ. The text names the first layer where they do.
    """
    if plan.example is None:
        return "not compared with the whole model, which could not be traced"
    device = torch.device(get_accelerator().current_device_name())
    devices = [] if device.type == "cpu" else [get_accelerator().current_device()]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"), torch.no_grad():
        module = materialize_module(plan.example, device)
        inputs = materialize_inputs(plan.example, device)
        own = plan.within(module)
        comparison = _ObservedRuns()
        failed = _run(module, inputs, own, group.rank, comparison.keep)
        if _largest(failed is not None, group, device):
            return f"not compared with the whole model: its stand-in does not run ({failed})"
        apply_plan(module, own, _SilentCommunicator(group), lambda *_: None)
        failed = _run(module, inputs, own, group.rank, comparison.compare)
    return _outcome(comparison, failed, _rounding(module, device), group, device)


class _SilentCommunicator(Communicator):
    """A communicator that pretends to be a rank of ``group``, but communicates nothing: outputs are left unchanged."""

    def __init__(self, group: Communicator) -> None:
        self.rank, self.size, self.ranks = group.rank, group.size, group.ranks

    def all_reduce(self, tensor: Tensor, *, scale: float = 1.0) -> Pending:
        return DONE

    def all_gather(self, output: Tensor, input: Tensor) -> Pending:
        return DONE

    def broadcast(self, tensor: Tensor, src: int) -> Pending:
        return DONE


class _ObservedRuns:
    """Records inputs and outputs of layers in the whole run, and compares those of the split run with them. ``errors``:
    relative differences at ``places``, in order."""

    def __init__(self) -> None:
        self.values: dict[str, deque[Tensor]] = defaultdict(deque)
        self.places: list[str] = []
        self.errors: list[float] = []

    def keep(self, place: str, value: Tensor) -> Tensor:
        if not place.startswith(_OUTPUT):
            self.places.append(place)
        self.values[place].append(value.clone())
        return value

    def compare(self, place: str, value: Tensor) -> Tensor:
        whole = self.values[place].popleft()
        if not place.startswith(_OUTPUT):
            self.errors.append(_difference(value, whole))
        return whole


def _difference(value: Tensor, whole: Tensor) -> float:
    """Return the relative difference in the 2-norm; infinite if the shapes differ."""
    if whole.shape != value.shape:
        return math.inf
    finite = whole.isfinite()
    ours, theirs = (each.where(finite, 0).double() for each in (value, whole))
    difference, size = float((ours - theirs).norm()), float(theirs.norm())
    return difference / size if size else difference


def _run(
    module: nn.Module, inputs: Mapping[str, Tensor], plan: TensorParallelPlan, rank: int, observe: Observe
) -> str | None:
    """Run one forward in which ``observe`` gets the inputs of row-parallel layers and the results. Return the error,
    or None."""
    hooks = list(_watch(module, plan, rank, observe))
    try:
        result = module(**inputs)
        for number, leaf in enumerate(tree_leaves(dict(result) if isinstance(result, Mapping) else result)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                observe(f"result {number} of the model", leaf)
    except Exception as error:  # reported by the caller
        return f"{type(error).__name__}: {error}"
    finally:
        for hook in hooks:
            hook.remove()
    return None


def _watch(module: nn.Module, plan: TensorParallelPlan, rank: int, observe: Observe) -> Iterator[Any]:
    """Hook the inputs of row-parallel layers, and all outputs that involve communication; yield the handles."""
    rows = {name.rpartition(".")[0]: each.cut for name, each in plan.parameters.items() if each.kind == "row"}
    for path, cut in rows.items():

        def got(_: Any, args: tuple[Tensor, ...], path: str = path, cut: Cut = cut) -> None:
            value = args[0]
            is_whole = value.shape[-1] == cut.size
            observe(f"the input of {path}", cut.along(-1).take(value, rank) if is_whole else value)

        yield module.get_submodule(path).register_forward_pre_hook(got)
    gathered = {name.rpartition(".")[0] for name, each in plan.parameters.items() if each.gather}
    spread = [path for each in plan.vocabulary for path in (*each.embeddings, *each.heads)]
    for path in dict.fromkeys((*rows, *sorted(gathered), *spread)):

        def gave(_: Any, args: Any, output: Tensor, place: str = f"{_OUTPUT}{path}") -> Tensor:
            return observe(place, output)

        yield module.get_submodule(path).register_forward_hook(gave)


def _rounding(module: nn.Module, device: torch.device) -> float:
    of_weights = max((_ROUNDING.get(param.dtype, 0.0) for param in module.parameters()), default=1e-3)
    reduced = device.type != "cpu" and torch.get_float32_matmul_precision() != "highest"
    return max(of_weights, _TF32) if reduced else of_weights


def _outcome(
    comparison: _ObservedRuns, failed: str | None, limit: float, group: Communicator, device: torch.device
) -> str:
    """Return the outcome as text. PlanError, on all ranks, for the first difference that any of them has seen."""
    errors = comparison.errors
    wrong = [number for number, error in enumerate(errors) if not error <= limit]
    mine = wrong[0] if wrong else len(errors) if failed else math.inf
    first = -_largest(-mine, group, device)
    if first == math.inf:
        worst = _largest(max(errors, default=0.0), group, device)
        return f"compared with the whole model on a few tokens: largest relative difference {worst:.0e}"
    place = comparison.places[min(int(first), len(comparison.places) - 1)]
    why = "on another rank" if mine > first else failed or f"relative difference {errors[int(first)]:.1e}"
    raise PlanError(
        f"split over {group.size} ranks, the model would compute different results than unsplit, starting "
        f"with {place} ({why}). Keep the layers of that block whole with rules of partition_type 'skip' in "
        "tensor_parallel.partition_config"
    )


def _largest(value: float, group: Communicator, device: torch.device) -> float:
    number = torch.tensor([float(value)], device=device, dtype=torch.float32)
    group.all_reduce_max(number).wait()
    return float(number)


# A meta module is materialized with random numbers that are equal on all ranks, without communication.

_PERIOD = 1_048_573
"""Period of the random numbers, a prime: they repeat, but no two rows or heads of a weight get the same ones."""
_MAX_FP32 = 2**31
"""Number of weight elements up to which the stand-in is in fp32; beyond, it is in bf16."""


def materialize_module(example: Example, device: torch.device) -> nn.Module:
    """Materialize the example's module on ``device`` in evaluation mode, with random weights of trained magnitude, and
    ties preserved. Buffers keep the user's values if known."""
    module = example.module
    numbers = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(0)).to(device)
    few = sum(param.numel() for param in module.parameters()) <= _MAX_FP32
    memo: dict[int, Any] = {}
    for param in module.parameters():
        values = _random(param.shape, numbers, torch.float32 if few else torch.bfloat16)
        memo[id(param)] = nn.Parameter(values, requires_grad=False)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        known = example.buffers.get(name)
        memo[id(buffer)] = _unknown(buffer, device) if known is None else known.detach().to(device, copy=True)
    made = copy.deepcopy(module, memo).eval()
    clear_hooks(made)  # the user's hooks are not meant for the stand-in
    return made


def materialize_inputs(example: Example, device: torch.device) -> dict[str, Any]:
    """Return the example's inputs, including nests, with values: random tokens of the vocabulary, else random
    numbers."""
    table = getattr(example.module, "get_input_embeddings", lambda: None)()
    tables = [table] if isinstance(table, nn.Embedding) else []
    tables = tables or [each for each in example.module.modules() if isinstance(each, nn.Embedding)]
    tokens = min((each.num_embeddings for each in tables), default=2)
    source = torch.Generator().manual_seed(0)

    def filled(meta: Any) -> Any:
        return _value(meta, tokens, source).to(device) if isinstance(meta, Tensor) else meta

    return tree_map(filled, dict(example.inputs))


def _value(meta: Tensor, tokens: int, source: torch.Generator) -> Tensor:
    if meta.is_floating_point():
        return torch.randn(meta.shape, generator=source)
    if meta.dtype is torch.bool:
        return torch.ones(meta.shape, dtype=torch.bool)
    return torch.randint(tokens, meta.shape, generator=source).to(meta.dtype)


def _random(shape: torch.Size, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return random weights, of normally distributed ``numbers``: around 1 for norms and biases, else scaled so that
    products keep the size of inputs."""
    made = torch.empty(shape, dtype=dtype, device=numbers.device)
    flat = made.view(-1)
    for start in range(0, flat.numel(), _PERIOD):
        piece = flat[start : start + _PERIOD]
        piece.copy_(numbers[: piece.numel()])
    if len(shape) < 2:
        return made.mul_(0.3).add_(1.0)
    inputs = shape[-1] if len(shape) < 4 else shape[1:].numel()
    return made.mul_(inputs**-0.5)


def _unknown(buffer: Tensor, device: torch.device) -> Tensor:
    """Return values for a buffer with which most forwards run: all-visible masks, positions 0, frequencies 1."""
    fill = torch.zeros if not buffer.is_floating_point() and buffer.dtype is not torch.bool else torch.ones
    return fill(buffer.shape, dtype=buffer.dtype, device=device)
