"""Fusion of visual and text tokens into one sharded sequence.

Each rank holds a shard of the visual tokens and the whole text, and gets its shard of the fused sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.comm.collectives import communicator_of
from deepspeed.parallel.sequence.assignment import shard_lengths
from deepspeed.parallel.sequence.exchange import join_shards

_DEFAULT_IMAGE_TOKEN_ID = -200


class ModalityFusionSPAdapter(nn.Module):
    """Projects this rank's visual tokens, and inserts those of all ranks at the text's placeholders.

    Args:
        projection: maps visual features to the text's width, per token (or per group, if shards hold whole groups).
        process_group: the ranks that share the sequence, in its order. None: one rank.
        image_token_id: placeholder in ``input_ids``: one per visual token, or one per image (row of the visual
            features), which all its tokens replace. Without placeholders the text passes through.
    """

    def __init__(
        self, projection: nn.Module, process_group: Any, image_token_id: int = _DEFAULT_IMAGE_TOKEN_ID
    ) -> None:
        super().__init__()
        self.projection = projection
        self.process_group = process_group
        self.image_token_id = image_token_id

    def forward(self, visual_features: Tensor, text_embeds: Tensor, input_ids: Tensor) -> Tensor:
        """Return this rank's shard of the fused sequence, [batch, own tokens, hidden]; lengths differ by at most one.

        Args:
            visual_features: [images, own visual tokens, visual size], or [own visual tokens, visual size]; shards may
                have different lengths.
            text_embeds: [batch, tokens, hidden], the same on all ranks; embeddings of placeholders are replaced.
            input_ids: [batch, tokens].

        Backward sums the gradients of visual features over ranks; gradients of text embeddings cover this rank's shard
        only. ValueError: the numbers of placeholders (if any) and visual tokens do not match. Collective.
        """
        own = self.projection(visual_features)
        images = own.unsqueeze(0) if own.dim() == 2 else own
        comm = communicator_of(self.process_group)
        visual = join_shards(images, comm, dim=1)
        fused = text_embeds
        if self._spans(input_ids):
            fused = self._fuse(visual.to(text_embeds.dtype), text_embeds, input_ids)
        lengths = shard_lengths(fused.shape[1], comm.size)
        return fused.split(lengths, dim=1)[comm.rank]

    def _places(self, input_ids: Tensor) -> Tensor:
        """Return the mask of placeholders, bool [batch, tokens]."""
        return input_ids == self.image_token_id

    def _spans(self, input_ids: Tensor) -> list[tuple[int, int, int]]:
        """Return the spans that images replace, in order: (row, first, last + 1)."""
        return [(row, at, at + 1) for row, at in self._places(input_ids).nonzero().tolist()]

    def _fuse(self, visual: Tensor, text: Tensor, input_ids: Tensor) -> Tensor:
        """Fuse visual [images, tokens, hidden] and text [batch, tokens, hidden] into [batch, all tokens, hidden]."""
        places, spans = self._places(input_ids), self._spans(input_ids)
        count, images, each = int(places.sum()), visual.shape[0], visual.shape[1]
        if count == images * each:
            return text.masked_scatter(places.unsqueeze(-1), visual)
        if len(spans) != images:
            raise ValueError(
                f"{type(self).__name__}: {count} places for {images} x {each} visual tokens; input_ids need "
                "one placeholder per visual token or one per image"
            )
        rows = [
            _spliced(
                row,
                [(low, high, image) for image, (at, low, high) in zip(visual, spans, strict=True) if at == n],
            )
            for n, row in enumerate(text)
        ]
        if len({len(row) for row in rows}) > 1:
            raise ValueError(
                f"{type(self).__name__}: rows of the batch have different numbers of images, so their "
                "sequences differ in length; pad with one placeholder per visual token"
            )
        return torch.stack(rows)


def _spliced(row: Tensor, images: list[tuple[int, int, Tensor]]) -> Tensor:
    """Replace the span of each image in ``row`` [tokens, hidden] by the image's tokens [its tokens, hidden]."""
    pieces, start = [], 0
    for low, high, image in images:
        pieces += [row[start:low], image]
        start = high
    return torch.cat([*pieces, row[start:]])


class LlavaFusionAdapter(ModalityFusionSPAdapter):
    """LLaVA: one placeholder per visual token, or one per image."""


class InternVLFusionAdapter(ModalityFusionSPAdapter):
    """InternVL: images are cut into tiles (rows of the visual features); one placeholder per visual token."""

    def _fuse(self, visual: Tensor, text: Tensor, input_ids: Tensor) -> Tensor:
        count, needed = int(self._places(input_ids).sum()), visual.shape[0] * visual.shape[1]
        if count != needed:
            raise ValueError(f"InternVLFusionAdapter: {count} places for {needed} visual tokens")
        return super()._fuse(visual, text, input_ids)


class Qwen2VLFusionAdapter(ModalityFusionSPAdapter):
    """Qwen2-VL: visual tokens go between the start and end token of an image: one placeholder per visual token, or the
    tokens of an image (row of the visual features) replace everything between the two, even if that is empty.

    Args:
        projection, process_group: as in the base class; the patch merger is a projection per group.
        vision_start_token_id, vision_end_token_id: tokens between them, in the same row, are placeholders.
    """

    def __init__(
        self, projection: nn.Module, process_group: Any, vision_start_token_id: int, vision_end_token_id: int
    ) -> None:
        super().__init__(projection, process_group)
        self.vision_start_token_id = vision_start_token_id
        self.vision_end_token_id = vision_end_token_id

    def _places(self, input_ids: Tensor) -> Tensor:
        begun = (input_ids == self.vision_start_token_id).cumsum(1)
        ends = input_ids == self.vision_end_token_id
        before = begun - (input_ids == self.vision_start_token_id).long()  # started at an earlier token
        return (before - ends.cumsum(1)) > 0

    def _spans(self, input_ids: Tensor) -> list[tuple[int, int, int]]:
        begins = (input_ids == self.vision_start_token_id).nonzero().tolist()
        ends = (input_ids == self.vision_end_token_id).nonzero().tolist()
        if [row for row, _ in begins] != [row for row, _ in ends]:
            raise ValueError(
                f"{type(self).__name__}: {len(begins)} tokens start an image but {len(ends)} end one; each "
                "row of input_ids needs matching pairs"
            )
        return [(row, low + 1, high) for (row, low), (_, high) in zip(begins, ends, strict=True)]
