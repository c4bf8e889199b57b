"""Counts summed over the tree of modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import nn

from deepspeed.base.sharded import full_numel
from deepspeed.observe.flops.counting import Amount, CountRecord, record_of


def records_in(module: nn.Module) -> Iterator[CountRecord]:
    """Yield the records of the module and all inside it, each once."""
    for inside in module.modules():
        record = record_of(inside)
        if record is not None:
            yield record


def forward_of(module: nn.Module) -> Amount:
    return _total([record.forward for record in records_in(module)])


def backward_of(module: nn.Module) -> Amount:
    return _total([record.backward for record in records_in(module)])


def recomputed_of(module: nn.Module) -> Amount:
    return _total([record.recomputed for record in records_in(module)])


def _total(amounts: list[Amount]) -> Amount:
    return Amount(sum(amount.macs for amount in amounts), sum(amount.flops for amount in amounts))


def get_module_flops(module: nn.Module) -> int:
    """Flops of its forward, with all modules inside it; 0 if it is not being profiled."""
    return forward_of(module).flops


def get_module_macs(module: nn.Module) -> int:
    """MACs of its forward, with all modules inside it; 0 if it is not being profiled."""
    return forward_of(module).macs


def get_module_duration(module: nn.Module) -> float:
    """Seconds of its forward. A module that is never called, such as a list, takes what the modules inside it take."""
    record = record_of(module)
    if record is not None and record.calls:
        return record.seconds
    return sum((get_module_duration(child) for child in module.children()), 0.0)


def held_bytes(module: nn.Module) -> int:
    """Bytes that its forward made and left alive: outputs, and what the backward needs. A module that is never called
    holds what the modules inside it hold."""
    record = record_of(module)
    if record is not None and record.calls:
        return record.held
    return sum(held_bytes(child) for child in module.children())


def peak_bytes(module: nn.Module) -> int:
    """The most bytes that its forward made and that were alive at once."""
    record = record_of(module)
    if record is not None and record.calls:
        return record.peak
    return max((peak_bytes(child) for child in module.children()), default=0)


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of the module's parameters and buffers, each counted once; those that ZeRO has partitioned count
    whole.
    """
    weights = sum(full_numel(param) * param.element_size() for param in module.parameters())
    return weights + sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())


def params_of(module: nn.Module) -> int:
    """Elements of its parameters, each counted once; those that ZeRO has partitioned count whole."""
    return sum(full_numel(param) for param in module.parameters())


def average(model: nn.Module, passes: int) -> None:
    """Divide what was counted by the number of passes in which it was."""
    if passes < 2:
        return
    for record in records_in(model):
        record.seconds /= passes
        for amount in record.amounts():
            amount.macs, amount.flops = round(amount.macs / passes), round(amount.flops / passes)


def by_class_and_depth(model: nn.Module) -> list[dict[str, tuple[int, int, float]]]:
    """For every depth of the tree: class name -> (parameters, MACs, seconds) of all modules of that class there."""
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
