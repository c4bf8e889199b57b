"""Descriptions of parameters for universal checkpoints, and loading a single parameter from one."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.foreign.universal_format import open_parameter
from deepspeed.checkpoint.load import FragmentReader
from deepspeed.checkpoint.placement import placement_of


@dataclass(slots=True)
class SubparamShape:
    """Parameters of several matrices side by side, each split over all tensor-parallel ranks.

    ``patterns``: regular expressions that match their names. ``shape``: global shape, whose entry at
    ``partition_dim`` is the tuple of the matrices' extents, such as ``((4096, 1024, 1024), 4096)`` for a fused q, k
    and v. A client saves its ``dataclasses.asdict`` under ``parameter_with_sub_params``.
    """

    patterns: list[str]
    shape: tuple[tuple[int, ...] | int, ...]
    partition_dim: int


def load_hp_checkpoint_state(
    self: nn.Parameter,
    folder: str | os.PathLike[str],
    tp_rank: int,
    tp_world_size: int,
    ep_rank: int = 0,
    ep_size: int = 1,
) -> int | None:
    """Load a trained parameter's master weights and optimizer state, and publish its weights, from its ``folder`` in
    a universal checkpoint (``zero/NAME``); return the step, None if there is none.

    Collective: all ranks that train the parameter call it. The parameter's placement determines the part to read; the
    given ranks and sizes are only range-checked. ValueError: no engine trains the parameter, or a rank is not below
    its size; CheckpointError: the folder lacks optimizer state, or does not fit.
    """
    access: Any = getattr(self, "_ds_state_access", None)
    name = access.name_of(self) if access is not None else None
    if access is None or name is None:
        raise ValueError("no engine trains this parameter, so there is no state to load")
    if not 0 <= tp_rank < tp_world_size or not 0 <= ep_rank < ep_size:
        raise ValueError(
            f"rank {tp_rank} of {tp_world_size}, expert rank {ep_rank} of {ep_size}: rank out of range"
        )
    catalog = open_parameter(Path(folder), name, placement_of(self).global_shape)
    reader, held, values = FragmentReader(catalog), catalog.fragments[name], catalog.values.get(name, {})
    access.ensure_state()
    for index, tensors in access.shards():
        if index.name != name:
            continue
        for kind, tensor in tensors.items():
            if kind in held:
                reader.fill(index, tensor, held[kind], f"{kind} of {name}")
            elif kind not in values:
                raise CheckpointError(f"{folder} does not hold {kind} of {name}")
    for kind, value in values.items():
        access.set_scalar_state(kind, {name: value if isinstance(value, Tensor) else _scalar(value)})
    access.publish()
    step = values.get("step")
    return None if step is None else int(step)


def _scalar(value: Any) -> Tensor:
    import torch

    return torch.as_tensor(value)


def enable_universal_checkpoint(param_list: Iterable[nn.Parameter]) -> None:
    """Attach ``load_hp_checkpoint_state(folder, tp_rank, tp_world_size)`` to each parameter."""
    for param in param_list:
        vars(param)[load_hp_checkpoint_state.__name__] = functools.partial(load_hp_checkpoint_state, param)
