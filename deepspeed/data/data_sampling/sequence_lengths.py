"""Token counts of a data set's sequences: read from an analysis, or counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepspeed import comm as dist
from deepspeed.base.logging import logger
from deepspeed.data.data_sampling.data_analyzer import DataAnalyzer
from deepspeed.data.data_sampling.index_files import SINGLE, batches_of
from deepspeed.data.data_sampling.indexed_dataset import MMapIndexedDataset

_METRIC = "seqlen"
_BATCH_SIZE = 256


def sequence_lengths(
    dataset: Any,
    metrics_path: str | None = None,
    batch_lengths: Callable[[Any], Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> np.ndarray:
    """Return the tokens of each sample, the same on all ranks: rank 0 reads or counts them. Collective.

    Args:
        metrics_path: the folder of an analysis with the metric "seqlen". If there is none, the counts are written
            there for the next run.
        batch_lengths: returns the lengths of all samples of a batch made by ``collate_fn``; None: `length_of` per
            sample.

    Raises:
        ValueError: the files are of a data set of another size, or a sample has no recognizable length.
    """
    shared = dist.is_initialized() and dist.get_world_size() > 1
    message: list[Any] = [None]
    if not shared or dist.get_rank() == 0:
        try:
            message = [_found(dataset, metrics_path, batch_lengths, collate_fn)]
        except Exception as error:  # raised on every rank
            message = [error]
    if shared:
        dist.broadcast_object_list(message, src=0)
    if isinstance(message[0], Exception):
        raise message[0]
    return message[0]


def _found(
    dataset: Any, metrics_path: str | None, batch_lengths: Callable[[Any], Any] | None, collate_fn: Any
) -> np.ndarray:
    if batch_lengths is None:
        batch_lengths, collate_fn = _lengths_of, list
    elif collate_fn is None:
        collate_fn = torch.utils.data.default_collate
    if metrics_path is None:
        counted = [
            np.asarray(batch_lengths(batch)).reshape(-1)
            for _, batch in batches_of(dataset, 0, len(dataset), _BATCH_SIZE, collate_fn)
        ]
        return _checked(
            np.concatenate(counted) if counted else np.empty(0, np.int64), dataset, "the data set"
        )
    prefix = str(Path(metrics_path) / _METRIC / f"{_METRIC}_sample_to_metric")
    if not MMapIndexedDataset.exists(prefix):
        logger.info(f"counting the tokens of {len(dataset)} sequences; caching them in {metrics_path}")
        count = batch_lengths
        DataAnalyzer(
            dataset,
            batch_size=_BATCH_SIZE,
            metric_names=[_METRIC],
            metric_functions=[lambda batch: torch.as_tensor(count(batch)).to(torch.int64)],
            metric_types=[SINGLE],
            metric_dtypes=[torch.int64],
            save_path=metrics_path,
            collate_fn=collate_fn,
        ).run_map_reduce()
    return _checked(np.array(MMapIndexedDataset(prefix, skip_warmup=True).flat), dataset, prefix)


def _checked(lengths: np.ndarray, dataset: Any, source: str) -> np.ndarray:
    if len(lengths) != len(dataset):
        raise ValueError(
            f"{source} has {len(lengths)} lengths for a data set of {len(dataset)} samples: analyse this data set, or "
            "set another data_efficiency.data_sampling.dynamic_batching.metrics_path"
        )
    return lengths.astype(np.int64)


def _lengths_of(samples: list[Any]) -> torch.Tensor:
    return torch.tensor([length_of(sample) for sample in samples], dtype=torch.int64)


def length_of(sample: Any) -> int:
    """Return the tokens of a sample: the sum of its attention mask, or the length of its token ids, embeddings or
    first field.

    ValueError: it has no recognizable length.
    """
    if isinstance(sample, Mapping):
        mask = sample.get("attention_mask")
        if mask is not None:
            return int(torch.as_tensor(mask).sum())
        for name in ("input_ids", "inputs_embeds", "tokens", "text"):
            if name in sample:
                return length_of(sample[name])
        if sample:
            return length_of(next(iter(sample.values())))
    if isinstance(sample, (torch.Tensor, np.ndarray)) and sample.ndim:
        return int(sample.shape[0])
    if isinstance(sample, Sequence) and not isinstance(sample, (str, bytes)) and len(sample):
        first = sample[0]
        return len(sample) if isinstance(first, (int, np.integer)) else length_of(first)
    raise ValueError(
        f"cannot determine the number of tokens of a sample ({type(sample).__name__}): pass dataset_seqlens or "
        "batch_seqlens_fn, or set the analysis files in data_efficiency.data_sampling.dynamic_batching.metrics_path"
    )
