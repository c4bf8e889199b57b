"""The `tiled_compute` section: long sequences in tiles, on models as they are."""

from __future__ import annotations

from deepspeed.config.section import Int, LenientConfigModel, key


class TiledComputeConfig(LenientConfigModel):
    """Compute feed-forward layers and the loss in tiles of the sequence, each again in backward."""

    enabled: bool = key(False, "Apply the techniques below to the model.")
    mlp: bool = key(True, "Compute feed-forward layers in tiles.")
    loss: bool = key(
        True, "Compute logits and cross-entropy in tiles: whole logits exist only if they are read."
    )
    mlp_shards: Int | None = key(
        None, "Tiles of a feed-forward layer; null: sequence length / hidden size.", ge=1
    )
    loss_shards: Int | None = key(None, "Tiles of the loss; null: vocabulary size / hidden size.", ge=1)
    attention_chunk: Int | None = key(
        None,
        "Tokens of a chunk of causal self-attention, with other chunks in host memory; null: whole.",
        ge=1,
    )
