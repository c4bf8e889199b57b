"""Low-rank adapters beside the weights of a model that several requests share (E. J. Hu et al.: LoRA, 2021).

Each token's row of a layer's output gets the product of its own request's adapter (L. Chen et al.: Punica, 2024): one
forward computes requests with different adapters and without any, and an adapter's rows are computed together.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from deepspeed.inference.cache.pages import PagePiece
from deepspeed.inference.model.facts import LayoutError

_PREFIX = "base_model.model."
_NEUTRAL = {
    "bias": "none",
    "use_dora": False,
    "lora_bias": False,
    "modules_to_save": None,
    "alpha_pattern": {},
}
"""Settings of PEFT that are not supported otherwise; None: any, or nothing."""

_numbers = itertools.count(1)


@dataclass(eq=False)
class Adapter:
    """``layers``: the two matrices [rank, inputs] and [outputs, rank], the second of which is scaled, of each layer.
    ``number``: unique, as keys and values of tokens depend on the adapter that made them."""

    layers: Mapping[nn.Module, tuple[Tensor, Tensor]]
    number: int = field(default_factory=lambda: next(_numbers))


def load_adapter(module: nn.Module, folder: str) -> Adapter:
    """Read a folder of PEFT for ``module``, in the dtype and on the device of each layer. ValueError: it is none, or
    has parts that are not supported, or is for another model. OSError: it cannot be read."""
    path = Path(folder)
    if not (path / "adapter_config.json").is_file():
        raise ValueError(f"{folder} is no folder of an adapter: there is no adapter_config.json")
    config = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    _check_config(config, folder)
    if not (path / "adapter_model.safetensors").is_file():
        raise ValueError(f"{folder}: there is no adapter_model.safetensors")
    tensors, known = load_file(path / "adapter_model.safetensors"), dict(module.named_modules())
    head = module.get_output_embeddings()  # type: ignore[operator]
    layers: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    for name, down in tensors.items():
        layer_name, _, kind = name.removeprefix(_PREFIX).rpartition(".lora_")
        if kind == "B.weight" and name.replace("lora_B", "lora_A") in tensors:
            continue
        layer, up = known.get(layer_name), tensors.get(name.replace("lora_A", "lora_B"))
        if kind != "A.weight" or layer is None or layer is head or up is None:
            raise ValueError(
                f"{folder}: {name} is not supported: only lora_A and lora_B of linear layers below the head"
            )
        if (down.shape[1], up.shape[0]) != _sizes(layer):
            raise ValueError(
                f"{folder}: {name} is for {down.shape[1]} inputs, the layer has {_sizes(layer)[0]}"
            )
        root = math.sqrt(len(down)) if config.get("use_rslora") else len(down)
        weight = next(layer.parameters())
        dtype = weight.dtype if weight.dtype.is_floating_point else torch.get_default_dtype()
        scaled = up.float() * (config["lora_alpha"] / root)
        layers[layer] = down.to(weight.device, dtype), scaled.to(weight.device, dtype)
    if not layers:
        raise ValueError(f"{folder}: adapter_model.safetensors has no weights")
    return Adapter(layers)


def _check_config(config: Mapping[str, Any], folder: str) -> None:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{folder}: peft_type={config.get('peft_type')!r} is not supported, only 'LORA'")
    for name, neutral in _NEUTRAL.items():
        if config.get(name) not in (neutral, None, False, [], {}):
            raise ValueError(f"{folder}: {name}={config[name]!r} is not supported")


def _sizes(layer: nn.Module) -> tuple[int, int]:
    """Inputs and outputs."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    weight = getattr(layer, "weight", None)  # of a Conv1D of Transformers
    return (weight.shape[0], weight.shape[1]) if type(layer).__name__ == "Conv1D" else (0, 0)  # type: ignore[union-attr]


@contextlib.contextmanager
def adapted(pieces: Sequence[PagePiece], device: torch.device) -> Iterator[None]:
    """A block in which the layers compute rows of tokens, those of ``pieces`` in their order, with their adapters."""
    rows: dict[Adapter, list[int]] = {}
    total = 0
    for piece in pieces:
        if piece.adapter is not None:
            rows.setdefault(piece.adapter, []).extend(range(total, total + piece.count))
        total += piece.count
    parts: dict[nn.Module, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for adapter, indices in rows.items():
        index = torch.tensor(indices, device=device)
        for layer, (down, up) in adapter.layers.items():
            parts.setdefault(layer, []).append((index, down, up))
    handles = [
        layer.register_forward_hook(partial(_add, parts=some, total=total)) for layer, some in parts.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add(
    layer: nn.Module,
    inputs: tuple[Tensor, ...],
    output: Tensor,
    *,
    parts: Sequence[tuple[Tensor, Tensor, Tensor]],
    total: int,
) -> Tensor:
    """``inputs[0]`` [.., inputs] of ``total`` rows."""
    rows, made = inputs[0].reshape(-1, inputs[0].shape[-1]), output.reshape(-1, output.shape[-1])
    if len(rows) != total:
        raise LayoutError(f"an adapter's layer {type(layer).__name__} computes {len(rows)} of {total} tokens")
    for index, down, up in parts:
        made = made.index_add(0, index, (rows[index].to(down.dtype) @ down.T @ up.T).to(made.dtype))
    return made.view(output.shape)
