"""Capture and restore the random states of one rank (python, numpy, torch, device) as tensors and plain numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from deepspeed.base.accelerator import get_accelerator


def capture(*, device: bool = True) -> dict[str, Any]:
    """Return all random states. ``device=False``: without the device's generator, which a worker process must not
    touch."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # pyright: ignore
    if kind == "MT19937":  # numpy's default, and the only one with a global legacy state
        keys = torch.from_numpy(np.asarray(keys).astype(np.int64))
        state["numpy"] = {"keys": keys, "position": int(position), "gauss": (int(has_gauss), float(cached))}
    accelerator = get_accelerator()
    if device and accelerator.device_name() != "cpu":
        state["device"] = accelerator.get_rng_state()
    return state


def restore(state: dict[str, Any]) -> None:
    own = state["python"]
    random.setstate((own["version"], tuple(own["words"].tolist()), own["gauss"]))
    torch.set_rng_state(state["torch"].clone())
    if "numpy" in state:
        saved = state["numpy"]
        keys = saved["keys"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", keys, saved["position"], *saved["gauss"]))
    accelerator = get_accelerator()
    if "device" in state and accelerator.device_name() != "cpu":
        accelerator.set_rng_state(state["device"].clone())


def set_random_seed(seed: int) -> None:
    """Seed Python, NumPy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # NumPy takes 32 bits
    torch.manual_seed(seed)
