"""Version, commit, torch, accelerator and native ops of this installation.

Nothing here is compiled for a particular torch release, so `torch_info` describes the installed torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed

from deepspeed.base.accelerator import get_accelerator
from deepspeed.ops.op_builder import ALL_OPS
from deepspeed.version import __version__ as __version__
from deepspeed.version import git_branch as git_branch
from deepspeed.version import git_hash as git_hash
from deepspeed.version import version as version


def _two_parts(text: str | None) -> str:
    """Shorten a version to major.minor: `2.6.1+cpu` -> `2.6`; None -> "0.0"."""
    return ".".join(text.split("+")[0].split(".")[:2]) if text else "0.0"


def _nccl_version() -> str:
    if not torch.distributed.is_nccl_available():
        return "0.0"
    found: Any = torch.cuda.nccl.version()  # (2, 27, 5)
    return ".".join(str(part) for part in found[:2])


torch_info: dict[str, Any] = {
    "version": _two_parts(torch.__version__),
    "cuda_version": _two_parts(torch.version.cuda),
    "nccl_version": _nccl_version(),
    "hip_version": _two_parts(torch.version.hip),
    "bf16_support": get_accelerator().is_bf16_supported(),
}
"""Versions as major.minor ("0.0": not installed), and whether the current accelerator supports bf16."""

accelerator_name: str = get_accelerator().device_name()

compatible_ops: dict[str, bool] = {name: builder().is_compatible() for name, builder in ALL_OPS.items()}
"""Op name -> whether it can run here."""

installed_ops: dict[str, bool] = {
    name: builder.OP.module is not None and compatible_ops[name] for name, builder in ALL_OPS.items()
}
"""Op name -> whether this release includes it and it can run here."""
