"""A split is tried before it is made: a few tokens go through a stand-in of the model, whole and then split.

The stand-in is what the plan was made from (one block for all that are alike), with random weights of its own: the
user's module is not run, and weights that are not here yet, partitioned, or zero at the start of training hide nothing.
Ranks do not communicate while they try: where they would, at row-parallel layers, split embeddings and gathered
outputs, the split run goes on with what the whole one had there. So each layer is judged on its own, rounding does not
add up, experts are chosen alike, and a rank that fails keeps no other waiting; then they agree on the verdict.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.module_utils import without_hooks
from deepspeed.comm.collectives import Communicator
from deepspeed.comm.pending import DONE, Pending
from deepspeed.parallel.tensor.applying import apply_plan
from deepspeed.parallel.tensor.cuts import Cut
from deepspeed.parallel.tensor.planning.plan import Example, PlanError, TensorParallelPlan

_ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest difference, relative in the 2-norm, that is rounding. A wrong split changes values by their own size."""
_TF32 = 2e-2
_OUTPUT = "the output of "

See = Callable[[str, Tensor], Tensor]
"""(which tensor, its value in this run) -> its value in the whole run"""


def try_split(plan: TensorParallelPlan, group: Communicator) -> str:
    """Compare a split stand-in with the whole one; what came out, in words for the report. Collective.

    PlanError, on all ranks alike: the results differ. The text names the first layer where they do.
    """
    if plan.example is None:
        return "not compared with the whole model, which could not be followed"
    device = torch.device(get_accelerator().current_device_name())
    devices = [] if device.type == "cpu" else [get_accelerator().current_device()]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"), torch.no_grad():
        module = stand_in(plan.example, device)
        inputs = example_values(plan.example, device)
        own = plan.within(module)
        whole = _Whole()
        failed = _run(module, inputs, own, group.rank, whole.keep)
        if _largest(failed is not None, group, device):
            return f"not compared with the whole model: its stand-in does not run ({failed})"
        apply_plan(module, own, _Alone(group), lambda *_: None)
        split = _TrialSplit(whole)
        failed = _run(module, inputs, own, group.rank, split.compare)
    return _judge(split, failed, _rounding(module, device), group, device)


class _Alone(Communicator):
    """A rank of ``group`` that does not communicate: what it would get is left as it is."""

    def __init__(self, group: Communicator) -> None:
        self.rank, self.size, self.ranks = group.rank, group.size, group.ranks

    def all_reduce(self, tensor: Tensor, *, scale: float = 1.0) -> Pending:
        return DONE

    def all_gather(self, output: Tensor, input: Tensor) -> Pending:
        return DONE

    def broadcast(self, tensor: Tensor, src: int) -> Pending:
        return DONE


class _Whole:
    """Keeps what the whole stand-in's layers got and gave."""

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = defaultdict(list)
        self.places: list[str] = []

    def keep(self, place: str, value: Tensor) -> Tensor:
        if not place.startswith(_OUTPUT):
            self.places.append(place)
        self.values[place].append(value.clone())
        return value


class _TrialSplit:
    """Compares the split one with it. ``errors``: relative differences in ``places``, in the order of the forward."""

    def __init__(self, whole: _Whole) -> None:
        self.values = {place: iter(every) for place, every in whole.values.items()}
        self.places = whole.places
        self.errors: list[float] = []

    def compare(self, place: str, value: Tensor) -> Tensor:
        whole = next(self.values[place])
        if not place.startswith(_OUTPUT):
            self.errors.append(_difference(value, whole))
        return whole


def _difference(value: Tensor, whole: Tensor) -> float:
    """Relative; infinite if the shapes differ."""
    if whole.shape != value.shape:
        return math.inf
    finite = whole.isfinite()
    ours, theirs = (each.where(finite, 0).double() for each in (value, whole))
    difference, size = float((ours - theirs).norm()), float(theirs.norm())
    return difference / size if size else difference


def _run(
    module: nn.Module, inputs: Mapping[str, Tensor], plan: TensorParallelPlan, rank: int, see: See
) -> str | None:
    """One forward in which ``see`` gets the inputs of row-parallel layers and the results; why it failed, if it did."""
    hooks = list(_watch(module, plan, rank, see))
    try:
        result = module(**inputs)
        for number, leaf in enumerate(tree_leaves(dict(result) if isinstance(result, Mapping) else result)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                see(f"result {number} of the model", leaf)
    except Exception as error:  # whatever it is, the caller names it
        return f"{type(error).__name__}: {error}"
    finally:
        for hook in hooks:
            hook.remove()
    return None


def _watch(module: nn.Module, plan: TensorParallelPlan, rank: int, see: See) -> Iterator[Any]:
    """Hooks on the inputs of row-parallel layers, and on whatever outputs ranks would communicate for."""
    rows = {name.rpartition(".")[0]: each.cut for name, each in plan.parameters.items() if each.kind == "row"}
    for path, cut in rows.items():

        def got(_: Any, args: tuple[Tensor, ...], path: str = path, cut: Cut = cut) -> None:
            value = args[0]
            is_whole = value.shape[-1] == cut.size
            see(f"the input of {path}", cut.along(-1).take(value, rank) if is_whole else value)

        yield module.get_submodule(path).register_forward_pre_hook(got)
    gathered = {name.rpartition(".")[0] for name, each in plan.parameters.items() if each.gather}
    spread = [path for each in plan.vocabulary for path in (*each.embeddings, *each.heads)]
    for path in dict.fromkeys((*rows, *sorted(gathered), *spread)):

        def gave(_: Any, args: Any, output: Tensor, place: str = f"{_OUTPUT}{path}") -> Tensor:
            return see(place, output)

        yield module.get_submodule(path).register_forward_hook(gave)


def _rounding(module: nn.Module, device: torch.device) -> float:
    of_weights = max((_ROUNDING.get(param.dtype, 0.0) for param in module.parameters()), default=1e-3)
    reduced = device.type != "cpu" and torch.get_float32_matmul_precision() != "highest"
    return max(of_weights, _TF32) if reduced else of_weights


def _judge(
    split: _TrialSplit, failed: str | None, limit: float, group: Communicator, device: torch.device
) -> str:
    """PlanError on all ranks for the first difference that one of them has seen."""
    errors = split.errors
    wrong = [number for number, error in enumerate(errors) if not error <= limit]
    mine = wrong[0] if wrong else len(errors) if failed else math.inf
    first = -_largest(-mine, group, device)
    if first == math.inf:
        worst = _largest(max(errors, default=0.0), group, device)
        return f"compared with the whole model on a few tokens: largest relative difference {worst:.0e}"
    place = split.places[min(int(first), len(split.places) - 1)]
    why = "on another rank" if mine > first else failed or f"relative difference {errors[int(first)]:.1e}"
    raise PlanError(
        f"split over {group.size} ranks, the model would compute something else than it does whole, beginning with "
        f"{place} ({why}). Keep the layers of that block whole with rules of partition_type 'skip' in "
        "tensor_parallel.partition_config"
    )


def _largest(value: float, group: Communicator, device: torch.device) -> float:
    number = torch.tensor([float(value)], device=device, dtype=torch.float32)
    group.all_reduce_max(number).wait()
    return float(number)


# A meta module given memory and random numbers: the same on all ranks, without communication.

_PERIOD = 1_048_573
"""Prime: random numbers are repeated, but no two rows or heads of a weight get the same ones."""
_MAX_FP32 = 2**31
"""Elements of weights up to which they are in fp32, and beyond in bf16."""


def stand_in(example: Example, device: torch.device) -> nn.Module:
    """A copy of the example's module on ``device`` in evaluation mode, with weights as of training, tied as they are.
    Buffers have their values where the module had any."""
    module, numbers = example.module, _numbers(device)
    few = sum(param.numel() for param in module.parameters()) <= _MAX_FP32
    memo: dict[int, Any] = {}
    for param in module.parameters():
        values = _random(param.shape, numbers, torch.float32 if few else torch.bfloat16)
        memo[id(param)] = nn.Parameter(values, requires_grad=False)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        known = example.buffers.get(name)
        memo[id(buffer)] = _unknown(buffer, device) if known is None else known.detach().to(device, copy=True)
    made = copy.deepcopy(module, memo).eval()
    without_hooks(made)  # the user's: they are not for it
    return made


def example_values(example: Example, device: torch.device) -> dict[str, Any]:
    """Return the example's inputs, nests of tensors too, with values: random tokens of the vocabulary, random numbers
    elsewhere."""
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


def _numbers(device: torch.device) -> Tensor:
    """Normally distributed, fp32 [_PERIOD]"""
    return torch.randn(_PERIOD, generator=torch.Generator().manual_seed(0)).to(device)


def _random(shape: torch.Size, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Around 1 for norms and biases, otherwise so that a product keeps the size of its inputs."""
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
    """Values with which most forwards run: masks that hide nothing, first places, frequencies of 1."""
    fill = torch.zeros if not buffer.is_floating_point() and buffer.dtype is not torch.bool else torch.ones
    return fill(buffer.shape, dtype=buffer.dtype, device=device)
