"""Convert the weights of a Transformers checkpoint to a universal checkpoint without optimizer state.

    python -m deepspeed.tools.hf_to_universal --hf_checkpoint_dir gpt2/ --save_dir checkpoints/gpt2

``load_checkpoint`` reads the Transformers folder directly; this is for tools that read the universal layout
(``universal_format``), which find weights by the names of the model. If Transformers is installed and the folder has
the model's ``config.json``, names and tensors are those that ``from_pretrained`` would load. Floating-point tensors are
stored in fp32.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from deepspeed.base.tool_arguments import add_options, takes
from deepspeed.checkpoint.constants import CAT_DIM, PARAM
from deepspeed.checkpoint.errors import CheckpointNotFoundError
from deepspeed.checkpoint.files.archive_writer import write_errors_at
from deepspeed.checkpoint.files.writers import StagedFolder, putting_in_place
from deepspeed.checkpoint.foreign.hub_weights import converted_tensors, model_described_in
from deepspeed.checkpoint.foreign.plain_weights import find_plain, tensors_of
from deepspeed.checkpoint.foreign.universal_export import write_value
from deepspeed.checkpoint.foreign.universal_format import FOLDER
from deepspeed.checkpoint.names import LATEST_UNIVERSAL, SAVED_BY
from deepspeed.checkpoint.save_ids import new_id, save_entry
from deepspeed.checkpoint.state import MASTER


def convert(
    hf_checkpoint_dir: str | os.PathLike[str],
    save_dir: str | os.PathLike[str],
    *,
    safe_serialization: bool = False,
) -> Path:
    """Write the weights in ``hf_checkpoint_dir``, one file in memory at a time, to ``save_dir``, and that folder's name
    to ``latest_universal`` next to it; return the folder, which appears only once it is complete.

    ``safe_serialization``: accept only ``.safetensors`` files, which are preferred anyway. CheckpointNotFoundError:
    there are no (such) weights.
    """
    source, target = _weights_in(Path(hf_checkpoint_dir), safe_serialization), Path(os.path.abspath(save_dir))
    staged = StagedFolder(target.parent, target.name, exclusive=False)
    with putting_in_place(staged, LATEST_UNIVERSAL):
        _write(source, Path(hf_checkpoint_dir), staged.staging / FOLDER)
    return staged.final


def _weights_in(folder: Path, safe_serialization: bool) -> Path:
    found = find_plain(folder)
    if found is None or (safe_serialization and ".safetensors" not in found.suffixes):
        kind = ".safetensors files" if safe_serialization else "weights (.safetensors or .bin files)"
        raise CheckpointNotFoundError(
            f"{folder} holds no {kind} as Transformers' save_pretrained writes them"
        )
    return found


def _write(source: Path, described: Path, folder: Path) -> None:
    folder.mkdir()
    save = {SAVED_BY: save_entry(new_id(), 0)}
    for name, value in _named_as_in_model(source, described):
        made = folder / name
        with write_errors_at(made):
            made.mkdir()
        whole = value.float() if value.is_floating_point() else value
        write_value(made, MASTER, {PARAM: whole, CAT_DIM: 0}, save)


def _named_as_in_model(source: Path, described: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of ``source`` under the names and in the form of the model that the config in ``described``
    defines; unchanged if there is no config or Transformers does not know the model."""
    module = model_described_in(described)
    return tensors_of(source) if module is None else converted_tensors(module, tensors_of(source))


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Convert a Transformers checkpoint to a universal checkpoint."
    )
    options = {
        "--hf_checkpoint_dir": takes("folder with the model's weights", required=True),
        "--save_dir": takes("folder for the universal checkpoint", required=True),
        "--safe_serialization": "reject weights other than .safetensors files",
        "--num_workers": takes("accepted, no effect: files are converted in order", 4),
    }
    given = add_options(parser, options).parse_args(args)
    folder = convert(given.hf_checkpoint_dir, given.save_dir, safe_serialization=given.safe_serialization)
    print(f"wrote the universal checkpoint {folder}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"hf_to_universal: {error}")
    except KeyboardInterrupt:
        sys.exit("hf_to_universal: interrupted; nothing was written")
