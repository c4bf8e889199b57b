"""The ranks that the launcher assigned, before any process group exists; and what calls of this package's functions are
given."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.base.environment import this_process


def get_local_rank_from_launcher() -> int:
    return this_process(os.environ).local_rank


def get_world_rank_from_launcher() -> int:
    return this_process(os.environ).rank


def get_world_size_from_launcher() -> int:
    return this_process(os.environ).world_size


# Arguments of a communication function, for whoever records its calls.

_TENSORS = ("tensor", "tensors", "input_list", "input_tensor_list")
"""Names of the argument whose size is the size of a message; the first that a function has."""


def get_default_args(func: Callable[..., Any]) -> dict[str, Any]:
    """The parameters that have a default, with it."""
    parameters = inspect.signature(func).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def get_tensor_position(func: Callable[..., Any]) -> int:
    """Which positional argument is the message; -1: none is (``barrier``)."""
    parameters = list(inspect.signature(func).parameters)
    return next((parameters.index(name) for name in _TENSORS if name in parameters), -1)


def get_tensor_kwarg(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """The message among keyword arguments and defaults; None: it is not there."""
    given = {**get_default_args(func), **kwargs}
    return next((given[name] for name in _TENSORS if name in given), None)


def get_msg_size_from_args(func: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Bytes of the message of a call ``func(*args, **kwargs)``; 0 where there is none."""
    position = get_tensor_position(func)
    message = args[position] if 0 <= position < len(args) else get_tensor_kwarg(func, kwargs)
    tensors = message if isinstance(message, (list, tuple)) else [] if message is None else [message]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def get_debug_log_name(func_args: Mapping[str, Any], debug: bool) -> str:
    """Under which name a call with the arguments ``log_name`` and ``debug`` (who called) is recorded."""
    name = func_args["log_name"]
    return f"{name} | [Caller Func: {func_args['debug']}]" if debug else name
