"""Hints for installing optional dependencies."""

from __future__ import annotations

import re
import shlex
from importlib import metadata

DISTRIBUTION = "deepspeed"


def requirements_of(extra: str) -> list[str]:
    """Return the requirements of ``extra``, such as ``["transformers>=4.45"]``.

    Empty if the package runs from a folder that was never installed, and so has no metadata.
    """
    try:
        declared = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
    found = []
    for line in declared:
        requirement, _, marker = line.partition(";")
        if re.search(rf"extra\s*==\s*[\"']{re.escape(extra)}[\"']", marker):
            found.append(requirement.strip().replace(" ", ""))
    return found


def install_hint(package: str, *, extra: str) -> str:
    """Return the command that installs ``package`` in the versions that our ``extra`` requires.

    It never names ``deepspeed[extra]``: pip would fetch that from a package index, where the name belongs to another
    project.
    """
    wanted = [line for line in requirements_of(extra) if _name_of(line) == _normal(package)]
    return f"pip install {shlex.join(wanted or [package])}"


def _name_of(requirement: str) -> str:
    return _normal(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
