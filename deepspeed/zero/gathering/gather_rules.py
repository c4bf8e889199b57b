"""Rules of the config for gathering at stage 3: modules gathered as a whole, parameters that stay gathered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from deepspeed.base.sharded import full_numel
from deepspeed.zero.gathering.leaf_modules import (
    PARAMETER_MARK,
    apply_zero_leaf_module_config,
    set_z3_leaf_module,
    z3_leaf_module,
)

if TYPE_CHECKING:
    from deepspeed.config.sections.zero import DeepSpeedZeroConfig


def mark_leaves(module: nn.Module, zero: DeepSpeedZeroConfig) -> None:
    """Mark the leaf modules that the config asks for, and the parameters of all leaves (``z3_leaf_parameter``)."""
    apply_zero_leaf_module_config(module, zero.leaf_module)
    if zero.module_granularity_threshold > 0:
        for fine in fine_grained(module, zero.module_granularity_threshold):
            set_z3_leaf_module(fine, True)
    for name, leaf in module.named_modules():
        if z3_leaf_module(leaf):
            for param in leaf.parameters():
                setattr(param, PARAMETER_MARK, name)


def fine_grained(module: nn.Module, threshold: int) -> list[nn.Module]:
    """The outermost modules with fewer than ``threshold`` parameter elements per module in them.

    The documented measure is elements / (1 + descendants). Modules that are never called themselves (``ModuleList``)
    and those without children are skipped: there is nothing to join.
    """
    descendants = sum(1 for _ in module.modules()) - 1
    elements = sum(full_numel(p) for p in module.parameters())
    called = type(module).forward is not nn.Module.forward
    if called and descendants and 0 < elements < threshold * (1 + descendants):
        return [module]
    return [found for child in module.children() for found in fine_grained(child, threshold)]


def persistence_threshold(numels: Iterable[int], threshold: int, most: int) -> int:
    """Largest size up to ``threshold`` such that all parameters of at most that size hold at most ``most`` elements.

    Small parameters come first, because each costs a gather and takes little memory; parameters of one size persist
    together or not at all, so the result does not depend on their order.
    """
    sizes = sorted(n for n in numels if 0 < n <= threshold)
    if sum(sizes) <= most:
        return threshold
    fitting, total = 0, 0
    for size in sorted(set(sizes)):
        total += size * sizes.count(size)
        if total > most:
            break
        fitting = size
    return fitting
