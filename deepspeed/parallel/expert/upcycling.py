"""Sparse upcycling: initialize a mixture of experts from a dense model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.logging import log_dist
from deepspeed.checkpoint.consolidate import consolidate, materialize, resolve_folder
from deepspeed.parallel.expert.layer import MoE


def upcycle(
    model: nn.Module,
    dense: Mapping[str, Tensor] | str | Path,
    layers: Mapping[str, str] | None = None,
    *,
    tag: str | None = None,
    noise: float = 0.0,
) -> list[str]:
    """Initialize ``model``, before ``deepspeed.initialize``, from a dense model: every expert starts as a copy of the
    layer that the mixture replaces, gates keep their weights. Returns the paths of the mixtures; rank 0 logs a summary.

    A. Komatsuzaki et al.: Sparse upcycling: Training mixture-of-experts from dense checkpoints, ICLR 2023.

    Args:
        dense: a state dict, or a folder of checkpoints (of any stage and world size; ``tag`` selects one).
        layers: path of each ``MoE`` in ``model`` -> path of the layer of the dense model that becomes its experts;
            default: the same path. The residual layer of ``use_residual=True`` starts as this layer too.
        noise: standard deviation of the noise added to every expert's weights, relative to theirs, to make experts
            differ; 0: they diverge only through the tokens they get.

    Raises:
        KeyError: ``layers`` names something other than an ``MoE``, or the dense model lacks a non-gate weight.
        ValueError: shapes differ.
    """
    weights: Mapping[str, Any]
    if isinstance(dense, Mapping):
        weights = dense
    else:
        weights = consolidate(resolve_folder(Path(dense), tag)).mapped(materialize)
    mixtures = {path: each for path, each in model.named_modules() if isinstance(each, MoE)}
    unknown = sorted((layers or {}).keys() - mixtures.keys())
    if unknown:
        raise KeyError(f"{unknown[0]!r} is not an MoE layer of the model: {', '.join(mixtures) or 'none'}")
    with torch.no_grad():
        for path, mixture in mixtures.items():
            source = (layers or {}).get(path, path)
            experts: Any = mixture.deepspeed_moe.experts
            for number, expert in enumerate(experts.deepspeed_experts):
                _fill(expert, weights, source, f"expert {number} of {path}")
                _add_noise(expert, noise)
            if mixture.use_residual:
                _fill(mixture.mlp, weights, source, f"the residual layer of {path}")
        inside = {id(p) for each in mixtures.values() for p in each.parameters()}
        rest = {name: t for name, t in _tensors(model).items() if id(t) not in inside}
        for name, tensor in rest.items():
            _copy(tensor, weights, name, name)
    log_dist(
        f"upcycling: {len(mixtures)} MoE layers initialized from dense layers, {len(rest)} other tensors "
        "copied; gates keep their initialization",
        ranks=[0],
    )
    return list(mixtures)


def _fill(module: nn.Module, weights: Mapping[str, Any], source: str, what: str) -> None:
    for name, tensor in _tensors(module).items():
        _copy(tensor, weights, f"{source}.{name}", f"{name} of {what}")


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _copy(into: Tensor, weights: Mapping[str, Any], name: str, what: str) -> None:
    if name not in weights:
        raise KeyError(
            f"the dense model has no {name!r}, from which to initialize {what}; set `layers` to its layers"
        )
    if weights[name].shape != into.shape:
        raise ValueError(
            f"{name} has shape {tuple(weights[name].shape)} in the dense model, but {what} has {tuple(into.shape)}"
        )
    into.copy_(weights[name])


def _add_noise(expert: nn.Module, noise: float) -> None:
    if noise:
        for param in expert.parameters():
            spread = param.float().std(correction=0)
            param.add_((torch.randn(param.shape, device=param.device) * spread * noise).to(param.dtype))
