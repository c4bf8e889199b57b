"""The shards of a checkpoint that this rank will read, computed when only the first file is open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from deepspeed.checkpoint.catalog import Catalog
from deepspeed.checkpoint.placement import placement_of
from deepspeed.checkpoint.sharded_weights import ShardedWeights
from deepspeed.checkpoint.shards import ShardIndex, covers
from deepspeed.checkpoint.state import TrainingState


def needed_shards(
    catalog: Catalog, module: nn.Module, state: TrainingState | None, *, masters: bool, optimizer: bool
) -> list[ShardIndex]:
    """Return the shards to read. ``masters``: read trained weights from the masters; ``optimizer``: read its state.

    Names are those of the checkpoint. Unsharded weights are included if the first file does not have them (a stage 3
    checkpoint).
    """
    trained = (
        {name for entry in state.trainable() for name in (entry.name, *entry.shared_names)}
        if state
        else set()
    )
    from_masters = trained if masters else set()
    shared = {entry.name: entry.shared_names for entry in state.trainable()} if state else {}
    needed: list[ShardIndex] = []
    if state is not None and (masters or optimizer):
        needed += _saved_under(catalog, (index for index, _ in state.shards()), shared)
    parts = ShardedWeights(module)
    needed += _saved_under(
        catalog, (index for index, _ in parts.fragments() if index.name not in from_masters), shared
    )
    for name, param in module.named_parameters():
        if name in from_masters or hasattr(param, "ds_owner"):
            continue
        found = catalog.find([name])
        if found is None:
            continue
        target = placement_of(param).index(found)
        if not covers(target, [source.index for source in catalog.module.get(found, [])]):
            needed.append(target)
    return needed


def _saved_under(
    catalog: Catalog, shards: Iterator[ShardIndex], shared: dict[str, tuple[str, ...]]
) -> Iterator[ShardIndex]:
    for index in shards:
        found = catalog.find([index.name, *shared.get(index.name, ())])
        if found is not None:
            yield replace(index, name=found)
