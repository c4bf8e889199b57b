"""Adam, AdamW and SGD with width-dependent learning rates (muP: "Tensor Programs V", arXiv 2203.03466).

The ``mup`` package knows which dims of a parameter grow with the width (``mup.set_base_shapes``, called by the user)
and splits parameter groups accordingly; the update itself is ours, so that every stage of ZeRO can partition it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.sgd import SGD


def mu_adam(
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    adam_w_mode: bool = False,
) -> torch.optim.Optimizer:
    """Make Adam over the groups of ``mup.MuAdam``: the ``lr`` of matrices is divided by their width multiplier.

    Raises:
        DeepSpeedConfigError: ``mup`` is not installed, or a parameter has no base shape.
    """
    cls = partial(FusedAdam, bias_correction=bias_correction, adam_w_mode=adam_w_mode)
    return _grouped_by_width(
        "MuAdam", params, cls, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    )


def mu_adamw(
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> torch.optim.Optimizer:
    """Make ``mu_adam`` with decoupled weight decay."""
    return mu_adam(params, lr, bias_correction, betas, eps, weight_decay, adam_w_mode=True)


def mu_sgd(
    params: Any,
    lr: float = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> torch.optim.Optimizer:
    """Make SGD over the groups of ``mup.MuSGD``: ``lr`` grows for vectors and falls for matrices with their widths.

    Raises:
        DeepSpeedConfigError: ``mup`` is not installed, or a parameter has no base shape.
    """
    settings = {"lr": lr, "weight_decay": weight_decay}
    return _grouped_by_width(
        "MuSGD", params, partial(SGD, momentum=momentum, dampening=dampening, nesterov=nesterov), settings
    )


def _grouped_by_width(name: str, params: Any, cls: Any, settings: dict[str, Any]) -> torch.optim.Optimizer:
    try:
        import mup  # type: ignore[import-not-found]
    except ImportError as error:
        raise DeepSpeedConfigError(
            f"optimizer.type={name!r} needs the package mup for the base widths: pip install mup"
        ) from error

    def without_empty(groups: list[dict[str, Any]], **rest: Any) -> torch.optim.Optimizer:
        return cls([group for group in groups if group["params"]], **rest)

    try:
        return getattr(mup, name)(params, impl=without_empty, **settings)
    except AssertionError as error:  # a parameter without a base shape; mup's message explains the fix
        raise DeepSpeedConfigError(f"optimizer.type={name!r}: {error}") from error
