"""Time communication calls for the communication log."""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.base.accelerator import synchronize_stream
from deepspeed.comm.pending import CommunicationError, Pending, is_peer_failure
from deepspeed.comm.record import CommsLogger, get_caller_func

PROCESS_LOG = CommsLogger()
"""Log of the documented functions, and of engines whose config enables none."""


_newest = PROCESS_LOG
"""The log that the documented functions write and show: the newest engine's that has one, else the process's. It
outlives its engine, as a summary may be requested at the end of a run."""


def set_newest_log(log: CommsLogger) -> None:
    global _newest
    _newest = log


def newest_log() -> CommsLogger:
    return _newest


class _NewestLog:
    """The documented object `deepspeed.comm.comms_logger`: a proxy of the newest log."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_newest, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_newest, name, value)


comms_logger = _NewestLog()

_paused = False  # while a recorded call runs inside another, or the log itself communicates


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Configure the newest communication log from a config (a DeepSpeedConfig, or its `comms_logger` section), then
    from the individual arguments. A section that is not enabled changes nothing."""
    section = getattr(deepspeed_config, "comms_config", deepspeed_config)
    section = getattr(section, "comms_logger", section)
    if section is not None and section.enabled:
        _newest.configure(section)
    single = {
        "enabled": enabled,
        "prof_all": prof_all,
        "prof_ops": prof_ops,
        "verbose": verbose,
        "debug": debug,
    }
    for name, value in single.items():
        if value is not None:
            setattr(_newest, name, value)


@contextlib.contextmanager
def paused_log() -> Iterator[None]:
    """Record nothing inside the block."""
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


def recording(log: CommsLogger, op_name: str) -> bool:
    """Return whether a call of this operation should be recorded now."""
    return not _paused and log.wants(op_name)


def _begun(
    log: CommsLogger, op_name: str, record_name: str, message_bytes: int, group_size: int, on_device: bool
) -> Callable[[], None]:
    """Begin to time one call; return the function that ends and records it. An asynchronous call ends at `wait()`, so
    it includes what the caller computes in between."""

    def now() -> float:
        if on_device:
            synchronize_stream()
        return time.perf_counter()

    start = now()

    def finish() -> None:
        log.append(op_name, record_name, (now() - start) * 1e3, message_bytes, group_size)

    return finish


class MeasuredWork:
    """Proxy of a handle that calls ``finish`` at the end of the first `wait()`."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish: Callable[[], None] | None = finish

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self._work.wait(*args, **kwargs)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def measured(
    log: CommsLogger, op_name: str, message: Tensor, group_size: int, issue: Callable[[], Pending]
) -> Pending:
    """Issue a communicator's collective and record it."""
    record_name = f"{op_name} | [Caller Func: {get_caller_func(frame=4)}]" if log.debug else op_name
    record = _begun(log, op_name, record_name, message.nbytes, group_size, message.device.type != "cpu")
    pending = issue()

    def finish() -> None:
        pending.wait()
        record()

    return Pending(finish)


def timed_op(
    func: Callable[..., Any], message: str = "tensor", renamed: Mapping[str, str] | None = None
) -> Callable[..., Any]:
    """Give a communication function the arguments `prof`, `log_name` and `debug`, and record its calls.

    `message` names the argument whose bytes count as the message, `renamed` maps arguments to different public names.
    `prof=True` records this call even if the logger's configuration would not; `log_name` is the row in the log; with
    the logger's `debug`, the caller's name is added. Failures caused by another rank are raised as
    CommunicationError.
    """
    op_name = func.__name__
    signature = inspect.signature(func)
    own_to_public = renamed or {}
    public_to_own = {public: own for own, public in own_to_public.items()}
    extra = {"prof": False, "log_name": op_name, "debug": None}
    positional = len(signature.parameters)
    unusual = frozenset((*extra, *public_to_own))

    @functools.wraps(func)
    def operation(*args: Any, **kwargs: Any) -> Any:
        try:
            if not _newest.enabled and len(args) <= positional and unusual.isdisjoint(kwargs):
                return func(*args, **kwargs)
            return with_options(args, kwargs)
        except RuntimeError as error:
            if isinstance(error, CommunicationError) or not is_peer_failure(error):
                raise
            group = public_signature.bind(*args, **kwargs).arguments.get("group")
            raise CommunicationError.of(op_name, dist.get_process_group_ranks(group), error) from error

    def with_options(args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        options = {name: value for name, value in given.items() if name in extra}
        kwargs = {public_to_own.get(name, name): value for name, value in given.items() if name not in extra}
        if len(args) > positional:
            options.update(zip(extra, args[positional:], strict=False))
            args = args[:positional]
        if _paused or not (options.get("prof") or recording(_newest, op_name)):
            return func(*args, **kwargs)
        bound = signature.bind(*args, **kwargs).arguments
        caller = options.get("debug") or get_caller_func(frame=3)
        return _record(func, op_name, bound, message, options.get("log_name", op_name), caller)

    parameters = [
        *(one.replace(name=own_to_public.get(one.name, one.name)) for one in signature.parameters.values()),
        *(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value)
            for name, value in extra.items()
        ),
    ]
    public_signature = signature.replace(parameters=parameters)
    operation.__signature__ = public_signature  # type: ignore[attr-defined]
    return operation


def _record(
    func: Callable[..., Any], op_name: str, bound: dict[str, Any], message: str, log_name: str, caller: str
) -> Any:
    log = _newest
    record_name = f"{log_name} | [Caller Func: {caller}]" if log.debug else log_name
    tensors = _tensors(bound.get(message))
    nbytes, size = sum(tensor.nbytes for tensor in tensors), dist.get_world_size(bound.get("group"))
    on_device = any(tensor.device.type != "cpu" for tensor in tensors)
    finish = _begun(log, op_name, record_name, nbytes, size, on_device)
    with paused_log():
        result = func(**bound)
    if (bound.get("async_op") and result is not None) or isinstance(result, dist.Work):  # isend, irecv
        return MeasuredWork(result, finish)
    finish()
    return result


def _tensors(argument: Any) -> list[Tensor]:
    if isinstance(argument, torch.Tensor):
        return [argument]
    if isinstance(argument, (list, tuple)):
        return [item for item in argument if isinstance(item, torch.Tensor)]
    return []
