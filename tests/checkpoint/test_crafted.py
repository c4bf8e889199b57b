"""Files that others have made execute nothing: checkpoints whose pickles call functions, configs and hostfiles with
commands for values."""

from __future__ import annotations

import json
import os
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import deepspeed
from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.files.archive_reader import read_archive
from deepspeed.checkpoint.files.safe_types import allowed_types
from deepspeed.checkpoint.names import CHECKSUMS, DS_CONFIG
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.tools.launcher.runner import fetch_hostfile
from deepspeed.tools.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.pool import distributed


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def start(stage: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": stage},
    }
    return deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)[0]


@pytest.mark.parametrize("kind", ["model", "optim"])
@pytest.mark.parametrize("stage", [1, 3])
@distributed(world_size=1)
def test_checkpoints(stage: int, kind: str, tmp_path: Path) -> None:
    engine = start(stage)
    engine.save_checkpoint(str(tmp_path), tag="one")
    (path,) = (tmp_path / "one").glob(f"*{kind}_states.pt")
    sprung = tmp_path / "sprung"
    torch.save({"module": Trap(sprung), "optimizer_state_dict": Trap(sprung)}, path)
    with pytest.raises(CheckpointError, match=path.name):
        engine.load_checkpoint(str(tmp_path), tag="one")
    with pytest.raises(CheckpointError, match=path.name):
        get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), tag="one")
    assert not sprung.exists()
    engine.destroy()


def test_compressed_files_are_refused(tmp_path: Path) -> None:
    """A few kB that would be 16 MB in memory."""
    plain, packed = tmp_path / "plain.pt", tmp_path / "packed.pt"
    torch.save({"module": torch.zeros(1 << 22)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for info in source.infolist():
            target.writestr(info.filename, source.read(info))
    assert packed.stat().st_size < 1 << 20
    plain.unlink()
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"packed\.pt is rejected: its member .* is compressed"):
        read_archive(packed)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


class Calls:
    """Unpickled, it is what ``function`` returns for ``arguments``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


HUGE = 1 << 40


@pytest.mark.parametrize(
    "value",
    [
        Calls(bytearray, HUGE),
        Calls(bytes, HUGE),
        Calls(list, range(HUGE)),
        Calls(list, range(1 << 30)),
        Calls(np.ndarray, (HUGE,)),
        Calls(np._core.multiarray._reconstruct, np.ndarray, (1 << 30,), b"d"),
    ],
)
def test_constructors_do_not_take_memory(value: Any, tmp_path: Path) -> None:
    torch.save({"module": value}, tmp_path / "f.pt")
    with pytest.raises(CheckpointError, match=r"f\.pt"):
        read_archive(tmp_path / "f.pt")


@distributed(world_size=1)
def test_an_index_names_files_of_its_own_folder(tmp_path: Path) -> None:
    engine = start(1)
    torch.save(engine.module.state_dict(), tmp_path / "elsewhere.bin")
    folder = tmp_path / "weights"
    (folder / "deep").mkdir(parents=True)
    torch.save(engine.module.state_dict(), folder / "deep/a.bin")
    index = folder / "pytorch_model.bin.index.json"
    for name, problem in (
        ("../elsewhere.bin", "outside its folder"),
        (str(tmp_path / "elsewhere.bin"), "outside its folder"),
        ("deep/../../elsewhere.bin", "outside its folder"),
        ("x" * 5000, "does not exist"),
        (3, "is not an index"),
    ):
        index.write_text(json.dumps({"weight_map": {"weight": name, "bias": name}}))
        with pytest.raises(CheckpointError, match=problem) as caught:
            engine.load_checkpoint(str(folder))
        assert len(str(caught.value)) < 400 + len(str(folder))
    index.write_text(json.dumps({"weight_map": {"weight": "deep/a.bin", "bias": "deep/a.bin"}}))
    assert engine.load_checkpoint(str(folder))[0] == str(folder)
    engine.destroy()


@distributed(world_size=1)
def test_tags_of_any_length(tmp_path: Path) -> None:
    """Including ``latest`` as a link to an unrelated file."""
    engine = start(1)
    for tag in ("x" * 300, "/".join(["y" * 200] * 30)):
        for call in (engine.load_checkpoint, engine.save_checkpoint):
            with pytest.raises(CheckpointError):
                call(str(tmp_path), tag=tag)
    secret = "token " + "s" * 200
    (tmp_path / "secret").write_text(secret)
    (tmp_path / "latest").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(str(tmp_path))
    assert secret[:40] in str(caught.value) and secret[:101] not in str(caught.value)
    engine.destroy()


def parts(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where to find everything in nested containers; of each list the first element."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:1])
        if isinstance(value, (list, tuple))
        else ()
    )
    for key, item in items:
        yield (*path, key)
        yield from parts(item, (*path, key))


def without(value: Any, path: tuple[Any, ...], put: Any) -> Any:
    """A copy with ``put`` at that place; nothing for ``...``."""
    items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    key, *rest = path
    if rest:
        items[key] = without(items[key], tuple(rest), put)
    elif put is ...:
        del items[key]
    else:
        items[key] = put
    return (
        items
        if isinstance(value, dict)
        else type(value)(items.values())
        if type(value) in (list, tuple)
        else tuple(items.values())
    )


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=1)
def test_whatever_is_missing_or_of_another_kind(stage: int, tmp_path: Path) -> None:
    """Loads, or is refused as a checkpoint; no bare KeyError."""
    engine = start(stage)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.save_checkpoint(str(tmp_path), tag="one")
    refused = 0
    for path in sorted((tmp_path / "one").glob("*.pt")):
        written = path.read_bytes()
        with allowed_types():
            content = {k: v for k, v in torch.load(path).items() if k not in (CHECKSUMS, DS_CONFIG)}
        for number, place in enumerate(parts(content)):
            torch.save(without(content, place, (..., None, "x", [1])[number % 4]), path)
            try:
                engine.load_checkpoint(str(tmp_path), tag="one")
            except CheckpointError:
                refused += 1
        path.write_bytes(written)
    assert refused > 20
    engine.load_checkpoint(str(tmp_path), tag="one")
    engine.destroy()


@pytest.mark.parametrize("text", ["$(mkdir {0})", "`mkdir {0}`", "__import__('os').mkdir('{0}')"])
def test_configs_and_hostfiles(text: str, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    value = text.format(sprung)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"train_batch_size": value, "optimizer": {"type": value}}))
    with pytest.raises(DeepSpeedConfigError):
        deepspeed.initialize(model=torch.nn.Linear(1, 1), config=str(config))
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{value} slots=2\n")
    with suppress(ValueError):  # a name without blanks may be taken; it is quoted wherever it goes
        assert fetch_hostfile(str(hosts)) == {value: 2}
    hosts.write_text(f"worker slots={value}\n")
    with pytest.raises(ValueError):
        fetch_hostfile(str(hosts))
    assert not sprung.exists()
