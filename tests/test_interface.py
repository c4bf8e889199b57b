"""Documented signatures: every parameter by its name, in its order, with its default."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

LINES = [
    line
    for line in (Path(__file__).parent / "files" / "interface.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
]
# Ours differ where the documented default is of no use or could be written to by accident.
DEFAULTS = {
    ("deepspeed.comm.all_reduce_coalesced", "log_name"): "all_reduce_coalesced",
    ("deepspeed.comm.inference_all_reduce", "log_name"): "inference_all_reduce",
    ("deepspeed.runtime.dataloader.DeepSpeedDataLoader", "deepspeed_dataloader_config"): None,
    (
        "deepspeed.runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor",
        "target_device",
    ): None,
    ("deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload._register_deepspeed_module", "count"): (
        0,
    ),
}


def resolve(path: str) -> Any:
    names = path.split(".")
    for length in range(len(names), 0, -1):
        try:
            found = importlib.import_module(".".join(names[:length]))
        except ModuleNotFoundError:
            continue
        for name in names[length:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


def documented(line: str) -> tuple[str, list[tuple[str, Any]]]:
    """The path, and per parameter its name (with stars) and default: a value, `...`, or `inspect.Parameter.empty`."""
    path, _, rest = line.partition("(")
    arguments = ast.parse(f"def f({rest}: pass").body[0].args  # type: ignore[attr-defined]
    empty = inspect.Parameter.empty
    positional = [argument.arg for argument in arguments.args]
    defaults = [ast.literal_eval(default) for default in arguments.defaults]
    parameters: list[tuple[str, Any]] = list(
        zip(positional, [empty] * (len(positional) - len(defaults)) + defaults, strict=True)
    )
    if arguments.vararg:
        parameters.append(("*" + arguments.vararg.arg, empty))
    if arguments.kwarg:
        parameters.append(("**" + arguments.kwarg.arg, empty))
    return path, parameters


def ours(found: Any) -> list[tuple[str, Any]]:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(found).parameters.values()
    return [(stars.get(p.kind, "") + p.name, p.default) for p in parameters if p.name != "self"]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition("(")[0].removeprefix("deepspeed."))
def test_signature(line: str) -> None:
    path, expected = documented(line)
    found = ours(resolve(path))
    assert [name for name, _ in found[: len(expected)]] == [name for name, _ in expected]
    for (name, default), (_, given) in zip(expected, found, strict=False):
        if default is ...:
            assert given is not inspect.Parameter.empty
        else:
            assert given == DEFAULTS.get((path, name), default), name
    for name, default in found[len(expected) :]:  # more is allowed where a caller need not know
        assert name.startswith("*") or default is not inspect.Parameter.empty
