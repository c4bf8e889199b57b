"""Structure of a causal language model, discovered by running it: blocks, and the modules before and after them.

One forward of two short sequences is traced with hooks. No architecture is special-cased: a model whose hidden states
do not simply pass from one block to the next is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.zero.gradients.backward import tensors_in

BATCH, LENGTH = 2, 3  # of the sequences


@dataclass(slots=True)
class BlockStructure:
    """Parts of a model. ``blocks``: path of the list of blocks; ``before`` and ``after``: paths of the modules with
    direct parameters called before and after them. ``shapes``: output shapes of those before; None: batch or length."""

    model: nn.Module
    blocks: str
    in_tuples: bool = False
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[int | None, ...]] = field(default_factory=dict)

    def block_list(self) -> nn.ModuleList:
        found = self.model.get_submodule(self.blocks)
        assert isinstance(found, nn.ModuleList)
        return found


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden states among the arguments of a block."""
    return args[0] if args else kwargs["hidden_states"]


def trace_blocks(model: nn.Module) -> BlockStructure:
    """Find the parts of ``model``, called with input_ids. PipelineError: it cannot be split between its blocks."""
    lists = {name: sum(p.numel() for p in m.parameters()) for name, m in model.named_modules() if _is_list(m)}
    if not lists:
        raise PipelineError(f"{type(model).__name__} has no list of blocks (nn.ModuleList) to cut between")
    structure = BlockStructure(model, max(lists, key=lambda name: lists[name]))
    with _traced(structure) as trace, torch.no_grad():
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64, device=next(model.parameters()).device)
        model(input_ids=tokens, use_cache=False)
    trace.finish()
    return structure


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) > 0


class _BlockTrace:
    """Hooks that trace one forward."""

    def __init__(self, structure: BlockStructure) -> None:
        self.structure = structure
        self.passed = 0
        """Number of blocks called so far."""
        self.hidden: Tensor | None = None
        self.others: set[int] = set()
        """Ids of all tensors that blocks returned; ``kept`` keeps them alive so that ids are not reused."""
        self.kept: list[Tensor] = []
        self.called: dict[str, set[bool]] = {}

    def error(self, why: str) -> PipelineError:
        return PipelineError(
            f"{type(self.structure.model).__name__} cannot be cut between its blocks ({self.structure.blocks}): "
            f"{why}. Rewrite it as the layers of a PipelineModule"
        )

    def before_block(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if number != self.passed:
            raise self.error(f"block {number} is called after {self.passed} others")
        if not args and "hidden_states" not in kwargs:
            raise self.error(f"block {number} gets no hidden_states")
        hidden = hidden_of(args, kwargs)
        if self.hidden is not None and hidden is not self.hidden:
            raise self.error(f"block {number} does not get the output of the previous block")
        others = tensors_in([args[1:], {key: v for key, v in kwargs.items() if key != "hidden_states"}])
        if any(id(tensor) in self.others for tensor in others):
            raise self.error(f"block {number} also gets other values from earlier blocks")

    def after_block(self, number: int, output: Any) -> None:
        self.structure.in_tuples = isinstance(output, tuple)
        first, *rest = output if isinstance(output, tuple) else (output,)
        if not isinstance(first, Tensor):
            raise self.error(f"block {number} returns {type(first).__name__} instead of hidden states")
        self.hidden, self.passed = first, number + 1
        self.kept += [first, *tensors_in(rest)]
        self.others |= {id(tensor) for tensor in tensors_in(rest)} | {id(first)}

    def after_module(self, name: str, output: Any) -> None:
        begun, over = self.passed > 0, self.passed == len(self.structure.block_list())
        if begun and not over:
            raise self.error(f"{name} is called between two of them")
        self.called.setdefault(name, set()).add(over)
        if not begun:
            if not isinstance(output, Tensor):
                raise self.error(f"{name} returns {type(output).__name__}, not a tensor")
            lead = [None if size in (BATCH, 1) else size for size in output.shape[:1]]
            lead += [None if size == LENGTH else size for size in output.shape[1:2]]
            self.structure.shapes[name] = (*lead, *output.shape[2:])

    def finish(self) -> None:
        structure = self.structure
        if self.passed != len(structure.block_list()):
            raise self.error(f"only {self.passed} are called")
        for name, module in _others(structure):
            places = self.called.get(name, set())
            if len(places) != 1:
                where = "before and after them" if places else "never, though it has weights"
                raise self.error(f"{name} ({type(module).__name__}) is called {where}")
            (structure.after if places.pop() else structure.before).append(name)


def _others(structure: BlockStructure) -> list[tuple[str, nn.Module]]:
    """Return the modules outside the blocks that have direct parameters."""
    inside = f"{structure.blocks}."
    return [
        (name, module)
        for name, module in structure.model.named_modules()
        if not name.startswith(inside) and next(module.parameters(recurse=False), None) is not None
    ]


@contextmanager
def _traced(structure: BlockStructure) -> Iterator[_BlockTrace]:
    trace, handles = _BlockTrace(structure), []
    for number, block in enumerate(structure.block_list()):
        handles += [
            block.register_forward_pre_hook(
                lambda _, args, kwargs, n=number: trace.before_block(n, args, kwargs), with_kwargs=True
            ),
            block.register_forward_hook(lambda _, args, output, n=number: trace.after_block(n, output)),
        ]
    for name, module in _others(structure):
        handles.append(
            module.register_forward_hook(lambda _, args, output, n=name: trace.after_module(n, output))
        )
    training = {module: module.training for module in structure.model.modules()}
    structure.model.eval()
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in training.items():
            module.training = mode
