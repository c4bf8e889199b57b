"""The wrapper that starts every rank. Run by path, so it may import nothing but the standard library.

    shim.py PARENT_PID KIND OPTIONS TARGET [ARGUMENT ...]

KIND is ``script``, ``module`` or ``program``; OPTIONS is the JSON text of `ShimOptions`. The shim ties the rank
to the launcher's lifetime, binds it to its cores, adds ``--local_rank=N``, and then becomes the user's
program: a script or module runs in this same interpreter as ``__main__``, a program replaces it. An exception
that escapes a script, or a ``sys.exit`` with a code other than 0, is written to the file that torch's elastic agent
reads (``TORCHELASTIC_ERROR_FILE``). Only the rank that fails first prints its traceback: the others fail because of
it, and their tracebacks would bury the root cause.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import types
from typing import Any, NamedTuple

PR_SET_PDEATHSIG = 1
LINUX = sys.platform.startswith("linux")
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
FIRST_FAILURE = "first_failure"
SCRIPT_ENDED = "script_ended"  # file in a rank's folder: when its script ended without a failure
LOCAL_RANK_OPTION = "--local_rank"
SIGKILL = 9  # not in `signal` on Windows
INTERRUPTED = 128 + signal.SIGINT
USAGE_ERROR = 2  # exit code of commands that are called incorrectly


class ShimOptions(NamedTuple):
    """The options of this machine's ranks, the same for all of them."""

    local_rank_argument: bool = True
    own_log: bool = False  # standard output is this rank's log file: send standard error there, too
    cores: list[list[int]] | None = None  # by local rank
    lost_peer_pattern: str = ""  # of exceptions caused by a peer, which only the launcher reports


def die_with_parent(parent_pid: int, signum: int = SIGKILL) -> None:
    """Make the kernel send ``signum`` to this process when its parent ends, however it ends (Linux only)."""
    if not LINUX:
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent_pid:  # the parent ended before the request took effect
        os._exit(128 + signum)


def main() -> None:
    parent_pid, kind, options_json, target, *arguments = sys.argv[1:]
    die_with_parent(int(parent_pid))
    options = ShimOptions(**json.loads(options_json))
    local_rank = int(os.environ["LOCAL_RANK"])
    if options.own_log:
        os.dup2(1, 2)
    if options.cores is not None:
        os.sched_setaffinity(0, options.cores[local_rank])
    if options.local_rank_argument:
        arguments.insert(0, f"{LOCAL_RANK_OPTION}={local_rank}")
        if kind != "program":
            spare_strict_parsers(arguments[0])

    if kind == "program":
        run_program(target, arguments)
    sys.argv = [target, *arguments]
    run = run_module if kind == "module" else run_script
    try:
        run(target)
    except SystemExit as end:
        if end.code not in (None, 0):
            _set_last_exception(end)
            report_exit(end, options.own_log)
        else:
            record_end()
        raise
    except KeyboardInterrupt as interrupt:
        _set_last_exception(interrupt)
        sys.exit(INTERRUPTED)  # the launcher reports the interrupt once, for all ranks
    except BaseException as error:
        _set_last_exception(error)
        report(error, options.own_log, options.lost_peer_pattern)
        sys.exit(1)
    record_end()


def _set_last_exception(error: BaseException) -> None:
    """Set ``sys.last_*`` as Python does for an uncaught exception: exit handlers read it to learn
    whether the run succeeded (a rank that failed must not wait for the others)."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__


def spare_strict_parsers(added: str) -> None:
    """Make argparse parsers that do not declare ``--local_rank`` ignore the ``added`` argument.

    Scripts written for this command take the option, as documented; scripts for other launchers read LOCAL_RANK and
    would fail with "unrecognized arguments". Only the parser can tell the two apart: the option may be declared in any
    module that the script imports. ``sys.argv`` holds the argument either way.
    """
    import argparse

    parse_args = argparse.ArgumentParser.parse_args

    def parse_args_sparing(self, args=None, namespace=None):
        given = list(sys.argv[1:] if args is None else args)
        takes_it = any(option.startswith(LOCAL_RANK_OPTION) for option in self._option_string_actions)
        if added in given and not takes_it:
            given.remove(added)
        return parse_args(self, given, namespace)

    argparse.ArgumentParser.parse_args = parse_args_sparing  # type: ignore[assignment]


def run_program(target: str, arguments: list[str]) -> None:
    """Replace this process by the program; never returns."""
    try:
        os.execvp(target, [target, *arguments])
    except OSError as error:
        print(f"deepspeed: cannot run {target!r}: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def run_script(path: str) -> None:
    """Run a Python file as ``python path`` would: in a fresh ``__main__``, with the file's folder first on
    ``sys.path``.
    """
    full_path = os.path.abspath(path)
    if not os.path.isfile(full_path):  # a folder or archive with a __main__.py
        import runpy

        runpy.run_path(path, run_name="__main__")
        return
    main_module = types.ModuleType("__main__")
    main_module.__file__ = full_path
    main_module.__dict__["__cached__"] = None
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    # The shim's own module must outlive the swap: its functions are still running.
    sys.modules["__deepspeed_shim__"] = sys.modules["__main__"]
    sys.modules["__main__"] = main_module
    with open(full_path, "rb") as file:
        source = file.read()
    exec(compile(source, full_path, "exec", dont_inherit=True), main_module.__dict__)


def run_module(name: str) -> None:
    """Run a module as ``python -m name`` would."""
    import runpy

    _set_first_path(os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _set_first_path(folder: str) -> None:
    """Replace the shim's own folder, the first on ``sys.path``, by ``folder``."""
    if not getattr(sys.flags, "safe_path", False):  # -P and PYTHONSAFEPATH, from Python 3.11 on
        sys.path[0] = folder


def report(error: BaseException, own_log: bool, lost_peer_pattern: str = "") -> None:
    """Record the error for the launcher; print it if it is the first failure on this machine and not caused by a
    peer, or if the rank has its own log file."""
    import traceback

    now = time.time()
    trace = _without_shim_frames(error.__traceback__)
    error.__traceback__ = trace
    origin = _oldest(error)
    lost_peer = lost_peer_pattern and re.search(lost_peer_pattern, _one_line_of(origin), re.IGNORECASE)
    first = _is_first_failure() and not lost_peer
    if first or own_log:
        sys.excepthook(type(error), error, trace)  # the user's own hook, if set
        sys.stderr.flush()
    _write(
        now,
        first,
        _one_line_of(error),
        exit_code=1,
        on_screen=first and not own_log,
        origin=_one_line_of(origin) if origin is not error else "",
        callstack="".join(traceback.format_exception(type(error), error, trace)),
    )


def report_exit(end: SystemExit, own_log: bool) -> None:
    """Record the exit code for the launcher, before peers notice that this rank has ended. A message in place of a code
    is printed by the first rank only, or to the rank's own log file."""
    now = time.time()
    first = _is_first_failure()
    text = "" if isinstance(end.code, int) else str(end.code)
    _write(now, first, text, exit_code=end.code & 0xFF if isinstance(end.code, int) else 1, on_screen=first)
    if text and not (first or own_log):
        end.code = 1


def record_end() -> None:
    """Tell the launcher that the script has succeeded, before exit handlers close connections that peers may still
    use."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    try:
        with open(os.path.join(os.path.dirname(path), SCRIPT_ENDED), "w", encoding="utf-8") as file:
            file.write(repr(time.time()))
    except OSError:  # the folder is gone or full: only the failure report becomes less precise
        pass


def _write(
    now: float,
    first: bool,
    message: str,
    *,
    exit_code: int,
    on_screen: bool,
    origin: str = "",
    callstack: str = "",
) -> None:
    """Write the error file, if the agent wants one: in torch's layout, from which ProcessFailure reads message, call
    stack and time, plus facts of our own."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    record: dict[str, Any] = {
        "message": {
            "message": message,
            "extraInfo": {"py_callstack": callstack, "timestamp": str(int(now))},
        },
        "origin": origin,
        "time": now,
        "first": first,
        "on_screen": on_screen,
        "exit_code": exit_code,
    }
    # Written atomically: the launcher may stop this rank, and read its report, at any moment.
    part = f"{path}.part"
    with open(part, "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.replace(part, path)


def _one_line_of(error: BaseException) -> str:
    import traceback

    summary = traceback.TracebackException(type(error), error, None)
    summary.__notes__ = None  # pyright: ignore[reportAttributeAccessIssue]  # the report has one line
    return "".join(summary.format_exception_only()).strip()


def _oldest(error: BaseException) -> BaseException:
    """Return the original exception: a ``finally`` that communicates with peers raises a second one over it."""
    seen = {id(error)}
    while True:
        earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if earlier is None or id(earlier) in seen:
            return error
        seen.add(id(earlier))
        error = earlier


def _is_first_failure() -> bool:
    """Return True in exactly one rank of this machine: the one that creates the marker file next to the ranks'
    folders."""
    path = os.environ.get(ERROR_FILE)
    if not path:
        return True
    marker = os.path.join(os.path.dirname(os.path.dirname(path)), FIRST_FAILURE)
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    except OSError:
        return True  # the folder is gone or full: rather one traceback too many than none
    return True


def _without_shim_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return the traceback from the user's first frame on; None if no user code ran (a missing module, bad
    syntax).
    """
    while trace is not None:
        names = trace.tb_frame.f_globals
        if names is not globals() and names.get("__name__") != "runpy":
            break
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
