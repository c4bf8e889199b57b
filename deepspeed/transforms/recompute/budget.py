"""``activation_checkpointing.memory_budget``: limits the activations that an unmodified model keeps until backward.

The repeated blocks of a model (``zero/partitioning.py``) are called through ``BudgetedCall``. In the first forward with
gradients, one block of each kind runs normally and is measured (``block_record.py``), the others keep only their
inputs. At its end, the ranks agree on the measurements, and ``knapsack.py`` decides what each block keeps from then on.
What is measured is what actually runs, including parallel layers, adapters and autocast.

A block that does not keep everything runs under torch's non-reentrant checkpoint, with the chosen results kept (below):
same operations and random numbers, so bit-identical results.
"""

from __future__ import annotations

import copy
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from deepspeed.base.logging import log_dist
from deepspeed.base.memory import GIB
from deepspeed.base.tracing import inside_transform
from deepspeed.comm.collectives import Communicator
from deepspeed.comm.mesh import ProcessMesh
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.transforms.recompute import checkpointing
from deepspeed.transforms.recompute.block_record import BlockRecord, Key, SavedBytes, is_counted, record_block
from deepspeed.transforms.recompute.checkpointing import SWITCH
from deepspeed.transforms.recompute.knapsack import (
    Block,
    BudgetTooSmall,
    Footprint,
    RecomputeChoice,
    RecomputeOption,
    choose,
)
from deepspeed.zero.partitioning import blocks_of

KEY = "activation_checkpointing.memory_budget"
NOTHING: frozenset[Key] = frozenset()


class Budget:
    """Activation budget of one model's blocks. ``limit``: up to 1, a share of the bytes without recomputation; above,
    bytes.
    """

    def __init__(self, limit: float, ranks: LayerRanks | None) -> None:
        self.limit = limit
        self.ranks = ranks
        self.choice: RecomputeChoice | None = None
        self.chosen: dict[nn.Module, frozenset[Key] | None] = {}
        """Results that each block keeps; None: everything. Missing blocks keep only their inputs."""
        self.measurement: ForwardMeasurement | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Budget:
        """Return the budget of a copy of the model, for the copied blocks."""
        made = memo[id(self)] = Budget(self.limit, self.ranks)
        made.choice = self.choice
        made.chosen = {copy.deepcopy(block, memo): chosen for block, chosen in self.chosen.items()}
        return made

    def decide(self, measured: ForwardMeasurement) -> None:
        """Choose what to keep, from the counts of all ranks. DeepSpeedConfigError: the budget is too small."""
        counted = measured.result()
        if self.ranks is not None:
            counted = max_over_ranks(counted, self.ranks)
        budget = int(self.limit * counted.everything) if self.limit <= 1 else int(self.limit)
        try:
            # When counting on the meta device, such a mode is active, in which tensors have no values.
            with _disable_current_modes():
                choice = choose(counted, budget)
        except BudgetTooSmall as problem:
            raise DeepSpeedConfigError(
                f"{KEY}={self.limit:g}: {_size(budget)} cannot be met: {_size(counted.everything)} are kept "
                f"without recomputation, {_size(counted.outside)} of them outside the model's blocks, and "
                f"recomputing all blocks still keeps {_size(problem.least)}. Set "
                f"{_at_least(self.limit, problem.least, counted)} or more, or use a smaller micro-batch"
            ) from None
        self.choice = choice
        chosen = (option.chosen for option in choice.options)
        self.chosen = dict(zip(measured.blocks, chosen, strict=True))
        log_dist(report(choice), ranks=[0])


def _at_least(limit: float, least: int, counted: Footprint) -> str:
    if limit > 1:
        return str(least)
    return f"{-(-100 * least // max(counted.everything, 1)) / 100:g}"


class ForwardMeasurement:
    """Measurement of one forward: calls of blocks in order, and bytes saved outside them."""

    def __init__(self, model: nn.Module) -> None:
        self._outside = SavedBytes([*model.parameters(), *model.buffers()])
        self._context = self._outside.counting()
        self._kinds: dict[Any, int] = {}
        self._records: list[BlockRecord] = []
        self._calls: list[tuple[nn.Module, int]] = []
        self._before = 0

    def begin(self) -> None:
        self._context.__enter__()

    def end(self) -> None:
        self._context.__exit__(None, None, None)

    def call(self, block: nn.Module, run: Callable[[], Any], rerun: Callable[[], Any], inputs: Any) -> Any:
        """Run and measure ``run()`` if it is the first call of its kind; else call ``rerun()``, which keeps only
        inputs."""
        self._outside.paused = True  # do not count what blocks save as outside
        try:
            kind = _kind(block, inputs)
            number = self._kinds.get(kind)
            if number is None:
                number = self._kinds[kind] = len(self._records)
                outputs, record = record_block(block, run, [inputs])
                self._records.append(record)
            else:
                outputs = rerun()
            self._calls.append((block, number))
            self._before = self._outside.total
            return outputs
        finally:
            self._outside.paused = False

    @property
    def blocks(self) -> list[nn.Module]:
        return list(dict.fromkeys(block for block, _ in self._calls))

    def result(self) -> Footprint:
        calls = Counter(block for block, _ in self._calls)
        kinds = dict(self._calls)
        return Footprint(
            kinds=self._records,
            blocks=[Block(kinds[block], calls[block]) for block in self.blocks],
            outside=self._outside.total,
            before=self._before,
        )


def _kind(block: nn.Module, inputs: Any) -> Any:
    """Return a key that is equal for equivalent calls: class, mode, weights, and the inputs' shapes."""
    weights = tuple((name, p.requires_grad) for name, p in block.named_parameters())
    sizes = tuple(getattr(p, "ds_shape", p.shape) for p in block.parameters())
    leaves = tree_leaves(inputs)
    shapes = tuple((t.shape, t.dtype, t.requires_grad) for t in leaves if isinstance(t, Tensor))
    return type(block), block.training, weights, sizes, shapes


class BudgetedCall:
    """Replacement ``forward`` of a block that keeps what ``budget`` has chosen."""

    def __init__(self, block: nn.Module, budget: Budget) -> None:
        self.block = block
        self.budget = budget
        self.inner: Callable[..., Any] | None = vars(block).get("forward")
        """An earlier replacement of the class's forward, if any."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.inner or partial(type(self.block).forward, self.block)
        if not torch.is_grad_enabled() or inside_transform():
            return run(*args, **kwargs)
        args, kwargs = tuple(map(_no_cache, args)), {key: _no_cache(each) for key, each in kwargs.items()}
        measurement = self.budget.measurement
        if measurement is not None:
            return measurement.call(
                self.block,
                lambda: run(*args, **kwargs),
                lambda: _checkpointed(run, NOTHING, args, kwargs),
                (args, kwargs),
            )
        chosen = self.budget.chosen.get(self.block, NOTHING)
        return run(*args, **kwargs) if chosen is None else _checkpointed(run, chosen, args, kwargs)


@runtime_checkable
class _Cache(Protocol):
    """A KV cache, which Transformers models pass to their layers by default."""

    def update(self, *args: Any, **kwargs: Any) -> Any: ...
    def get_seq_length(self, *args: Any) -> int: ...


def _no_cache(value: Any) -> Any:
    """Replace an empty cache by None: a recomputed layer would append to it twice.

    ValueError: the cache is not empty.
    """
    if not isinstance(value, _Cache) or isinstance(value, (Tensor, nn.Module)):
        return value
    if value.get_seq_length():
        raise ValueError(
            f"{KEY}: the model's layers get a {type(value).__name__} with {value.get_seq_length()} tokens "
            "in training, which recomputed layers cannot extend; leave the key out"
        )
    return None


def _checkpointed(run: Callable[..., Any], chosen: Collection[Key], args: Any, kwargs: Any) -> Any:
    return checkpointing.selective_checkpoint(run, partial(selective_contexts, chosen), args, kwargs)


class MemoryBudget:
    """The module transform of ``activation_checkpointing.memory_budget``."""

    name, after, before = "memory_budget", (), ()

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def apply(self, module: nn.Module, context: Any) -> None:
        """Install the budget. DeepSpeedConfigError: the model has no repeated blocks, or is a pipeline."""
        if any(kind.__name__ == "PipelineModule" for kind in type(module).__mro__):
            raise DeepSpeedConfigError(
                f"{KEY}={self.limit:g}: pipelines do not support a budget yet, as several micro-batches are "
                "in flight; give PipelineModule activation_checkpoint_interval, and leave the key out"
            )
        budget = budget_blocks(module, self.limit, LayerRanks(context.mesh, module))
        context.report(f"{len(budget.chosen)} blocks keep {_limit(self.limit)} of their activations at most")


def budget_blocks(module: nn.Module, limit: float, ranks: LayerRanks | None) -> Budget:
    """Run the blocks of ``module`` within a budget, allocated after its first forward with gradients."""
    blocks = blocks_of(module)
    if not blocks:
        raise DeepSpeedConfigError(
            f"{KEY}={limit:g}: the model has no repeated blocks (elements of one class in a ModuleList or "
            "Sequential) to recompute; call deepspeed.checkpointing.checkpoint in the model instead"
        )
    budget = Budget(limit, ranks)
    budget.chosen = dict.fromkeys(blocks, NOTHING)
    for block in blocks:
        vars(block)["forward"] = BudgetedCall(block, budget)
    _FirstForward(module, budget)
    return budget


class _FirstForward:
    """Hooks that measure the first forward of ``module`` with gradients, then remove themselves."""

    def __init__(self, module: nn.Module, budget: Budget) -> None:
        self.budget = budget
        self._handles = [
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled() or inside_transform() or self.budget.measurement is not None:
            return
        refuse_own_checkpoints(module)
        self.budget.measurement = ForwardMeasurement(module)
        self.budget.measurement.begin()

    def _end(self, module: nn.Module, args: Any, outputs: Any) -> None:
        measurement, self.budget.measurement = self.budget.measurement, None
        if measurement is None:
            return
        measurement.end()
        if outputs is None:  # the forward raised
            return
        for handle in self._handles:
            handle.remove()
        self.budget.decide(measurement)


def refuse_own_checkpoints(module: nn.Module) -> None:
    own = [name for name, each in module.named_modules() if getattr(each, SWITCH, False) and each.training]
    if own:
        raise DeepSpeedConfigError(
            f"{KEY} chooses what is recomputed, but {own[0] or 'the model'} checkpoints itself: turn that off "
            "(model.gradient_checkpointing_disable()), or leave the key out"
        )


# --- Report -----------------------------------------------------------------------------------------


def report(choice: RecomputeChoice) -> str:
    """Format a report of what is kept and what is recomputed, a few lines."""
    counted = choice.counted
    lines = [
        f"memory budget: {_size(choice.budget)} of {_size(counted.everything)} to keep everything; "
        f"{_size(choice.peak)} are used ({_size(counted.outside)} outside the blocks), for "
        f"{choice.extra_share:.1%} more FLOPs in the blocks"
    ]
    for first, last, option, block in _runs(choice):
        which = f"block {first}" if first == last else f"blocks {first} to {last}"
        lines.append(f"  {which}: {_rerun_text(counted.kinds[block.kind], option.chosen)}")
    return "\n".join(lines)


def _runs(choice: RecomputeChoice) -> Iterator[tuple[int, int, RecomputeOption, Block]]:
    """Group consecutive blocks that do the same: (first block, last block, option, block)."""
    pairs = zip(choice.options, choice.counted.blocks, strict=True)
    for (option, block), same in itertools.groupby(enumerate(pairs), key=itemgetter(1)):
        numbers = [number for number, _ in same]
        yield numbers[0], numbers[-1], option, block


def _rerun_text(record: BlockRecord, chosen: Collection[Key] | None) -> str:
    if chosen is None:
        return "keeps everything"
    needed = [op for op in record.ops[: record.needed] if op.out]
    kept = Counter(op.label for op in needed if op.key in chosen)
    products = Counter(op.label for op in needed if op.key not in chosen and op.flops)
    rest = sum(op.key not in chosen and not op.flops for op in needed)
    return (
        f"keeps {_listed(kept) or 'its inputs'}; recomputes {_listed(products) or 'no matrix product'} and "
        f"{rest} smaller operations"
    )


def _listed(names: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items())


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.3f} GiB" if nbytes >= GIB / 100 else f"{nbytes / 2**20:.3f} MiB"


def _limit(limit: float) -> str:
    return f"{limit:.0%}" if limit <= 1 else _size(int(limit))


# Ranks that run one model decide equally: each measures its own batch, and the maximum over ranks is used.


class LayerRanks:
    """The ranks that run the same layers: replicas, and ranks that share each layer or sequence."""

    def __init__(self, mesh: ProcessMesh, module: nn.Module) -> None:
        self._mesh = mesh
        self._module = module

    def __deepcopy__(self, memo: object) -> LayerRanks:
        return self

    @property
    def groups(self) -> list[Communicator]:
        """One group per axis: the overall maximum is taken axis by axis, as a model-parallel unit may have no group of
        all these ranks."""
        axes = (("dp", "sp"), ("tp",))
        return [self._mesh.communicator(*names) for names in axes if self._mesh.size(*names) > 1]

    def largest(self, numbers: list[int]) -> list[int]:
        """Return the elementwise maximum over all ranks. Collective."""
        device = next((p.device for p in self._module.parameters()), torch.device("cpu"))
        values = torch.tensor(numbers, dtype=torch.int64, device=device)
        for group in self.groups:
            group.all_reduce_max(values).wait()
        return values.tolist()

    def is_same(self, number: int) -> bool:
        """Return whether ``number`` is the same on all ranks. Collective."""
        high, low = self.largest([number, -number])
        return high == -low


def max_over_ranks(counted: Footprint, ranks: LayerRanks) -> Footprint:
    """Take the maximum bytes and FLOPs over all ranks, which may have batches of different sizes. If the ranks' blocks
    run different operations (experts without tokens), only whole blocks can be recomputed.

    Raises:
        RuntimeError: the ranks run blocks in different orders.
    """
    if not ranks.groups:
        return counted
    if not ranks.is_same(_digest(counted.blocks)):
        raise RuntimeError(
            "activation_checkpointing.memory_budget: the ranks run the blocks of the model in different "
            "orders, or of different kinds, in the first forward; they must match on all ranks"
        )
    kinds = list(counted.kinds)
    if not ranks.is_same(_digest([[str(op.key) for op in record.ops] for record in kinds])):
        kinds = [_without_choices(record) for record in kinds]
    outside, before = ranks.largest([counted.outside, counted.before])
    return replace(counted, kinds=[_largest(each, ranks) for each in kinds], outside=outside, before=before)


def _digest(value: object) -> int:
    return zlib.crc32(repr(value).encode())


def _without_choices(record: BlockRecord) -> BlockRecord:
    """Merge all operations into one that cannot be kept."""
    ops = record.ops[: record.needed]
    if not ops:
        return record
    flops, cost = sum(op.flops for op in ops), sum(op.cost for op in ops)
    return replace(record, ops=(replace(ops[0], flops=flops, cost=cost, keepable=False),), needed=1)


def _largest(record: BlockRecord, ranks: LayerRanks) -> BlockRecord:
    numbers = [record.needed, record.inputs, record.saved]
    for op in record.ops:
        numbers += [op.flops, op.cost, op.out, not op.keepable, op.saved]
    needed, inputs, saved, *rest = ranks.largest([int(number) for number in numbers])
    ops = [
        replace(
            op,
            flops=rest[place],
            cost=rest[place + 1],
            out=rest[place + 2],
            keepable=not rest[place + 3],
            saved=bool(rest[place + 4]),
        )
        for op, place in zip(record.ops, range(0, len(rest), 5), strict=True)
    ]
    return replace(record, ops=tuple(ops), needed=needed, inputs=inputs, saved=saved)


# Keep the results of chosen operations in the first run of a checkpointed region, and reuse them in the second.
#
# (Selective recomputation: Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022.)


class _Numbering(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[Any, int] = {}

    def __enter__(self) -> Any:
        self._counts.clear()
        return super().__enter__()

    def key(self, func: Any) -> Key:
        position = self._counts.get(func, 0)
        self._counts[func] = position + 1
        return func, position


class _KeptResult(NamedTuple):
    tensor: Tensor
    version: int


class _Keep(_Numbering):
    """Mode for the first run: keeps the chosen results."""

    def __init__(self, chosen: Collection[Key], kept: dict[Key, Any]) -> None:
        super().__init__()
        self._chosen, self._kept = chosen, kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if is_counted(func) and (key := self.key(func)) in self._chosen:
            self._kept[key] = tree_map_only(Tensor, lambda t: _KeptResult(t.detach(), t._version), outputs)
        return outputs


class _Reuse(_Numbering):
    """Mode for the second and later runs: returns the kept results instead of computing them."""

    def __init__(self, kept: dict[Key, Any]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_counted(func):
            found = self._kept.get(self.key(func))
            if found is not None:
                return _unchanged(func, found)
        return func(*args, **(kwargs or {}))


def _unchanged(func: Any, kept: Any) -> Any:
    if isinstance(kept, _KeptResult):
        tensor, version = kept
        if tensor._version != version:
            raise RuntimeError(
                f"the result of {func} was changed in place after it was kept for recomputation: the block computes "
                "something different from when it was measured; leave activation_checkpointing.memory_budget out"
            )
        return tensor.detach()
    if isinstance(kept, (tuple, list)):
        return type(kept)(_unchanged(func, each) for each in kept)
    return kept


def selective_contexts(chosen: Collection[Key]) -> tuple[_Keep, _Reuse]:
    """Return the contexts of a region's first and second run (``context_fn`` of ``torch.utils.checkpoint``)."""
    kept: dict[Key, Any] = {}
    return _Keep(chosen, kept), _Reuse(kept)
