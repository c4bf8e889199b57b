"""Weights of a Transformers model as its files hold them, and as the model itself does.

The two differ: files of the hub have one tensor per expert where the model has one per layer, and names that later
releases of Transformers changed. Transformers keeps the rules of each architecture and applies them in
``from_pretrained``; here the same rules are applied to named tensors, wherever these come from and go to.
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
    """Tensors of files that are converted together, such as the experts of a layer.

    ``first``: the model's name of the first result. ``stored``: (name in the file, pattern that it matched, tensor).
    """

    first: str
    rule: Any
    model: Any
    stored: list[tuple[str, str, Tensor]] = field(default_factory=list)

    def tensors(self, device: torch.device | None = None) -> dict[str, Tensor]:
        """The model's tensors, by name. ``device``: meta gives their shapes and dtypes without reading."""
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

        self._model = module if _is_whole(module) else _unsplit(module)
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
        """None: ``module`` is neither a model of Transformers nor a stage of one, or the installed release has no
        such rules (its models are as their files)."""
        try:
            from transformers import PreTrainedModel, conversion_mapping  # noqa: F401
        except ImportError:
            return None
        is_stage = hasattr(module, "whole_meta") and hasattr(module, "config")  # of a Transformers model
        whole = module.whole_meta() if is_stage else module  # type: ignore[operator]
        return cls(whole) if isinstance(whole, PreTrainedModel) else None

    def name_of(self, stored: str) -> tuple[str, str | None]:
        """The model's name of a tensor, and the pattern of the conversion that it takes part in, if any. What the model
        does not have keeps its name."""
        prefix = self._model.base_model_prefix
        name, pattern = self._rename(stored, self._renamings, self._converters, prefix, self._known)
        if name not in self._known and stored in self._known:
            name, pattern = self._rename(stored, [], [], prefix, self._known)
        return (name, pattern) if name in self._known else (stored, None)

    def groups(self, stored: Mapping[str, Tensor]) -> tuple[dict[str, str], list[ConvertedGroup]]:
        """Sort the tensors of files into those that are only renamed, as {name in the file: name in the model}, and
        those that are converted."""
        renamed: dict[str, str] = {}
        groups: dict[str, ConvertedGroup] = {}
        for name in sorted(stored, key=self._order):  # experts in the order of their numbers
            found, pattern = self.name_of(name)
            if pattern is None:
                renamed[name] = found
                continue
            group = groups.setdefault(found, ConvertedGroup(found, self._by_pattern[pattern], self._model))
            group.stored.append((name, pattern, stored[name]))
        return renamed, list(groups.values())


def stored_as_in_model(
    module: nn.Module, stored: Mapping[str, Tensor]
) -> tuple[dict[str, str], list[ConvertedGroup]]:
    """``Conversion.groups`` for ``module``; where it is no model of Transformers, all names stay."""
    conversion = Conversion.of(module)
    return ({name: name for name in stored}, []) if conversion is None else conversion.groups(stored)


def as_in_model(module: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Names and values as ``module`` has them, of ``tensors`` as files have them: first, one by one, what keeps its
    value, then what is converted, one group at a time."""
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
    while groups:  # what a group holds is freed with it
        yield from groups.pop(0).tensors().items()


def model_described_in(folder: Path) -> nn.Module | None:
    """The model of Transformers, without weights, whose config is in ``folder``; None: there is none that the installed
    release knows."""
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
    """Give values to the buffers on the meta device that no file holds, on the host, as ``from_pretrained`` does. All
    else of ``module`` stays as it is; so does a module that is no model of Transformers."""
    initialize: Any = getattr(module, "initialize_weights", None)
    if Conversion.of(module) is None or initialize is None:
        return
    for each in (*module.parameters(), *module.buffers()):
        each._is_hf_initialized = not each.is_meta  # type: ignore[attr-defined]  # what has values keeps them
    for layer in module.modules():
        layer._is_hf_initialized = False  # type: ignore[assignment]  # else it is passed over
        for name in layer._non_persistent_buffers_set:
            buffer = layer._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                layer._buffers[name] = torch.empty_like(buffer, device="cpu")
    with torch.no_grad():
        initialize()


def _is_whole(module: nn.Module) -> bool:
    return not any(hasattr(each, "ds_shape") or placement_of(each).boxes for each in module.parameters())


def _unsplit(module: Any) -> nn.Module:
    """A model without weights whose tensors have their whole shapes, which some conversions look at."""
    with torch.device("meta"):
        return type(module)(module.config)
