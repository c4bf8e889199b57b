"""Compressed layers of which each tensor-parallel rank holds a part.

Ranges of groups, thresholds and masks are those of the whole weight: while a technique is on, forward gathers it,
compresses it and goes on with this rank's part. So the ranks compute what one process computes, for an all-gather of
the weights that are compressed. Masks and learned scores are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed.compression.techniques import Compressible, tokens
from deepspeed.parallel.tensor.cuts import Cut
from deepspeed.parallel.tensor.embedding import VocabParallelEmbedding
from deepspeed.parallel.tensor.layers import LinearAllreduce, LinearLayer
from deepspeed.parallel.tensor.mappings import gather_from, shared_weight, whole_of_part

if TYPE_CHECKING:
    from deepspeed.parallel.tensor.layers import TensorParallelLayer

    class _Split(TensorParallelLayer, Compressible):
        """Bases of an object of these classes: a split layer, and the compressed layer that it was."""
else:
    _Split = nn.Module


class _InParts(_Split):
    """Common part of all of them; first among the bases."""

    def _adopt(self, module: nn.Module) -> None:
        super()._adopt(module)
        for name, child in module.named_children():  # the range of activations
            self.add_module(name, child)

    def _keep(self, module: nn.Module, cuts: Mapping[str, Cut | None], *, own: bool = False) -> None:
        scores = {name: None for name, _ in module.named_parameters(recurse=False) if name.endswith("scores")}
        super()._keep(module, {**cuts, **scores}, own=own)

    def whole(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            return gather_from(tensor, self.group, self.cut)

    def part(self, whole: Tensor) -> Tensor:
        return self.cut.take(whole, self.group.rank)

    def _learned(self, name: str) -> Tensor:
        return shared_weight(super()._learned(name), self.group)

    def compressed_weight(self) -> Tensor:
        return self._compressed_part(self.weight)

    def _compressed_part(self, weight: Tensor) -> Tensor:
        if not self.changes_weight():
            return weight
        return self.part(self.compressed(whole_of_part(weight, self.group, self.cut)))


class CompressedColumns(_InParts, LinearLayer):
    """Column-parallel."""

    def operands(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = super().operands()
        if bias is not None and self._prunes("row"):
            kept = self.get_mask("row").view(-1)
            bias = bias * self.cut.along(0).take(kept, self.group.rank)
        return self._compressed_part(weight), bias

    def _product(self, inputs: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        return super()._product(self._quantized_input(inputs, tokens(inputs)), weight, bias)


class CompressedRows(_InParts, LinearAllreduce):
    """Row-parallel."""

    def operands(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = super().operands()
        if bias is not None and self._prunes("row"):
            # All ranks add the same bias after the sum: its mask has the whole gradient on each of them.
            bias = bias * super(_InParts, self).get_mask("row").view(-1)
        return self._compressed_part(weight), bias

    def _product(self, inputs: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        if self.activation_quantization_enabled and self.activation_quantizer is not None:
            cut = self.cut.along(-1)  # a token's range is that of all its features
            whole = whole_of_part(inputs, self.group, cut)
            inputs = cut.take(self._quantized_input(whole, tokens(whole)), self.group.rank)
        return super()._product(inputs, weight, bias)


class CompressedVocabulary(_InParts, VocabParallelEmbedding):
    """An embedding of which each rank has a part of the vocabulary."""
