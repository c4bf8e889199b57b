"""Whole fp32 weights assembled from a checkpoint's shards, one tensor at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from deepspeed.checkpoint.catalog import SavedFragment
from deepspeed.checkpoint.errors import CheckpointNotFoundError
from deepspeed.checkpoint.files.archive_writer import LazyTensor
from deepspeed.checkpoint.files.tags import given_tag, read_latest
from deepspeed.checkpoint.files.writers import find_folder
from deepspeed.checkpoint.load import FragmentReader
from deepspeed.checkpoint.originals import ORIGINALS, Expression, Originals, Weight
from deepspeed.checkpoint.reader import open_checkpoint
from deepspeed.checkpoint.shards import ShardIndex


@dataclass(frozen=True, slots=True)
class ConsolidatedWeights:
    """Lazy tensors by name; ``aliases``: other name -> name in ``tensors``."""

    tensors: OrderedDict[str, LazyTensor]
    aliases: dict[str, str]

    def materialized(self) -> OrderedDict[str, Tensor]:
        """Return all tensors in memory; tied ones share storage."""
        return self.mapped(materialize)

    def mapped(self, make: Callable[[LazyTensor], Tensor]) -> OrderedDict[str, Tensor]:
        made = OrderedDict((name, make(tensor)) for name, tensor in self.tensors.items())
        for alias, name in self.aliases.items():
            made[alias] = made[name]
        return made

    def original(self, originals: Originals) -> ConsolidatedWeights:
        """Return the tensors of the module before its transforms."""
        exported = originals.exported(self.tensors, self.aliases)
        return ConsolidatedWeights(
            OrderedDict((name, self._made(made)) for name, made in exported.tensors.items()), exported.aliases
        )

    def _made(self, made: Expression) -> LazyTensor:
        if isinstance(made, Weight):
            return self.tensors[made.name]
        shape = made.shape(lambda name: tuple(self.tensors[name].shape))
        dtype = made.dtype(lambda name: self.tensors[name].dtype)
        return LazyTensor(shape, dtype, lambda: [made.value(lambda name: materialize(self.tensors[name]))])


def materialize(tensor: LazyTensor) -> Tensor:
    parts = list(tensor.parts())
    assert len(parts) == 1
    return parts[0].view(tensor.shape)


def resolve_folder(checkpoint_dir: Path, tag: str | None) -> Path:
    """Return ``checkpoint_dir/tag``, with the tag from ``latest`` if None. ValueError or FileNotFoundError."""
    if tag is None:
        tag = read_latest(checkpoint_dir)
        if tag is None:
            raise CheckpointNotFoundError(
                f"{checkpoint_dir} has no file 'latest' with the tag of the latest checkpoint: pass tag="
            )
    return find_folder(checkpoint_dir, given_tag(tag))


def consolidate(folder: Path, *, exclude_frozen: bool = False) -> ConsolidatedWeights:
    """Return the master weights of trained parameters, and frozen weights and buffers as the model file has them.
    Names and shapes are those of the untransformed module.

    Works on our checkpoints and on those of release 0.19. CheckpointError if a part is missing or damaged.
    """
    catalog = open_checkpoint(folder)
    reader = FragmentReader(catalog)
    buffers = set(catalog.buffer_names)
    trained = catalog.index.get("trained")
    tensors: OrderedDict[str, LazyTensor] = OrderedDict()
    aliases = catalog.aliases
    for name in [*catalog.module, *(name for name in catalog.fragments if name not in catalog.module)]:
        if name in aliases:
            continue
        frozen = name not in buffers and trained is not None and name not in trained
        if frozen and exclude_frozen:
            continue
        tensors[name] = _whole(name, catalog.masters(name), reader)
    whole = ConsolidatedWeights(tensors, {alias: name for alias, name in aliases.items() if name in tensors})
    packed = catalog.index.get(ORIGINALS)
    return whole.original(Originals.unpacked(packed)) if packed is not None else whole


def _whole(name: str, sources: list[SavedFragment], reader: FragmentReader) -> LazyTensor:
    shape, dtype = sources[0].index.global_shape, sources[0].data.dtype

    def make() -> list[Tensor]:
        whole = torch.empty(prod(shape), dtype=dtype)
        target = ShardIndex(name, shape, (), 0, whole.numel())
        reader.fill(target, whole, sources, name)
        return [whole]

    return LazyTensor(shape, dtype, make)
