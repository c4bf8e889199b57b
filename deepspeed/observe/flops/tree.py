"""Counts, summed over the module tree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import nn

from deepspeed.base.sharded import full_numel
from deepspeed.observe.flops.counting import CountRecord, WorkCount, record_of


def records_in(module: nn.Module) -> Iterator[CountRecord]:
    """Yield the records of the module and all its submodules, each once."""
    for inside in module.modules():
        record = record_of(inside)
        if record is not None:
            yield record


def forward_of(module: nn.Module) -> WorkCount:
    return _total([record.forward for record in records_in(module)])


def backward_of(module: nn.Module) -> WorkCount:
    return _total([record.backward for record in records_in(module)])


def recomputed_of(module: nn.Module) -> WorkCount:
    return _total([record.recomputed for record in records_in(module)])


def _total(amounts: list[WorkCount]) -> WorkCount:
    return WorkCount(sum(amount.macs for amount in amounts), sum(amount.flops for amount in amounts))


def get_module_flops(module: nn.Module) -> int:
    """Return the flops of the module's forward, including submodules; 0 if it is not profiled."""
    return forward_of(module).flops


def get_module_macs(module: nn.Module) -> int:
    """Return the MACs of the module's forward, including submodules; 0 if it is not profiled."""
    return forward_of(module).macs


def get_module_duration(module: nn.Module) -> float:
    """Return the seconds of the module's forward; for a module that is never called, such as a ModuleList, the sum of
    its children."""
    record = record_of(module)
    if record is not None and record.calls:
        return record.seconds
    return sum((get_module_duration(child) for child in module.children()), 0.0)


def held_bytes(module: nn.Module) -> int:
    """Return the bytes that the module's forward allocated and left alive: outputs, and tensors saved for backward; for
    a module that is never called, the sum of its children."""
    record = record_of(module)
    if record is not None and record.calls:
        return record.held
    return sum(held_bytes(child) for child in module.children())


def peak_bytes(module: nn.Module) -> int:
    """Return the peak bytes that the module's forward allocated; for a module that is never called, the largest of its
    children."""
    record = record_of(module)
    if record is not None and record.calls:
        return record.peak
    return max((peak_bytes(child) for child in module.children()), default=0)


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of the module's parameters and buffers, each counted once; partitioned ones count in full."""
    weights = sum(full_numel(param) * param.element_size() for param in module.parameters())
    return weights + sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())


def params_of(module: nn.Module) -> int:
    """Return the number of the module's parameter elements, each parameter counted once; partitioned ones count in
    full."""
    return sum(full_numel(param) for param in module.parameters())


def average(model: nn.Module, passes: int) -> None:
    """Divide all counts and times by the number of counted passes."""
    if passes < 2:
        return
    for record in records_in(model):
        record.seconds /= passes
        for amount in record.amounts():
            amount.macs, amount.flops = round(amount.macs / passes), round(amount.flops / passes)


def by_class_and_depth(model: nn.Module) -> list[dict[str, tuple[int, int, float]]]:
    """Return, by depth of the tree: class name -> (parameters, MACs, seconds), summed over the modules of that
    class."""
    levels: list[dict[str, tuple[int, int, float]]] = []
    row = [model]
    while row:
        sums: dict[str, tuple[int, int, float]] = defaultdict(lambda: (0, 0, 0.0))
        for module in row:
            params, macs, seconds = sums[type(module).__name__]
            sums[type(module).__name__] = (
                params + params_of(module),
                macs + get_module_macs(module),
                seconds + get_module_duration(module),
            )
        levels.append(dict(sums))
        row = [child for module in row for child in module.children()]
    return levels
