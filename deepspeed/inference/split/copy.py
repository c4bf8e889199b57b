"""A tensor-parallel copy of a training module, for generation."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn

from deepspeed.base.sharded import is_zero_param
from deepspeed.checkpoint.placement import local_part
from deepspeed.comm.collectives import Communicator
from deepspeed.inference.split.layers import split_over
from deepspeed.zero.gathering.gathered_parameters import GatheredParameters


@dataclass(frozen=True, slots=True)
class _Weight:
    """A parameter of the training module, and the copy's parameter that stands for it."""

    source: nn.Parameter
    held: nn.Parameter
    shape: torch.Size
    is_cut: bool


class SplitCopy:
    """A copy of ``module`` with its layers split over ``group``. Unsplit weights share the module's storage; of split
    ones each rank holds its part, so a copy costs ``1 / group.size`` of the weights.

    Create while all weights are whole (``unwrap_model_for_generation``). Collective.

    Args:
        module: the training module, which is not changed.
        group: the ranks that generate together.
        pinned: keep the memory of split weights between uses.
        layers_at_once: number of layers to gather at a time while filling the copy, if weights are partitioned.

    DeepSpeedConfigError: the model cannot be split.
    """

    def __init__(self, module: nn.Module, group: Communicator, *, pinned: bool, layers_at_once: int) -> None:
        copies = {
            id(param): nn.Parameter(param.detach(), requires_grad=False) for param in module.parameters()
        }
        sources = {id(copies[id(param)]): param for param in module.parameters()}
        memo: dict[int, object] = {**copies, **{id(buffer): buffer for buffer in module.buffers()}}
        self.module = copy.deepcopy(module, memo)
        self._pinned = pinned
        cut: dict[int, nn.Parameter] = {}

        def on_swap(old: nn.Parameter, new: nn.Parameter) -> None:
            cut[id(old)] = new

        split_over(self.module, group, on_swap=on_swap)
        self._blocks = _blocks(module, layers_at_once)
        self._weights: dict[int, _Weight] = {}
        for copied, source in sources.items():
            held = cut.get(copied, copies[id(source)])
            self._weights[id(source)] = _Weight(source, held, held.shape, copied in cut)
        self.release()

    def fill(self, *, whole: bool) -> None:
        """Copy the module's current weights. Collective if they are partitioned.

        Args:
            whole: the weights are whole already.
        """
        for block in self._blocks:
            with GatheredParameters(block, enabled=not whole):
                self._fill(block)

    def release(self) -> None:
        """Drop all references to the module's weights; pinned weights keep their memory."""
        for weight in self._weights.values():
            if not (self._pinned and weight.is_cut):
                weight.held.data = weight.held.data.new_empty(0)

    @torch.no_grad()
    def _fill(self, block: list[nn.Parameter]) -> None:
        for param in block:
            weight = self._weights[id(param)]
            whole = param.detach()
            if not weight.is_cut:
                weight.held.data = whole.clone() if is_zero_param(param) else whole
                continue
            if weight.held.shape != weight.shape:
                weight.held.data = whole.new_empty(weight.shape)
            weight.held.copy_(local_part(weight.held, whole))


def _blocks(module: nn.Module, count: int) -> list[list[nn.Parameter]]:
    """Group parameters by numbered layer, ``count`` layers per block; those outside any layer form a block."""
    layers: dict[str, list[nn.Parameter]] = {}
    for name, param in module.named_parameters():
        path = name.split(".")
        number = next((at for at, part in enumerate(path) if part.isdigit()), None)
        layers.setdefault("" if number is None else ".".join(path[: number + 1]), []).append(param)
    others = layers.pop("", [])
    numbered = list(layers.values())
    together = [sum(numbered[at : at + count], []) for at in range(0, len(numbered), count)]
    return [*([others] if others else []), *together]
