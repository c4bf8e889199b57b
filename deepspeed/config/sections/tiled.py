"""The `tiled_compute` section: long sequences in tiles, on models as they are."""

from __future__ import annotations

from pydantic import Field

from deepspeed.config.section import Int, LenientConfigModel


class TiledComputeConfig(LenientConfigModel):
    """Compute feed-forward layers and the loss in tiles of the sequence, each again in backward."""

    enabled: bool = Field(default=False, description="Apply the techniques below to the model.")
    mlp: bool = Field(default=True, description="Compute feed-forward layers in tiles.")
    loss: bool = Field(
        default=True,
        description="Compute logits and cross-entropy in tiles: whole logits exist only if they are read.",
    )
    mlp_shards: Int | None = Field(
        default=None, ge=1, description="Tiles of a feed-forward layer; null: sequence length / hidden size."
    )
    loss_shards: Int | None = Field(
        default=None, ge=1, description="Tiles of the loss; null: vocabulary size / hidden size."
    )
    attention_chunk: Int | None = Field(
        default=None,
        ge=1,
        description="Tokens of a chunk of causal self-attention, with other chunks in host memory; null: whole.",
    )
