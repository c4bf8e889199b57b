"""The user's model and batch, named as `module:function`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor


class NoSuchFunction(ValueError):
    """The named function cannot be imported."""


def call_of(name: str) -> Callable[[], Any]:
    """Import the function `module:function`, with the current folder on ``sys.path``. NoSuchFunction: there is none."""
    module_name, found, function = name.partition(":")
    if not found:
        raise NoSuchFunction(f"{name!r}: expected module:function")
    sys.path.insert(0, os.getcwd())
    try:
        value: Any = importlib.import_module(module_name)
        for part in function.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise NoSuchFunction(f"{name}: {error}") from error
    finally:
        sys.path.pop(0)
    return value


def loss_of(model: Callable[..., Any], batch: Any) -> Tensor:
    """Return the model's loss of a batch: a dict of keyword arguments, or a tuple of positional ones. The model returns
    the loss, an object with a ``loss``, or a tuple that begins with it. ValueError: it returns none of these."""
    result = model(**batch) if isinstance(batch, dict) else model(*batch)
    loss = getattr(result, "loss", None)
    if loss is None:
        loss = result[0] if isinstance(result, tuple) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            f"the model returned {type(result).__name__}: a calibration needs the loss, or an output with .loss"
        )
    return loss
