"""Tensors as bytes and back."""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.base.torch import required_torch_version


def tensor_to_bytes(tensor: Tensor) -> bytes:
    """The elements of a tensor in the host's byte order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def bytes_to_tensor(buffer: bytes) -> Tensor:
    """The bytes as a tensor of uint8."""
    return (
        torch.frombuffer(bytearray(buffer), dtype=torch.uint8)
        if buffer
        else torch.empty(0, dtype=torch.uint8)
    )


def required_minimum_torch_version(major_version: int, minor_version: int) -> bool:
    """Whether the installed torch is of this release or newer."""
    return required_torch_version(min_version=f"{major_version}.{minor_version}")
