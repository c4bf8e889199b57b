"""BERT's transformer layer for training, with fused weights and options to save less for backward."""

from __future__ import annotations

import copy
import ctypes
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from deepspeed.ops import gpu, native
from deepspeed.ops.transformer.products import linear, linear_gradients

# ---- parts of the layer that save less for backward, and recompute or derive the rest there


class InvertibleLayerNorm(torch.autograd.Function):
    """Layer norm that saves its output, which the next product saves anyway, instead of its input: the normalized input
    is ``(output - bias) / weight``. A weight of exactly 0 cannot be inverted: its gradient, and its contribution to the
    gradient of the input, are 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        out, _, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        ctx.save_for_backward(out, weight, bias, rstd)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        out, weight, bias, rstd = ctx.saved_tensors
        wide = torch.promote_types(out.dtype, torch.float32)
        grad, scale = grad.to(wide), weight.to(wide)
        normalized = (out.to(wide) - bias.to(wide)) / scale.masked_fill(scale == 0, torch.inf)
        scaled = grad * scale
        along = (scaled * normalized).mean(-1, keepdim=True)
        grad_x = (scaled - scaled.mean(-1, keepdim=True) - normalized * along) * rstd.to(wide)
        rows = tuple(range(grad.dim() - 1))
        grad_weight, grad_bias = (grad * normalized).sum(rows), grad.sum(rows)
        return grad_x.to(out.dtype), grad_weight.to(weight.dtype), grad_bias.to(bias.dtype), None


class GeluLinear(torch.autograd.Function):
    """``gelu(x) @ weight.T`` that saves ``x`` instead of ``gelu(x)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(functional.gelu(x), weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        inner = functional.gelu(x) if needs[1] else x
        grad_inner, grad_weight = linear_gradients(
            grad, inner, weight, x_needs=needs[0], weight_needs=needs[1]
        )
        grad_x = None if grad_inner is None else torch.ops.aten.gelu_backward(grad_inner, x)
        return grad_x, grad_weight


class DroppedWeights(torch.autograd.Function):
    """``dropout(weights) @ value`` that saves the weights, which the softmax saves anyway, instead of the dropout's
    result: a seed, or a mask for torch's dropout, tells what was dropped."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor, ratio: float) -> Tensor:
        ctx.ratio, ctx.seed = ratio, new_seed() if runs_here(weights, ratio) else None
        if ctx.seed is not None:
            ctx.save_for_backward(weights, None, value)
            return dropped(weights, ratio, ctx.seed) @ value
        result, kept = torch.native_dropout(weights, ratio, True)
        ctx.save_for_backward(weights, kept, value)
        ctx.scale = 1.0 / (1.0 - ratio) if ratio < 1 else 0.0
        return result @ value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        weights, kept, value = ctx.saved_tensors
        grad_value = grad_weights = None
        if ctx.needs_input_grad[1]:
            grad_value = _same_dropout(ctx, weights, kept).mT @ grad
        if ctx.needs_input_grad[0]:
            grad_weights = _same_dropout(ctx, grad @ value.mT, kept)
        return grad_weights, grad_value, None


def _same_dropout(ctx: Any, x: Tensor, kept: Tensor | None) -> Tensor:
    """Apply the dropout of forward to ``x``."""
    if kept is None:
        return dropped(x, ctx.ratio, ctx.seed)
    return torch.ops.aten.native_dropout_backward(x, kept, ctx.scale)


@dataclass(eq=False)
class DeepSpeedTransformerConfig:
    """Config of a `DeepSpeedTransformerLayer`.

    Args:
        batch_size, max_seq_length, local_rank, fp16, training: accepted for compatibility: size and device follow from
            the inputs, the engine casts weights, and the layer's mode tells whether it trains.
        hidden_size: of a token.
        intermediate_size: of the feed-forward part; -1: four times ``hidden_size``.
        heads: of the attention; they divide ``hidden_size``.
        attn_dropout_ratio, hidden_dropout_ratio: dropout of the attention weights, and of the output of both parts.
            Uses torch's generator, so ``seed`` has no effect.
        num_hidden_layers: of the whole model, for ``adjust_init_range``.
        initializer_range: standard deviation of new weights.
        layer_norm_eps: of both norms.
        pre_layer_norm: norms before attention and feed-forward part; otherwise after them, as in BERT.
        normalize_invertible: norms save their output instead of their input. Saves 2 x tokens x ``hidden_size``.
        gelu_checkpoint: the activation is recomputed. Saves tokens x ``intermediate_size``.
        adjust_init_range: the initial range of the matrices whose output is added to the residual is divided by
            sqrt(2 x ``num_hidden_layers``).
        attn_dropout_checkpoint: dropout of attention weights is recomputed. Saves heads x tokens squared per sequence.
        stochastic_mode: permits results that differ from run to run; here they never do.
        return_tuple: the layer returns a tuple of one.
    """

    batch_size: int = -1
    hidden_size: int = -1
    intermediate_size: int = -1
    heads: int = -1
    attn_dropout_ratio: float = -1
    hidden_dropout_ratio: float = -1
    num_hidden_layers: int = -1
    initializer_range: float = -1
    layer_norm_eps: float = 1e-12
    local_rank: int = -1
    seed: int = -1
    fp16: bool = False
    pre_layer_norm: bool = True
    normalize_invertible: bool = False
    gelu_checkpoint: bool = False
    adjust_init_range: bool = True
    attn_dropout_checkpoint: bool = False
    stochastic_mode: bool = False
    return_tuple: bool = False
    training: bool = True
    max_seq_length: int = -1

    def __post_init__(self) -> None:
        self.layer_id = -1
        if self.intermediate_size <= 0:
            self.intermediate_size = 4 * self.hidden_size

    @classmethod
    def from_dict(cls, json_object: Mapping[str, Any]) -> DeepSpeedTransformerConfig:
        """Make a config from names and values; unknown names become attributes."""
        config = cls()
        for name, value in json_object.items():
            setattr(config, name, value)
        if config.intermediate_size <= 0:
            config.intermediate_size = 4 * config.hidden_size
        return config

    @classmethod
    def from_json_file(cls, json_file: str | Path) -> DeepSpeedTransformerConfig:
        """Make a config from the object in a JSON file, as `from_dict` does."""
        return cls.from_dict(json.loads(Path(json_file).read_text(encoding="utf-8")))


class DeepSpeedTransformerLayer(nn.Module):
    """Self-attention and a feed-forward part with GELU, as in BERT, with norms before or after them.

    ``attn_qkvw`` [3 x hidden, hidden] has query, key and value in one matrix. ``attn_nw``, ``attn_nb`` are the norm
    between attention and feed-forward part; ``norm_w``, ``norm_b`` the norm before attention (``pre_layer_norm``) or
    after the feed-forward part.

    Args:
        config: copied to ``layer.config``. Early scripts pass the layer's index before it.
        initial_weights, initial_biases: of query, key, value, the attention's output, the norm between the parts, the
            feed-forward part's two matrices, the other norm; the tensors are copied.

    Raises:
        ValueError: sizes are missing or do not match.
    """

    layer_id = 0
    attn_qkvw: nn.Parameter
    attn_qkvb: nn.Parameter
    attn_ow: nn.Parameter
    attn_ob: nn.Parameter
    attn_nw: nn.Parameter
    attn_nb: nn.Parameter
    inter_w: nn.Parameter
    inter_b: nn.Parameter
    output_w: nn.Parameter
    output_b: nn.Parameter
    norm_w: nn.Parameter
    norm_b: nn.Parameter

    def __init__(
        self,
        config: Any,
        initial_weights: Sequence[Tensor] | Any = None,
        initial_biases: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(config, int):
            config, initial_weights, self.layer_id = initial_weights, None, config
        self.config = copy.copy(config)
        self.config.layer_id = self.layer_id
        hidden, inner = config.hidden_size, config.intermediate_size
        if hidden <= 0 or config.heads <= 0 or hidden % config.heads != 0:
            raise ValueError(
                f"hidden_size={hidden} and heads={config.heads}: both are required, and hidden_size "
                "must be a multiple of heads"
            )
        norm = (hidden,)
        shapes = ((3 * hidden, hidden), (hidden, hidden), norm, (inner, hidden), (hidden, inner), norm)
        for name, shape in zip(_PARTS, shapes, strict=True):
            setattr(self, f"{name}w", nn.Parameter(torch.empty(shape)))
            setattr(self, f"{name}b", nn.Parameter(torch.empty(shape[:1])))
        if initial_weights is None or initial_biases is None:
            self.init_transformer_weights(self.config.adjust_init_range)
        else:
            self.load_parts(initial_weights, initial_biases)

    def init_transformer_weights(self, adjust_init_range: bool = False) -> None:
        """Initialize matrices from a normal distribution, biases to 0, norms to 1."""
        spread = self.config.initializer_range if self.config.initializer_range > 0 else 0.02
        at_residual = spread
        if adjust_init_range and self.config.num_hidden_layers > 0:
            at_residual = spread / math.sqrt(2.0 * self.config.num_hidden_layers)
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                if name in ("attn_nw", "norm_w"):
                    parameter.fill_(1.0)
                elif parameter.dim() == 1:
                    parameter.zero_()
                else:
                    parameter.normal_(0.0, at_residual if name in ("attn_ow", "output_w") else spread)

    @torch.no_grad()
    def load_parts(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        """Copy ``initial_weights`` and ``initial_biases`` into the parameters. ValueError: not eight of each."""
        if len(weights) != 8 or len(biases) != 8:
            raise ValueError(
                "expected 8 weights and 8 biases (query, key, value, attention output, norm, two of the "
                f"feed-forward part, norm), got {len(weights)} and {len(biases)}"
            )
        for given, stem in ((weights, "w"), (biases, "b")):
            fused = torch.cat([given[0], given[1], given[2]])
            for name, value in zip(_PARTS, (fused, *given[3:]), strict=True):
                getattr(self, f"{name}{stem}").copy_(value)

    def parts(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the arguments of `load_parts`: views of the parameters."""
        found = []
        for stem in ("w", "b"):
            fused, *rest = (getattr(self, f"{name}{stem}").detach() for name in _PARTS)
            found.append([*fused.chunk(3), *rest])
        return found[0], found[1]

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        layer_head_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        grads: Any = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor]:
        """Compute the layer: [batch, tokens, hidden] in and out.

        Args:
            attention_mask: added to the scores, or bool (False masks); broadcastable to [batch, heads, tokens, tokens],
                or [batch, tokens].
            grads: accepted for compatibility. The other arguments belong to other kinds of layers, and must be None.

        Raises:
            ValueError: one of these is given.
        """
        foreign = {
            "head_mask": head_mask,
            "layer_head_mask": layer_head_mask,
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_attention_mask": encoder_attention_mask,
            "past_key_value": past_key_value,
            "past_key_values": kwargs.get("past_key_values"),
            "output_attentions": output_attentions or None,
        }
        given = [name for name, value in foreign.items() if value is not None]
        if given:
            raise ValueError(
                f"DeepSpeedTransformerLayer is an encoder layer for training: {given[0]} must be None"
            )
        out = (
            self._pre(hidden_states, attention_mask)
            if self.config.pre_layer_norm
            else self._post(hidden_states, attention_mask)
        )
        return (out,) if self.config.return_tuple else out

    def _pre(self, x: Tensor, mask: Tensor | None) -> Tensor:
        attended = self._attention(self._norm(x, self.norm_w, self.norm_b), mask)
        x, normed = self._added_norm(x, attended, self.attn_nw, self.attn_nb)
        return self._added(x, self._feed_forward(normed))

    def _post(self, x: Tensor, mask: Tensor | None) -> Tensor:
        _, x = self._added_norm(x, self._attention(x, mask), self.attn_nw, self.attn_nb)
        return self._added_norm(x, self._feed_forward(x), self.norm_w, self.norm_b)[1]

    def _added_norm(self, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``_added``, and its norm."""
        if self.config.normalize_invertible and torch.is_grad_enabled():
            total = self._added(residual, x)
            return total, self._norm(total, weight, bias)
        ratio = self.config.hidden_dropout_ratio if self.training else 0.0
        return added_norm(x, ratio, residual, weight, bias, self.config.layer_norm_eps)

    def _norm(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if self.config.normalize_invertible and torch.is_grad_enabled():
            return InvertibleLayerNorm.apply(x, weight, bias, self.config.layer_norm_eps)
        return functional.layer_norm(x, weight.shape, weight, bias, self.config.layer_norm_eps)

    def _attention(self, x: Tensor, mask: Tensor | None) -> Tensor:
        heads = self.config.heads
        fused = linear(x, self.attn_qkvw, self.attn_qkvb).unflatten(-1, (3, heads, -1))
        query, key, value = fused.permute(2, 0, 3, 1, 4)
        mask = None if mask is None else _broadcastable(mask, x.dtype)
        ratio = self.config.attn_dropout_ratio if self.training else 0.0
        if ratio <= 0:
            context = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        else:
            context = self._with_dropout(query, key, value, mask, ratio)
        return linear(context.transpose(1, 2).flatten(2), self.attn_ow, self.attn_ob)

    def _with_dropout(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, ratio: float
    ) -> Tensor:
        scores = (query / math.sqrt(query.shape[-1])) @ key.mT
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        weights = torch.softmax(scores, dim=-1)
        if self.config.attn_dropout_checkpoint:
            return DroppedWeights.apply(weights, value, ratio)
        return dropout(weights, ratio) @ value

    def _feed_forward(self, x: Tensor) -> Tensor:
        inner = linear(x, self.inter_w, self.inter_b)
        if self.config.gelu_checkpoint and torch.is_grad_enabled():
            return GeluLinear.apply(inner, self.output_w) + self.output_b
        return linear(functional.gelu(inner), self.output_w, self.output_b)

    def _added(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return a part's output ``x`` after dropout plus ``residual``, the part's input."""
        return dropout(x, self.config.hidden_dropout_ratio if self.training else 0.0, residual)


_PARTS = ("attn_qkv", "attn_o", "attn_n", "inter_", "output_", "norm_")


def _broadcastable(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as [batch, 1, 1, tokens] or wider: bool, or floats to add. In an integer mask [batch, tokens], 0
    masks."""
    if mask.dim() == 2:
        mask = mask[:, None, None, :]
        if not mask.is_floating_point():
            return mask.bool()
    return mask if mask.dtype == torch.bool else mask.to(dtype)


# ---- between the parts of the layer: dropout, residual addition, and the norm of the sum


def added_norm(
    x: Tensor, ratio: float, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return ``x`` after dropout plus ``residual``, and its layer norm: on a GPU by one kernel, forward and
    backward."""
    if (
        runs_here(x, ratio)
        and gpu.usable(x, residual, weight, bias)
        and not torch.is_autocast_enabled("cuda")
    ):
        from deepspeed.ops.gpu import norms  # imports Triton

        if norms.supports(x, residual, weight, bias) and residual.dtype is x.dtype:
            seed = new_seed() if ratio > 0 else 0
            return norms.AddedNorm.apply(x, residual, weight, bias, max(ratio, 0.0), seed, eps, True)
    total = dropout(x, ratio, residual)
    return total, functional.layer_norm(total, weight.shape, weight, bias, eps)


# ---- dropout that saves nothing for backward: what is dropped is a function of an element's index and a seed
#
# The seed comes from torch's generator, so runs are reproducible, and recomputation with restored random state drops
# the same elements. One native pass on the host, or one Triton kernel on a GPU, also adds the residual, with the same
# bits; elsewhere torch's dropout is used.


class _DropoutCall(ctypes.Structure):
    """The C struct ``ds_dropout_call``."""

    _fields_ = [
        *native.fields("output input residual", "numel"),
        *(("seed", ctypes.c_uint64), ("limit", ctypes.c_uint32)),
        *native.fields("", "", "scale", "dtype"),
    ]


def dropout(x: Tensor, ratio: float, residual: Tensor | None = None) -> Tensor:
    """Drop elements of ``x`` with probability ``ratio``, scale the others, and add ``residual``."""
    if ratio <= 0.0:
        return x if residual is None else x + residual
    if not runs_here(x, ratio) or (residual is not None and residual.dtype != x.dtype):
        dropped = functional.dropout(x, ratio)
        return dropped if residual is None else dropped + residual
    return _Dropout.apply(x, residual, ratio, new_seed())


def runs_here(x: Tensor, ratio: float) -> bool:
    """Return whether the native pass or the kernel supports ``x``."""
    if x.dtype not in native.DTYPE_CODES or ratio >= 1.0 or torch.compiler.is_compiling():
        return False
    if x.is_cuda:  # a captured graph would drop the same elements in every replay
        return gpu.usable(x) and not torch.cuda.is_current_stream_capturing()
    return x.device.type == "cpu" and native.library() is not None


def new_seed() -> int:
    return int(torch.randint(2**62, ()).item())


def dropped(x: Tensor, ratio: float, seed: int, residual: Tensor | None = None) -> Tensor:
    """Run the pass, for values or gradients. Requires ``runs_here``."""
    if x.is_cuda:
        from deepspeed.ops.gpu import dropout as kernels  # imports Triton

        return kernels.dropped(x, ratio, seed, residual)
    x, lib = x.contiguous(), native.library()
    assert lib is not None
    out = torch.empty_like(x)
    rest = None if residual is None else residual.contiguous()
    limit, scale = int(ratio * 2**32), 1.0 / (1.0 - ratio)
    pointers = map(native.address, (out, x, rest))
    call = _DropoutCall(*pointers, x.numel(), seed, limit, scale, native.DTYPE_CODES[x.dtype])
    lib.ds_dropout(ctypes.addressof(call), torch.get_num_threads())
    return out


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, ratio: float, seed: int) -> Tensor:
        ctx.ratio, ctx.seed = ratio, seed
        return dropped(x, ratio, seed, residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        grad_x = dropped(grad, ctx.ratio, ctx.seed) if ctx.needs_input_grad[0] else None
        return grad_x, grad if ctx.needs_input_grad[1] else None, None, None
