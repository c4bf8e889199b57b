"""Low-rank adapters applied next to shared weights, per request (E. J. Hu et al.: LoRA, 2021).

Each row of a layer's output gets the product of its own request's adapter (L. Chen et al.: Punica, 2024): one forward
serves requests with different adapters or none, and the rows of one adapter are computed together.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from deepspeed.inference.cache.pages import PagePiece
from deepspeed.inference.model.info import LayoutError

_PREFIX = "base_model.model."
_NEUTRAL = {
    "bias": "none",
    "use_dora": False,
    "lora_bias": False,
    "modules_to_save": None,
    "alpha_pattern": {},
    "alora_invocation_tokens": None,
}
"""PEFT settings supported only with these values; None: any, or nothing."""

_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of ``init_lora_weights`` that change the base weights before training."""

_TRIAL_TOKENS = 7

_numbers = itertools.count(1)


@dataclass(eq=False)
class Adapter:
    """``layers``: per layer the matrices [rank, inputs] and [outputs, rank]; the second includes the LoRA scale.
    ``number``: unique, because cached keys and values depend on the adapter that computed them."""

    layers: Mapping[nn.Module, tuple[Tensor, Tensor]]
    number: int = field(default_factory=lambda: next(_numbers))


def load_adapter(module: nn.Module, folder: str, adaptable: Set[nn.Module] | None = None) -> Adapter:
    """Read a PEFT adapter folder for ``module``, in the dtype and on the device of each layer. ``adaptable``: the
    module's `adaptable_layers`; None: computed here. ValueError: not an adapter, unsupported parts, or an adapter of
    another model. OSError: unreadable."""
    path, config = Path(folder), _config_of(folder)
    if not (path / "adapter_model.safetensors").is_file():
        raise ValueError(f"{folder}: adapter_model.safetensors is missing")
    tensors, known = load_file(path / "adapter_model.safetensors"), dict(module.named_modules())
    adaptable = adaptable_layers(module) if adaptable is None else adaptable
    layers: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    for name, down in tensors.items():
        layer_name, _, kind = name.removeprefix(_PREFIX).rpartition(".lora_")
        if kind == "B.weight" and name.replace("lora_B", "lora_A") in tensors:
            continue
        layer, up = known.get(layer_name), tensors.get(name.replace("lora_A", "lora_B"))
        if kind != "A.weight" or layer is None or layer not in adaptable or up is None:
            raise ValueError(
                f"{folder}: {name} is not supported: only lora_A and lora_B of linear layers below the head "
                "are, and not those of experts"
            )
        layers[layer] = _matrices(layer, down, up, config, f"{folder}: {name}")
    if not layers:
        raise ValueError(f"{folder}: adapter_model.safetensors has no weights")
    return Adapter(layers)


def adaptable_layers(module: nn.Module) -> Set[nn.Module]:
    """Return the linear layers below the head of a causal model that compute all tokens of a forward, and so may have
    an adapter. Found by a forward, during which ``module`` must not be used otherwise."""
    head, made = module.get_output_embeddings(), dict[nn.Module, bool]()  # type: ignore[operator]

    def note(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        rows = [
            each.numel() // each.shape[-1] if isinstance(each, Tensor) and each.ndim > 1 else 0
            for each in (*inputs[:1], output)
        ]
        made[layer] = made.get(layer, True) and rows == [_TRIAL_TOKENS] * 2

    handles = [
        layer.register_forward_hook(note)
        for name, layer in module.named_modules()
        # An expert may happen to get all tokens of the trial.
        if layer is not head and _sizes(layer) != (0, 0) and "experts" not in name.split(".")
    ]
    try:
        with torch.inference_mode():
            size = module.config.get_text_config(decoder=True).vocab_size  # type: ignore[union-attr, operator]
            tokens = torch.arange(_TRIAL_TOKENS, device=next(module.parameters()).device) % size
            module(input_ids=tokens[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return {layer for layer, sees_all in made.items() if sees_all}


def _matrices(
    layer: nn.Module, down: Tensor, up: Tensor, config: Mapping[str, Any], name: str
) -> tuple[Tensor, Tensor]:
    """Return ``layer``'s two matrices. ValueError: they do not fit the layer or each other, or are not finite."""
    inputs, outputs = _sizes(layer)
    rank = len(down) if down.ndim else 0
    if not rank or (down.shape, up.shape) != ((rank, inputs), (outputs, rank)):
        raise ValueError(
            f"{name} is for another layer: {list(down.shape)} and {list(up.shape)}, expected [rank, "
            f"{inputs}] and [{outputs}, rank]"
        )
    if not (down.isfinite().all() and up.isfinite().all()):
        raise ValueError(f"{name}: the weights are not finite")
    weight = next(layer.parameters())
    dtype = weight.dtype if weight.dtype.is_floating_point else torch.get_default_dtype()
    scaled = up.float() * (config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank))
    # Copy: the reader returns a mapping of the file, which changes or ends with it.
    return down.to(weight.device, dtype, copy=True), scaled.to(weight.device, dtype)


def _config_of(folder: str) -> Mapping[str, Any]:
    """Return the adapter's config. ValueError: it is missing, or has unsupported settings."""
    path = Path(folder) / "adapter_config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not an adapter folder: adapter_config.json is missing")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected an object")
    _check_config(config, folder)
    return config


def _check_config(config: Mapping[str, Any], folder: str) -> None:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{folder}: peft_type={config.get('peft_type')!r} is not supported, only 'LORA'")
    for name, neutral in _NEUTRAL.items():
        if config.get(name) not in (neutral, None, False, [], {}):
            raise ValueError(f"{folder}: {name}={config[name]!r} is not supported")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGED_BASE):
        raise ValueError(
            f"{folder}: init_lora_weights={start!r} has changed the base weights, so the adapter does not fit those of "
            "the model: save it with PEFT's path_initial_model_for_weight_conversion, or merge it into the model"
        )
    alpha = config.get("lora_alpha")
    if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise ValueError(f"{folder}: lora_alpha={alpha!r}: expected a number")


def _sizes(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of inputs and outputs; (0, 0) if the layer is not linear."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    weight = getattr(layer, "weight", None)  # of a Conv1D of Transformers
    return (weight.shape[0], weight.shape[1]) if type(layer).__name__ == "Conv1D" else (0, 0)  # type: ignore[union-attr]


@contextlib.contextmanager
def adapted(pieces: Sequence[PagePiece], device: torch.device) -> Iterator[None]:
    """Add the adapters' products to layer outputs within the block, for rows of tokens in the order of ``pieces``."""
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
    """Forward hook: add the products of ``parts`` to the output; ``inputs[0]`` is [.., inputs] with ``total`` rows."""
    rows, made = inputs[0].reshape(-1, inputs[0].shape[-1]), output.reshape(-1, output.shape[-1])
    if len(rows) != total:
        raise LayoutError(f"an adapter's layer {type(layer).__name__} computes {len(rows)} of {total} tokens")
    for index, down, up in parts:
        made = made.index_add(0, index, (rows[index].to(down.dtype) @ down.T @ up.T).to(made.dtype))
    return made.view(output.shape)
