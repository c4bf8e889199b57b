"""The documented compressed layers: linear, embedding, convolution, batch norm, and Megatron's parallel linears."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.comm import documented_groups as groups
from deepspeed.comm.collectives import Communicator
from deepspeed.compression.techniques import TOPK, Compressible, _shape, tokens
from deepspeed.compression.techniques import QuantAct as QuantAct
from deepspeed.parallel.tensor.cuts import Cut
from deepspeed.parallel.tensor.embedding import VocabParallelEmbedding
from deepspeed.parallel.tensor.layers import LinearAllreduce, LinearLayer
from deepspeed.parallel.tensor.mappings import (
    copy_to,
    gather_from,
    gather_whole,
    reduce_from,
    shared_weight,
    split_to,
)

if TYPE_CHECKING:
    from deepspeed.parallel.tensor.layers import TensorParallelLayer

    class _Split(TensorParallelLayer, Compressible):
        """For type checkers: a tensor-parallel layer that is also compressible."""
else:
    _Split = nn.Module


# Compressed tensor-parallel layers.
#
# Quantization ranges, thresholds and masks are those of the whole weight: while a technique is on, forward
# all-gathers the weight, compresses it and keeps this rank's part. The ranks thus compute what one process
# computes, at the price of that all-gather. Masks and learned scores are replicated on every rank.


class _SplitLayer(_Split):
    """Base of the split layers below; comes first in their MRO."""

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
        return self.part(self.compressed(gather_whole(weight, self.group, self.cut)))


class CompressedColumns(_SplitLayer, LinearLayer):
    """A compressed column-parallel linear layer."""

    def operands(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = super().operands()
        if bias is not None and self._prunes("row"):
            kept = self.get_mask("row").view(-1)
            bias = bias * self.cut.along(0).take(kept, self.group.rank)
        return self._compressed_part(weight), bias

    def _product(self, inputs: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        return super()._product(self._quantized_input(inputs, tokens(inputs)), weight, bias)


class CompressedRows(_SplitLayer, LinearAllreduce):
    """A compressed row-parallel linear layer."""

    def operands(self) -> tuple[Tensor, Tensor | None]:
        weight, bias = super().operands()
        if bias is not None and self._prunes("row"):
            # All ranks add the same bias after the all-reduce, so each already has the whole gradient of its mask.
            bias = bias * super(_SplitLayer, self).get_mask("row").view(-1)
        return self._compressed_part(weight), bias

    def _product(self, inputs: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        if self.activation_quantization_enabled and self.activation_quantizer is not None:
            cut = self.cut.along(-1)  # a token's range spans all its features, so they are gathered
            whole = gather_whole(inputs, self.group, cut)
            inputs = cut.take(self._quantized_input(whole, tokens(whole)), self.group.rank)
        return super()._product(inputs, weight, bias)


class CompressedVocabulary(_SplitLayer, VocabParallelEmbedding):
    """A compressed vocabulary-parallel embedding."""


class Embedding_Compress(Compressible, nn.Embedding):
    """An embedding whose table may be quantized."""

    plain_class = nn.Embedding
    tp_classes = {"vocabulary": CompressedVocabulary}

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(
            input,
            self.compressed_weight(),
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )


class LinearLayer_Compress(Compressible, nn.Linear):
    """A linear layer whose weight and input may be quantized, and its weights, rows or heads pruned."""

    plain_class = nn.Linear
    tp_classes = {"column": CompressedColumns, "row": CompressedRows}
    sizes = ("out_features", "in_features")
    num_heads: int | None = None

    def __init__(self, *kargs: Any, bias: bool = True, **kwargs: Any) -> None:
        super().__init__(*kargs, bias=bias, **kwargs)

    def enable_row_pruning(self, ratio: float, method: str) -> None:
        """Prepare for keeping the share ``ratio`` of output features: those with the largest sum of |weight| ("l1",
        fixed now) or the largest learned scores ("topk")."""
        self._enable_rows("row", ratio, method)

    def enable_head_pruning(self, ratio: float, method: str, num_heads: int) -> None:
        """Prepare for keeping the share ``ratio`` of attention heads, whose outputs are this layer's input features,
        by learned scores. ValueError: another method than "topk", or heads that do not fit."""
        if method != TOPK:
            raise ValueError(f"head_pruning.method is {TOPK!r}, not {method!r}")
        inputs = _shape(self.weight)[1]
        if num_heads < 1 or inputs % num_heads:
            raise ValueError(f"head_pruning.num_heads={num_heads} does not divide {inputs} input features")
        self.num_heads, self.head_pruning_ratio, self.head_pruning_method = num_heads, ratio, method
        self.head_pruning_scores = self._scores(1, num_heads)

    def head_pruning_reshape(self, w: Tensor, mask: Tensor) -> Tensor:
        """Return ``w`` [outputs, inputs] with each head's input features multiplied by the head's entry of ``mask``."""
        heads = mask.numel()
        return (w.view(w.shape[0], heads, -1) * mask.view(1, heads, 1)).view(w.shape)

    def compressed(self, weight: Tensor) -> Tensor:
        weight = super().compressed(weight)
        if self.row_pruning_enabled:
            weight = weight * self.get_mask("row")
        if self.head_pruning_enabled:
            weight = self.head_pruning_reshape(weight, self.get_mask("head"))
        return weight

    def compressed_bias(self) -> Tensor | None:
        if self.bias is None or not self.row_pruning_enabled:
            return self.bias
        return self.bias * self.get_mask("row").view(-1)

    def forward(self, input: Tensor, skip_bias_add: bool = False) -> Any:
        """Return the output, or (output without bias, bias) with ``skip_bias_add``."""
        inputs = self._quantized_input(input, tokens(input))
        if skip_bias_add:
            return F.linear(inputs, self.compressed_weight()), self.compressed_bias()
        return F.linear(inputs, self.compressed_weight(), self.compressed_bias())

    @torch.no_grad()
    def fix_row_col_pruning_helper(
        self, mask: Tensor | None = None, dim_reduction: bool = False
    ) -> Tensor | None:
        """Make row pruning permanent and return the boolean mask of kept rows. Given the ``mask`` of the preceding
        layer, prune this layer's input features instead. ``dim_reduction``: remove what is pruned, don't zero it."""
        if mask is None:
            return self._fix_rows("row", dim_reduction)
        return self._prune(mask.view(-1).bool(), 1, dim_reduction)

    @torch.no_grad()
    def fix_head_pruning_helper(
        self, mask: Tensor | None = None, num_heads: int | None = None, dim_reduction: bool = False
    ) -> Tensor | None:
        """Make head pruning permanent: in the layer that has the scores prune the input features and return the mask
        of kept heads; given that ``mask``, in query, key and value prune the output features of ``num_heads`` heads."""
        if mask is not None:
            heads = mask.view(-1).bool()
            per_head = self.weight.shape[0] // (num_heads or heads.numel())
            return self._prune(heads.repeat_interleave(per_head), 0, dim_reduction)
        kept = self.get_mask("head").detach().view(-1).bool()
        self._prune(kept.repeat_interleave(self.weight.shape[1] // kept.numel()), 1, dim_reduction)
        self._drop_mask("head")
        return kept


class Conv2dLayer_Compress(Compressible, nn.Conv2d):
    """A convolution whose weight and input may be quantized, and its weights or output channels pruned."""

    plain_class = nn.Conv2d
    sizes = ("out_channels", "in_channels")
    applied_mask: Tensor
    """Of the last forward, for the batch norm that follows."""

    def enable_channel_pruning(self, ratio: float, method: str) -> None:
        """Prepare for keeping the share ``ratio`` of output channels: those with the largest sum of |weight| ("l1",
        fixed now) or the largest learned scores ("topk")."""
        self._enable_rows("channel", ratio, method)

    def forward(self, input: Tensor) -> Tensor:
        inputs = self._quantized_input(input, input.shape[0] if input.dim() == 4 else 1)
        weight, bias = self.compressed_weight(), self.bias
        if self.channel_pruning_enabled:
            mask = self.get_mask("channel")
            vars(self)["applied_mask"] = mask.detach()
            weight = weight * mask
            bias = bias * mask.view(-1) if bias is not None else None
        return self._conv_forward(inputs, weight, bias)

    @torch.no_grad()
    def fix_channel_pruning_helper(
        self, mask: Tensor | None = None, dim_reduction: bool = False
    ) -> Tensor | None:
        """Make channel pruning permanent and return the boolean mask of kept channels. Given the ``mask`` of the
        preceding layer, prune this layer's input channels. ``dim_reduction``: remove what is pruned, don't zero it."""
        if mask is None:
            return self._fix_rows("channel", dim_reduction and self.groups == 1)
        if self.groups != 1:
            raise ValueError("channel_pruning: a related convolution must not have groups")
        return self._prune(mask.view(-1).bool(), 1, dim_reduction)


class BNLayer_Compress(Compressible, nn.BatchNorm2d):
    """A batch norm after a convolution with pruned channels: it keeps those channels at zero."""

    plain_class = nn.BatchNorm2d
    mask_from: tuple[Conv2dLayer_Compress]
    """The convolution, in a tuple, so that it is not registered as a submodule."""

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        source = vars(self).get("mask_from")
        if source is None or not source[0].channel_pruning_enabled:
            return output
        return output * source[0].applied_mask.view(1, -1, 1, 1)

    @torch.no_grad()
    def fix_channel_pruning_helper(self, mask: Tensor, dim_reduction: bool = True) -> None:
        """Remove the channels that ``mask`` drops, or without ``dim_reduction`` zero their scale and shift."""
        kept = mask.view(-1).bool()
        if dim_reduction:
            for name in ("weight", "bias", "running_mean", "running_var"):
                self._keep(name, kept)
            self.num_features = int(kept.sum())
        elif self.affine:
            self.weight.data, self.bias.data = self.weight.data * kept, self.bias.data * kept
        vars(self).pop("mask_from", None)


# Parallel layers --------------------------------------------------------------------------------------------


def _ranks(mpu: Any = None) -> Communicator:
    """Return the tensor-parallel ranks of ``mpu``, or else of the newest engine's mesh."""
    if mpu is not None:
        group = getattr(mpu, "get_tensor_model_parallel_group", None) or mpu.get_model_parallel_group
        return Communicator(group())
    mesh = groups.get_mesh()
    return Communicator(groups.get_tensor_model_parallel_group() if mesh is not None else None)


class ColumnParallelLinear_Compress(LinearLayer_Compress):
    """Megatron's column-parallel linear layer: each rank of ``mpu`` has a part of the output features. Returns
    (output, bias or None)."""

    mpu: Any

    def __init__(
        self,
        mpu: Any,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        skip_bias_add: bool = False,
    ) -> None:
        ranks = _ranks(mpu)
        super().__init__(input_size, _share(output_size, ranks), bias=bias)
        self.mpu, self.gather_output, self.skip_bias_add = mpu, gather_output, skip_bias_add

    def forward(self, input_: Tensor) -> Any:  # type: ignore[override]
        ranks = _ranks(self.mpu)
        inputs = copy_to(input_, ranks)
        if self.skip_bias_add:
            output, bias = super().forward(inputs, True)
        else:
            output, bias = super().forward(inputs), None
        if self.gather_output:
            cut = Cut.even(output.dim() - 1, output.shape[-1] * ranks.size, ranks.size)
            output = gather_from(output, ranks, cut)
        return output, bias


class RowParallelLinear_Compress(LinearLayer_Compress):
    """Megatron's row-parallel linear layer: each rank of ``mpu`` has a part of the input features. Returns (output,
    bias or None)."""

    mpu: Any

    def __init__(
        self,
        mpu: Any,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        skip_bias_add: bool = False,
    ) -> None:
        ranks = _ranks(mpu)
        super().__init__(_share(input_size, ranks), output_size, bias=bias)
        self.mpu, self.input_is_parallel, self.skip_bias_add = mpu, input_is_parallel, skip_bias_add

    def forward(self, input_: Tensor) -> Any:  # type: ignore[override]
        ranks = _ranks(self.mpu)
        inputs = input_
        if not self.input_is_parallel:
            inputs = split_to(input_, ranks, Cut.even(input_.dim() - 1, input_.shape[-1], ranks.size))
        partial, bias = super().forward(inputs, True)
        output = reduce_from(partial, ranks)
        if self.skip_bias_add:
            return output, bias
        return (output + bias if bias is not None else output), None


def _share(size: int, ranks: Communicator) -> int:
    if size % ranks.size:
        raise ValueError(f"{size} features cannot be shared by {ranks.size} ranks")
    return size // ranks.size
