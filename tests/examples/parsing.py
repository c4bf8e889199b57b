"""Runs a program until it has parsed its command line, and no further."""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import io
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from tests.tools.launcher.programs import REPOSITORY

# Libraries that examples import before they parse, and that not every environment has.
OPTIONAL = {
    "transformers",
    "accelerate",
    "trl",
    "peft",
    "lightning",
    "datasets",
    "tokenizers",
    "matplotlib",
    "triton",
    "ray",
}
EXAMPLES = (f"{REPOSITORY}/examples/", f"{REPOSITORY}/benchmarks/")


class Wrong(BaseException):
    """A command line that its program refuses; no program catches it."""


class Parsed(BaseException):
    """The program has accepted its command line; ``left``: the words that it did not know."""

    def __init__(self, left: Sequence[str] = ()) -> None:
        self.left = list(left)


def after_parsing(
    function: Callable[[], object], words: Sequence[str], *, only_options: bool = False
) -> list[str]:
    """Calls ``function`` with the command line ``words``, up to the end of the function in which it parses them: what
    that checks beyond the parser counts. Returns the words left over. With ``only_options`` words are only looked up:
    each option has to exist. Raises Wrong."""
    wrap, parser = _look_up if only_options else _parse, argparse.ArgumentParser
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        _as_before(words),
        mock.patch.object(parser, "parse_args", wrap(parser.parse_args)),
        mock.patch.object(parser, "parse_known_args", wrap(parser.parse_known_args)),
    ):
        try:
            function()
        except Parsed as parsed:
            return parsed.left
        except SystemExit as ended:
            raise Wrong(f"it ends with {ended.code}") from ended
        except Exception as error:
            raise Wrong(f"{type(error).__name__}: {error}") from error
    raise Wrong("it does not parse its arguments")


def _parse(original: Callable[..., Any]) -> Callable[..., Any]:
    def parse(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        found = original(parser, args, namespace)
        caller = sys._getframe(1)
        if caller.f_code.co_filename == argparse.__file__:
            return found
        left = found[1] if isinstance(found, tuple) else []
        if caller.f_code.co_name in ("main", "<module>"):
            raise Parsed(left)

        def stop(frame: types.FrameType, event: str, arg: object) -> None:
            if event == "return" and frame is caller:
                if arg is None:  # it has raised something
                    raise Wrong(f"{caller.f_code.co_name} does not accept them")
                raise Parsed(left)

        sys.setprofile(stop)
        return found

    return parse


def _look_up(original: Callable[..., Any]) -> Callable[..., Any]:
    def parse(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        options = [word.partition("=")[0] for word in sys.argv[1:] if word.startswith("-")]
        if unknown := [option for option in options if option not in parser._option_string_actions]:
            raise Wrong(f"no options of it: {unknown}")
        raise Parsed

    return parse


def refuse(parser: argparse.ArgumentParser, message: str) -> None:
    """Instead of ``ArgumentParser.error``, which prints and exits."""
    sys.setprofile(None)
    raise Wrong(message)


@contextlib.contextmanager
def _as_before(words: Sequence[str]) -> Iterator[None]:
    """Leaves the interpreter as it was: modules of the examples have the same names."""
    argv, path, environment, modules = list(sys.argv), list(sys.path), dict(os.environ), dict(sys.modules)
    sys.argv[1:] = words
    sys.meta_path.append(Absent())
    try:
        yield
    finally:
        sys.setprofile(None)
        sys.meta_path.pop()
        sys.argv[:], sys.path[:] = argv, path
        os.environ.clear()
        os.environ.update(environment)
        for name, module in list(sys.modules.items()):
            ours = (getattr(module, "__file__", None) or "").startswith(EXAMPLES)
            if name not in modules and (ours or isinstance(module, Stand)):
                del sys.modules[name]


class Stand(types.ModuleType):
    """Stands for a library that is not installed; has every name, as a class."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _imported_by_an_example() -> bool:
    frame = sys._getframe(2)
    while "importlib" in frame.f_code.co_filename and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(EXAMPLES)


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the optional libraries that nothing before it has found, for our examples and benchmarks only: other
    libraries take another way without them."""

    def find_spec(
        self, fullname: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in OPTIONAL or not _imported_by_an_example():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return Stand(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...
