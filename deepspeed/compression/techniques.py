"""State of a compressed module: quantization of its weight and input, and its pruning masks.

``weight`` remains a parameter under its own name, trained in full precision; forward computes with
``compressed_weight()`` instead. The schedule switches each technique on (``..._enabled``) and sets the bit width.
"""

from __future__ import annotations

import math
from inspect import get_annotations
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from deepspeed.compression.packing import MAX_BITS, Grid
from deepspeed.compression.utils import (
    NEAREST,
    SYMMETRIC,
    AsymQuantizer,
    SymQuantizer,
    TopKBinarizer,
    quantizer_for,
    top_mask,
)

L1, TOPK, SNIP = "l1", "topk", "snip_momentum"
RANGE = "x_min_max"
SCORES = "sparse_pruning_scores"
"""Buffer of fp32 scores, stored as int32 because engines cast floating-point buffers to 16 bits."""


class QuantAct(nn.Module):
    """Quantizes activations to a static range: a running mean of the batches' ranges, updated in training.

    ``quant_mode``: "symmetric" or "asymmetric". The range is the buffer ``x_min_max`` [2]; if zero, it is set to the
    range of the next batch.
    """

    x_min_max: Tensor

    def __init__(self, act_range_momentum: float = 0.95, quant_mode: str = SYMMETRIC) -> None:
        super().__init__()
        self.act_range_momentum = act_range_momentum
        self.quant_mode = quant_mode
        self.act_function = SymQuantizer if quant_mode == SYMMETRIC else AsymQuantizer
        self.register_buffer(RANGE, torch.zeros(2))

    def forward(self, x: Tensor, num_bits: int, *args: Any) -> Tensor:
        if self.training:
            self._update_range(x.detach())
        low, high = self.x_min_max.float()
        return self.act_function.apply(x, num_bits, low, high)

    @torch.no_grad()
    def _update_range(self, x: Tensor) -> None:
        now = torch.stack(torch.aminmax(x)).to(self.x_min_max)
        mixed = self.x_min_max * self.act_range_momentum + now * (1 - self.act_range_momentum)
        self.x_min_max.copy_(torch.where((self.x_min_max == 0).all(), now, mixed))


class Compressible(nn.Module):
    """Base of the compressed layers. They are made from ordinary ones in place (``take``): the module keeps its
    identity, parameters, hooks and attributes; only its class changes, until ``release``."""

    weight: nn.Parameter
    plain_class: type[nn.Module]
    sizes: ClassVar[tuple[str, str]]
    """Names of the attributes with the numbers of output and input features (or channels)."""

    # What follows is state: `release` deletes the annotated attributes.
    weight_quantization_enabled: bool = False
    weight_quantization_enabled_in_forward: bool = False
    weight_quantize_num_groups: int = 1
    weight_quantize_type: str = SYMMETRIC
    weight_rounding: str = NEAREST
    weight_bits: tuple[int, int, int] | None = None
    """(start bits, target bits, steps per bit); None if the weight is not to be quantized."""
    weight_quantize_bits: int = 8
    """Current bit width."""
    weight_quantize_share: float = 1.0
    """Share of the quantized value in the mixture with the unquantized weight."""
    weight_quantize_seed: int | None = None
    """Seed of stochastic rounding: the same noise on all ranks and in a recomputed forward."""
    activation_quantization_enabled: bool = False
    activation_quantization_bits: int | None = None
    activation_quantization_range: str | None = None
    activation_quantizer: Any
    sparse_pruning_enabled: bool = False
    sparse_pruning_method: str | None = None
    sparse_pruning_ratio: float = 1.0
    row_pruning_enabled: bool = False
    row_pruning_method: str | None = None
    row_pruning_ratio: float
    head_pruning_enabled: bool = False
    head_pruning_method: str | None = None
    head_pruning_ratio: float
    channel_pruning_enabled: bool = False
    channel_pruning_method: str | None = None
    channel_pruning_ratio: float
    name_seed: int | None = None
    """Seed of initial mask scores, combined with torch's initial seed; None: torch's default generator."""
    grid: Grid | None = None
    """The integer levels of the weight, once it is rounded permanently."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin(self.plain_class)

    @classmethod
    def take(cls, module: nn.Module) -> Compressible:
        """Make ``module``, whose class is a base of this one, compressible."""
        plain = type(module)
        module.__class__ = cls
        taken = cast(Compressible, module)
        taken._begin(plain)
        return taken

    def _begin(self, plain: type[nn.Module]) -> None:
        self.plain_class = plain
        self.activation_quantizer = None  # of the instance: one of the class would hide a submodule

    def release(self) -> nn.Module:
        """Turn the module back into an ordinary layer. The effect of the techniques must be made permanent before."""
        plain, mine = self.plain_class, vars(self)
        kinds = [kind for kind in type(self).__mro__ if issubclass(kind, Compressible)]
        for name in mine.keys() & {name for kind in kinds for name in get_annotations(kind)}:
            del mine[name]
        for kind in _PRUNING:
            self._forget_mask(kind)
        self._modules.pop("activation_quantizer", None)
        self.__class__ = plain  # type: ignore[assignment]
        return self

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, weight_quantization={self.weight_quantization_enabled}, "
            f"activation_quantization={self.activation_quantization_enabled}, "
            f"sparse_pruning={self.sparse_pruning_enabled}"
        )

    # Weight quantization ------------------------------------------------------------------------------------

    def enable_weight_quantization(
        self,
        start_bits: int,
        target_bits: int,
        quantization_period: int,
        weight_quantization_enabled_in_forward: bool,
        quantization_type: str,
        num_groups: int,
        rounding: str = NEAREST,
    ) -> None:
        """Prepare to quantize the weight in ``num_groups`` groups, from ``start_bits`` down to ``target_bits`` by one
        bit every ``quantization_period`` steps. Without ``..._in_forward`` the engine quantizes the 16-bit weights
        after each update instead (MoQ)."""
        numel = math.prod(_shape(self.weight))
        if numel % num_groups:
            raise ValueError(
                f"a weight of shape {tuple(_shape(self.weight))} cannot be quantized in quantize_groups={num_groups} "
                "groups of equal size"
            )
        for bits in (start_bits, target_bits):
            quantizer_for(bits, quantization_type)
        self.weight_bits = (start_bits, target_bits, quantization_period)
        self.weight_quantize_bits = target_bits
        self.weight_quantization_enabled_in_forward = weight_quantization_enabled_in_forward
        self.weight_quantize_type = quantization_type
        self.weight_quantize_num_groups = num_groups
        self.weight_rounding = rounding
        vars(self.weight).update(start_bits=start_bits, target_bits=target_bits, q_period=quantization_period)

    def quantized(self, weight: Tensor, bits: int, rounding: str = NEAREST) -> Tensor:
        """Quantize ``weight`` (whole, of this module's shape) to ``bits``."""
        apply = quantizer_for(bits, self.weight_quantize_type).apply
        groups, seed = self.weight_quantize_num_groups, self.weight_quantize_seed
        return apply(weight, bits, None, None, groups, rounding, seed)

    def quantized_now(self, weight: Tensor, rounding: str) -> Tensor:
        """Quantize ``weight`` to the current bits, mixed with the unquantized one as the schedule says."""
        rounded = self.quantized(weight, self.weight_quantize_bits, rounding)
        if self.weight_quantize_share >= 1:
            return rounded
        return torch.lerp(weight, rounded, self.weight_quantize_share)

    @torch.no_grad()
    def fix_weight_quantization(self) -> None:
        """Round the weight to the target bits permanently."""
        if self.weight_bits is not None:
            bits = self.weight_bits[1]
            if bits > MAX_BITS:
                self.weight.data = self.quantized(self.weight.data, bits)
            else:
                self.grid = Grid.of(
                    self.weight.data, bits, self.weight_quantize_type, self.weight_quantize_num_groups
                )
                self.weight.data = self.grid.values(self.weight.dtype)
        self.weight_quantization_enabled = False
        self.weight_quantization_enabled_in_forward = False

    def compressed_weight(self) -> Tensor:
        """Return the weight with which forward computes."""
        return self.compressed(self.weight)

    def compressed(self, weight: Tensor) -> Tensor:
        """Quantize and then mask ``weight`` (whole, of this module's shape). The gradient is elementwise."""
        if self._quantizes_in_forward():
            weight = self.quantized_now(weight, self.weight_rounding if self.training else NEAREST)
        if self._prunes("sparse"):
            weight = weight * self.get_mask("sparse")
        return weight

    def changes_weight(self) -> bool:
        """Return whether ``compressed`` currently changes the weight."""
        return self._quantizes_in_forward() or any(self._prunes(kind) for kind in _PRUNING)

    def _quantizes_in_forward(self) -> bool:
        return self.weight_quantization_enabled and self.weight_quantization_enabled_in_forward

    def _prunes(self, kind: str) -> bool:
        return bool(getattr(self, f"{kind}_pruning_enabled") and getattr(self, f"{kind}_pruning_method"))

    def whole(self, tensor: Tensor) -> Tensor:
        """Gather a tensor that is split over ranks like the weight, without gradient."""
        return tensor

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor; the inverse of ``whole``."""
        return whole

    # Activation quantization --------------------------------------------------------------------------------

    def enable_activation_quantization(
        self, bits: int, quantization_type: str, range_calibration: str
    ) -> None:
        """Prepare to quantize inputs to ``bits``, with one range for all ("static", from the batches seen in training)
        or one per token or image ("dynamic")."""
        self.activation_quantization_bits = bits
        self.activation_quantization_range = f"{range_calibration}_{quantization_type}"
        if range_calibration == "static":
            self.activation_quantizer = QuantAct(quant_mode=quantization_type).to(self.weight.device)
        else:
            kind = SymQuantizer if quantization_type == SYMMETRIC else AsymQuantizer
            self.activation_quantizer = kind.apply

    def _quantized_input(self, inputs: Tensor, groups: int) -> Tensor:
        if not self.activation_quantization_enabled or self.activation_quantizer is None:
            return inputs
        return self.activation_quantizer(inputs, self.activation_quantization_bits, None, None, groups)

    # Pruning ------------------------------------------------------------------------------------------------

    def enable_sparse_pruning(self, ratio: float, method: str) -> None:
        """Prepare to keep the share ``ratio`` of single weights: the largest ("l1", fixed now), those with the largest
        learned scores ("topk"), or those that the model's pruner chooses ("snip_momentum")."""
        self.sparse_pruning_ratio, self.sparse_pruning_method = ratio, method
        if method == L1:
            self.register_buffer("sparse_pruning_mask", top_mask(self.weight.detach().abs(), ratio))
        elif method == SNIP:
            self.register_buffer("sparse_pruning_mask", torch.ones_like(self.weight, dtype=torch.bool))
            self.register_buffer(SCORES, torch.zeros_like(self.weight, dtype=torch.int32))
        elif method == TOPK:
            self.sparse_mask_scores = self._scores(*_shape(self.weight))
        else:
            raise ValueError(f"sparse_pruning.method is {L1!r}, {TOPK!r} or {SNIP!r}, not {method!r}")

    def _scores(self, *shape: int) -> nn.Parameter:
        generator = None
        if self.name_seed is not None:  # each mask size gets a different seed
            seed = torch.initial_seed() ^ self.name_seed ^ (math.prod(shape) << 32)
            generator = torch.Generator().manual_seed(seed)
        scores = torch.empty(*shape, device="cpu")
        nn.init.kaiming_uniform_(scores, a=math.sqrt(5), generator=generator)
        return nn.Parameter(scores.to(self.weight.device, self.weight.dtype))

    def _enable_rows(self, kind: str, ratio: float, method: str) -> None:
        """Register the mask of whole rows (output features or channels), a buffer or parameter named after ``kind``."""
        setattr(self, f"{kind}_pruning_ratio", ratio)
        setattr(self, f"{kind}_pruning_method", method)
        rows, *others = _shape(self.weight)
        ones = [1] * len(others)
        if method == L1:
            sizes = self.weight.detach().abs().flatten(1).sum(dim=1)
            self.register_buffer(f"{kind}_pruning_mask", top_mask(sizes, ratio).view(rows, *ones))
        elif method == TOPK:
            setattr(self, f"{kind}_mask_scores", self._scores(rows, *ones))
        else:
            raise ValueError(f"{kind}_pruning.method is {L1!r} or {TOPK!r}, not {method!r}")

    def get_mask(self, pruning_type: str = "row") -> Tensor:
        """Return the mask of a kind of pruning, broadcastable over the weight: constant, or with a gradient to its
        scores."""
        method = getattr(self, f"{pruning_type}_pruning_method")
        if method in (L1, SNIP):
            return self._buffers[f"{pruning_type}_pruning_mask"]  # type: ignore[return-value]
        scores = "head_pruning_scores" if pruning_type == "head" else f"{pruning_type}_mask_scores"
        return TopKBinarizer.apply(
            self._learned(scores), getattr(self, f"{pruning_type}_pruning_ratio"), False
        )

    def _learned(self, name: str) -> Tensor:
        """Return learned scores by name, for use in forward."""
        return getattr(self, name)

    def _drop_mask(self, kind: str) -> None:
        """Drop a mask that has been made permanent, and disable its pruning."""
        self._forget_mask(kind)
        setattr(self, f"{kind}_pruning_method", None)
        setattr(self, f"{kind}_pruning_enabled", False)

    def _forget_mask(self, kind: str) -> None:
        for name in (f"{kind}_pruning_mask", f"{kind}_mask_scores", f"{kind}_pruning_scores"):
            self._buffers.pop(name, None)
            self._parameters.pop(name, None)

    @torch.no_grad()
    def fix_sparse_pruning_helper(self) -> None:
        """Set the masked weights to zero permanently."""
        self._mask_weight(self.get_mask("sparse").detach())
        self._drop_mask("sparse")

    def _mask_weight(self, mask: Tensor) -> None:
        """Multiply the weight by ``mask``, which broadcasts over it, permanently."""
        self.weight.data = self.weight.data * mask
        if self.grid is not None:
            self.grid.mask(mask)

    def _keep(self, name: str, kept: Tensor, dim: int = 0) -> None:
        """Keep only the entries ``kept`` (boolean) of a parameter or buffer along ``dim``."""
        if name == "weight" and self.grid is not None:
            self.grid.keep(kept, dim)
        tensor = getattr(self, name)
        if tensor is not None:
            tensor.data = tensor.data.index_select(dim, kept.nonzero().view(-1)).contiguous()

    def _prune(self, kept: Tensor, dim: int, remove: bool) -> None:
        """Remove the entries along ``dim`` of the weight, and for dim 0 of the bias, that are not ``kept`` (boolean),
        or without ``remove`` zero them."""
        if remove:
            self._keep("weight", kept, dim)
            setattr(self, self.sizes[dim], self.weight.shape[dim])
        else:
            self._mask_weight(kept.view([-1 if each == dim else 1 for each in range(self.weight.dim())]))
        bias = getattr(self, "bias", None)
        if dim == 0 and remove:
            self._keep("bias", kept)
        elif dim == 0 and bias is not None:
            bias.data = bias.data * kept

    def _fix_rows(self, kind: str, remove: bool) -> Tensor:
        """Make the pruning of rows permanent; return the boolean mask of kept rows."""
        kept = self.get_mask(kind).detach().view(-1).bool()
        self._prune(kept, 0, remove)
        self._drop_mask(kind)
        return kept


def tokens(inputs: Tensor) -> int:
    """Return the number of tokens (rows) in a linear layer's input; each has its own quantization range."""
    return max(inputs.numel() // inputs.shape[-1], 1)


def _shape(weight: Tensor) -> torch.Size:
    """Return the full shape, also of a weight that ``zero.Init`` has partitioned."""
    return getattr(weight, "ds_shape", weight.shape)


_PRUNING = ("sparse", "row", "head", "channel")
