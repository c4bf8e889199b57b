"""Weights of a Transformers model: conversion from the layout of its files to the model's.

The two differ: files of the hub have one tensor per expert where the model has one per layer, and names that later
releases of Transformers changed. Transformers keeps the rules of each architecture and applies them in
``from_pretrained``; here the same rules are applied to named tensors, independent of source and destination.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.checkpoint.placement import placement_of


@dataclass(eq=False, slots=True)
class ConvertedGroup:
    """File tensors that are converted together, such as the experts of a layer.

    ``first``: name in the model of the first result. ``stored``: (name in the file, matched pattern, tensor).
    """

    first: str
    rule: Any
    model: Any
    stored: list[tuple[str, str, Tensor]] = field(default_factory=list)

    def tensors(self, device: torch.device | None = None) -> dict[str, Tensor]:
        """Return the model's tensors by name. ``device``: "meta" gives shapes and dtypes without reading."""
        rule = deepcopy(self.rule)
        for name, pattern, value in self.stored:
            rule.add_tensor(self.first, name, pattern, value if device is None else value.to(device))
        made = rule.convert(self.first, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


class Conversion:
    """The rules by which ``from_pretrained`` would load files into ``module``.

    Args:
        module: a model of Transformers; its weights may be on the meta device, split or sharded over ranks.
    """

    def __init__(self, module: Any) -> None:
        from transformers import conversion_mapping, core_model_loading

        is_part = any(hasattr(p, "ds_shape") or placement_of(p).boxes for p in module.parameters())
        self._model = _unsplit(module) if is_part else module
        self._known = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers()),
        }
        rules = conversion_mapping.get_model_conversion_mapping(module)
        self._renamings = [each for each in rules if isinstance(each, core_model_loading.WeightRenaming)]
        self._converters = [each for each in rules if isinstance(each, core_model_loading.WeightConverter)]
        self._by_pattern = {key: each for each in self._converters for key in each.source_patterns}
        self._rename = core_model_loading.rename_source_key
        self._order = core_model_loading.dot_natural_key

    @classmethod
    def of(cls, module: nn.Module) -> Conversion | None:
        """Return the conversion of ``module``; None if it is neither a Transformers model nor a pipeline stage of
        one, or if the installed release has no such rules (its models have the layout of their files)."""
        try:
            from transformers import PreTrainedModel, conversion_mapping  # noqa: F401
        except ImportError:
            return None
        is_stage = hasattr(module, "whole_meta") and hasattr(module, "config")  # of a Transformers model
        whole = module.whole_meta() if is_stage else module  # type: ignore[operator]
        return cls(whole) if isinstance(whole, PreTrainedModel) else None

    def name_of(self, stored: str) -> tuple[str, str | None]:
        """Return the name in the model of a file's tensor, and the matched conversion pattern (None if it is not
        converted). A name that the model lacks is unchanged."""
        prefix = self._model.base_model_prefix
        name, pattern = self._rename(stored, self._renamings, self._converters, prefix, self._known)
        if name not in self._known and stored in self._known:
            name, pattern = self._rename(stored, [], [], prefix, self._known)
        return (name, pattern) if name in self._known else (stored, None)

    def groups(self, stored: Mapping[str, Tensor]) -> tuple[dict[str, str], list[ConvertedGroup]]:
        """Split file tensors into those only renamed, {name in the file: name in the model}, and those to convert."""
        renamed: dict[str, str] = {}
        groups: dict[str, ConvertedGroup] = {}
        for name in sorted(stored, key=self._order):  # experts in numeric order
            found, pattern = self.name_of(name)
            if pattern is None:
                renamed[name] = found
                continue
            group = groups.setdefault(found, ConvertedGroup(found, self._by_pattern[pattern], self._model))
            group.stored.append((name, pattern, stored[name]))
        return renamed, list(groups.values())


def converted_tensors(
    module: nn.Module, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of ``module`` for the file tensors ``tensors``: first the unconverted ones, one by
    one, then the converted ones, one group at a time."""
    conversion = Conversion.of(module)
    if conversion is None:
        yield from tensors
        return
    stored: dict[str, Tensor] = {}
    for name, value in tensors:
        found, pattern = conversion.name_of(name)
        if pattern is None:
            yield found, value
        else:
            stored[name] = value
    groups = conversion.groups(stored)[1]
    stored.clear()
    while groups:  # frees each group after its conversion
        yield from groups.pop(0).tensors().items()


def model_described_in(folder: Path) -> nn.Module | None:
    """Return the Transformers model (on the meta device) of the config in ``folder``; None if the installed release
    has no such model."""
    try:
        import transformers
    except ImportError:
        return None
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        kind = getattr(transformers, (config.architectures or [""])[0])
    except (OSError, ValueError, AttributeError):
        return None
    with torch.device("meta"):
        return kind(config)


def compute_buffers(module: nn.Module) -> None:
    """Initialize, on the host, meta buffers that no file holds, as ``from_pretrained`` does. Everything else in
    ``module`` is unchanged, and so is a module that is not a Transformers model."""
    initialize: Any = getattr(module, "initialize_weights", None)
    if Conversion.of(module) is None or initialize is None:
        return
    for each in (*module.parameters(), *module.buffers()):
        each._is_hf_initialized = not each.is_meta  # type: ignore[attr-defined]  # tensors with values keep them
    for layer in module.modules():
        layer._is_hf_initialized = False  # type: ignore[assignment]  # otherwise the layer is skipped
        for name in layer._non_persistent_buffers_set:
            buffer = layer._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                layer._buffers[name] = torch.empty_like(buffer, device="cpu")
    with torch.no_grad():
        initialize()


def _unsplit(module: Any) -> nn.Module:
    """Return a meta model of the same class with unsplit shapes, which some conversions read."""
    with torch.device("meta"):
        return type(module)(module.config)
