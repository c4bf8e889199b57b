"""Checks of Triton kernels on machines without a GPU.

    @interpreted
    def test_sums(dtype): ...           # on CPU tensors, in a process in which Triton interprets kernels

    @compiling
    def test_sums_compile():            # in a process in which Triton compiles
        assert built(lambda: sums(torch.empty(3))) == {"_sums_kernel"}

Whether kernels are interpreted is decided when Triton is imported, and cannot be changed; so such tests run in separate
processes, one for all interpreted and one for all compiling tests of a session. Fixtures and parameters arrive
pickled. The process of pytest itself never imports Triton.

`built` calls a function that launches kernels, and compiles every launch for each of `CAPABILITIES` instead, with no
driver: from the arguments that it would have had on a GPU. It fails where a program needs more shared memory than these
GPUs have.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import pytest

from tests import forked

CAPABILITIES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""By compute capability (times ten), the bytes of shared memory that one program may have."""
TIMEOUT_S = 900.0
"""Timeout of a test that hangs. No test takes a minute alone; compilers may if other programs use the CPU."""
_ROOT = Path(__file__).resolve().parents[3]
_START = "import sys; from tests.ops.gpu.triton_kit import serve; serve(sys.argv[1])"


def interpreted(function: Callable[..., None]) -> Callable[..., None]:
    """The decorated test runs where Triton interprets kernels. Skipped without Triton."""
    return _elsewhere(function, interpret=True)


def compiling(function: Callable[..., None]) -> Callable[..., None]:
    """The decorated test runs where Triton compiles kernels. Skipped without Triton."""
    return _elsewhere(function, interpret=False)


def _elsewhere(function: Callable[..., None], *, interpret: bool) -> Callable[..., None]:
    @functools.wraps(function)
    def send(**kwargs: Any) -> None:
        __tracebackhide__ = True
        kind, text = _process(interpret).ask(function, kwargs)
        if kind == "skipped":
            pytest.skip(text)
        if kind == "failed":
            pytest.fail(text, pytrace=False)

    send.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    missing = importlib.util.find_spec("triton") is None
    return pytest.mark.skipif(missing, reason="needs Triton")(send)


# ---------------------------------------------------------------------------------------------- the process of pytest


class _Process:
    def __init__(self, interpret: bool) -> None:
        with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/socket", "AF_UNIX") as listener:
            path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
            environment = {**os.environ, "TRITON_INTERPRET": str(int(interpret)), "PYTHONPATH": path}
            self._process = forked.start(["-c", _START, str(listener.address)], env=environment)
            self._connection = _accept(listener, self._process)

    def ask(self, function: Callable[..., None], kwargs: dict[str, Any]) -> tuple[str, str]:
        try:
            self._connection.send((function.__module__, function.__qualname__, kwargs))
            if self._connection.poll(TIMEOUT_S):
                return self._connection.recv()
            self._process.kill()
            problem = f"no answer in {TIMEOUT_S:.0f} s"
        except (EOFError, OSError):
            problem = "the process ended"
        _process.cache_clear()
        output, errors = self._process.communicate(timeout=10)
        return "failed", f"{problem}\n{output}{errors}"


def _accept(listener: Listener, process: forked.Process) -> Connection:
    socket: Any = listener._listener._socket  # type: ignore[attr-defined]
    socket.settimeout(TIMEOUT_S)
    try:
        return listener.accept()
    except TimeoutError:
        process.kill()
        raise RuntimeError("".join(process.communicate(timeout=10))) from None


@functools.cache
def _process(interpret: bool) -> _Process:
    return _Process(interpret)


# ---------------------------------------------------------------------------------------------- the other process


def serve(address: str) -> None:
    """Run tests until the connection closes."""
    import numpy
    import torch

    assert "triton" not in sys.modules, "Triton was imported before it was said whether it interprets"
    if os.environ["TRITON_INTERPRET"] == "1":
        _let_loops_end()
    torch.set_num_threads(1)
    connection = Client(address, "AF_UNIX")
    while True:
        try:
            module, name, kwargs = connection.recv()
        except EOFError:
            return
        numpy.random.seed(0)
        torch.manual_seed(0)
        connection.send(_outcome(module, name, kwargs))


def _let_loops_end() -> None:
    """Older interpreters read the end of a loop from an array of one element in a way that numpy has given up."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor: Any, *scope: Any) -> None:
        original(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch


def _outcome(module: str, name: str, kwargs: dict[str, Any]) -> tuple[str, str]:
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        found.__wrapped__(**kwargs)
    except pytest.skip.Exception as skip:
        return "skipped", str(skip.msg)
    except BaseException as error:  # an exit inside a test is a failure of that test
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        return "failed", "".join(traceback.format_exception(type(error), error, frames))
    return "passed", ""


# ---------------------------------------------------------------------------------------------- compilation


def built(launching: Callable[[], Any], capabilities: tuple[int, ...] = tuple(CAPABILITIES)) -> set[str]:
    """The names of the kernels that ``launching`` launches, all of which compile."""
    return {name for name, _, _ in assembled(launching, capabilities)}


def assembled(
    launching: Callable[[], Any], capabilities: tuple[int, ...] = tuple(CAPABILITIES)
) -> list[tuple[str, int, str]]:
    """(kernel, capability, PTX) of everything that ``launching`` launches, once for each set of arguments' types."""
    results = []
    with _recorded() as launches:
        launching()
    assert launches, "no kernel was launched"
    for kernel, *launch in launches:
        for capability in capabilities:
            results.append((kernel.__name__, capability, _compiled(kernel, *launch, capability)))
    return results


def _compiled(
    kernel: Any, signature: Any, constants: Any, options: Any, aligned: tuple[int, ...], capability: int
) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    done: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert done.metadata.shared <= CAPABILITIES[capability], (
        f"{kernel.__name__}: {done.metadata.shared} bytes of shared memory"
    )
    return done.asm["ptx"]


_Launch = tuple[Any, dict[str, str], dict[str, Any], dict[str, Any], tuple[int, ...]]
"""A kernel, types of its arguments, those that are constants, options, and which are multiples of 16."""


@contextmanager
def _recorded() -> Iterator[list[_Launch]]:
    from triton.runtime.jit import JITFunction

    launches: dict[bytes, _Launch] = {}
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = self.arg_names
        options = {name: kwargs.pop(name) for name in list(kwargs) if name not in names}
        defaults = {p.name: p.default for p in self.params if p.has_default}
        values = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        loose = {p.name for p in self.params if p.do_not_specialize}
        fixed = {p.name for p in self.params if p.is_constexpr or values[p.name] is None}
        fixed |= {name for name in names if name not in loose and _is_one(values[name])}
        signature = {name: "constexpr" if name in fixed else _type_of(values[name]) for name in names}
        constants = {name: values[name] for name in names if name in fixed}
        moving = [i for i, name in enumerate(names) if name not in fixed | loose]
        aligned = tuple(i for i in moving if _is_aligned(values[names[i]]))
        shown = {name: str(value) for name, value in constants.items()}
        key = pickle.dumps((self.__name__, signature, shown, options, aligned))
        launches.setdefault(key, (self, signature, constants, options, aligned))

    JITFunction.run = run  # type: ignore[method-assign, assignment]
    recorded: list[Any] = []
    try:
        yield recorded
    finally:
        JITFunction.run = original  # type: ignore[method-assign]
    recorded.extend(launches.values())


def _is_one(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value == 1


def _is_aligned(value: Any) -> bool:
    """Alignment for which Triton specializes programs: on a GPU, allocations start at such addresses."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.storage_offset() * value.itemsize % 16 == 0
    return isinstance(value, int) and not isinstance(value, bool) and value % 16 == 0


def _type_of(value: Any) -> str:
    """As Triton writes the type of an argument."""
    import torch
    from triton._utils import type_canonicalisation_dict

    if isinstance(value, torch.Tensor):
        return "*" + type_canonicalisation_dict[str(value.dtype).removeprefix("torch.")]
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    assert isinstance(value, float), f"an argument {value!r}"
    return "fp32"


if __name__ == "__main__":
    serve(sys.argv[1])
