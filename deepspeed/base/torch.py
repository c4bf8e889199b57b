"""Small documented helpers around torch itself."""

from __future__ import annotations

import torch


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
