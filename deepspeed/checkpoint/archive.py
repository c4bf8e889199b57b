"""Files that ``torch.load`` reads, written straight from live tensors and read page by page.

``torch.save`` of a view writes all of the storage behind it, and cloning first doubles the memory. Here the
structure of the file is written first, with room left for the tensors (``torch.serialization.skip_data``),
and then each tensor's bytes go from where they lie into their place: nothing is copied, and the peak is one
chunk. Reading maps the file, so that only what is touched is read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, skip_data

from deepspeed.checkpoint.errors import CheckpointError, CheckpointNotFoundError
from deepspeed.checkpoint.safe_types import REDUCERS, allowed_types

CHUNK_BYTES = 1 << 20
"""What is summed and then written stays in the cache between the two."""

_LOCAL_HEADER_BYTES = 30
_WORDS = {1: np.uint8, 2: np.uint16}


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """Stands for a tensor whose values come, part by part, when its turn to be written comes.

    The parts have its dtype and as many elements together, in row-major order.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Checksum:
    """Sum of a tensor's elements, read as unsigned integers of their size (of 32 bits where they are larger), modulo
    2**32.

    It does not depend on how the tensor is cut: the sums of its parts add up to the sum of the whole, so readers that
    each load a part can verify it together. 32 bits, since wider sums take ten times as long.
    """

    MODULUS = 1 << 32

    def __init__(self) -> None:
        self.value = 0

    def add(self, data: np.ndarray, itemsize: int) -> None:
        """``data``: contiguous bytes, a whole number of elements of ``itemsize``."""
        word = _WORDS.get(itemsize, np.uint32)
        total = int(np.add.reduce(data.view(word), dtype=np.uint32)) if data.size else 0
        self.value = (self.value + total) % self.MODULUS


def checksum(tensor: Tensor) -> int:
    """The checksum of ``tensor``."""
    total = Checksum()
    for chunk in byte_chunks(tensor):
        total.add(chunk, tensor.dtype.itemsize)
    return total.value


def byte_chunks(tensor: Tensor) -> Iterator[np.ndarray]:
    """The bytes of ``tensor`` in row-major order, a few at a time, on the host; each valid until the next.

    Not through ``Tensor.numpy``, after which torch refuses to resize a storage, as releasing gathered weights does.
    """
    if not tensor.numel():
        return
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    for part in flat.split(max(1, CHUNK_BYTES // tensor.dtype.itemsize)):
        host = part.cpu().contiguous()
        memory: Any = (ctypes.c_ubyte * (host.numel() * host.element_size())).from_address(host.data_ptr())
        yield np.frombuffer(memory, dtype=np.uint8)


Sums = dict[int, list[int]]
"""Checksums of the tensors written, by ``id`` of the tensor: one for each part."""


def write_archive(
    path: Path, content: Any, sums: Sums | None = None, *, class_names: Mapping[type, str] | None = None
) -> int:
    """Write ``content`` so that ``torch.load(path, weights_only=True)`` gives it back.

    Tensors, however deep inside, are written as CPU tensors of their own size; those that share memory
    completely (tied weights) are written once and are shared again when loaded. ``LazyTensor`` is written as
    the tensor that its parts make up. ``sums`` receives each tensor's checksums as soon as it is written, so
    that a ``LazyTensor`` that comes later can hold them. ``class_names``: full names under which a reader knows the
    classes of objects in ``content``, where they differ from ours. Returns the number of bytes of the file.
    CheckpointError: a class that cannot be loaded safely (nothing but a torso is left at ``path`` then).
    OSError: the file system refused.
    """
    plan = _Plan(class_names or {})
    _write_structure(path, content, plan)
    refuse_unsafe(path, content)
    sums = {} if sums is None else sums
    with open(path, "r+b", buffering=0) as file:
        sink = Sink(file)
        for (offset, nbytes), tensor in zip(_records(path, plan.tensors), plan.tensors, strict=True):
            own = sums[id(tensor)] = _write_tensor(sink, offset, nbytes, tensor)
            for alias in plan.aliases.get(id(tensor), ()):
                sums[alias] = own
        return os.fstat(file.fileno()).st_size


def refuse_unsafe(path: Path, content: Any) -> None:
    """Raise CheckpointError if ``path`` needs a class that ``weights_only=True`` does not load."""
    if not get_unsafe_globals_in_checkpoint(path):
        return  # nothing but what torch itself allows
    with allowed_types():
        unsafe = get_unsafe_globals_in_checkpoint(path)
    if not unsafe:
        try:
            read_archive(path)
        except CheckpointError as error:
            raise CheckpointError(f"the state to save could not be loaded again: {error}") from error
        return
    where = ""
    if isinstance(content, dict):
        keys = [repr(key) for key, value in content.items() if _needs(value, unsafe)]
        where = f" under {', '.join(keys)}" if keys else ""
    raise CheckpointError(
        f"the state to save holds {', '.join(sorted(unsafe)[:5])}{where}. Checkpoints are loaded with "
        "weights_only=True, which makes no objects of unknown classes: save plain data instead, or allow the class "
        "with torch.serialization.add_safe_globals([...]) before saving and before loading."
    )


def read_archive(path: Path) -> Any:
    """The content of a file; its tensors are mapped from it and cost nothing until they are read.

    CheckpointError names the file when it is missing, truncated, not an archive, or holds unknown classes. Its
    structure is verified here, by the archive's own checksum; tensors have checksums of their own.
    """
    try:
        _verify_structure(path)
        with allowed_types():
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{path} does not exist") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(_unreadable(path, error)) from error
    except _DAMAGE as error:
        raise CheckpointError(_damaged(path, error)) from error


_DAMAGE = (
    RuntimeError,
    OSError,
    EOFError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    zipfile.BadZipFile,
)
"""What reading a file that is not as it was written may end in."""


def _verify_structure(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.filename.endswith("/data.pkl"):
                archive.read(info)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an operating system's error while writing ``path`` the words that help."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error.strerror or error}{_space_left(path, error)}"
        ) from error


def _write_structure(path: Path, content: Any, plan: _Plan) -> None:
    """The file with room for its tensors. OSError, where torch's writer has a RuntimeError that does not say why."""
    try:
        with allowed_types(), skip_data():
            torch.save(content, path, pickle_module=plan)  # pyright: ignore[reportArgumentType]
    except RuntimeError:
        with open(path, "ab", buffering=0) as file:  # fails again if the system is the reason
            file.write(bytes(1 << 16))
            file.truncate(sum(prod(tensor.shape) * tensor.dtype.itemsize for tensor in plan.tensors))
        raise


class _Plan:
    """Passed to ``torch.save`` as its pickle module: puts empty stand-ins in the place of tensors and notes
    them."""

    def __init__(self, class_names: Mapping[type, str]) -> None:
        self.tensors: list[Tensor | LazyTensor] = []
        self.aliases: dict[int, list[int]] = {}
        self._regions: dict[torch.dtype, mmap.mmap] = {}
        self._stand_ins: dict[Any, tuple[Tensor, Tensor | LazyTensor]] = {}
        self._made: set[int] = set()
        plan = self

        class Pickler(_renaming(class_names)):
            def reducer_override(self, obj: Any) -> Any:
                if isinstance(obj, LazyTensor) or plan.is_plain(obj):
                    return plan.stand_in(obj).__reduce_ex__(2)
                if type(obj) in REDUCERS:
                    return REDUCERS[type(obj)](obj)
                return NotImplemented

        self.Pickler = Pickler
        self.__name__ = pickle.__name__

    def is_plain(self, value: Any) -> bool:
        """A strided tensor with memory of its own; others reduce themselves to such ones."""
        return (
            isinstance(value, Tensor)
            and type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
            and value.layout == torch.strided
            and not value.is_quantized
            and value.device.type != "meta"
            and id(value) not in self._made
        )

    def stand_in(self, value: Tensor | LazyTensor) -> Tensor:
        """An untouched tensor with a storage of exactly the right size: address space, not memory."""
        key = _memory(value)
        if key in self._stand_ins:
            tensor, original = self._stand_ins[key]
            if original is not value:
                self.aliases.setdefault(id(original), []).append(id(value))
            return tensor
        count = prod(value.shape)
        if count:
            region = self._region(value.dtype, count * value.dtype.itemsize)
            tensor = torch.frombuffer(region, dtype=value.dtype, count=count).view(value.shape)
        else:
            tensor = torch.empty(tuple(value.shape), dtype=value.dtype)
        self.tensors.append(value)
        self._made.add(id(tensor))
        self._stand_ins[key] = (tensor, value)
        return tensor

    def _region(self, dtype: torch.dtype, nbytes: int) -> mmap.mmap:
        """Anonymous memory that nobody touches; one per dtype, since torch refuses one address in two
        dtypes."""
        region = self._regions.get(dtype)
        if region is None or len(region) < nbytes:
            region = self._regions[dtype] = mmap.mmap(-1, nbytes)
        return region


def _renaming(class_names: Mapping[type, str]) -> Any:
    """A pickler that calls these classes by other names, which need not exist here; the fast one without any."""
    if not class_names:
        return pickle.Pickler

    in_python: Any = pickle._Pickler  # pyright: ignore[reportAttributeAccessIssue] - the one that can be extended

    class Renaming(in_python):
        def save_global(self, obj: Any, name: str | None = None) -> None:
            if isinstance(obj, type) and obj in class_names:
                module, _, own = class_names[obj].rpartition(".")
                self.write(pickle.GLOBAL + f"{module}\n{own}\n".encode())
                self.memoize(obj)
            else:
                super().save_global(obj, name)

    return Renaming


def _memory(value: Tensor | LazyTensor) -> Any:
    """Equal for tensors that are the same memory in the same shape."""
    if isinstance(value, LazyTensor) or not value.numel():
        return id(value)
    return (value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride())


def _records(path: Path, tensors: list[Tensor | LazyTensor]) -> list[tuple[int, int]]:
    """Offset and size of each tensor's bytes in the file, in the order in which torch numbered them."""
    found: dict[int, tuple[int, int]] = {}
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        for info in archive.infolist():
            folder, _, number = info.filename.rpartition("/")
            if folder.endswith("/data") and number.isdigit():
                file.seek(info.header_offset)
                header = file.read(_LOCAL_HEADER_BYTES)
                name_bytes, extra_bytes = (
                    int.from_bytes(header[26:28], "little"),
                    int.from_bytes(header[28:], "little"),
                )
                found[int(number)] = (
                    info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes,
                    info.file_size,
                )
    sizes = [prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors]
    if [found[number][1] for number in sorted(found)] != sizes:
        raise CheckpointError(f"{path}: the state holds bare storages; save tensors instead")
    return [found[number] for number in sorted(found)]


def _write_tensor(sink: Sink, offset: int, nbytes: int, value: Tensor | LazyTensor) -> list[int]:
    sink.file.seek(offset)
    sums = sink.write_tensor(value)
    assert sink.file.tell() == offset + nbytes, (
        f"the parts of a tensor have {sink.file.tell() - offset} bytes, not {nbytes}"
    )
    return sums


class Sink:
    """An unbuffered file, open for writing, that takes whole tensors."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write_tensor(self, value: Tensor | LazyTensor) -> list[int]:
        """Returns the checksum of each part. No part is alive any more when the next one is made."""
        parts = iter(value.parts() if isinstance(value, LazyTensor) else (value,))
        sums: list[int] = []
        while (part := next(parts, None)) is not None:
            sums.append(self._write_part(part))
            del part
        return sums

    def _write_part(self, part: Tensor) -> int:
        total = Checksum()
        for chunk in byte_chunks(part):
            total.add(chunk, part.dtype.itemsize)
            self.write(chunk)
        return total.value

    def write(self, chunk: np.ndarray) -> None:
        left = memoryview(chunk)  # type: ignore[arg-type]  # numpy arrays are buffers
        while left:
            left = left[self.file.write(left) :]


def _needs(value: Any, classes: list[str]) -> bool:
    """Whether pickling ``value`` alone names one of ``classes``."""
    names: set[str] = set()

    class Spy(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, (Tensor, LazyTensor)):
                return int, ()
            cls = obj if isinstance(obj, type) else type(obj)
            names.add(f"{cls.__module__}.{cls.__name__}")
            if callable(obj):
                names.add(f"{getattr(obj, '__module__', '')}.{getattr(obj, '__name__', '')}")
            return NotImplemented

    with open(os.devnull, "wb") as sink:
        Spy(sink, protocol=2).dump(value)
    return not names.isdisjoint(classes)


def _unreadable(path: Path, error: Exception) -> str:
    text = str(error)
    found = re.search(r"GLOBAL (\S+)", text) or re.search(r"add_safe_globals\(\[(\S+?)\]\)", text)
    if found:
        return (
            f"{path} holds an object of the class {found[1]}, which is not loaded by default. If you trust the file, "
            "allow the class with torch.serialization.add_safe_globals([...]) before loading."
        )
    detail = text.partition("WeightsUnpickler error:")[2].strip()
    return _damaged(path, pickle.UnpicklingError(detail) if detail else error)


def _damaged(path: Path, error: Exception) -> str:
    size = path.stat().st_size if path.exists() else 0
    if isinstance(error, zipfile.BadZipFile) and "CRC" not in str(error):
        return f"{path} ({size} bytes) is truncated or not a checkpoint file"
    detail = (str(error) or type(error).__name__).splitlines()[0][:200]
    return f"{path} ({size} bytes) is damaged: {detail}"


def _space_left(path: Path, error: Exception) -> str:
    try:
        stat = os.statvfs(path.parent)
    except (OSError, AttributeError):
        return f" ({path.parent} is gone)" if not path.parent.exists() else ""
    free = stat.f_bavail * stat.f_frsize
    return f" ({free / 2**20:.0f} MiB free in {path.parent})"
