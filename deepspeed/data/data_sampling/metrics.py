"""Arguments of metric functions, and what they may return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

SINGLE = "single_value_per_sample"
ACCUMULATED = "accumulate_value_over_samples"


def batches_of(
    dataset: Any, first: int, last: int, batch_size: int, collate: Callable[[list[Any]], Any]
) -> Iterator[tuple[int, Any]]:
    """Batches of the samples from ``first`` to ``last``, each with the place of its first sample."""
    whole = getattr(dataset, "__getitems__", None)
    for start in range(first, last, batch_size):
        places = range(start, min(start + batch_size, last))
        samples = whole(list(places)) if whole is not None else [dataset[place] for place in places]
        yield start, collate(samples)


def numpy_dtype(dtype: Any, name: str) -> Any:
    """The numpy dtype of a torch (or numpy) dtype. TypeError: files do not hold it."""
    found = torch.empty(0, dtype=dtype).numpy().dtype if isinstance(dtype, torch.dtype) else np.dtype(dtype)
    if found.kind not in "iu":
        raise TypeError(
            f"metric {name!r} has the dtype {dtype}: index files hold integers. Round it, or multiply it first"
        )
    return found.type


def checked_values(values: Any, dtype: Any, name: str) -> np.ndarray:
    """Return the result of a metric function as an array. TypeError: its dtype is not ``dtype``, if that is given."""
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    wanted = np.dtype(numpy_dtype(dtype if dtype is not None else array.dtype, name))
    if array.dtype != wanted:
        raise TypeError(f"metric {name!r} returned {array.dtype.name}, but its metric_dtype is {dtype}")
    return array
