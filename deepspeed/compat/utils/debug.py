"""Names of modules and parameters, and output that does not interleave, for debugging by hand."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from deepspeed.base.logging import this_rank


class _Names:
    """Qualified names of the model that was registered last; the objects themselves are not kept alive."""

    def __init__(self) -> None:
        self.modules: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.params = WeakTensorKeyDictionary()  # by identity: tensors compare by element


_names = _Names()


def debug_clear_module_and_param_names() -> None:
    _names.modules.clear()
    _names.params.clear()


def debug_extract_module_and_param_names(model: nn.Module) -> None:
    """Registers the names of ``model`` for the functions below."""
    debug_clear_module_and_param_names()
    _names.modules.update({module: name for name, module in model.named_modules()})
    for name, param in model.named_parameters():
        _names.params[param] = name


def debug_module2name(module: nn.Module) -> str:
    return _names.modules.get(module, "unknown")


def debug_module2name_id(module: nn.Module) -> str:
    return f"name={debug_module2name(module)} id={getattr(module, 'id', 'none')}"


def debug_module2name_class(module: nn.Module) -> str:
    return f"name={debug_module2name(module)} {type(module).__name__}"


def debug_param2name(param: nn.Parameter) -> str:
    return str(_names.params.get(param, "unknown"))


def ds_id(param: nn.Parameter) -> Any:
    return getattr(param, "ds_id", "none")


def ds_shape(param: nn.Parameter) -> Any:
    """Shape of the full parameter, even while ZeRO keeps only a slice here."""
    return tuple(getattr(param, "ds_shape", param.shape))


def debug_param2name_id(param: nn.Parameter) -> str:
    return f"name={debug_param2name(param)} id={ds_id(param)}"


def debug_param2name_id_shape(param: nn.Parameter) -> str:
    return f"{debug_param2name_id(param)} shape={ds_shape(param)}"


def debug_param2name_id_shape_device(param: nn.Parameter) -> str:
    return f"{debug_param2name_id_shape(param)} device={param.device}"


def debug_param2name_id_numel(param: nn.Parameter) -> str:
    return f"{debug_param2name_id(param)} numel={getattr(param, 'ds_numel', param.numel())}"


def debug_param2name_id_shape_status(param: nn.Parameter) -> str:
    return f"{debug_param2name_id_shape(param)} status={getattr(param, 'ds_status', 'none')}"


@contextlib.contextmanager
def _machine_lock() -> Iterator[None]:
    """Held by one process of this user and machine at a time; does nothing if the system has no such lock."""
    try:
        import fcntl
    except ImportError:  # not a Unix
        yield
        return
    name = f"deepspeed_print_{os.getuid()}.lock"
    with open(os.path.join(tempfile.gettempdir(), name), "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def printflock(*msgs: Any) -> None:
    """``print`` by one rank of the machine at a time."""
    with _machine_lock():
        print(*msgs)
        sys.stdout.flush()


def log_rank_file(rank: int, *msgs: Any) -> None:
    """Appends to ``log_rank_<rank>.txt`` in the working directory."""
    with open(f"log_rank_{rank}.txt", "a", encoding="utf-8") as file:
        file.writelines(f"{msg}\n" for msg in msgs)


def print_backward_tensors(tensor: torch.Tensor) -> None:
    """Prints the variables at the leaves of ``tensor``'s autograd graph."""
    seen: set[Any] = set()
    pending = [tensor.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable: torch.Tensor | None = getattr(node, "variable", None)
        if variable is not None:
            print(f"Tensor with grad found: shape={tuple(variable.shape)} grad={variable.grad is not None}")
        pending.extend(parent for parent, _ in node.next_functions)


def print_rank(*msg: Any, force: bool = False) -> None:
    """With ``force``, prints with the rank as a prefix, one rank of the machine at a time."""
    if force:
        printflock(f"[{this_rank()}]", *msg)


def print_rank0(*msg: Any, force: bool = False) -> None:
    if force and this_rank() == 0:
        printflock(f"[{this_rank()}]", *msg)
