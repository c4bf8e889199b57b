#!/usr/bin/env python
"""Convert a checkpoint to plain fp32 weights that load without this package.

    ./zero_to_fp32.py . out/                      # in a folder of checkpoints: the one that "latest" names
    ./zero_to_fp32.py . out/ --safe_serialization --max_shard_size 2GB

A copy of this file is stored next to every checkpoint; it needs the installed package.
"""

from __future__ import annotations

import argparse
import glob
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.tool_arguments import add_options, takes
from deepspeed.checkpoint.consolidate import consolidate, materialize, resolve_folder
from deepspeed.checkpoint.errors import CheckpointNotFoundError
from deepspeed.checkpoint.export import save_weights
from deepspeed.checkpoint.files.archive_writer import LazyTensor
from deepspeed.checkpoint.names import is_url
from deepspeed.checkpoint.renaming import renaming

OUTPUT_DTYPE_NAMES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}
"""Dtypes of exports, by name."""


class GatheredTensor:
    """A placeholder for a tensor that ``contiguous()`` gathers from its shards."""

    def __init__(self, lazy: LazyTensor) -> None:
        self._lazy = lazy
        self.shape = torch.Size(lazy.shape)
        self.dtype = lazy.dtype

    def contiguous(self) -> Tensor:
        return materialize(self._lazy)


def to_torch_tensor(
    state_dict: dict[str, Any], return_empty_tensor: bool = False, dtype: torch.dtype | str | None = None
) -> OrderedDict[str, Tensor]:
    """Replace the placeholders of ``lazy_mode`` by tensors; tied ones share memory.

    ``return_empty_tensor`` gives uninitialised tensors of the right shape, to determine sizes. ``dtype``: dtype of the
    floating-point tensors, a torch dtype or a name in ``OUTPUT_DTYPE_NAMES``; None leaves them unchanged.
    """
    wanted = None if dtype is None else _output_dtype(dtype)
    made: dict[int, Tensor] = {}
    result: OrderedDict[str, Tensor] = OrderedDict()
    for name, value in state_dict.items():
        if id(value) not in made:
            kept = wanted if wanted is not None and value.dtype.is_floating_point else value.dtype
            empty = torch.empty(value.shape, dtype=kept) if return_empty_tensor else None
            made[id(value)] = empty if empty is not None else value.contiguous().to(kept)
        result[name] = made[id(value)]
    return result


def _output_dtype(dtype: torch.dtype | str) -> torch.dtype:
    found = OUTPUT_DTYPE_NAMES.get(dtype.removeprefix("torch.").lower()) if isinstance(dtype, str) else dtype
    if found is None or found not in OUTPUT_DTYPE_NAMES.values():
        raise ValueError(f"Unsupported output dtype {dtype!r}: use one of {', '.join(OUTPUT_DTYPE_NAMES)}")
    return found


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> OrderedDict[str, Any]:
    """Return the full fp32 state dict on the CPU, for ``model.load_state_dict``.

    ``checkpoint_dir`` may be a URL. ``tag`` defaults to the one that ``latest`` names (FileNotFoundError, also a
    ValueError, if there is none). ``lazy_mode`` gives ``GatheredTensor`` placeholders, so that one tensor is in memory
    at a time.
    """
    folder = os.fspath(checkpoint_dir)
    if is_url(folder):
        from deepspeed.checkpoint.remote.mirror import local_copy

        folder = local_copy(folder, tag)
    whole = consolidate(resolve_folder(Path(folder), tag), exclude_frozen=exclude_frozen_parameters)
    return whole.mapped(GatheredTensor if lazy_mode else materialize)  # pyright: ignore[reportArgumentType]


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights to ``output_dir``: ``pytorch_model.bin`` or ``model.safetensors``, in several files with an
    index if they exceed ``max_shard_size``. Holds one tensor in memory at a time.

    Floating-point tensors are written as ``dtype``: float32, float16 or bfloat16, or one of their names. With float32,
    tensors that the fp32 state dict holds in 16 bits keep their dtype.
    """
    wanted = _output_dtype(dtype)
    state = get_fp32_state_dict_from_zero_checkpoint(
        checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode=True
    )
    first: dict[int, str] = {}  # tied weights are one object
    for name, value in state.items():
        first.setdefault(id(value), name)
    save_weights(
        {name: _written(state[name], wanted) for name in first.values()},
        Path(output_dir),
        aliases={name: first[id(value)] for name, value in state.items() if first[id(value)] != name},
        max_shard_size=max_shard_size,
        safetensors=safe_serialization,
    )


def _written(value: GatheredTensor | Tensor, dtype: torch.dtype) -> LazyTensor:
    """Return the tensor in the export's dtype, read only when it is written. 16-bit tensors of the fp32 state dict
    (buffers of 16-bit models) are not widened."""
    kept = dtype if value.dtype.is_floating_point and dtype is not torch.float32 else value.dtype
    return LazyTensor(tuple(value.shape), kept, lambda: (value.contiguous().to(kept),))


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 weights, as ``convert_zero_checkpoint_to_state_dict`` does."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir,
        output_dir,
        torch.float32,
        max_shard_size,
        safe_serialization,
        tag,
        exclude_frozen_parameters,
    )


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Move ``model`` to the CPU, load the fp32 weights into it with ``strict=False``, and return it. It may be wrapped
    differently from the saved model (``torch.compile``)."""
    model = model.cpu()
    saved = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    rename = renaming(saved, model.state_dict(), "") or str
    model.load_state_dict({rename(name): value for name, value in saved.items()}, strict=False)
    return model


def get_model_state_file(checkpoint_dir: str, zero_stage: int) -> str:
    """Return the path of rank 0's model states. FileNotFoundError: there is no such file."""
    if not os.path.isdir(checkpoint_dir):
        raise CheckpointNotFoundError(f"the folder {checkpoint_dir} does not exist")
    name = "mp_rank_00_model_states.pt" if zero_stage <= 2 else "zero_pp_rank_0_mp_rank_00_model_states.pt"
    file = os.path.join(checkpoint_dir, name)
    if not os.path.exists(file):
        raise CheckpointNotFoundError(f"{file} does not exist")
    return file


def get_checkpoint_files(checkpoint_dir: str, glob_pattern: str) -> list[str]:
    """Return the matching files in natural order. FileNotFoundError if there is none."""
    files = sorted(glob.glob(os.path.join(checkpoint_dir, glob_pattern)), key=natural_keys)
    if not files:
        raise CheckpointNotFoundError(f"no {glob_pattern} in {checkpoint_dir}")
    return files


def get_optim_files(checkpoint_dir: str) -> list[str]:
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: str) -> list[str]:
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def atoi(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def natural_keys(text: str) -> list[int | str]:
    """Return a sort key that puts ``rank_10`` after ``rank_9``."""
    return [atoi(part) for part in re.split(r"(\d+)", text)]


def command_parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of this command and of ``zero_to_torch.py``."""
    parser = argparse.ArgumentParser(description=description)
    options = {
        "checkpoint_dir": "checkpoint folder that contains the file 'latest'",
        "output_dir": "folder for the weights",
        "--max_shard_size": takes("size limit of each file, such as 5GB or 200MB", "5GB"),
        "--safe_serialization": "write safetensors instead of torch files",
        "-t --tag": takes(
            "checkpoint to convert, such as global_step100 (default: the one named in 'latest')"
        ),
        "--exclude_frozen_parameters": "write only trained parameters",
        "-d --debug": "show tracebacks",
    }
    return add_options(parser, options)


def run_command(
    parser: argparse.ArgumentParser, args: Sequence[str] | None, convert: Callable[..., None], name: str
) -> None:
    """Run ``convert`` with the command line's arguments; print errors without a traceback, unless ``--debug`` is
    set."""
    given = vars(parser.parse_args(args))
    debug, folder, output = (given.pop(key) for key in ("debug", "checkpoint_dir", "output_dir"))
    try:
        convert(folder, output, **given)
    except ValueError as error:
        if debug:
            raise
        parser.exit(1, f"{name}: {error}\n")
    print(f"wrote the weights of {folder} to {output}")


def main(args: Sequence[str] | None = None) -> None:
    parser = command_parser("Write the fp32 weights of a checkpoint as plain files.")
    run_command(parser, args, convert_zero_checkpoint_to_fp32_state_dict, "zero_to_fp32")


if __name__ == "__main__":
    main()
