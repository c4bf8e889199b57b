"""Pooling of hidden states into one vector, as configured in a model's folder and requested by a client. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from deepspeed.inference.scheduling.requests import NotFiniteError
from deepspeed.inference.serving.bodies import RequestError

_MODES = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}


def pooling_of(folder: str) -> str | None:
    """Return the pooling in a sentence-transformers folder; None: it is not such a folder. ValueError: a pooling other
    than last token, mean or first token."""
    path = Path(folder) / "1_Pooling" / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): set --pooling") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected an object: set --pooling")
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ValueError(
            f"{path}: pooling by {' and '.join(modes) or 'nothing'} is not supported: set --pooling"
        )
    return _MODES[modes[0]]


def dimensions_of(config: Any) -> tuple[int, ...] | None:
    """Return the sizes to which a model's vectors may be truncated, by its config; empty: any; None: not allowed."""
    listed = getattr(config, "matryoshka_dimensions", None)
    if listed:
        return tuple(int(size) for size in listed)
    return () if getattr(config, "is_matryoshka", False) else None


def check_dimensions(asked: int | None, allowed: tuple[int, ...] | None) -> None:
    """Check a requested size. RequestError: vectors may not be truncated to ``asked`` values (`dimensions_of`)."""
    if asked is None or allowed == () or (allowed is not None and asked in allowed):
        return
    why = "the model was not trained for shorter vectors"
    raise RequestError(
        f"dimensions: {why if allowed is None else f'expected one of {list(allowed)}'}", "dimensions"
    )


def vectors_of(pooled: Sequence[Tensor], dimensions: int | None, normalized: bool) -> Tensor:
    """Return the first ``dimensions`` values of each of ``pooled`` [size], in host memory and, with ``normalized``, at
    norm 1. RequestError: there are fewer. NotFiniteError: a value is NaN or infinite."""
    size = len(pooled[0])
    if dimensions is not None and dimensions > size:
        raise RequestError(f"dimensions: the vectors have {size} numbers", "dimensions")
    cut = torch.stack([each[:dimensions] for each in pooled])
    made = (functional.normalize(cut, dim=1) if normalized else cut).cpu()
    finite = made.isfinite().all(1)
    if not finite.all():
        raise NotFiniteError(f"the model gives input.{int(finite.int().argmin())} a non-finite vector")
    return made


def encoded(vector: Tensor, index: int, encoding: str) -> bytes:
    """Encode an entry of the response in JSON: its values as a list, or as base64 of little-endian fp32."""
    raw = vector.numpy().astype("<f4").tobytes()
    numbers = vector.tolist() if encoding == "float" else base64.b64encode(raw).decode()
    return json.dumps({"object": "embedding", "index": index, "embedding": numbers}).encode()
