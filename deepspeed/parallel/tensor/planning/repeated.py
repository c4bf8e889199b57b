"""Blocks of a model that are alike: one of them is followed, and its plan holds for the others.

So the time for a plan does not grow with the number of layers. Blocks are members of one ``nn.ModuleList`` with equal
classes, weights and numbers. (A layer's own number does not count: nothing that it changes is a matter of channels.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn

from deepspeed.parallel.tensor.planning.plan import TensorParallelPlan

_OWN_NUMBER = frozenset(("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx"))
_PLAIN = (int, float, str, bool, type(None))
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Repeated:
    """Path of a block that is followed -> paths of those like it, which are not."""

    others: Mapping[str, tuple[str, ...]]

    def like(self, name: str) -> list[str]:
        """``name``, and what is called so in the blocks for which its own stands."""
        for path, others in self.others.items():
            if name == path or name.startswith((f"{path}.", f"{path}:")):
                return [name, *(other + name[len(path) :] for other in others)]
        return [name]


def shorten(module: nn.Module, kept: Container[str]) -> Repeated:
    """Take blocks out of ``module`` for which others stand. ``kept``: names of parameters that stay whole: blocks that
    differ in them are not alike."""
    uses = Counter(id(param) for _, param in module.named_parameters(remove_duplicate=False))
    others: dict[str, tuple[str, ...]] = {}
    done: list[str] = []
    for path, blocks in list(module.named_modules()):
        if not isinstance(blocks, nn.ModuleList) or any(
            not each or path.startswith(f"{each}.") for each in done
        ):
            continue
        done.append(path)
        alike: dict[Any, list[str]] = defaultdict(list)
        for key, block in blocks.named_children():
            place = f"{path}.{key}" if path else key
            shared = any(uses[id(p)] > 1 for p in block.parameters()) or not any(block.children())
            alike[place if shared else _signature(block, place, kept)].append(place)
        for first, *more in alike.values():
            if more:
                others[first] = tuple(more)
                for each in more:
                    del blocks._modules[each.rpartition(".")[2]]
    return Repeated(others)


def _signature(block: nn.Module, place: str, kept: Container[str]) -> tuple[Any, ...]:
    parts: list[Any] = []
    for path, module in block.named_modules():
        numbers = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, _PLAIN) and name not in _OWN_NUMBER
        }
        parts.append((path, type(module), tuple(sorted(numbers.items()))))
    for name, param in block.named_parameters(remove_duplicate=False):
        parts.append((name, tuple(param.shape), param.dtype, f"{place}.{name}" in kept))
    return tuple(parts)


def expanded(plan: TensorParallelPlan, repeated: Repeated) -> TensorParallelPlan:
    """The plan of the whole model, of that of the shortened one."""
    if not repeated.others:
        return plan
    like = repeated.like

    def every(mapping: Mapping[str, T], of: Callable[[T, int], T] = lambda value, _: value) -> dict[str, T]:
        return {
            other: of(value, number)
            for name, value in mapping.items()
            for number, other in enumerate(like(name))
        }

    def shared(name: str | None, number: int) -> str | None:
        names = [name] if name is None else like(name)
        return names[number] if number < len(names) else names[0]

    return replace(
        plan,
        parameters=every(plan.parameters),
        inputs=every(plan.inputs, shared),
        outputs_summed=tuple(other for name in plan.outputs_summed for other in like(name)),
        summed=tuple(other for name in plan.summed for other in like(name)),
        attributes=tuple(
            replace(each, module=other) for each in plan.attributes for other in like(each.module)
        ),
        arguments=tuple(
            replace(each, module=other) for each in plan.arguments for other in like(each.module)
        ),
        whole=every(plan.whole),
    )
