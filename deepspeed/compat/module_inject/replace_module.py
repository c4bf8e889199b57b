"""Layers of a model replaced by others of the same weights, by class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.checkpoint.foreign.hub_weights import as_in_model
from deepspeed.checkpoint.foreign.plain_weights import tensors_of
from deepspeed.compat.module_inject.inject import revert_layers
from deepspeed.compat.module_inject.replace_policy import generic_policies, replace_policies
from deepspeed.compat.module_inject.tensor_slicing import Loading, ReplaceWithTensorSlicing
from deepspeed.ops.formats.integers import divisors, symmetric_levels

__all__ = [
    "GroupQuantizer",
    "ReplaceWithTensorSlicing",
    "generic_injection",
    "get_transformer_name",
    "replace_module",
    "revert_transformer_layer",
    "skip_level_0_prefix",
]

_Make = Callable[..., nn.Module]


def revert_transformer_layer(
    orig_layer_impl: Callable[..., nn.Module], model: nn.Module, config: Any, preln: bool = False
) -> nn.Module:
    """Put ``orig_layer_impl(config)`` with the same weights in the place of each `DeepSpeedTransformerLayer`; the
    model. ValueError: it has none."""
    return revert_layers(orig_layer_impl, model, config, preln)


def replace_module(
    model: nn.Module,
    orig_class: type[nn.Module] | None,
    replace_fn: _Make,
    _replace_policy: Any,
    checkpoint: str | None = None,
) -> nn.Module:
    """Put ``replace_fn(layer, policy, number, prefix=name, state_dict=weights)`` in the place of each layer of
    ``orig_class``.

    Args:
        model: the model; it is changed in place.
        orig_class: exactly this class; None: all classes for which there is a policy.
        replace_fn: gives the new layer. ``policy`` is ``_replace_policy``, or the policy of the class; ``number``
            counts the layers in order. One that takes no keyword arguments is given none.
        _replace_policy: see there.
        checkpoint: a file of weights, which the other modules of the model load, and which ``replace_fn`` is given.

    Returns:
        The model.

    Raises:
        ValueError: it has no such layer, and there is no ``checkpoint`` to load either.
    """
    policies = {orig_class: _replace_policy} if orig_class is not None else _known_classes()
    weights = None if checkpoint is None else dict(as_in_model(model, tensors_of(Path(checkpoint))))
    count = _replace_below(model, policies, replace_fn, weights, "", 0)
    if not count and weights is None:
        wanted = orig_class.__name__ if orig_class is not None else "a class that has a policy"
        raise ValueError(f"{type(model).__name__} has no layer of {wanted}")
    return model


def _known_classes() -> dict[type, Any]:
    return {kind: policy for policy in replace_policies for kind in policy(None)._orig_layer_class or ()}


def _replace_below(
    module: nn.Module,
    policies: Mapping[type, Any],
    make: _Make,
    weights: dict[str, Tensor] | None,
    prefix: str,
    count: int,
) -> int:
    """How many have been replaced, ``count`` included."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if type(child) in policies:
            more = {"prefix": path, "state_dict": weights} if _takes_keywords(make) else {}
            setattr(module, name, make(child, policies[type(child)], count, **more))
            count += 1
            continue
        if weights is not None:
            if Loading.is_load_module(child):
                Loading.load(child, weights, f"{path}.")
            Loading.load_buffer(child, weights, f"{path}.")
        count = _replace_below(child, policies, make, weights, f"{path}.", count)
    return count


def _takes_keywords(make: _Make) -> bool:
    taken = inspect.signature(make).parameters
    every = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    return every or {"prefix", "state_dict"} <= taken.keys()


def get_transformer_name(replaced_module: nn.Module) -> str:
    """The path to the list of the blocks, for "h" in "transformer.h"; empty: there is none."""
    for path, module in replaced_module.named_modules():
        if isinstance(module, nn.ModuleList) and len(module):
            return path
    return ""


def skip_level_0_prefix(model: nn.Module, state_dict: Mapping[str, Any] | None) -> bool:
    """Whether names in ``state_dict`` lack the first level of those that the model's parameters have."""
    if not state_dict:
        return False
    names = [name for name, _ in model.named_parameters()]
    below = [name.partition(".")[2] for name in names]
    return not any(name in state_dict for name in names) and any(name in state_dict for name in below)


def generic_injection(
    module: Any, dtype: torch.dtype | None = None, enable_cuda_graph: bool = True
) -> nn.Module | None:
    """Have the policies of whole models (UNet and VAE of Diffusers) applied to the parts of a pipeline; the model that
    was changed last, None if there was none.

    ValueError: ``dtype`` is not float16, float32 or bfloat16.
    """
    if dtype not in (None, torch.float16, torch.float32, torch.bfloat16):
        raise ValueError(f"dtype={dtype}: weights of Diffusers are float16, bfloat16 or float32")
    found = None
    for name in sorted(vars(module)) if not isinstance(module, nn.Module) else []:
        part = getattr(module, name)
        for kind in generic_policies:
            policy = kind()
            if isinstance(part, nn.Module) and policy.match(part):
                found = policy.apply(part.to(dtype) if dtype is not None else part, enable_cuda_graph)
                setattr(module, name, found)
    return found


class GroupQuantizer:
    """8-bit integers with one scale per group of rows.

    Args:
        q_int8: quantize at all.
        group_size: rows per group.
        num_bits: bits of the integers.
        num_groups: groups of a weight, instead of ``group_size``.
    """

    def __init__(
        self, q_int8: bool = True, group_size: int = 1, num_bits: int = 8, num_groups: int = 0
    ) -> None:
        self.q_int8 = q_int8
        self.group_size = group_size
        self.num_bits = num_bits
        self.num_groups = num_groups

    def quantize(
        self, inputs: Tensor, qkv: bool = True, count: int = 1, parallel_dim: int = 0
    ) -> nn.Parameter:
        """The integers as a parameter, whose ``scale`` [groups, 3] has in its first column what they are multiplied
        with (behind it, the scales of each half of ``inputs`` along ``parallel_dim``). As it is, without ``q_int8`` or
        ``qkv``."""
        if not self.q_int8 or not qkv:
            kept = nn.Parameter(inputs, requires_grad=False)
            vars(kept)["scale"] = torch.empty(1)
            return kept
        groups = self.num_groups or inputs.shape[0] // self.group_size
        rounded = [
            symmetric_levels(part.reshape(groups, -1).float(), self.num_bits)
            for part in (inputs, *inputs.chunk(2, parallel_dim))
        ]
        made = nn.Parameter(rounded[0][0].to(torch.int8).reshape(inputs.shape), requires_grad=False)
        vars(made)["scale"] = torch.cat([divisors(scale) for _, scale in rounded], 1)
        return made
