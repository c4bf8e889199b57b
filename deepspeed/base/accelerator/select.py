"""Choose the accelerator of this process: the one in ``DS_ACCELERATOR``, else the one torch finds, else the CPU."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from deepspeed.base.accelerator.abstract_accelerator import DeepSpeedAccelerator

ENVIRONMENT_VARIABLE = "DS_ACCELERATOR"
SUPPORTED_ACCELERATORS = ("cuda", "cpu", "xpu", "npu", "mps", "hpu", "mlu", "sdaa", "supa")
OWN_CLASS = {
    "cpu": "cpu_accelerator:CPU_Accelerator",
    "cuda": "cuda_accelerator:CUDA_Accelerator",
    "mps": "torch_device:MPS_Accelerator",
}
OTHERS = "torch_device:TorchDevice_Accelerator"
"""Classes as "module:name" in this folder, so that only the one in use is imported."""


ds_accelerator: DeepSpeedAccelerator | None = None
"""The accelerator of this process; None: not chosen yet."""


def get_accelerator() -> DeepSpeedAccelerator:
    """Return the accelerator of this process, chosen on the first call."""
    global ds_accelerator
    if ds_accelerator is None:
        name = os.environ.get(ENVIRONMENT_VARIABLE, "").strip().lower()
        ds_accelerator = _make(name) if name else _make(_found_by_torch())
    return ds_accelerator


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> DeepSpeedAccelerator:
    """Replace the accelerator of this process."""
    global ds_accelerator
    ds_accelerator = accel_obj
    return accel_obj


def take_device_of_rank(local_rank: int) -> int:
    """Make the device of ``local_rank`` the current one; return its index, which is 0 if the launcher shows each rank
    only its own device (Slurm's --gpus-per-task, Ray).

    Raises:
        ValueError: this process sees several devices, but too few for ``local_rank``.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return local_rank
    seen = accelerator.device_count()
    if 1 < seen <= local_rank:
        raise ValueError(
            f"LOCAL_RANK={local_rank}, but only {seen} devices are visible to this process: start at most "
            f"{seen} ranks on this host, or make one device visible to each rank (CUDA_VISIBLE_DEVICES)"
        )
    index = 0 if seen == 1 else local_rank
    accelerator.set_device(index)
    return index


def synchronize_stream() -> None:
    """Wait for the current stream only. Waiting for the whole device could deadlock: a transfer on another stream may
    wait for a receiver that waits for this process."""
    event = get_accelerator().Event()
    event.record()
    event.synchronize()


def is_current_accelerator_supported() -> bool:
    """Return whether the chosen accelerator is supported."""
    return get_accelerator().device_name() in SUPPORTED_ACCELERATORS


def _make(name: str) -> DeepSpeedAccelerator:
    if name in OWN_CLASS:
        return _class(OWN_CLASS[name])()
    if name not in SUPPORTED_ACCELERATORS and name != _found_by_torch():
        allowed = ", ".join(SUPPORTED_ACCELERATORS)
        raise ValueError(f"{ENVIRONMENT_VARIABLE}={name} is not a known accelerator; use one of {allowed}.")
    return _class(OTHERS)(name)


def _class(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(f"deepspeed.base.accelerator.{module}"), name)


def _found_by_torch() -> str:
    # Query NVML instead of the driver: counting devices then creates no context, and processes forked later can still
    # use the GPU.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if not torch.accelerator.is_available():
        return "cpu"
    device = torch.accelerator.current_accelerator()
    return "cpu" if device is None else device.type
