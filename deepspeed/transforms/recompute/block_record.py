"""Recording of the operations of one block call and the bytes it saves for backward, on a device or simulated on the
meta device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepspeed.comm.collectives import OPERATIONS, Communicator

Key = tuple[Any, int]
"""An operation of a block: (function, number of earlier calls of it)."""

BYTE_AS_FLOPS = 10
"""Cost of a moved byte in FLOPs: makes every recomputation cost something, while products still dominate."""

_COMMUNICATION = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")
_UNFILLED = ("empty", "new_empty", "zeros", "new_zeros", "ones", "new_ones", "full", "new_full", "_to_copy")
"""Operations whose results are filled later, or cast from a weight: not worth keeping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOp:
    """One operation. ``out``: bytes that its results allocate. ``cost``: FLOPs, plus moved bytes in FLOPs.
    ``keepable``: whether its results can replace it in a rerun. ``saved``: whether autograd saves them. ``label``: the
    layer whose weight it uses, else the operation's name."""

    key: Key
    flops: int
    cost: int
    out: int
    keepable: bool
    saved: bool = False
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecord:
    """One call of a block. In bytes: ``inputs`` that require gradients; ``saved`` by autograd, each storage once,
    without weights and other inputs. A rerun for backward needs the first ``needed`` operations."""

    ops: tuple[RecordedOp, ...]
    needed: int
    inputs: int
    saved: int

    @property
    def flops(self) -> int:
        return sum(op.flops for op in self.ops)


def is_counted(func: Any) -> bool:
    """Return whether an operation is numbered; ``detach`` is not, as checkpoints add extra ones."""
    return func is not torch.ops.aten.detach.default and func.namespace != "prim"


def storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class SavedBytes:
    """Counts bytes that autograd saves inside ``counting()``, each storage once, without weights and ``ignored``."""

    def __init__(self, ignored: Iterable[Tensor] = (), at_pack: Callable[[int], None] | None = None) -> None:
        self._ignored = {storage_key(each) for each in ignored}
        self._at_pack = at_pack
        self.storages: dict[int, int] = {}
        self.paused = False

    @property
    def total(self) -> int:
        return sum(self.storages.values())

    def counting(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if self._at_pack is not None:
            self._at_pack(key)
        weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        if not weight and not self.paused and key not in self._ignored:
            self.storages[key] = tensor.untyped_storage().nbytes()
        return tensor


def record_block(block: nn.Module, call: Callable[[], Any], inputs: Iterable[Any]) -> tuple[Any, BlockRecord]:
    """Run ``call()``, which is ``block`` on ``inputs`` (any nest of tensors), with gradients; return its outputs and
    record."""
    tensors = [leaf for leaf in tree_leaves(list(inputs)) if isinstance(leaf, Tensor)]
    sizes = {storage_key(t): t.untyped_storage().nbytes() for t in tensors if t.requires_grad}
    recorder = _Recorder(block)
    elsewhere = [t for t in tensors if not t.requires_grad]
    saved = SavedBytes([*block.parameters(), *block.buffers(), *elsewhere], recorder.mark)
    with saved.counting(), _report_communication(recorder.written), recorder:
        outputs = call()
    return outputs, BlockRecord(
        ops=tuple(recorder.finished()), needed=recorder.needed, inputs=sum(sizes.values()), saved=saved.total
    )


class _Recorder(TorchDispatchMode):
    """Records every operation. ``needed``: number of operations before autograd's last save."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.needed = 0
        self._layers = {_address(p): name.rpartition(".")[0] for name, p in block.named_parameters()}
        self._ops: list[RecordedOp] = []
        self._counts: dict[Any, int] = {}
        self._made_by: dict[int, int] = {}
        self._overwritten: set[int] = set()
        self._saved: set[int] = set()

    def mark(self, key: int) -> None:
        """Note that autograd saves this storage."""
        self.needed = len(self._ops)
        if key in self._made_by:
            self._saved.add(self._made_by[key])

    def written(self, tensors: Iterable[Tensor]) -> None:
        """Note that storages were modified after they were computed: their producers must be rerun."""
        self._overwritten |= {self._made_by[key] for t in tensors if (key := storage_key(t)) in self._made_by}

    def finished(self) -> Iterator[RecordedOp]:
        for number, op in enumerate(self._ops):
            keepable = op.keepable and number not in self._overwritten
            yield replace(op, keepable=keepable, saved=number in self._saved)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        if is_counted(func):
            self._note(func, args, kwargs, outputs)
        return outputs

    def _note(self, func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        schema = func._schema
        if func.namespace in _COMMUNICATION:
            self.written(read)
        elif schema.is_mutable:
            written = [a for a, s in zip(args, schema.arguments, strict=False) if _is_written(s)]
            written += [kwargs.get(s.name) for s in schema.arguments if _is_written(s) and s.name in kwargs]
            self.written(leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor))
        old = {storage_key(t) for t in read}  # not all view ops declare aliasing in their schema
        fresh = {key: t.untyped_storage().nbytes() for t in made if (key := storage_key(t)) not in old}
        number = len(self._ops)
        self._made_by.update(dict.fromkeys(fresh, number))
        flops = flops_of(func, args, kwargs, outputs)
        moved = 0 if not fresh and not schema.is_mutable else sum(t.nbytes for t in (*read, *made))
        position = self._counts.get(func, 0)
        self._counts[func] = position + 1
        keepable = bool(read and fresh) and _can_be_kept(func, args, kwargs)
        layers = [self._layers[address] for t in read if (address := _address(t)) in self._layers]
        self._ops.append(
            RecordedOp(
                key=(func, position),
                flops=flops,
                cost=flops + BYTE_AS_FLOPS * moved,
                out=sum(fresh.values()),
                keepable=keepable,
                label=next(iter(layers), "") or func._schema.name.partition("::")[2].lstrip("_"),
            )
        )


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _can_be_kept(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether results can be kept. Random draws are repeated, so that later ones get the same numbers."""
    if func._schema.is_mutable or func.namespace in _COMMUNICATION:
        return False
    return not _draws(func, args, kwargs) and not func._schema.name.partition("::")[2].startswith(_UNFILLED)


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the operation draws random numbers. Attention does only with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    arguments = func._schema.arguments
    place = next((number for number, each in enumerate(arguments) if each.name == "dropout_p"), None)
    if place is None or "attention" not in func._schema.name:
        return True
    given = args[place] if place < len(args) else kwargs.get("dropout_p", arguments[place].default_value)
    return given != 0


def _address(tensor: Tensor) -> tuple[int, int]:
    return storage_key(tensor), int(tensor.storage_offset())


def flops_of(func: Any, args: Any, kwargs: Any, outputs: Any) -> int:
    """Return the FLOPs of products, convolutions and attention by torch's formulas; 0 for all else."""
    from torch.utils.flop_counter import flop_registry

    name = func._schema.name
    if name == "aten::_scaled_dot_product_flash_attention_for_cpu":  # torch has no formula for it
        query, key, value = args[:3]
        rows, width = math.prod(query.shape[:-1]), query.shape[-1] + value.shape[-1]
        return 2 * rows * key.shape[-2] * width
    formula = flop_registry.get(func.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=outputs))


@contextlib.contextmanager
def _report_communication(written: Callable[[Iterable[Tensor]], None]) -> Iterator[None]:
    """Report tensors that a ``Communicator`` fills to ``written`` inside the block: no torch operation shows them."""
    before = {name: getattr(Communicator, name) for name in OPERATIONS}

    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Communicator, *args: Any, **kwargs: Any) -> Any:
            written(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
            return method(self, *args, **kwargs)

        return call

    for name, method in before.items():
        setattr(Communicator, name, wrapped(method))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Communicator, name, method)
