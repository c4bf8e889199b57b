"""Export of weights: torch ``.bin`` files or safetensors, in shards, one tensor at a time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepspeed.checkpoint.files.archive_writer import ArchiveSink, LazyTensor, write_archive, write_errors_at
from deepspeed.checkpoint.files.flush import flush
from deepspeed.checkpoint.files.writers import replace_file, temporary_sibling

Weights = Mapping[str, Tensor | LazyTensor]

BIN_NAME = "pytorch_model.bin"
SAFETENSORS_NAME = "model.safetensors"
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save_weights(
    weights: Weights,
    folder: Path,
    *,
    aliases: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
    safetensors: bool = False,
    filename: str | None = None,
) -> list[Path]:
    """Write ``weights`` into ``folder``: one file, or shards of at most ``max_shard_size`` and an index of
    them.

    ``aliases`` (other name -> name in ``weights``) share their tensor: in ``.bin`` files it appears under both names;
    safetensors holds it once and lists the aliases in its metadata, as ``safetensors.torch.load_model`` expects. A
    tensor larger than a shard gets its own shard. Existing files of the same names are replaced.
    """
    filename = filename or (SAFETENSORS_NAME if safetensors else BIN_NAME)
    aliases = {alias: name for alias, name in (aliases or {}).items() if name in weights}
    primary = {name: tensor for name, tensor in weights.items() if name not in aliases}
    shards = _cut(primary, parse_size(max_shard_size) if max_shard_size is not None else None)
    with write_errors_at(folder):
        folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in _shard_names(filename, len(shards))]
    weight_map: dict[str, str] = {}
    for path, names in zip(paths, shards, strict=True):
        content = {name: primary[name] for name in names}
        inside = {alias: name for alias, name in aliases.items() if name in content}
        _write(path, content, inside, safetensors)
        weight_map.update(dict.fromkeys([*content, *(() if safetensors else inside)], path.name))
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in primary.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        path = folder / f"{filename}.index.json"
        replace_file(path, (json.dumps(index, indent=2) + "\n").encode())
        paths.append(path)
    return paths


def parse_size(size: int | str) -> int:
    """Return bytes of ``"5GB"``, ``"200MiB"`` or a number."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
    unit = _UNITS.get((match[2] or "B").upper()) if match else None
    if match is None or unit is None:
        raise ValueError(
            f"max_shard_size={size!r}: expected a size such as 5GB or 200MB, or a number of bytes"
        )
    return int(float(match[1]) * unit)


def write_safetensors(path: Path, weights: Weights, metadata: Mapping[str, str] | None = None) -> None:
    """Write the safetensors format: header length, JSON header, then the tensors' bytes.

    The library's `save_file` needs all tensors in memory; this one holds one at a time, which may be read from a
    checkpoint's shards on demand. The library validates the result by reading the header back: every dtype, shape and
    offset. ValueError: a dtype that the format or the installed library lacks.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    position = 0
    for name, tensor in weights.items():
        if tensor.dtype not in _SAFETENSORS_DTYPES:
            raise ValueError(
                f"{name} has dtype {tensor.dtype}, which safetensors does not support: export .bin files"
            )
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        sink = ArchiveSink(file)
        for tensor in weights.values():
            sink.write_tensor(tensor)
    try:
        with safe_open(path, framework="numpy") as file:
            complete = set(file.keys()) == set(weights)
    except SafetensorError as error:
        raise ValueError(f"the installed safetensors cannot read back {path}: {error}") from error
    assert complete, f"{path} lacks tensors"


def _write(
    path: Path, content: dict[str, Tensor | LazyTensor], aliases: dict[str, str], safetensors: bool
) -> None:
    written = temporary_sibling(path)
    try:
        with write_errors_at(path):
            if safetensors:
                write_safetensors(written, content, aliases)
            else:
                write_archive(
                    written, {**content, **{alias: content[name] for alias, name in aliases.items()}}
                )
            flush(written)
            os.replace(written, path)
    finally:
        written.unlink(missing_ok=True)


def _cut(weights: Weights, limit: int | None) -> list[list[str]]:
    """Return the names of each shard's weights."""
    shards: list[list[str]] = [[]]
    nbytes = 0
    for name, tensor in weights.items():
        if limit is not None and shards[-1] and nbytes + tensor.nbytes > limit:
            shards.append([])
            nbytes = 0
        shards[-1].append(name)
        nbytes += tensor.nbytes
    return shards


def _shard_names(filename: str, count: int) -> list[str]:
    if count == 1:
        return [filename]
    stem, dot, suffix = filename.rpartition(".")
    return [f"{stem}-{number + 1:05d}-of-{count:05d}{dot}{suffix}" for number in range(count)]
