"""Forward, loss and backward of a Transformers model with sharded sequences; the loss is over all shards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed import comm as dist
from deepspeed.comm import documented_groups as groups
from deepspeed.parallel.sequence.tiled.functions import IGNORED, TiledLoss

TILE_BYTES = 2**30
"""Maximum size of a loss tile's fp32 logits with ``num_loss_logit_shards="auto"``."""


class UlyssesSPFwdLossBwdWithLogits:
    """Trains on the batches of the sequence-parallel ranks in turn, each sharded over all of these ranks.

    Args:
        model: the engine.
        model_unwrapped: the wrapped Transformers model, whose ``loss_function`` and ``config.vocab_size`` are used.
        device: device of the batches.
        num_loss_logit_shards: number of tiles of the loss; "auto" chooses it by size.
        kwargs: set as attributes; ``sp_group`` overrides that of the newest engine.
    """

    def __init__(
        self,
        model: Any,
        model_unwrapped: Any,
        device: Any,
        num_loss_logit_shards: Any = "auto",
        **kwargs: Any,
    ) -> None:
        self.model = model
        self.model_unwrapped = model_unwrapped
        self.device = device
        self.num_loss_logit_shards = num_loss_logit_shards
        self.sp_group: Any = groups._get_sequence_parallel_group()
        vars(self).update(kwargs)
        alone = self.sp_group is None
        self.sp_world_size: int = 1 if alone else dist.get_world_size(self.sp_group)
        self.sp_rank: int = 0 if alone else dist.get_rank(self.sp_group)
        self.logits: Tensor
        self.loss: Tensor

    def sp_fwd_loss_bwd(self, batch: Mapping[str, Any]) -> Tensor:
        """Run one forward and backward for each rank's ``batch`` (``input_ids`` and ``labels`` [batch, sequence], of
        any length). Returns the mean of the batches' losses, each a mean over its tokens, detached. Collective over the
        group."""
        losses = [self._run_batch(micro) for micro in self._exchange(batch)]
        return torch.stack(losses).mean()

    def _exchange(self, batch: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        if self.sp_world_size == 1:
            return [batch]
        everyone: list[Any] = [None] * self.sp_world_size
        on_host = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in batch.items()}
        dist.all_gather_object(everyone, on_host, group=self.sp_group)
        return everyone

    def _run_batch(self, batch: Mapping[str, Any]) -> Tensor:
        batch = dict(batch)
        ids = batch["input_ids"]
        labels = nn.functional.pad(batch.pop("labels"), (0, 1), value=IGNORED)
        batch["shift_labels"] = labels[..., 1:]
        batch.setdefault("position_ids", torch.arange(ids.shape[1]).expand(ids.shape))
        mine = {
            key: value.tensor_split(self.sp_world_size, dim=1)[self.sp_rank].contiguous().to(self.device)
            for key, value in batch.items()
            if isinstance(value, Tensor)
        }
        shift_labels = mine.pop("shift_labels")
        self.forward({**batch, **mine} if len(mine) < len(batch) - 1 else mine)
        self.compute_loss(labels=None, shift_labels=shift_labels)
        self.backward()
        return self.loss_over_all

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the logits of this rank's shard [batch, own tokens, vocabulary]."""
        inputs = {key: value for key, value in batch.items() if key != "shift_labels"}
        self.logits = self.model(**inputs, use_cache=False).logits
        return self.logits

    def compute_loss(self, labels: None, shift_labels: Tensor) -> Tensor:
        """Return this rank's contribution to the mean over the tokens of all shards, times the number of ranks, because
        gradients are averaged over ranks. ``shift_labels`` [batch, own tokens]. Collective over the group."""
        counts = (shift_labels != IGNORED).sum()
        total = counts.clone()
        if self.sp_world_size > 1:
            dist.all_reduce(total, group=self.sp_group)
        shards = self.num_loss_logit_shards
        if shards == "auto":
            shards = math.ceil(self.logits.numel() * 4 / TILE_BYTES)
        local = TiledLoss.apply(
            self.model_unwrapped.loss_function,
            self.logits,
            self.model_unwrapped.config.vocab_size,
            shift_labels,
            max(1, int(shards)),
        )
        share = counts / total.clamp(min=1)
        self.loss_over_all = local.detach() * share
        if self.sp_world_size > 1:
            dist.all_reduce(self.loss_over_all, group=self.sp_group)
        self.loss = local * share * self.sp_world_size
        return self.loss

    def backward(self) -> None:
        self.model.backward(self.loss)
