"""Checkpoint helpers for clients."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from deepspeed.checkpoint import names
from deepspeed.compat.nested import rebuilt

_CPU = torch.device("cpu")


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Return the path ``mp_rank_XX_model_states.pt`` in ``base_folder``; ``mp_rank_str``: the two digits."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}{names.MODEL_SUFFIX}")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """Return the path ``zero_pp_rank_D_mp_rank_XX_optim_states.pt`` in ``base_folder``."""
    return os.path.join(base_folder, names.optim_file(dp_rank, mp_rank, bf16=False))


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: int | str, tp_rank: int) -> str:
    """Return the path of a pipeline layer's weights, ``LAYER_ID-model_XX-model_states.pt`` in ``base_folder``."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}-model_states.pt")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = _CPU) -> Any:
    """Return a copy of nested dicts, lists and tuples in which every tensor has a storage of its own size, on
    ``device``.

    ``torch.save`` writes the whole storage behind a view, so views of flat buffers would bloat the file. Container
    types are kept; values other than tensors are not copied.
    """

    def cloned(leaf: Any) -> Any:
        return leaf.detach().clone().to(device) if isinstance(leaf, Tensor) else leaf

    return rebuilt(item, cloned)
