"""Activations of a transformer, estimated from its shape (after V. Korthikanti et al.: Reducing activation
recomputation in large transformer models, 2022). The true size depends on the model's code: reports mark the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed.config.sections.model import TiledComputeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP; for a mixture of experts, of all experts that a token visits together."""
    vocabulary: int
    mlp_tensors: int
    """Number of tensors of the MLP's width that are kept for backward."""
    scores_kept: bool
    """Whether attention keeps its [heads, sequence, sequence] scores ("eager")."""


def shape_of(config: Any) -> TransformerShape | None:
    """Read the shape from a Hugging Face config; None if it lacks layers, hidden size or heads."""
    text = getattr(config, "text_config", None) or config
    layers = _first(text, "num_hidden_layers", "n_layer", "num_layers")
    hidden = _first(text, "hidden_size", "n_embd", "d_model")
    heads = _first(text, "num_attention_heads", "n_head", "num_heads")
    if not (layers and hidden and heads):
        return None
    experts = _first(text, "num_experts_per_tok", "top_k") or 1
    width = _first(text, "moe_intermediate_size", "intermediate_size", "n_inner", "d_ff") or 4 * hidden
    activation = str(_first(text, "hidden_act", "activation_function") or "")
    return TransformerShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_first(text, "num_key_value_heads") or heads,
        head_dim=_first(text, "head_dim") or hidden // heads,
        intermediate=width * experts,
        vocabulary=_first(text, "vocab_size") or 0,
        mlp_tensors=_mlp_tensors(activation),
        scores_kept=getattr(text, "_attn_implementation", None) == "eager",
    )


def _mlp_tensors(activation: str) -> int:
    """Count the MLP's kept tensors. A gated MLP keeps gate, activation, up projection and their product; a GELU written
    in Python every intermediate; a fused one input and output."""
    if "silu" in activation or "swi" in activation or "glu" in activation:
        return 4
    return 8 if activation in ("gelu_new", "gelu_fast", "quick_gelu") else 2


def _first(config: Any, *names: str) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def activation_bytes(
    shape: TransformerShape,
    *,
    micro_batch: int,
    sequence: int,
    itemsize: int,
    checkpointing: bool,
    ranks_per_sequence: int = 1,
    float8: bool = False,
    mlp_tiles: int = 1,
    loss_tiles: int = 1,
) -> int:
    """Estimate the bytes at the end of forward, the peak of live activations, for ``sequence`` tokens on each of
    ``ranks_per_sequence`` ranks.

    Per token and layer: normalized inputs and their fp32 copies, queries, keys, values and their rotated copies, the
    output of attention, and the MLP's kept tensors; per token three copies of the logits, two of them in fp32 (the loss
    and its gradient). With checkpointing: the input of each layer, and one layer in full. Of tiled computations, one
    tile is alive at a time. Dropout masks are ignored. Scores, if kept, cover a share of the heads and all tokens. With
    ``float8``, linear layers keep one-byte codes: in place of both normalized inputs and the MLP's inner tensor, and in
    addition to the output of attention.
    """
    tokens = micro_batch * sequence
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    kept = 4 * shape.hidden + 3 * queries + 4 * keys + shape.mlp_tensors * shape.intermediate // mlp_tiles
    layer = tokens * (itemsize * kept + 2 * 4 * shape.hidden)
    if float8:
        layer -= tokens * ((itemsize - 1) * (2 * shape.hidden + shape.intermediate // mlp_tiles) - queries)
    if shape.scores_kept:
        layer += 2 * itemsize * tokens * shape.heads * sequence * ranks_per_sequence
    logits = tokens * shape.vocabulary * (itemsize + 8) // loss_tiles
    if checkpointing:
        return layer_inputs_bytes(shape, tokens, itemsize) + max(layer, logits)
    return shape.layers * layer + logits


def layer_inputs_bytes(shape: TransformerShape, tokens: int, itemsize: int) -> int:
    """Return the bytes of all layers' inputs, which checkpointing keeps."""
    return shape.layers * tokens * shape.hidden * itemsize


def tiles_of(shape: TransformerShape, tokens: int, section: TiledComputeConfig) -> tuple[int, int]:
    """Return the number of tiles of an MLP and of the loss for ``tokens`` tokens: the section's, or its defaults."""
    if not section.enabled:
        return 1, 1
    mlp = section.mlp_shards or -(-tokens // shape.hidden)
    loss = section.loss_shards or -(-shape.vocabulary // shape.hidden)
    return (mlp if section.mlp else 1), (max(1, loss) if section.loss else 1)


def budgeted_bytes(everything: int, limit: float) -> int:
    """Return the bytes, out of ``everything``, that are kept under ``activation_checkpointing.memory_budget``: a share
    up to 1, bytes above."""
    return int(limit * everything) if limit <= 1 else min(int(limit), everything)
