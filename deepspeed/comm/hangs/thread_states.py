"""Describe the state of this process's threads from their frames, on demand.

The frames of a hanging rank tell which operation it waits in, with which tensor and among which ranks, which module
was running, and which line of the user's script led there. Reading them costs a running step nothing.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist

_HERE = str(Path(__file__).parents[1])
_PACKAGE = str(Path(_HERE).parent)
_TORCH = str(Path(torch.__file__).parent)
_TORCH_DISTRIBUTED = os.path.join(_TORCH, "distributed") + os.sep
_COMMUNICATING = (
    _HERE + os.sep,
    _TORCH_DISTRIBUTED,
    os.path.join(_PACKAGE, "parallel", "pipeline", "messages") + os.sep,
)
_NOT_THE_USERS = (
    _PACKAGE + os.sep,
    _TORCH + os.sep,
    "<",
    *(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)

LOADING, SAVING, RESTORING = "in its data loader", "saving a checkpoint", "loading a checkpoint"
STARTING, ELSEWHERE = "in deepspeed.initialize", "running other code"

_LOADING = (f"{_TORCH}/utils/data/", f"{_PACKAGE}/data/")
_STORING = (
    f"{_PACKAGE}/checkpoint/",
    f"{_PACKAGE}/engine/saving.py",
    f"{_PACKAGE}/engine/loading.py",
    f"{_TORCH}/serialization.py",
)
_INITIALIZE = f"{_PACKAGE}/engine/initialize.py"


class Names(Protocol):
    """An engine's names for objects found in frames."""

    def of_module(self, module: torch.nn.Module) -> str | None: ...
    def of_parameters(self, holder: Any) -> list[str]: ...
    def position(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HangReport:
    """State of one rank, as sent to the others."""

    rank: int
    host: str
    pid: int
    call: str = ""
    """The communication in which it waits, if any."""
    members: list[int] = field(default_factory=list)
    """The ranks of this call; empty if unknown."""
    doing: str = ELSEWHERE
    at: str = ""
    """Line of the user's script."""
    module: str = ""
    parameters: list[str] = field(default_factory=list)
    position: str = ""
    """Step and phase of the step."""
    stalled_s: float = 0.0
    groups: list[dict[str, Any]] = field(default_factory=list)
    """`OperationHistory.as_record` of each group."""
    stack: list[str] = field(default_factory=list)
    """Innermost last."""


def main_frames() -> list[FrameType]:
    """Return the frames of the main thread, innermost first."""
    return frames_of(threading.main_thread().ident)


def frames_of(thread: int | None) -> list[FrameType]:
    found: list[FrameType] = []
    with _steady():
        frame = sys._current_frames().get(thread or 0)
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
    return found


def is_communicating(frames: list[FrameType]) -> bool:
    """Return whether the innermost frame waits for other ranks."""
    if not frames:
        return False
    innermost = frames[0]
    if innermost.f_code.co_filename.startswith(_COMMUNICATING):
        return True
    line = linecache.getline(innermost.f_code.co_filename, innermost.f_lineno)
    if ".wait(" not in line:
        return False
    with contextlib.suppress(Exception):  # a script waits for a torch handle
        return any(isinstance(value, dist.Work) for value in list(_locals(innermost).values()))
    return False


def code_position(frames: list[FrameType]) -> tuple[tuple[Any, int], ...]:
    """Return a value that changes as the code advances."""
    return tuple((frame.f_code, frame.f_lasti) for frame in frames)


def describe(frames: list[FrameType], names: Iterable[Names]) -> dict[str, Any]:
    """Return the fields of a `HangReport` that are read from frames."""
    known = list(names)
    call, members = _call(frames) if is_communicating(frames) else ("", [])
    return {
        "call": call,
        "members": members,
        "doing": _doing(frames),
        "at": _users_line(frames),
        "module": next(_module_names(frames, known), ""),
        "parameters": _parameter_names(frames, known),
        "position": "; ".join(filter(None, (_quietly(each.position) for each in known))),
        "stack": stack_of(frames),
    }


def stack_of(frames: list[FrameType]) -> list[str]:
    """Return the lines of a stack trace, innermost last."""
    entries = traceback.StackSummary.extract(
        ((frame, frame.f_lineno) for frame in reversed(frames)), lookup_lines=True
    )
    return [line for entry in entries.format() for line in entry.rstrip("\n").split("\n")]


def threads() -> Iterator[tuple[str, list[FrameType]]]:
    """Yield name and frames of every other thread that runs Python code, the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    with _steady():
        running = list(sys._current_frames())
    for ident in sorted(running, key=lambda ident: (ident != main, ident)):
        if ident != threading.get_ident():
            yield names.get(ident, f"thread {ident}"), frames_of(ident)


def runs_users_code(frames: list[FrameType]) -> bool:
    """Return whether the thread runs user code: the script, or a module that is not installed. Threads of this
    package, the launcher and libraries do not."""
    return any(not frame.f_code.co_filename.startswith(_NOT_THE_USERS) for frame in frames)


# ---- reading frames


@contextlib.contextmanager
def _steady() -> Iterator[None]:
    """Disable garbage collection while objects are made of another thread's frames. Use it for nothing else: other
    code would see the collector disabled.

    Before Python 3.12 the allocation may start a collection. If a finalizer then lets the other thread run, its frame
    is gone when this one continues, and the process dies of SIGSEGV, or both threads deadlock (CPython issue 106883).
    Later versions collect between instructions only.
    """
    pauses = sys.version_info < (3, 12) and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()


def _locals(frame: FrameType) -> dict[str, Any]:
    with _steady():
        return frame.f_locals


def _call(frames: list[FrameType]) -> tuple[str, list[int]]:
    """Return the operation and its ranks: from our own wait, else from torch's function."""
    for frame in frames:
        if not frame.f_code.co_filename.startswith(_COMMUNICATING):
            break
        found = _quietly(lambda frame=frame: _own_call(frame))
        if found:
            return found
    torchs = []
    for frame in frames:
        if not frame.f_code.co_filename.startswith(_TORCH_DISTRIBUTED):
            break
        if frame.f_code.co_filename.endswith("distributed_c10d.py"):
            torchs.append(frame)
    if torchs:
        return _quietly(lambda: _torch_call(torchs[-1])) or (torchs[-1].f_code.co_name, [])
    return "communication", []


def _own_call(frame: FrameType) -> tuple[str, list[int]] | None:
    """Return operation and ranks of a wait inside this package, whose locals hold the ranks; None if this frame is no
    such wait."""
    if frame.f_code.co_filename.startswith(_TORCH_DISTRIBUTED):
        return None
    here = _locals(frame)
    owner = here.get("self")
    channel = here.get("channel") or getattr(owner, "_channel", None) or owner
    ranks = getattr(channel, "ranks", None)
    if not isinstance(ranks, tuple):
        return None
    operation = here.get("operation")
    text = operation if isinstance(operation, str) else str(owner) if hasattr(owner, "_operation") else ""
    return (text, list(ranks)) if text else None


def _torch_call(frame: FrameType) -> tuple[str, list[int]]:
    here = _locals(frame)
    given = (here.get(name) for name in ("tensor", "input", "input_tensor"))
    tensor = next((each for each in given if isinstance(each, torch.Tensor)), None)
    text = frame.f_code.co_name
    if tensor is not None:
        text += f" of {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    for name in ("dst", "src"):
        if isinstance(here.get(name), int):
            text += f", {name}={here[name]}"
    group = here.get("group")
    return text, list(dist.get_process_group_ranks(group if isinstance(group, dist.ProcessGroup) else None))


def _doing(frames: list[FrameType]) -> str:
    for frame in frames:
        path = frame.f_code.co_filename
        if path.startswith(_LOADING):
            return LOADING
        if path.startswith(_STORING) or "/safetensors/" in path:
            calls = {each.f_code.co_name for each in frames if not each.f_code.co_filename.startswith("<")}
            return RESTORING if any("load" in name for name in calls) else SAVING
        if path == _INITIALIZE:
            return STARTING
    return ELSEWHERE


def _users_line(frames: list[FrameType]) -> str:
    frame = next((f for f in frames if not f.f_code.co_filename.startswith(_NOT_THE_USERS)), None)
    frame = frame or (frames[0] if frames else None)
    if frame is None:
        return ""
    path, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(path, line).strip()
    function = frame.f_code.co_name
    inside = "" if function == "<module>" else f" in {function}"
    return f"{os.path.basename(path)}:{line}{inside}" + (f": {text}" if text else "")


def _module_names(frames: list[FrameType], known: list[Names]) -> Iterator[str]:
    for frame in frames:
        if frame.f_code.co_name == "_call_impl":
            module: Any = _locals(frame).get("self")
            for names in known:
                if name := _quietly(lambda module=module, names=names: names.of_module(module)):
                    yield name


def _parameter_names(frames: list[FrameType], known: list[Names]) -> list[str]:
    """Return the parameter names of the innermost bucket in the frames."""
    for frame in frames:
        here = _locals(frame)
        for holder in (here.get("self"), here.get("bucket"), here.get("grads")):
            if not hasattr(holder, "layout"):
                continue
            for names in known:
                if found := _quietly(lambda holder=holder, names=names: names.of_parameters(holder)):
                    return found
    return []


def _quietly(read: Callable[[], Any]) -> Any:
    """Call ``read`` and return its result, or None if it fails because the data is changing."""
    with contextlib.suppress(Exception):
        return read()
    return None
