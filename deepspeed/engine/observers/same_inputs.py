"""One-time check that tensor-parallel ranks are given the same batches."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from deepspeed.base.exceptions import ExplainedError
from deepspeed.base.logging import logger
from deepspeed.comm.collectives import Communicator
from deepspeed.parallel.tensor.layers import TensorParallelLayer

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine


DOCUMENTED = "Data inconsistency within the TP group. Please check the Dataloader implementation to ensure consistency."


class DifferentInputs(ExplainedError, ValueError, AssertionError):
    """Has the documented message, which scripts compare; the differences are in its notes and in the log."""

    def __init__(self, details: str) -> None:
        super().__init__(DOCUMENTED)
        self.details = details
        self.__notes__ = [details]


class SameInputsCheck:
    """Compares the tensors of an engine's first training forward over its tensor-parallel ranks, then unsubscribes.

    Differences raise ``DifferentInputs`` on all ranks of the group if the module contains our parallel layers, or the
    config shares layers; otherwise they are a warning, since foreign layers may expect different inputs.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.group = engine.mesh.communicator("tp")
        engine.events.on("before_forward", self.compare)

    def compare(self, inputs: tuple[Any, ...], kwargs: dict[str, Any], **_: Any) -> None:
        module = self.engine.module
        if not module.training:
            return
        self.engine.events.off("before_forward", self.compare)
        found = differing_inputs(module.forward, inputs, kwargs, self.group, self.engine.device)
        if not found:
            return
        names = "; ".join(f"{name} (ranks {ranks})" for name, ranks in found.items())
        text = (
            f"ranks {list(self.group.ranks)} share the layers of the model and must get the same batch, but these "
            f"inputs differ from rank {self.group.ranks[0]}: {names}. Pass the sampler of the data loader the number "
            f"of data-parallel ranks ({self.engine.mesh.size('dp')}) and this rank's index among them, or use "
            "engine.deepspeed_io or the training_data argument of deepspeed.initialize"
        )
        shared = self.engine._config.tensor_parallel_config.autotp_size > 1
        if shared or any(isinstance(each, TensorParallelLayer) for each in module.modules()):
            logger.error(text)
            raise DifferentInputs(text)
        logger.warning(text)


# Comparison of the arguments of a forward over ranks.


def differing_inputs(
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    group: Communicator,
    device: torch.device | str = "cpu",
) -> dict[str, list[int]]:
    """Return the names of tensors among the arguments of ``forward`` that differ between ranks of ``group``, with the
    global ranks whose tensor is not the first rank's; "the arguments" if the ranks have different arguments.

    Collective. Reads every tensor once, and compares shapes, dtypes and values, but not devices.
    """
    tensors = _named_tensors(forward, args, kwargs)
    names = zlib.crc32("\n".join(tensors).encode())
    structure = _gather_rows(torch.tensor([len(tensors), names], dtype=torch.int64, device=device), group)
    others = _differing_ranks(structure, group)
    if others:
        return {"the arguments": others}
    checksums = torch.tensor([_checksum(each) for each in tensors.values()], dtype=torch.int64, device=device)
    every = _gather_rows(checksums, group)
    found = {name: _differing_ranks(every[:, i : i + 1], group) for i, name in enumerate(tensors)}
    return {name: ranks for name, ranks in found.items() if ranks}


def _named_tensors(
    forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Tensor]:
    try:
        named: Mapping[str, Any] = inspect.signature(forward).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # no signature, or arguments that the forward itself will reject
        named = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
    found: dict[str, Tensor] = {}
    for name, value in named.items():
        leaves, _ = tree_flatten_with_path(value)
        found |= {f"{name}{keystr(path)}": leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
    return found


def _checksum(tensor: Tensor) -> int:
    kind = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    if tensor.is_meta:
        return kind
    values = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return zlib.crc32(values.numpy().data, kind)


def _gather_rows(own: Tensor, group: Communicator) -> Tensor:
    """Gather ``own`` [n] from all ranks: [ranks, n]."""
    every = own.new_empty(group.size * own.numel())
    group.all_gather(every, own).wait()
    return every.view(group.size, own.numel())


def _differing_ranks(every: Tensor, group: Communicator) -> list[int]:
    """Return the global ranks whose row differs from the first."""
    different = (every != every[0]).any(1).tolist()
    return [rank for rank, differs in zip(group.ranks, different, strict=True) if differs]
