"""A Megatron-style tensor-parallel transformer that overlaps all-reduces with computation (Domino).

G. Wang et al.: Domino: Eliminating Communication in LLM Training via Generic Tensor Slicing and Overlapping (2024).
``config`` is Megatron-LM's ``TransformerConfig`` or has its attributes, ``mpu`` is a parallel-state module. See
``halves.py`` for the order of execution.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from deepspeed.base.accelerator import get_accelerator
from deepspeed.comm.collectives import Communicator, communicator_of
from deepspeed.parallel.tensor.domino.halves import Sublayer, run_sublayers

# Column- and row-parallel linear layers without their sums over ranks.
#
# ``DominoTransformer`` schedules these sums itself. Weights are drawn whole and each rank keeps its part, so the
# initial model does not depend on the number of ranks.


class DominoAsyncColumnParallelLinear(nn.Module):
    """Column-parallel linear layer with this rank's ``output_size`` outputs. ``blocks``: number of blocks of rows in
    the whole weight, each of which is split over ranks (2: gate and value of a gated unit)."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        _tp_group: ProcessGroup | None,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool = True,
        blocks: int = 1,
    ) -> None:
        super().__init__()
        self.group = communicator_of(_tp_group, prepared=True)
        whole = (blocks, output_size * self.group.size // blocks, input_size)
        self.weight = _weight(whole, 1, self.group, config, init_method)
        self.bias = _zeros(output_size, config) if bias else None
        if self.bias is not None:
            _mark(self.bias, 0, blocks)

    def forward(self, input_: Tensor) -> Tensor:
        """Return [..., own outputs]. The caller must sum the input's gradient."""
        return functional.linear(input_, self.weight, self.bias)


class RowParallelLinearNoComm(nn.Module):
    """Row-parallel linear layer: this rank's terms of ``output_size`` outputs, from its ``input_size`` inputs. The
    caller sums them over ranks and adds the bias."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool = True,
        tp_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        group = communicator_of(tp_group)
        whole = (1, output_size, input_size * group.size)
        self.weight = _weight(whole, 2, group, config, init_method)
        self.bias = _zeros(output_size, config) if bias else None

    def forward(self, input_: Tensor) -> tuple[Tensor, nn.Parameter | None]:
        """Return ([..., outputs], bias)."""
        return functional.linear(input_, self.weight), self.bias


def _weight(
    shape: tuple[int, int, int],
    dim: int,
    group: Communicator,
    config: Any,
    init_method: Callable[[Tensor], Any],
) -> nn.Parameter:
    """Create this rank's part along ``dim`` of the blocks [blocks, rows, columns], as a matrix."""
    blocks, rows, columns = shape
    whole = torch.empty(blocks * rows, columns, device=_device(), dtype=config.params_dtype)
    if config.perform_initialization:
        with torch.no_grad():
            init_method(whole)
    own = whole.view(shape).chunk(group.size, dim)[group.rank]
    weight = nn.Parameter(own.reshape(-1, own.shape[2]).clone() if group.size > 1 else whole)
    return _mark(weight, dim - 1, blocks)


def _zeros(size: int, config: Any) -> nn.Parameter:
    return nn.Parameter(torch.zeros(size, device=_device(), dtype=config.params_dtype))


def _mark(param: nn.Parameter, dim: int, blocks: int) -> nn.Parameter:
    """Mark a parameter as split, as Megatron-LM does: gradient norms count it on each rank, checkpoints store it
    whole."""
    marked: Any = param
    marked.tensor_model_parallel, marked.partition_dim, marked.partition_stride = True, dim, blocks
    return param


def _device() -> str:
    return get_accelerator().current_device_name()


Rotary = Callable[[Tensor, Tensor], Tensor]


class LayerType(enum.Enum):
    encoder = 1
    decoder = 2


class AttnMaskType(enum.Enum):
    """Kind of attention mask, compared by name so that Megatron-LM's own enum works too."""

    padding = 1
    causal = 2


class ModelType(enum.Enum):
    encoder_or_decoder = 1
    encoder_and_decoder = 2


class DominoModule(nn.Module):
    """Base of all modules in this file."""


class CoreAttention(DominoModule):
    """Attention of this rank's heads: causal, ignoring any mask, or with ``AttnMaskType.padding`` by the given mask
    (True means masked out)."""

    def __init__(self, config: Any, tp_world_size: int, attn_mask_type: Any = AttnMaskType.causal) -> None:
        super().__init__()
        self.is_causal = attn_mask_type.name == "causal"
        self.dropout = config.attention_dropout
        if config.num_attention_heads % tp_world_size:
            raise ValueError(
                f"num_attention_heads={config.num_attention_heads} cannot be divided among {tp_world_size} "
                "tensor-parallel ranks: choose a number of ranks that divides it"
            )

    def forward(
        self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Tensor | None
    ) -> Tensor:
        """Map query, key and value [batch, heads, sequence, channels] to [sequence, batch, heads * channels]."""
        mask = None if self.is_causal or attention_mask is None else ~attention_mask
        context = functional.scaled_dot_product_attention(
            query_layer,
            key_layer,
            value_layer,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal,
        )
        return context.permute(2, 0, 1, 3).flatten(2)


class ShardedAttention(DominoModule):
    """Self-attention of this rank's heads. The fused projection interleaves query, key and value per head."""

    def __init__(
        self,
        config: Any,
        mpu: Any,
        apply_rotary_pos_emb: Rotary,
        layer_number: int,
        attn_mask_type: Any = AttnMaskType.causal,
    ) -> None:
        super().__init__()
        size, group = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_group()
        self.core_attention = CoreAttention(config, size, attn_mask_type)
        self.layer_number, self.apply_rotary_pos_emb = max(1, layer_number), apply_rotary_pos_emb
        self.heads, self.channels = config.num_attention_heads // size, config.kv_channels
        self.query_key_value = DominoAsyncColumnParallelLinear(
            config.hidden_size,
            3 * self.heads * self.channels,
            group,
            config,
            config.init_method,
            bias=config.add_bias_linear,
        )
        self.dense = RowParallelLinearNoComm(
            self.heads * self.channels,
            config.hidden_size,
            config,
            config.output_layer_init_method,
            bias=config.add_bias_linear,
            tp_group=group,
        )

    def domino_core_attention_forward(
        self, mixed_x_layer: Tensor, attention_mask: Tensor | None, rotary_pos_emb: Any = None
    ) -> Tensor:
        """Compute the attention of the fused projection's output -> [sequence, batch, heads * channels]."""
        mixed = mixed_x_layer.unflatten(2, (self.heads, 3 * self.channels))
        query, key, value = mixed.split(self.channels, dim=3)
        if rotary_pos_emb is not None:
            both = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb, rotary_pos_emb)
            query = self.apply_rotary_pos_emb(query, both[0])
            key = self.apply_rotary_pos_emb(key, both[1])
        by_head = [each.permute(1, 2, 0, 3) for each in (query, key, value)]
        return self.core_attention(*by_head, attention_mask)


class bias_dropout_add(nn.Module):
    """Computes ``residual + dropout(x + bias)``. ``drop_path``: probability that a sequence keeps only its residual."""

    def __init__(self, prob: float, drop_path: float = 0.0) -> None:
        super().__init__()
        self.dropout, self.drop_path = nn.Dropout(prob), drop_path

    def forward(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        output = self.dropout(x if bias is None else x + bias)
        if self.training and self.drop_path > 0:
            keeps = 1 - self.drop_path
            kept = torch.rand(output.shape[1], 1, dtype=output.dtype, device=output.device) < keeps
            output = output * kept / keeps
        return output + residual


class DominoTransformerLayer(DominoModule):
    """Attention and MLP, each after a norm. Takes and returns a tuple of half batches [sequence, batch, hidden]."""

    def __init__(
        self,
        config: Any,
        mpu: Any,
        apply_rotary_pos_emb: Rotary,
        layer_number: int,
        layer_type: Any = LayerType.encoder,
        self_attn_mask_type: Any = AttnMaskType.causal,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.layer_number, self.layer_type = layer_number, layer_type
        self.apply_residual_connection_post_layernorm = config.apply_residual_connection_post_layernorm
        self.group = communicator_of(mpu.get_tensor_model_parallel_group(), prepared=True)
        self.input_layernorm = _norm(config)
        self.self_attention = ShardedAttention(
            config, mpu, apply_rotary_pos_emb, layer_number, attn_mask_type=self_attn_mask_type
        )
        self.post_attention_layernorm = _norm(config)
        self._add_feed_forward(config, mpu)
        self.bias_dropout_add_func = bias_dropout_add(config.hidden_dropout, drop_path_rate)

    def _add_feed_forward(self, config: Any, mpu: Any) -> None:
        size, group = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_group()
        if config.ffn_hidden_size % size:
            raise ValueError(
                f"ffn_hidden_size={config.ffn_hidden_size} cannot be divided among {size} tensor-parallel ranks: "
                "choose a number of ranks that divides it"
            )
        own, bias = config.ffn_hidden_size // size, config.add_bias_linear
        blocks = 2 if config.gated_linear_unit else 1
        self.linear_fc1 = DominoAsyncColumnParallelLinear(
            config.hidden_size, own * blocks, group, config, config.init_method, bias=bias, blocks=blocks
        )
        self.linear_fc2 = RowParallelLinearNoComm(
            own, config.hidden_size, config, config.output_layer_init_method, bias=bias, tp_group=group
        )
        self.is_gated = blocks == 2
        self.activation = getattr(
            config, "activation_func", functional.silu if self.is_gated else functional.gelu
        )

    def mlp_activation_func(self, x: Tensor) -> Tensor:
        if not self.is_gated:
            return self.activation(x)
        gate, value = x.chunk(2, dim=-1)
        return self.activation(gate) * value

    def forward(
        self, hidden_states: tuple[Tensor, ...], attention_mask: Tensor | None, rotary_pos_emb: Any = None
    ) -> tuple[Tensor, ...]:
        sublayers = self.sublayers(_masks(attention_mask, hidden_states), rotary_pos_emb)
        return run_sublayers(sublayers, self.group, hidden_states, lambda hidden: hidden, self.parameters())

    def sublayers(self, masks: Sequence[Tensor | None], rotary_pos_emb: Any) -> list[Sublayer]:
        """Return the two sublayers. ``masks``: one per half."""

        def attention(normed: Tensor, half: int) -> tuple[Tensor, Any]:
            mixed = self.self_attention.query_key_value(normed)
            context = self.self_attention.domino_core_attention_forward(mixed, masks[half], rotary_pos_emb)
            return self.self_attention.dense(context)

        def feed_forward(normed: Tensor, half: int) -> tuple[Tensor, Any]:
            return self.linear_fc2(self.mlp_activation_func(self.linear_fc1(normed)))

        normed, add = self.apply_residual_connection_post_layernorm, self.bias_dropout_add_func
        return [
            Sublayer(self.input_layernorm, attention, add, normed),
            Sublayer(self.post_attention_layernorm, feed_forward, add, normed),
        ]


class DominoTransformer(DominoModule):
    """All layers and a final norm, [sequence, batch, hidden] -> [sequence, batch, hidden].

    The halves of the batch alternate through all layers; with ``config.domino_intra_layer_overlap`` each layer waits
    for its own all-reduces instead. A batch of one sequence runs without overlap.
    """

    def __init__(
        self,
        config: Any,
        mpu: Any,
        apply_rotary_pos_emb: Rotary,
        model_type: Any,
        layer_type: Any = LayerType.encoder,
        self_attn_mask_type: Any = AttnMaskType.causal,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.model_type, self.layer_type, self.num_layers = model_type, layer_type, config.num_layers
        self.group = communicator_of(mpu.get_tensor_model_parallel_group(), prepared=True)
        rates = torch.linspace(0, drop_path_rate, config.num_layers).tolist()
        self.layers = nn.ModuleList(
            DominoTransformerLayer(
                config, mpu, apply_rotary_pos_emb, number, layer_type, self_attn_mask_type, rate
            )
            for number, rate in enumerate(rates, 1)
        )
        self.final_layernorm = _norm(config) if post_process and post_layer_norm else None
        self.overlaps_layers = not getattr(config, "domino_intra_layer_overlap", False)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, rotary_pos_emb: Any = None
    ) -> Tensor:
        if self.overlaps_layers:
            return self.inter_layer_overlap_forward(hidden_states, attention_mask, rotary_pos_emb)
        return self.intra_layer_overlap_forward(hidden_states, attention_mask, rotary_pos_emb)

    def inter_layer_overlap_forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, rotary_pos_emb: Any = None
    ) -> Tensor:
        halves = hidden_states.chunk(2, dim=1)
        masks = _masks(attention_mask, halves)
        layers: Any = self.layers
        sublayers = [each for layer in layers for each in layer.sublayers(masks, rotary_pos_emb)]
        outputs = run_sublayers(sublayers, self.group, halves, self._last, self.parameters())
        return torch.cat(outputs, dim=1)

    def intra_layer_overlap_forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, rotary_pos_emb: Any = None
    ) -> Tensor:
        halves: tuple[Tensor, ...] = hidden_states.chunk(2, dim=1)
        for layer in self.layers:
            halves = layer(halves, attention_mask, rotary_pos_emb)
        return torch.cat([self._last(half) for half in halves], dim=1)

    def _last(self, hidden: Tensor) -> Tensor:
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)


def _norm(config: Any) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layernorm_epsilon)


def _masks(mask: Tensor | None, halves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the mask of each half; a mask [batch or 1, ...] covers the whole batch."""
    sizes = [half.shape[1] for half in halves]
    if mask is None or mask.shape[0] != sum(sizes) or len(sizes) == 1:
        return [mask] * len(sizes)
    return mask.split(sizes)
