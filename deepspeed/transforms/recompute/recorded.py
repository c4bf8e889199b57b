"""Record of what one call of a block computes and keeps for backward, counted while it runs: on a device, or simulated
on the meta device.
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
"""An operation of a block: which one, and how many of its kind came before it."""

BYTE_AS_FLOPS = 10
"""What a moved byte costs, in FLOPs: nothing is recomputed in vain, and products weigh far more than the rest."""

_COMMUNICATION = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")
_UNFILLED = ("empty", "new_empty", "zeros", "new_zeros", "ones", "new_ones", "full", "new_full", "_to_copy")
"""Filled by somebody else later, or cast from a weight: not worth keeping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedOp:
    """``out``: bytes of memory that its results add. ``cost``: FLOPs, and the bytes that it moves, in FLOPs.
    ``keepable``: whether its results can take its place in a second run. ``saved``: whether autograd keeps them.
    ``label``: the layer whose weight it uses, else its own name."""

    key: Key
    flops: int
    cost: int
    out: int
    keepable: bool
    saved: bool = False
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecord:
    """One call. Bytes: ``inputs`` that have gradients; ``saved`` by autograd, each memory once, without weights and
    what is only read. Running it again for backward means its first ``needed`` operations."""

    ops: tuple[RecordedOp, ...]
    needed: int
    inputs: int
    saved: int

    @property
    def flops(self) -> int:
        return sum(op.flops for op in self.ops)


def is_counted(func: Any) -> bool:
    """Return whether an operation has a number: checkpoints add some ``detach`` of their own."""
    return func is not torch.ops.aten.detach.default and func.namespace != "prim"


def storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class SavedBytes:
    """Bytes that autograd saves inside ``counting()``, each memory once, weights and ``ignored`` memory not at all."""

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
    """``call()``, which is ``block`` on ``inputs`` (any structure of tensors), with gradients; and what it did."""
    tensors = [leaf for leaf in tree_leaves(list(inputs)) if isinstance(leaf, Tensor)]
    sizes = {storage_key(t): t.untyped_storage().nbytes() for t in tensors if t.requires_grad}
    recorder = _Recorder(block)
    elsewhere = [t for t in tensors if not t.requires_grad]
    saved = SavedBytes([*block.parameters(), *block.buffers(), *elsewhere], recorder.mark)
    with saved.counting(), _communication_seen(recorder.written), recorder:
        outputs = call()
    return outputs, BlockRecord(
        ops=tuple(recorder.finished()), needed=recorder.needed, inputs=sum(sizes.values()), saved=saved.total
    )


class _Recorder(TorchDispatchMode):
    """Notes every operation. ``needed``: how many there were when autograd saved something for the last time."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.needed = 0
        self._layers = {_address(p): name.rpartition(".")[0] for name, p in block.named_parameters()}
        self._ops: list[RecordedOp] = []
        self._counts: dict[Any, int] = {}
        self._made_by: dict[int, int] = {}
        self._spoilt: set[int] = set()
        self._saved: set[int] = set()

    def mark(self, key: int) -> None:
        """Autograd saves this memory."""
        self.needed = len(self._ops)
        if key in self._made_by:
            self._saved.add(self._made_by[key])

    def written(self, tensors: Iterable[Tensor]) -> None:
        """Their memory changes after it was computed: whoever made it must be run again."""
        self._spoilt |= {self._made_by[key] for t in tensors if (key := storage_key(t)) in self._made_by}

    def finished(self) -> Iterator[RecordedOp]:
        for number, op in enumerate(self._ops):
            keepable = op.keepable and number not in self._spoilt
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
        old = {storage_key(t) for t in read}  # not all views say in their schema that they are
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
    """Random numbers are drawn again, so that those after them are the same ones."""
    if func._schema.is_mutable or func.namespace in _COMMUNICATION:
        return False
    return not _draws(func, args, kwargs) and not func._schema.name.partition("::")[2].startswith(_UNFILLED)


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the operation draws random numbers. Attention can, and does so only with dropout."""
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
    """Return the FLOPs of products, convolutions and attention, by torch's formulas; 0 for all else."""
    from torch.utils.flop_counter import flop_registry

    name = func._schema.name
    if name == "aten::_scaled_dot_product_flash_attention_for_cpu":  # has no formula there
        query, key, value = args[:3]
        rows, width = math.prod(query.shape[:-1]), query.shape[-1] + value.shape[-1]
        return 2 * rows * key.shape[-2] * width
    formula = flop_registry.get(func.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=outputs))


@contextlib.contextmanager
def _communication_seen(written: Callable[[Iterable[Tensor]], None]) -> Iterator[None]:
    """Inside, ``written`` hears of tensors that a ``Communicator`` fills, which no operation of torch shows."""
    before = {name: getattr(Communicator, name) for name in OPERATIONS}

    def heard(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Communicator, *args: Any, **kwargs: Any) -> Any:
            written(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
            return method(self, *args, **kwargs)

        return call

    for name, method in before.items():
        setattr(Communicator, name, heard(method))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Communicator, name, method)
