"""Weights of a model that was built without them (on the meta device), from the files that a config names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from deepspeed.checkpoint.plain_weights import find_plain, tensors_of
from deepspeed.config.problems import DeepSpeedConfigError

Checkpoint = str | dict[str, Any] | Sequence[str]


def weight_files(checkpoint: Checkpoint, base_dir: str = "") -> list[Path]:
    """The files that ``checkpoint`` names: a list of files, an object {"checkpoints": files, "base_dir": folder}, a
    JSON file with such an object, or the weights themselves (a file, or a folder as ``save_pretrained`` writes it).
    Relative paths start from ``base_dir``, which is for a JSON file its folder if nothing else is said.

    DeepSpeedConfigError: nothing is there, or the object is of a type whose weights are in a layout of their own.
    """
    if isinstance(checkpoint, str):
        path = Path(base_dir) / checkpoint
        plain = find_plain(path)
        if plain is not None:
            return [plain]
        if path.suffix == ".json" and path.is_file():
            return weight_files(json.loads(path.read_text()), base_dir or str(path.parent))
        raise DeepSpeedConfigError(
            f"checkpoint={str(path)!r}: neither weights (.safetensors, .bin, a folder of save_pretrained) nor a JSON "
            "file that lists them"
        )
    if isinstance(checkpoint, dict):
        kind = str(checkpoint.get("type", "")).lower()
        listed = checkpoint.get("checkpoints")
        if kind == "megatron" or isinstance(listed, dict) or listed is None:
            raise DeepSpeedConfigError(
                f"checkpoint: type {checkpoint.get('type')!r} with checkpoints of type {type(listed).__name__} cannot "
                "be read: give a list of files that hold whole weights under the model's names"
            )
        folder = checkpoint.get("base_dir") or base_dir
        return weight_files([listed] if isinstance(listed, str) else listed, folder)
    files = [Path(base_dir) / each for each in checkpoint]
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        raise DeepSpeedConfigError(f"checkpoint: {missing[0] if missing else 'the list is empty'}")
    return files


def load_weights(module: nn.Module, tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
    """Give ``module`` those of ``tensors`` (name, value) that it has, in its own dtypes. Names may lack, or have, that
    of the model without its head.

    DeepSpeedConfigError: a parameter or buffer has no values then, or a shape differs; ``source`` is named.
    """
    known = dict(_state(module))
    prefix = getattr(module, "base_model_prefix", "")
    found: dict[str, Tensor] = {}
    for given, value in tensors:
        names = (given, f"{prefix}.{given}", given.removeprefix(f"{prefix}."))
        name = next((each for each in names if each in known), None)
        if name is None:
            continue
        if known[name].shape != value.shape:
            raise DeepSpeedConfigError(
                f"{source}: {name} is {list(value.shape)}, the model's is {list(known[name].shape)}"
            )
        found[name] = value.to(known[name].dtype)
    module.load_state_dict(found, strict=False, assign=True)
    tie: Any = getattr(module, "tie_weights", None)
    if tie is not None:
        tie()
    empty = [name for name, each in _state(module) if each.is_meta]
    if empty:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise DeepSpeedConfigError(f"{source}: there are no values for {empty[0]}{more}")


def tensors_in(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """Name and value of all tensors, file by file."""
    for file in files:
        yield from tensors_of(file)


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers()
