"""Tensor-parallel weights, one file per rank: ``save_mp_checkpoint_path``.

The folder has ``ds_inference_config.json``, which ``checkpoint=`` takes. Each part records its placement in the whole
weight, so the files load at any world size: a weight is assembled from all files that have a piece of it.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from deepspeed import comm as dist
from deepspeed.checkpoint.placement import Placement, placement_of
from deepspeed.checkpoint.shards import intersect
from deepspeed.config.problems import DeepSpeedConfigError

DESCRIPTION = "ds_inference_config.json"
VERSION = 1.0
_SHARED = "non-tp.safetensors"
_KEY = "parts"
"""Metadata key: its value maps name -> [shape of the whole weight, boxes of it that the file has]."""


def save_parts(module: nn.Module, folder: str | Path, dtype: torch.dtype) -> Path:
    """Write the parts that this rank is the first to hold; rank 0 also writes the unsplit weights. Collective over all
    ranks. Return the path of the description."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0:
        # Of an earlier save: it must not describe files of both, should this one fail.
        (path / DESCRIPTION).unlink(missing_ok=True)
    split = {name: param for name, param in module.named_parameters() if placement_of(param).boxes}
    places = {name: placement_of(param) for name, param in split.items()}
    every = _of_all_ranks({name: (place.global_shape, place.boxes) for name, place in places.items()})
    own = _new_parts(every, rank)
    if own:
        _write(path / _file_of(rank), {name: split[name] for name in own}, own)
    if rank == 0:
        _write(path / _SHARED, _unsplit(module, split), {})
    _of_all_ranks({})  # barrier: all files exist before the description does
    if rank == 0:
        written = [_file_of(number) for number in range(len(every)) if _new_parts(every, number)]
        description = {
            "type": "ds_model",
            "version": VERSION,
            "base_dir": str(path),
            "parallelization": "tp",
            "tp_size": max(1, len(written)),
            "dtype": str(dtype).removeprefix("torch."),
            "checkpoints": {"non_tp": [_SHARED], "tp": written},
        }
        (path / DESCRIPTION).write_text(json.dumps(description, indent=2))
    _of_all_ranks({})
    return path / DESCRIPTION


def whole_tensors(files: Sequence[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, value) of all weights in the files of ``save_parts``, one at a time.

    DeepSpeedConfigError: a file is of another kind, or a piece of a weight is missing.
    """
    pieces: dict[str, list[tuple[Path, Placement]]] = defaultdict(list)
    for file in files:
        described = _metadata(file)
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if name not in described:
                    yield name, opened.get_tensor(name)
        for name, (shape, boxes) in described.items():
            of_tuples = tuple(tuple((low, high) for low, high in box) for box in boxes)
            pieces[name].append((file, Placement(global_shape=tuple(shape), boxes=of_tuples)))
    for name, found in pieces.items():
        yield name, _joined(name, found)


# ------------------------------------------------------------------------------------------------------ parts


def _file_of(rank: int) -> str:
    return f"tp_{rank:02d}.safetensors"


def _new_parts(every: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:
    """Return the parts of ``rank`` that no lower rank has."""
    return {
        name: described
        for name, described in every[rank].items()
        if all(others.get(name) != described for others in every[:rank])
    }


def _of_all_ranks(mine: dict[str, Any]) -> list[dict[str, Any]]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def _unsplit(module: nn.Module, split: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters and persistent buffers that every rank has whole."""
    known = {id(param) for param in split.values()}
    whole: dict[str, Tensor] = {
        name: param for name, param in module.named_parameters() if id(param) not in known
    }
    params = {id(param) for param in module.parameters()}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and id(value) not in params:
            whole[name] = value
    return whole


def _write(file: Path, tensors: Mapping[str, Tensor], described: Mapping[str, Any]) -> None:
    values = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    shared = len({value.data_ptr() for value in values.values() if value.numel()}) < len(values)
    if shared:  # the format refuses tensors that share memory
        values = {name: value.clone() for name, value in values.items()}
    save_file(values, file, metadata={"format": "pt", _KEY: json.dumps(described)})


def _metadata(file: Path) -> dict[str, Any]:
    try:
        with safe_open(file, framework="pt") as opened:
            found = (opened.metadata() or {}).get(_KEY)
    except SafetensorError as error:
        raise DeepSpeedConfigError(f"checkpoint: {file} cannot be read: {error}") from error
    if found is None:
        raise DeepSpeedConfigError(
            f"checkpoint: {file} does not say which parts of the weights it has: pass a description written "
            "by save_mp_checkpoint_path, or a list of files with whole weights"
        )
    return json.loads(found)


def _joined(name: str, found: Sequence[tuple[Path, Placement]]) -> Tensor:
    shape = found[0][1].global_shape
    indices = [place.index(name) for _, place in found]
    copies, missing = intersect(Placement(global_shape=shape).index(name), indices)
    if missing:
        files = ", ".join(file.name for file, _ in found)
        raise DeepSpeedConfigError(
            f"checkpoint: a part of {name} is in none of the files ({files} have some)"
        )
    whole = torch.empty(0)
    for number, (file, _) in enumerate(found):
        with safe_open(file, framework="pt") as opened:
            value = opened.get_tensor(name).flatten()
        whole = value.new_empty(math.prod(shape)) if number == 0 else whole
        for copy in (each for each in copies if each.source == number):
            at = value.storage_offset() + copy.source_offset
            part = value.as_strided(copy.shape, copy.source_strides, at)
            whole.as_strided(copy.shape, copy.target_strides, copy.target_offset).copy_(part)
    return whole.view(shape)
