"""Write files that ``torch.load`` can read, directly from live tensors.

``torch.save`` of a view writes its whole storage, and cloning first doubles the memory. Here the structure of the
file is written first, with space reserved for the tensors (``torch.serialization.skip_data``), and then each tensor's
bytes are written there straight from its memory: nothing is copied, and the peak is one chunk.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, _weights_only_unpickler
from torch._utils import _rebuild_parameter
from torch.serialization import get_unsafe_globals_in_checkpoint, skip_data

from deepspeed.checkpoint.errors import CheckpointError
from deepspeed.checkpoint.files.archive_reader import DAMAGE, NOTE, read_archive, tensor_records
from deepspeed.checkpoint.files.hashing import BlockHasher, byte_chunks, count_blocks
from deepspeed.checkpoint.files.round_trip import difference, failing_part, is_plain, is_strided, readable
from deepspeed.checkpoint.files.safe_types import allowed_types, reduced, trusts_files
from deepspeed.checkpoint.names import CHECKSUMS


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor whose values are produced part by part when it is written.

    Its parts have its dtype and add up to its elements, in row-major order.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Callable[[], Iterable[Tensor]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


_HASH_TABLE = LazyTensor((0,), torch.int32, lambda: ())
"""Placeholder for the hashes of all tensors before it; its length is known once the rest is pickled."""


def write_archive(
    path: Path,
    content: Any,
    *,
    checksums: bool = False,
    class_names: Mapping[type, str] | None = None,
    note: Mapping[str, Any] | None = None,
) -> int:
    """Write ``content`` so that ``torch.load(path, weights_only=True)`` gives it back.

    Tensors at any depth are written as CPU tensors of their own size, without the rest of their storage; those that
    share memory completely (tied weights) are written once and are shared again when loaded. ``LazyTensor`` is
    written as the tensor that its parts form. ``checksums`` adds the hashes of all of them to ``content``, a dict,
    under the key ``CHECKSUMS``, for ``open_archive``. ``class_names``: qualified names to pickle for classes of
    objects in ``content``, where the reader's differ from ours. ``note``: plain metadata for ``open_archive``, which
    ``torch.load`` ignores. Returns the file's size in bytes. CheckpointError: a class that cannot be loaded safely
    (an incomplete file is left at ``path``). OSError: a write failed.
    """
    plan = _StandInPickle(class_names or {})
    _write_structure(path, {**content, CHECKSUMS: _HASH_TABLE} if checksums else content, plan)
    if note:
        _append_note(path, note)
    _check_loadable(path, content, compare=not class_names)
    with open(path, "r+b", buffering=0) as file, closing(BlockHasher()) as hasher:
        sink = ArchiveSink(file, hasher if checksums else None)
        for (offset, nbytes), tensor in zip(_records(path, plan.tensors), plan.tensors, strict=True):
            _write_tensor(sink, offset, nbytes, plan.table(hasher) if tensor is _HASH_TABLE else tensor)
        return os.fstat(file.fileno()).st_size


def _check_loadable(path: Path, content: Any, *, compare: bool) -> None:
    """Raise CheckpointError, naming the keys, if the structure at ``path`` needs a class that ``weights_only=True``
    rejects, or would not load back equal to ``content``. Nothing is checked if all classes are trusted."""
    if trusts_files() or is_plain(content, LazyTensor):
        return
    if unsafe := _unsafe_classes(path):
        raise CheckpointError(
            f"the state to save holds {', '.join(sorted(unsafe)[:5])}{_under(content, lambda v: _needs(v, unsafe))}. "
            "Checkpoints are loaded with weights_only=True, which refuses unknown classes: save plain data instead, "
            "or allow the class with torch.serialization.add_safe_globals([...]) before saving and before loading, "
            "or, if all loaded files can be trusted, allow all classes with the environment variable "
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1."
        )
    if not compare or _is_state_dict(content):
        return
    try:
        loaded = read_archive(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"the state to save could not be loaded back{_under(content, _fails_to_load)}: "
            f"{str(error).rpartition('damaged: ')[2]}"
        ) from error
    found = difference(content, loaded, LazyTensor)
    if found is not None:
        where, problem = found
        raise CheckpointError(f"the state to save would change on loading: {readable(where)} {problem}")


def _is_state_dict(content: Any) -> bool:
    """Return whether ``content`` is a flat state dict, which needs no comparison."""
    return isinstance(content, dict) and all(
        isinstance(name, str) and isinstance(value, (Tensor, LazyTensor)) for name, value in content.items()
    )


def _unsafe_classes(path: Path) -> list[str]:
    """Return the names of classes that are not allowed; empty if unpickling fails earlier."""
    with suppress(pickle.UnpicklingError), allowed_types():
        return get_unsafe_globals_in_checkpoint(path)
    return []


def _under(content: Any, fails: Callable[[Any], bool]) -> str:
    where = failing_part(content, fails)
    return f" under {where}" if where else ""


@contextmanager
def write_errors_at(path: Path) -> Iterator[None]:
    """Turn an OSError while writing ``path`` into a CheckpointError with the path and the free space."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}{_space_left(path)}") from error


def _write_structure(path: Path, content: Any, plan: _StandInPickle) -> None:
    """Write the file with space for its tensors. Raises the OSError behind a RuntimeError of torch's writer, which
    does not give the cause."""
    try:
        with allowed_types(), skip_data():
            torch.save(content, path, pickle_module=plan)  # pyright: ignore[reportArgumentType]
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"the state to save{_under(content, _fails_to_save)} cannot be pickled ({error}): save plain data instead"
        ) from error
    except RuntimeError:
        with open(path, "ab", buffering=0) as file:  # raises OSError if the file system is the cause
            file.write(bytes(1 << 16))
            file.truncate(sum(tensor.nbytes for tensor in plan.tensors))
        raise


def _append_note(path: Path, note: Mapping[str, Any]) -> None:
    """Append a record to the archive; the offsets of torch's records do not change."""
    with zipfile.ZipFile(path, "a") as archive:
        folder = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{folder}{NOTE}", json.dumps(note))


class _StandInPickle:
    """The pickle module of ``torch.save``: replaces tensors by empty stand-ins and records them."""

    def __init__(self, class_names: Mapping[type, str]) -> None:
        self.tensors: list[Tensor | LazyTensor] = []
        self._regions: dict[torch.dtype, mmap.mmap] = {}
        self._stand_ins: dict[Any, Tensor] = {}
        self._made: set[int] = set()
        plan = self

        class Pickler(_renaming(class_names)):
            def __init_subclass__(cls) -> None:
                cls.persistent_id = _persistent_id_of_storages(cls.persistent_id)

            def reducer_override(self, obj: Any) -> Any:
                if isinstance(obj, LazyTensor):
                    return plan.stand_in(obj).__reduce_ex__(2)
                if type(obj) is torch.nn.Parameter and plan.is_plain(obj):
                    return _rebuild_parameter, (obj.data, obj.requires_grad, OrderedDict())
                if plan.is_plain(obj):
                    return _with_grad(plan.stand_in(obj).__reduce_ex__(2), obj.requires_grad)
                return reduced(obj)

        self.Pickler = Pickler
        self.__name__ = pickle.__name__

    def is_plain(self, value: Any) -> bool:
        """Return whether ``value`` is a plain strided tensor; other kinds pickle as such tensors."""
        return (
            type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
            and is_strided(value)
            and id(value) not in self._made
        )

    def stand_in(self, value: Tensor | LazyTensor) -> Tensor:
        """Return a stand-in with a storage of exactly the right size: address space, but no memory."""
        key = _memory(value)
        if key not in self._stand_ins:
            blocks = sum(count_blocks(tensor.nbytes) for tensor in self.tensors)
            shape = (blocks,) if value is _HASH_TABLE else tuple(value.shape)
            self._stand_ins[key] = self._untouched(shape, value.dtype)
            self._made.add(id(self._stand_ins[key]))
            self.tensors.append(value)
        return self._stand_ins[key]

    def table(self, hasher: BlockHasher) -> LazyTensor:
        """Return the hashes of all tensors; call it after they are written."""
        hashes = hasher.result().view(np.int32)
        return LazyTensor(hashes.shape, torch.int32, lambda: [torch.from_numpy(hashes)])

    def _untouched(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = prod(shape)
        if not count:
            return torch.empty(shape, dtype=dtype)
        region = self._region(dtype, count * dtype.itemsize)
        return torch.frombuffer(region, dtype=dtype, count=count).view(shape)

    def _region(self, dtype: torch.dtype, nbytes: int) -> mmap.mmap:
        """Map anonymous memory that is never touched; one region per dtype, as torch refuses one address in two
        dtypes."""
        region = self._regions.get(dtype)
        if region is None or len(region) < nbytes:
            region = self._regions[dtype] = mmap.mmap(-1, nbytes)
        return region


def _renaming(class_names: Mapping[type, str]) -> Any:
    """Return a pickler that writes these classes under other names, which need not exist here; the C pickler if there
    are none."""
    if not class_names:
        return pickle.Pickler

    in_python: Any = pickle._Pickler  # pyright: ignore[reportAttributeAccessIssue] - the C pickler has no save_global

    class Renaming(in_python):
        def save_global(self, obj: Any, name: str | None = None) -> None:
            if isinstance(obj, type) and obj in class_names:
                module, _, own = class_names[obj].rpartition(".")
                self.write(pickle.GLOBAL + f"{module}\n{own}\n".encode())
                self.memoize(obj)
            else:
                super().save_global(obj, name)

    return Renaming


def _persistent_id_of_storages(persistent_id: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Call torch's ``persistent_id`` for storages only: for other objects it returns None, after three calls each."""

    def persistent_id_of_storages(pickler: Any, obj: Any) -> Any:
        is_storage = isinstance(obj, (torch.TypedStorage, torch.UntypedStorage))
        return persistent_id(pickler, obj) if is_storage else None

    return persistent_id_of_storages


def _with_grad(reduced: Any, requires_grad: bool) -> Any:
    """Return torch's reduce tuple of a tensor with ``requires_grad`` replaced."""
    function, (storage, offset, size, stride, _, *rest) = reduced
    return function, (storage, offset, size, stride, requires_grad, *rest)


def _memory(value: Tensor | LazyTensor) -> Any:
    """Return a key that is equal for tensors of the same memory, shape, strides and dtype."""
    if isinstance(value, LazyTensor) or not value.numel():
        return id(value)
    reading = (value.dtype, value.is_conj(), value.is_neg())
    return (value.device, value.data_ptr(), *reading, tuple(value.shape), value.stride())


def _records(path: Path, tensors: list[Tensor | LazyTensor]) -> list[tuple[int, int]]:
    """Return the offset and size in bytes of each tensor in the file, in torch's numbering order."""
    found = tensor_records(path)
    sizes = [tensor.nbytes for tensor in tensors if tensor is not _HASH_TABLE]
    if [found[number][1] for number in sorted(found)][: len(sizes)] != sizes or len(found) != len(tensors):
        raise CheckpointError(f"{path}: the state holds bare storages; save tensors instead")
    return [found[number] for number in sorted(found)]


def _write_tensor(sink: ArchiveSink, offset: int, nbytes: int, value: Tensor | LazyTensor) -> None:
    sink.file.seek(offset)
    sink.write_tensor(value)
    assert sink.file.tell() == offset + nbytes, (
        f"the parts of a tensor have {sink.file.tell() - offset} bytes, expected {nbytes}"
    )


class ArchiveSink:
    """Writes whole tensors to an open unbuffered file, and hashes them if there is a ``hasher``."""

    def __init__(self, file: Any, hasher: BlockHasher | None = None) -> None:
        self.file = file
        self.hasher = hasher

    def write_tensor(self, value: Tensor | LazyTensor) -> None:
        """Write a tensor; each part is freed before the next one is made."""
        parts = iter(value.parts() if isinstance(value, LazyTensor) else (value,))
        while (part := next(parts, None)) is not None:
            for chunk in byte_chunks(part):
                self._write_chunk(chunk)
            del part
        if self.hasher is not None:
            self.hasher.end_of_tensor()

    def _write_chunk(self, chunk: np.ndarray) -> None:
        """Write a chunk while the hasher's thread hashes it."""
        if self.hasher is not None:
            self.hasher.add(chunk)
        self.write(chunk)
        if self.hasher is not None:
            self.hasher.wait()

    def write(self, chunk: np.ndarray) -> None:
        left = memoryview(chunk)  # type: ignore[arg-type]  # numpy arrays are buffers
        while left:
            left = left[self.file.write(left) :]


def _needs(value: Any, classes: list[str]) -> bool:
    """Return whether the pickle of ``value`` names one of ``classes``."""
    names: set[str] = set()

    def note(obj: Any) -> None:
        cls = obj if isinstance(obj, type) else type(obj)
        names.add(f"{cls.__module__}.{cls.__name__}")
        if callable(obj):
            names.add(f"{getattr(obj, '__module__', '')}.{getattr(obj, '__name__', '')}")

    _pickled(value, note)
    return not names.isdisjoint(classes)


def _fails_to_save(value: Any) -> bool:
    try:
        _pickled(value)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError):
        return True
    return False


def _fails_to_load(value: Any) -> bool:
    try:
        with allowed_types():
            _weights_only_unpickler.load(io.BytesIO(_pickled(value)))
    except (pickle.UnpicklingError, *DAMAGE):
        return True
    return False


def _pickled(value: Any, note: Callable[[Any], None] = lambda obj: None) -> bytes:
    """Pickle ``value`` without its tensors; ``note`` is called with every object of a non-basic type."""

    class Spy(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, (Tensor, LazyTensor)):
                return int, ()
            note(obj)
            return reduced(obj)

    with io.BytesIO() as sink:
        Spy(sink, protocol=2).dump(value)
        return sink.getvalue()


def serialize(value: Any) -> bytes:
    """Return the serialized bytes of a small value of a checkpoint, for another rank. ``deserialize`` makes no objects
    of unknown classes."""
    own: list[Tensor] = []

    class ValuePickler(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if type(obj) is Tensor:  # a view would bring all of its memory along
                own.append(obj.detach().clone())
                return own[-1].__reduce_ex__(2)
            return reduced(obj)

    with io.BytesIO() as sink:
        torch.save(value, sink, pickle_module=SimpleNamespace(Pickler=ValuePickler, __name__=pickle.__name__))
        return sink.getvalue()


def _space_left(path: Path) -> str:
    try:
        stat = os.statvfs(path.parent)
    except (OSError, AttributeError):
        return f" ({path.parent} no longer exists)" if not os.path.exists(path.parent) else ""
    free = stat.f_bavail * stat.f_frsize
    return f" ({free / 2**20:.0f} MiB free in {path.parent})"
