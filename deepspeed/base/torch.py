"""Small documented helpers around torch itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def required_torch_version(
    min_version: float | str | None = None, max_version: float | str | None = None
) -> bool:
    """Tell whether the installed torch is between two releases, both inclusive: `required_torch_version(2.6)`.

    Releases are compared by major and minor number. A float such as 2.1 cannot tell release 2.1 from 2.10; write
    that one as text, "2.10".
    """
    if min_version is None and max_version is None:
        raise AssertionError("required_torch_version needs min_version, max_version or both")
    installed = _numbers(torch.__version__)
    if min_version is not None and installed < _numbers(str(min_version)):
        return False
    return max_version is None or installed <= _numbers(str(max_version))


def is_functorch_transforming() -> bool:
    """Tell whether this runs inside a transform of `torch.func` (grad, vmap, ...)."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined]


def register_grad_hook(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Call `hook(param)` each time the gradient of the leaf `param` has been accumulated; returns the handle."""
    return param.register_post_accumulate_grad_hook(hook)


def jit_script_compat(fn: F) -> F:
    """Formerly `torch.jit.script`, which new releases of torch drop: returns the function unchanged."""
    return fn
