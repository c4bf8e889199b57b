"""Functions shared by the command-line tools. Nothing here imports torch, which `deepspeed` itself does not need."""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import re
import select
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, ParamSpec, TypeVar

from deepspeed.base.exceptions import ExplainedError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells."""

P = ParamSpec("P")
R = TypeVar("R")
Container = TypeVar("Container", bound=argparse._ActionsContainer)

_UNKNOWN = re.compile(r"unrecognized arguments: (.*)", re.DOTALL)


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser that suggests similar options for an unknown one."""

    def error(self, message: str) -> NoReturn:
        unknown = _UNKNOWN.match(message)
        options = [word.partition("=")[0] for word in unknown[1].split()] if unknown else []
        near = [text for option in options if option.startswith("-") and (text := self._suggestion(option))]
        super().error("; ".join([message, *near]))

    def _suggestion(self, option: str) -> str:
        found = difflib.get_close_matches(option, self._option_string_actions, n=2, cutoff=0.6)
        return f"did you mean {' or '.join(found)} instead of {option}?" if found else ""


def takes(help: str, default: Any = None, **more: Any) -> dict[str, Any]:
    """Describe an option that takes a value, of the default's type if that is a number, for `add_options`."""
    if type(default) in (int, float):
        more.setdefault("type", type(default))
    if default is not None:
        more["default"] = default
    return {"help": help, **more}


def add_options(to: Container, rows: Mapping[str, str | dict[str, Any]]) -> Container:
    """Add a table of options from usage, such as ``-H --hostfile FILE``, to the keywords of ``add_argument``; return
    ``to``. A plain string is the help of a flag or of a positional argument."""
    for words, row in rows.items():
        names = [word for word in words.split() if word.startswith("-")] or [words]
        given: dict[str, Any] = {"help": row} if isinstance(row, str) else dict(row)
        if isinstance(row, str) and names[0].startswith("-"):
            given["action"] = "store_true"
        if not words.endswith(names[-1]):
            given["metavar"] = words.rpartition(" ")[2]
        to.add_argument(*names, **given)
    return to


def positive(text: str) -> int:
    """Parse a positive int (an option type)."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


def exit_quietly(tool: str, *refusals: type[Exception]) -> Callable[[Callable[P, R]], Callable[P, R | int]]:
    """Decorate the ``main`` of a tool: Ctrl-C, or a reader such as `head` that closes the pipe, ends it without a
    traceback. An ``ExplainedError``, or one of ``refusals``, prints its message and notes, and exits with 2."""

    def around(main: Callable[P, R]) -> Callable[P, R | int]:
        @functools.wraps(main)
        def run(*args: P.args, **kwargs: P.kwargs) -> R | int:
            try:
                result = main(*args, **kwargs)
                sys.stdout.flush()
                return result
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                raise SystemExit(INTERRUPTED) from None
            except BrokenPipeError:
                if not _reader_is_gone():
                    raise
                # Discard buffered output.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise SystemExit(0) from None
            except (ExplainedError, *refusals) as error:
                print(f"{tool}: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
                return 2

        return run

    return around


def _reader_is_gone() -> bool:
    """Return whether standard output was closed by its reader, to tell it from another broken pipe."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):
        return False
