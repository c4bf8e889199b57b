"""A rank's part of whole weights, copied into tensors that have the part's shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.comm.collectives import communicator

__all__ = ["Loading", "ReplaceWithTensorSlicing", "move"]


def move(tensor: Tensor, device: Any, copy: bool = True) -> Tensor:
    """``tensor`` on ``device``; without values if it is on the meta device."""
    if tensor.is_meta:
        return torch.empty_like(tensor, device=device)
    return tensor.to(device, copy=copy)


class ReplaceWithTensorSlicing:
    """Args:
    mp_group: the ranks that share the weights.
    mp_size: how many they are.
    out_dim, in_dim: where a target has its outputs and inputs.
    """

    def __init__(self, mp_group: Any = None, mp_size: int = 1, out_dim: int = 1, in_dim: int = 0) -> None:
        self.gpu_index = 0 if mp_group is None else communicator(mp_group).rank
        self.mp_size = mp_size
        self.out_dim = out_dim
        self.in_dim = in_dim

    def merge_assert(self, dim1: int, dim2: int) -> None:
        """AssertionError: the whole extent ``dim1`` is not larger than the part ``dim2``."""
        assert dim1 > dim2, (
            f"a weight that is {dim1} wide cannot be cut to {dim2}: join the files of other ranks first"
        )

    def copy(
        self, dst: Tensor, src: Tensor | None, int8: bool = False, allocate_tensor: bool = False
    ) -> nn.Parameter | None:
        """This rank's part of ``src`` in ``dst``, which says its shape, as a parameter without gradient; None for None.
        A matrix is cut along the dim in which the two differ."""
        if src is None:
            return None
        target = torch.empty_like(dst) if allocate_tensor else dst.data
        part = src.data
        for dim, own in self._pairs(part, target, int8):
            if part.shape[dim] != target.shape[own]:
                self.merge_assert(part.shape[dim], target.shape[own])
                part = part.narrow(dim, self.gpu_index * target.shape[own], target.shape[own])
                break
        return _parameter(_filled(target, part), src)

    def strided_copy(
        self,
        dst: Tensor,
        src: Tensor | None,
        num_splits: int,
        int8: bool = False,
        allocate_tensor: bool = False,
    ) -> nn.Parameter | None:
        """The same for ``num_splits`` matrices (or vectors) side by side, of each of which the rank has its part."""
        if src is None:
            return None
        target = torch.empty_like(dst) if allocate_tensor else dst.data
        dim = 0 if int8 or src.dim() == 1 else src.dim() - 1
        own = self.out_dim if src.dim() == 2 and target.dim() == 2 else 0
        part = src.data
        if part.shape[dim] != target.shape[own]:
            self.merge_assert(part.shape[dim], target.shape[own])
            extent = target.shape[own] // num_splits
            blocks = part.chunk(num_splits, dim)
            part = torch.cat([each.narrow(dim, self.gpu_index * extent, extent) for each in blocks], dim)
        return _parameter(_filled(target, part), src)

    def _pairs(self, src: Tensor, dst: Tensor, int8: bool) -> tuple[tuple[int, int], ...]:
        """Which dim of ``dst`` goes with which of ``src``: inputs, then outputs."""
        if src.dim() != 2 or dst.dim() != 2:
            return ((0, 0),)
        inputs, outputs = (1, 0) if int8 else (0, 1)
        return ((inputs, self.in_dim), (outputs, self.out_dim))


def _filled(target: Tensor, part: Tensor) -> Tensor:
    """``part`` in the memory and dtype of ``target``, with its own shape."""
    return target.reshape(-1).copy_(part.reshape(-1)).reshape(part.shape)


def _parameter(value: Tensor, src: Tensor) -> nn.Parameter:
    made = nn.Parameter(value, requires_grad=False)
    if hasattr(src, "scale"):
        vars(made)["scale"] = src.scale  # type: ignore[attr-defined]
    return made


class Loading:
    """Weights of single modules from a state dict with whole names."""

    @staticmethod
    def is_load_module(module: nn.Module) -> bool:
        """Whether it has weights of its own that are not shared out: a linear layer, a table, a norm."""
        name = type(module).__name__
        return isinstance(module, nn.Linear | nn.Embedding) or "Norm" in name or name.endswith("Embedding")

    @staticmethod
    def load_buffer(module: nn.Module, state_dict: dict[str, Tensor], prefix: str) -> None:
        """The buffers of ``module`` called ``prefix + name``, as far as they are there."""
        for name, buffer in module.named_buffers(recurse=False):
            value = state_dict.get(f"{prefix}{name}")
            if value is not None:
                module._buffers[name] = value.to(torch.device("cpu") if buffer.is_meta else buffer.device)

    @staticmethod
    def load(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, mp_group: Any = None) -> None:
        """The parameters of ``module`` called ``prefix + name``, as far as they are there: with ``mp_group``, this
        rank's part of those that are larger."""
        slicing = ReplaceWithTensorSlicing(
            mp_group, 1 if mp_group is None else communicator(mp_group).size, 0, 1
        )
        for name, param in module.named_parameters(recurse=False):
            value = state_dict.get(f"{prefix}{name}")
            if value is None:
                continue
            target = torch.empty_like(param, device="cpu") if param.is_meta else param.data
            taken = slicing.copy(target, value, int8=True)
            assert taken is not None
            module._parameters[name] = nn.Parameter(taken.data, requires_grad=param.requires_grad)
