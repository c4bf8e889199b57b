"""Load the weights of a model that was built on the meta device, from the files that a config names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from deepspeed.base.tables import first_of
from deepspeed.checkpoint.consolidate import consolidate, materialize, resolve_folder
from deepspeed.checkpoint.contents import shared_names
from deepspeed.checkpoint.files.tags import read_latest
from deepspeed.checkpoint.foreign.hub_weights import compute_buffers, converted_tensors
from deepspeed.checkpoint.foreign.megatron import MegatronSDLoader
from deepspeed.checkpoint.foreign.packed_weights import (
    GroupedIntegers,
    PackedWeightsError,
    method_of,
    unpacked,
)
from deepspeed.checkpoint.foreign.plain_weights import find_plain, tensors_of
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.inference.split.rank_files import DESCRIPTION, whole_tensors

Checkpoint = str | dict[str, Any] | Sequence[str]


def checkpoint_tensors(checkpoint: Checkpoint, base_dir: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (name, value) of the whole weights that ``checkpoint`` names:

    - a list of files with whole weights;
    - an object {"type", "checkpoints", "version", "base_dir"}: such a list; for the type "Megatron" the files of the
      tensor-parallel ranks, in rank order; or the description that ``save_mp_checkpoint_path`` wrote;
    - a JSON file with such an object, or with a list;
    - the weights themselves: a file, or a folder of such files, written by ``save_pretrained``,
      ``save_mp_checkpoint_path`` or ``engine.save_checkpoint`` (its latest checkpoint, in fp32).

    Relative paths start from ``base_dir``, which defaults to the folder of a JSON file.

    DeepSpeedConfigError: there is no such file, or its format cannot be read.
    """
    if isinstance(checkpoint, str):
        return _from_path(Path(base_dir) / checkpoint, base_dir)
    if not isinstance(checkpoint, dict):
        return tensors_in(_files(checkpoint, base_dir))
    listed = checkpoint.get("checkpoints")
    if listed is None:
        raise DeepSpeedConfigError(
            f"checkpoint has the keys {sorted(checkpoint)}, but needs 'checkpoints', a list of files"
        )
    folder = str(checkpoint.get("base_dir") or base_dir)
    if isinstance(listed, dict):
        return whole_tensors(_parts(listed, folder, base_dir))
    files = _files([listed] if isinstance(listed, str) else listed, folder)
    if str(checkpoint.get("type", "")).lower() == "megatron":
        return _merged(files, checkpoint.get("version"))
    return tensors_in(files)


def _from_path(path: Path, base_dir: str) -> Iterator[tuple[str, Tensor]]:
    plain = path if path.is_file() and path.suffix != ".json" else find_plain(path)
    if plain is not None:
        return tensors_in([plain])
    if (path / DESCRIPTION).is_file():
        path = path / DESCRIPTION
    elif path.is_dir() and read_latest(path) is not None:
        return iter(consolidate(resolve_folder(path, None)).mapped(materialize).items())
    elif files := sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin")):
        return tensors_in(files)
    if path.suffix != ".json" or not path.is_file():
        raise DeepSpeedConfigError(
            f"checkpoint={str(path)!r}: neither weights (a file, or a folder of .safetensors or .bin files) "
            "nor a JSON file listing them"
        )
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DeepSpeedConfigError(f"checkpoint={str(path)!r} is not JSON: {error}") from error
    return checkpoint_tensors(described, base_dir or str(path.parent))


def _files(listed: Sequence[str], folder: str) -> list[Path]:
    files = [Path(folder) / each for each in listed]
    missing = [str(file) for file in files if not file.is_file()]
    if missing or not files:
        raise DeepSpeedConfigError(
            f"checkpoint: {f'there is no file {missing[0]}' if missing else 'the list is empty'}"
        )
    return files


def _parts(listed: dict[str, Any], folder: str, beside: str) -> list[Path]:
    """Return the rank files: next to the description if all are there (the folder was moved), else in ``folder``."""
    names = [name for key in ("non_tp", "tp") for name in listed.get(key, ())]
    if beside and all((Path(beside) / name).is_file() for name in names):
        folder = beside
    return _files(names, folder)


def _merged(files: Sequence[Path], version: float | None) -> Iterator[tuple[str, Tensor]]:
    """Yield merged tensors of Megatron files, one per tensor-parallel rank."""
    loader = MegatronSDLoader([str(file) for file in files], version, None)
    try:
        _, state, _ = loader.load(1, 0)
    except (ValueError, KeyError) as error:
        raise DeepSpeedConfigError(f"checkpoint of type 'Megatron': {error}") from error
    yield from _flat(loader.get_module(state), "")


def _flat(state: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    for name, value in state.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")


def load_weights(
    module: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    source: str,
    *,
    cast: bool = True,
    keep: Callable[[nn.Module, str, GroupedIntegers], bool] | None = None,
) -> None:
    """Load those of ``tensors`` (name, value) that ``module`` has, cast to its dtypes, or (``cast=False``) in the
    file's dtypes, possibly still memory-mapped. Names may lack or carry the prefix of the model without its head; names
    of a Transformers model may be those of its files (`checkpoint/foreign/hub_weights.py`). Buffers that no file holds,
    such as rotary frequencies, are computed as Transformers does. Packed low-bit weights
    (`checkpoint/foreign/packed_weights.py`) are dequantized, unless ``keep`` (module, name of the weight, packed
    weight) installs them in the module and returns True.

    DeepSpeedConfigError, naming ``source``: a parameter or buffer gets no values, a shape differs, or weights are
    packed in an unknown layout.
    """
    known = dict(_state(module))
    prefix = getattr(module, "base_model_prefix", "")
    found: dict[str, Tensor] = {}
    for given, value in converted_tensors(module, _whole(module, tensors, source, keep)):
        names = (given, f"{prefix}.{given}", given.removeprefix(f"{prefix}."))
        name = next((each for each in names if each in known), None)
        if name is None:
            continue
        if known[name].shape != value.shape:
            raise DeepSpeedConfigError(
                f"{source}: {name} is {list(value.shape)}, but the model has {list(known[name].shape)}"
            )
        found[name] = value.to(known[name].dtype) if cast else value
    for alias, name in shared_names(module).items():  # the file may use either name of a shared weight
        present, absent = (name, alias) if name in found else (alias, name)
        if present in found:
            found.setdefault(absent, found[present])
    module.load_state_dict(found, strict=False, assign=True)
    tie: Any = getattr(module, "tie_weights", None)
    if tie is not None:
        tie()
    if any(each.is_meta for each in module.buffers()):
        compute_buffers(module)
    ignored = getattr(module, "_keys_to_ignore_on_load_missing", None) or ()
    empty = [
        name
        for name, each in _state(module)
        if each.is_meta
        or (
            isinstance(each, nn.Parameter)
            and each is known.get(name)  # neither loaded, nor tied, nor kept packed
            and not any(re.search(pattern, name) for pattern in ignored)
        )
    ]
    if empty:
        raise DeepSpeedConfigError(f"{source}: no values for {first_of(empty)}")


def _whole(
    module: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    source: str,
    keep: Callable[[nn.Module, str, GroupedIntegers], bool] | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``tensors``, unpacked if the model's config has a ``quantization_config``, which is then deleted."""
    config: Any = getattr(module, "config", None)
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        yield from tensors
        return
    try:
        for name, value in unpacked(tensors, quantization):
            if isinstance(value, Tensor):
                yield name, value
            elif keep is None or not keep(module, name, value):
                yield name, value.dequantized()
    except PackedWeightsError as error:
        raise DeepSpeedConfigError(
            f"{source}: its quantization_config declares {method_of(quantization)} weights: {error}; load "
            "them with from_pretrained, if Transformers supports them here, and pass the model"
        ) from error
    del config.quantization_config


def tensors_in(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, value) of all tensors, file by file."""
    for file in files:
        yield from tensors_of(file)


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers()
