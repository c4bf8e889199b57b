"""Export of a cleaned Transformers model as a folder for `from_pretrained`, whose config has the remaining sizes."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.logging import logger
from deepspeed.compression.packed import PackedWeight
from deepspeed.compression.techniques import Compressible

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
WIDTHS = (
    "intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim",
)  # fmt: skip
HEADS = ("num_attention_heads", "num_key_value_heads")
"""A config can have fewer heads only if the head size is a separate key (`head_dim`)."""

Shape = tuple[int, ...]


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with every packed weight in floating point, under the names of ordinary layers."""
    packed = {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        if isinstance(module, PackedWeight)
        for key, _ in module.named_buffers(recurse=False)
    }
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in packed}
    for name, module in model.named_modules():
        if isinstance(module, PackedWeight):
            prefix = f"{name}." if name else ""
            state[f"{prefix}weight"] = module.weight
            for key in [key for key in state if key.startswith(f"{prefix}activation_quantizer.")]:
                del state[key]
    return state


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write ``config.json`` and ``model.safetensors`` of a Transformers model that `redundancy_clean` has cleaned.

    The written config has the sizes of this model: fewer layers, narrower MLPs, fewer heads where the architecture has
    `head_dim`. Packed weights are written as the rounded values, in floating point.

    ValueError: not a Transformers model, not cleaned, or of shapes that its config cannot express.
    """
    inner: Any = getattr(model, "module", model)
    _check(inner)
    state = plain_state_dict(inner)
    found = _fit_config(inner, state)
    fresh = _new_model(inner, found)
    fresh.load_state_dict(_hf_state(fresh, inner, state), assign=True)
    fresh.tie_weights()
    fresh.generation_config = getattr(inner, "generation_config", None)
    fresh.save_pretrained(folder)


def _check(model: Any) -> None:
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        raise ValueError(
            f"{type(model).__name__} is not a Transformers model: save its state_dict() with torch.save instead"
        )
    for name, module in model.named_modules():
        if isinstance(module, Compressible):
            raise ValueError(f"{name} is still prepared for compression: call redundancy_clean first")


def _new_model(model: Any, config: Any) -> Any:
    """Construct a model of the same class from ``config`` on the meta device."""
    with torch.device("meta"):
        return type(model)(copy.deepcopy(config))


def _hf_state(fresh: nn.Module, model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``state`` with the weights of linear layers that replaced GPT-2's ``Conv1D`` transposed back."""
    result, ours = dict(state), dict(model.named_modules())
    for name, module in fresh.named_modules():
        if type(module).__name__ == "Conv1D" and isinstance(ours.get(name), nn.Linear):
            result[f"{name}.weight"] = result[f"{name}.weight"].t().contiguous()
    return result


# The config -------------------------------------------------------------------------------------------------


def _fit_config(model: Any, state: Mapping[str, Tensor]) -> Any:
    """Search for the config sizes that reproduce the model's shapes. ValueError: there are none."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    differing = _differences(model, config, state)
    for sizes in _trials(model, state):
        if not differing:
            break
        changed = copy.deepcopy(config)
        _resize(changed, sizes)
        try:
            left = _differences(model, changed, state)
        except Exception as error:  # configs and constructors raise anything for sizes they do not accept
            logger.debug(f"compression: {type(config).__name__} rejects a size: {error}")
            continue
        if _distance(left) < _distance(differing):
            config, differing = changed, left
    if differing:
        name, (ours, theirs) = next(iter(differing.items()))
        raise ValueError(
            f"{name} has shape {ours}, but {type(config).__name__} can only express {theirs} "
            f"({len(differing)} such tensors): from_pretrained could not load this model. Heads can be "
            "removed where the config has head_dim, other layers if all are left with the same size; else "
            "save state_dict() and load it into a model that was prepared and cleaned in the same way"
        )
    return config


Differences = dict[str, tuple[Shape | None, Shape | None]]


def _differences(model: Any, config: Any, state: Mapping[str, Tensor]) -> Differences:
    """Map names to (our shape, shape in a new model of ``config``) where the two differ."""
    fresh = _new_model(model, config)
    ours = {name: tuple(tensor.shape) for name, tensor in _hf_state(fresh, model, state).items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in fresh.state_dict().items()}
    return {
        name: (ours.get(name), theirs.get(name))
        for name in [*ours, *(name for name in theirs if name not in ours)]
        if ours.get(name) != theirs.get(name)
    }


def _distance(differing: Differences) -> int:
    """Count the differing dimensions; a missing tensor counts as four."""
    return sum(
        4 if ours is None or theirs is None else sum(a != b for a, b in zip(ours, theirs, strict=False))
        for ours, theirs in differing.values()
    )


def _resize(config: Any, sizes: Mapping[str, int]) -> None:
    """Set keys of a config, and cut its list of layer types to the number of layers."""
    for key, size in sizes.items():
        setattr(config, key, size)
        if key in LAYERS and getattr(config, "layer_types", None) is not None:
            config.layer_types = config.layer_types[:size]


def _trials(model: Any, state: Mapping[str, Tensor]) -> Iterator[dict[str, Any]]:
    """Yield candidate sizes, found in the model, for every size key of its config. With fewer heads, the head size is
    kept."""
    config = model.config
    lists = sorted({len(module) for module in model.modules() if isinstance(module, nn.ModuleList)})
    sizes = sorted({size for tensor in state.values() for size in tensor.shape})
    for keys, found in ((LAYERS, lists), (WIDTHS, sizes)):
        for key in keys:
            if hasattr(config, key):
                yield from ({key: size} for size in found)
    heads = getattr(config, HEADS[0], None)
    if not isinstance(heads, int) or heads < 1:
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kept = {"head_dim": head_dim}
    keys = [key for key in HEADS if getattr(config, key, None) == heads]
    fewer = sorted({size // head_dim for size in sizes if size % head_dim == 0} & set(range(1, heads)))
    yield from (kept | dict.fromkeys(keys, count) for count in fewer)
