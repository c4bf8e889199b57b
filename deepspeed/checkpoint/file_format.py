"""The section of our files that holds fragments: packing live state, and unpacking into a catalog.

A section lists its shards once, ``(name, shape, boxes, start, stop)``. Each kind of state is one flat tensor with the
shard numbers it covers, in order:

    {"shards": [...],
     "tensors": [{"kind": "exp_avg", "shards": [0, 1, ...], "data": [total]}, ...],
     "values":  [{"kind": "step", "shards": [...], "data": [n]}, ...],
     "wholes":  [{"kind": "row_factor", "shard": 3, "data": any shape}, ...],
     "masters_in_module": [0, 2, ...]}

Masters that are bit-equal to the model's fp32 weights are not written again: the shard refers to ``module``.

[Note: index] Every file has an index, under ``names.INDEX``. Its keys, with their types (*names*: a list of parameter
names) and where they are written:

    every file
      format            int                        ``names.FORMAT``
      save              {"id", "global_steps"}     the same in all files of a save
    optimizer file
      rank_state        {"random", "data"}         RNG states, position in the data
      module_boxes      name -> (shape, boxes)     as below, if the file has frozen experts under ``module``
    model file: what it holds
      wrapper           str                        prefix that a wrapper of the module adds to every name
      zero_stage        int
      bf16              bool                       part of the names of optimizer files
      dp_mp_sizes       (int, int)                 numbers of ranks, from which the file names follow
      stages            int                        of a pipeline, if there are several; ``trained``, ``excluded`` and
                                                   ``aliases`` are then those of all stages
      trained           names                      of parameters that require gradients
      excluded          names                      of frozen parameters that were left out on request
      aliases           name -> name               other names of tied weights -> the first one
      cut               names                      of sharded parameters (stage 3): empty tensors under ``module``
      module_boxes      name -> (shape, boxes)     of tensors under ``module`` that are part of a larger one; empty at
                                                   stage 3
      parts             [(name, shape, boxes,      stage 3: the shards under ``frozen_param_fragments``, in the same
                          start, stop)]            order; else None
    model file: what other files hold
      optimizer         str or None                ``names.OPTIMIZER_IN_...``; None: saved without training state
      part_files        str or None                stage 3: ``names.PARTS_IN_MODEL_FILES``
      weights_in_optimizer_files  bool             experts have their weights there; False at stage 3
      pending           bool                       saved between two updates: a file of gradients per rank
      own_state         bool                       a file of unshared optimizer state per rank
      buffers_differ    bool                       a file of buffers per rank
      optimizer_directory  dict or None            which optimizer file holds what (``shard_map.py``); read from the
                                                   first model file
      parts_directory   dict or None               the same for the shards in the model files of stage 3
      covered           key -> names               of all ranks, by the key of a shard map that is None
      frozen_elsewhere  names                      of frozen experts on any rank, if experts have separate names
    model file: positions and ranks
      rank_state        {"random", "data"}         at stage 3 without training state
      rank_states       [{"random", "data"}]       of all ranks, if they have no files of their own; read from the first
      micro_steps, accumulated, accumulation_steps   ints: in all, since the last update, of an update
      train_batch_size         int: samples of an update over all ranks
      world_size        int
      fp16, dynamic_loss_scale   bool              read only if the section's ``scalars`` do not say the latter
      optimizer_order   [names]                    by optimizer group, in the client's order
      sums_gradients    bool                       False if the cadence of gradient sums is *never*
      originals         dict                       of transformed modules (``originals.py``)
      engine_parts      name -> dict               states of observers that keep one

In format 1, ``optimizer`` and ``part_files`` are lists of file names. A new key whose value contains parameter names
must also be listed in ``renaming.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint.catalog import Catalog, ParamGroup, SavedFragment, param_groups
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.files.archive_reader import Archive
from deepspeed.checkpoint.files.archive_writer import LazyTensor
from deepspeed.checkpoint.shards import ShardIndex
from deepspeed.checkpoint.state import MASTER, ParamEntry

SHARD_MAPS = OPTIMIZER_MAP, PARTS_MAP = ("optimizer_directory", "parts_directory")
"""Index keys of the shard maps: of the optimizer's files, and of weights without optimizer state (stage 3)."""


def flat_kinds(index: ShardIndex, state: Mapping[str, Tensor]) -> list[str]:
    """Return the kinds of state that are per element; the others are values, or whole tensors."""
    return [k for k, tensor in state.items() if tensor.dim() == 1 and tensor.numel() == index.numel]


def pack_section(
    shards: Iterable[tuple[ShardIndex, dict[str, Tensor]]], weights: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the section for ``write_archive``, without copying tensors.

    ``weights``: the model's state dict, if its file is in the same folder.
    """
    indices: list[ShardIndex] = []
    flat: dict[tuple[str, torch.dtype], list[tuple[int, Tensor]]] = {}
    values: dict[tuple[str, torch.dtype], list[tuple[int, Tensor]]] = {}
    wholes: list[dict[str, Any]] = []
    in_module: list[int] = []
    for number, (index, state) in enumerate(shards):
        indices.append(index)
        per_element = flat_kinds(index, state)
        for kind, tensor in state.items():
            if kind == MASTER and _same_bits(tensor, weights.get(index.name), index):
                in_module.append(number)
            elif kind in per_element:
                flat.setdefault((kind, tensor.dtype), []).append((number, tensor))
            elif tensor.dim() == 0:
                values.setdefault((kind, tensor.dtype), []).append((number, tensor))
            else:
                wholes.append({"kind": kind, "shard": number, "data": tensor})
    return {
        "shards": [(i.name, i.global_shape, i.boxes, i.start, i.stop) for i in indices],
        "tensors": [_run(kind, dtype, parts) for (kind, dtype), parts in flat.items()],
        "values": [
            {
                "kind": kind,
                "shards": [n for n, _ in parts],
                "data": torch.stack([t.detach().cpu() for _, t in parts]),
            }
            for (kind, _), parts in values.items()
        ],
        "wholes": wholes,
        "masters_in_module": in_module,
    }


def pack_groups(groups: Sequence[Mapping[str, Any]], entries: Iterable[ParamEntry]) -> dict[str, Any]:
    """Return the hyperparameters of the optimizer's groups and the names of their parameters."""
    names: list[list[str]] = [[] for _ in groups]
    for entry in entries:
        if entry.group_index >= 0:
            names[entry.group_index].append(entry.name)
    return {"param_groups": groups, "group_params": names}


def unpack_section(section: Mapping[str, Any], archive: Archive, catalog: Catalog) -> None:
    """Add the fragments of one file to ``catalog``, which has the module tensors already."""
    indices = [ShardIndex(*entry) for entry in section["shards"]]
    for index in indices:
        catalog.fragments.setdefault(index.name, {})
    for run in section["tensors"]:
        numels = [indices[number].numel for number in run["shards"]]
        if run["data"].numel() != sum(numels):
            raise CheckpointError(
                f"{archive.path} is damaged: {run['kind']} has {run['data'].numel()} elements"
            )
        for number, part in zip(run["shards"], run["data"].split(numels), strict=True):
            catalog.add_fragment(run["kind"], SavedFragment(indices[number], part, archive))
    for number in section["masters_in_module"]:
        catalog.add_fragment(MASTER, _from_module(catalog, indices[number], archive.path))
    for packed in section["values"]:
        for number, value in zip(packed["shards"], packed["data"], strict=True):
            catalog.values.setdefault(indices[number].name, {})[packed["kind"]] = value
    for whole in section["wholes"]:
        catalog.values.setdefault(indices[whole["shard"]].name, {})[whole["kind"]] = whole["data"]


def unpack_groups(section: Mapping[str, Any]) -> list[ParamGroup]:
    return param_groups(section["param_groups"], section["group_params"])


def _run(kind: str, dtype: torch.dtype, parts: list[tuple[int, Tensor]]) -> dict[str, Any]:
    total = sum(tensor.numel() for _, tensor in parts)
    return {
        "kind": kind,
        "shards": [number for number, _ in parts],
        "data": LazyTensor((total,), dtype, lambda: (tensor for _, tensor in parts)),
    }


def _same_bits(master: Tensor, weight: Tensor | None, index: ShardIndex) -> bool:
    """Return whether the model's own weight equals the master bit for bit (NaN included)."""
    if weight is None or weight.dtype != master.dtype or weight.numel() != index.local_numel:
        return False
    part = weight.detach().reshape(-1)[index.start : index.stop]
    if part.data_ptr() == master.data_ptr() or not part.numel():
        return True
    return part.device == master.device and torch.equal(
        part.view(torch.uint8), master.detach().view(torch.uint8)
    )


def _from_module(catalog: Catalog, index: ShardIndex, file: Path) -> SavedFragment:
    """Return the fragment as an interval of the model's weight."""
    for whole in catalog.module.get(index.name, ()):
        if whole.index.boxes == index.boxes:
            return SavedFragment(index, whole.data[index.start : index.stop], whole.archive)
    raise CheckpointError(
        f"{file} refers to the weights of {index.name} in the model file of {catalog.folder}, which does not hold them"
    )
