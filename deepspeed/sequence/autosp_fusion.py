"""Where images and text become one sequence: visual tokens of all ranks take their places among those of the text.

A rank holds a shard of the visual tokens, and the whole text. It gets its shard of the sequence of both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .assignment import shard_lengths
from .autosp_vit import whole_patches
from .exchange import communicator_of

_DEFAULT_IMAGE_TOKEN_ID = -200


class ModalityFusionSPAdapter(nn.Module):
    """Projects this rank's visual tokens, and puts those of all ranks where the text has places for them.

    Args:
        projection: from visual features to the text's width, token by token (or group by group, if shards hold whole
            groups).
        process_group: the ranks that share the sequence, in its order. None: one rank.
        image_token_id: marks the places in ``input_ids``: one for each visual token, or one for each image (row of the
            visual features), which all its tokens replace.
    """

    def __init__(
        self, projection: nn.Module, process_group: Any, image_token_id: int = _DEFAULT_IMAGE_TOKEN_ID
    ) -> None:
        super().__init__()
        self.projection = projection
        self.process_group = process_group
        self.image_token_id = image_token_id

    def forward(self, visual_features: Tensor, text_embeds: Tensor, input_ids: Tensor) -> Tensor:
        """This rank's shard of the sequence, [batch, own tokens, hidden]; shards differ by one token at most.

        Args:
            visual_features: [images, own visual tokens, visual size], or [own visual tokens, visual size]; shards may
                have different lengths.
            text_embeds: [batch, tokens, hidden], the same on all ranks; what it has at places of visual tokens is
                replaced.
            input_ids: [batch, tokens].

        In backward gradients of visual features are summed over the ranks; those of text embeddings are of this rank's
        shard. ValueError: places and visual tokens differ in number. Collective.
        """
        own = self.projection(visual_features)
        images = own.unsqueeze(0) if own.dim() == 2 else own
        comm = communicator_of(self.process_group)
        visual = whole_patches(images, comm)
        fused = self._fuse(visual.to(text_embeds.dtype), text_embeds, self._places(input_ids))
        lengths = shard_lengths(fused.shape[1], comm.size)
        return fused.split(lengths, dim=1)[comm.rank]

    def _places(self, input_ids: Tensor) -> Tensor:
        """Bool [batch, tokens]."""
        return input_ids == self.image_token_id

    def _fuse(self, visual: Tensor, text: Tensor, places: Tensor) -> Tensor:
        """visual [images, tokens, hidden], text [batch, tokens, hidden] -> the sequence [batch, all tokens, hidden]."""
        count, images, each = int(places.sum()), visual.shape[0], visual.shape[1]
        if count == images * each:
            return text.masked_scatter(places.unsqueeze(-1), visual)
        if count != images:
            raise ValueError(
                f"{type(self).__name__}: {count} places for {images} x {each} visual tokens; input_ids need one place "
                "for each visual token, or one for each image"
            )
        rows, at = [], 0
        for row, own in zip(text, places, strict=True):
            found = own.nonzero().flatten().tolist()
            pieces, start = [], 0
            for place in found:
                pieces += [row[start:place], visual[at]]
                start, at = place + 1, at + 1
            rows.append(torch.cat([*pieces, row[start:]]))
        if len({len(row) for row in rows}) > 1:
            raise ValueError(
                f"{type(self).__name__}: rows of the batch have different numbers of images, so that their sequences "
                "differ in length; pad with one place for each visual token"
            )
        return torch.stack(rows)


class LlavaFusionAdapter(ModalityFusionSPAdapter):
    """LLaVA: one place for each visual token, or one for each image."""


class InternVLFusionAdapter(ModalityFusionSPAdapter):
    """InternVL: images are cut into tiles (rows of the visual features); each visual token has its place."""

    def _fuse(self, visual: Tensor, text: Tensor, places: Tensor) -> Tensor:
        count, needed = int(places.sum()), visual.shape[0] * visual.shape[1]
        if count != needed:
            raise ValueError(f"InternVLFusionAdapter: {count} places for {needed} visual tokens")
        return super()._fuse(visual, text, places)


class Qwen2VLFusionAdapter(ModalityFusionSPAdapter):
    """Qwen2-VL: visual tokens lie between the tokens that begin and end an image.

    Args:
        projection, process_group: as above; the merger of patches is a projection of groups.
        vision_start_token_id, vision_end_token_id: what lies between them, of the same row, are places.
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
