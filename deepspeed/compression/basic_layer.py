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

    tp_classes = {"vocabulary": CompressedVocabulary}

    def __init__(self, *kargs: Any, **kwargs: Any) -> None:
        nn.Embedding.__init__(self, *kargs, **kwargs)
        self._begin(nn.Embedding)

    def extra_repr(self) -> str:
        return f"{nn.Embedding.extra_repr(self)}, {_described(self)}"

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

    tp_classes = {"column": CompressedColumns, "row": CompressedRows}

    def __init__(self, *kargs: Any, bias: bool = True, **kwargs: Any) -> None:
        nn.Linear.__init__(self, *kargs, bias=bias, **kwargs)
        self._begin(nn.Linear)

    def _begin(self, plain: type[nn.Module]) -> None:
        super()._begin(plain)
        self.row_pruning_enabled = self.head_pruning_enabled = False
        self.row_pruning_method: str | None = None
        self.head_pruning_method: str | None = None
        self.num_heads: int | None = None

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, {_described(self)}"

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
        if mask is not None:
            kept = mask.view(-1).bool()
            if dim_reduction:
                self._keep("weight", kept, dim=1)
            else:
                self._mask_weight(kept)
            self.in_features = self.weight.shape[1]
            return None
        kept = self.get_mask("row").detach().view(-1).bool()
        self._fix_rows(kept, dim_reduction)
        self._drop_mask("row")
        return kept

    def _fix_rows(self, kept: Tensor, dim_reduction: bool) -> None:
        if dim_reduction:
            self._keep("weight", kept)
            self._keep("bias", kept)
            self.out_features = self.weight.shape[0]
        else:
            self._zero_rows(kept)

    @torch.no_grad()
    def fix_head_pruning_helper(
        self, mask: Tensor | None = None, num_heads: int | None = None, dim_reduction: bool = False
    ) -> Tensor | None:
        """Make head pruning permanent: in the layer that has the scores prune the input features and return the mask
        of kept heads; given that ``mask``, in query, key and value prune the output features of ``num_heads`` heads."""
        if mask is not None:
            heads = mask.view(-1).bool()
            per_head = self.weight.shape[0] // (num_heads or heads.numel())
            self._fix_rows(heads.repeat_interleave(per_head), dim_reduction)
            return None
        kept = self.get_mask("head").detach().view(-1).bool()
        features = kept.repeat_interleave(self.weight.shape[1] // kept.numel())
        if dim_reduction:
            self._keep("weight", features, dim=1)
            self.in_features = self.weight.shape[1]
        else:
            self._mask_weight(features)
        self._drop_mask("head")
        return kept


class Conv2dLayer_Compress(Compressible, nn.Conv2d):
    """A convolution whose weight and input may be quantized, and its weights or output channels pruned."""

    row_width = 3

    def __init__(self, *kargs: Any, **kwargs: Any) -> None:
        nn.Conv2d.__init__(self, *kargs, **kwargs)
        self._begin(nn.Conv2d)

    def _begin(self, plain: type[nn.Module]) -> None:
        super()._begin(plain)
        self.channel_pruning_enabled = False
        self.channel_pruning_method: str | None = None

    def extra_repr(self) -> str:
        return f"{nn.Conv2d.extra_repr(self)}, {_described(self)}"

    def enable_channel_pruning(self, ratio: float, method: str) -> None:
        """Prepare for keeping the share ``ratio`` of output channels: those with the largest sum of |weight| ("l1",
        fixed now) or the largest learned scores ("topk")."""
        self._enable_rows("channel", ratio, method)

    def forward(self, input: Tensor) -> Tensor:
        inputs = self._quantized_input(input, input.shape[0] if input.dim() == 4 else 1)
        weight, bias = self.compressed_weight(), self.bias
        if self.channel_pruning_enabled:
            mask = self.get_mask("channel")
            vars(self)["applied_mask"] = mask.detach()  # for the batch norm that follows
            weight = weight * mask
            bias = bias * mask.view(-1) if bias is not None else None
        if self.padding_mode == "zeros":
            return F.conv2d(inputs, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        inputs = F.pad(inputs, self._pads(), mode=self.padding_mode)
        return F.conv2d(inputs, weight, bias, self.stride, 0, self.dilation, self.groups)

    def _pads(self) -> list[int]:
        """Return the padding in ``F.pad`` order: last dimension first."""
        pads: list[int] = []
        for dim in (1, 0):
            if self.padding == "same":
                total = self.dilation[dim] * (self.kernel_size[dim] - 1)
                pads += [total // 2, total - total // 2]
            else:
                pads += [0, 0] if self.padding == "valid" else [int(self.padding[dim])] * 2
        return pads

    @torch.no_grad()
    def fix_channel_pruning_helper(
        self, mask: Tensor | None = None, dim_reduction: bool = False
    ) -> Tensor | None:
        """Make channel pruning permanent and return the boolean mask of kept channels. Given the ``mask`` of the
        preceding layer, prune this layer's input channels. ``dim_reduction``: remove what is pruned, don't zero it."""
        if mask is not None:
            kept = mask.view(-1).bool()
            if self.groups != 1:
                raise ValueError("channel_pruning: a related convolution must not have groups")
            if dim_reduction:
                self._keep("weight", kept, dim=1)
                self.in_channels = self.weight.shape[1]
            else:
                self._mask_weight(kept.view(1, -1, 1, 1))
            return None
        kept = self.get_mask("channel").detach().view(-1).bool()
        if dim_reduction and self.groups == 1:
            self._keep("weight", kept)
            self._keep("bias", kept)
            self.out_channels = self.weight.shape[0]
        else:
            self._zero_rows(kept)
        self._drop_mask("channel")
        return kept


class BNLayer_Compress(Compressible, nn.BatchNorm2d):
    """A batch norm after a convolution with pruned channels: it keeps those channels at zero."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        nn.BatchNorm2d.__init__(self, *args, **kwargs)
        self._begin(nn.BatchNorm2d)

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        source = vars(self).get("mask_from")
        if source is None or not source[0].channel_pruning_enabled:
            return output
        return output * vars(source[0])["applied_mask"].view(1, -1, 1, 1)

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


def _described(layer: Compressible) -> str:
    return (
        f"weight_quantization={layer.weight_quantization_enabled}, "
        f"activation_quantization={layer.activation_quantization_enabled}, "
        f"sparse_pruning={layer.sparse_pruning_enabled}"
    )


# Parallel layers --------------------------------------------------------------------------------------------


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Split ``tensor`` into equal parts along its last dimension. ValueError: the size is not divisible."""
    if tensor.shape[-1] % num_partitions:
        raise ValueError(f"{tensor.shape[-1]} features are not {num_partitions} equal parts")
    parts = tensor.split(tensor.shape[-1] // num_partitions, dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else tuple(parts)


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
