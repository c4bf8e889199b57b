"""The documented builder interface. Nothing is compiled at run time: ``load()`` returns what is already built."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any, ClassVar

import torch

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.extras import install_hint
from deepspeed.base.logging import logger
from deepspeed.ops import gpu, native
from deepspeed.ops.op_builder.table import Op

PYTORCH = "pytorch"


class OpBuilder:
    """Builder of one op. Subclasses are generated from the table; ``OP`` is the row."""

    OP: ClassVar[Op]
    NAME: ClassVar[str]
    BUILD_VAR: ClassVar[str]

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        """Return the documented import path of the op's binary. Here one library has them all
        (``deepspeed.ops.native``).
        """
        return self.OP.absolute_name

    def sources(self) -> list[str]:
        """Return the C++ source files of the op, which are compiled with the package."""
        return list(self.OP.sources)

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the op can be used here, on any path; ``verbose`` logs the reason if not."""
        reason = self.why_not()
        if reason and verbose:
            logger.warning(reason)
        return not reason

    def why_not(self) -> str:
        """Return why the op cannot be used, and the alternative; empty if it can."""
        if self.OP.module is None:
            return f"This package has no op {self.NAME}: {self.OP.instead}."
        if not self.OP.fallback and not importlib.import_module(self.OP.module).is_available():
            return f"The op {self.NAME} needs {self.OP.needs}; without it {self.OP.instead}. {self.hint()}".rstrip()
        return ""

    def path(self) -> str:
        """Return the path on which the op runs here: ``native AVX-512``, ``triton``, ``pytorch``, ...; empty if none.
        If kernels compute only a part of it, that part follows in parentheses.
        """
        if self.why_not():
            return ""
        found = self._kernels()
        return f"{found} ({self.OP.part})" if found and self.OP.part else found or PYTORCH

    def _kernels(self) -> str:
        """Return the kind of kernels that run the op here; empty if none do."""
        kinds, accelerator = self.OP.runs_on, get_accelerator()
        if "cuFile" in kinds:
            return "cuFile"
        if "triton" in kinds and accelerator.is_triton_supported():
            return "triton" if self.NAME == "fused_adam" or gpu.offered() else ""
        if "native" in kinds and (self.OP.on_host or accelerator.device_name() == "cpu"):
            isa = native.isa()
            return "" if isa is None else f"native {ISA_TITLES.get(isa, isa)}"
        return ""

    def hint(self) -> str:
        """Return how to get a faster path; empty if there is none."""
        on_gpu = get_accelerator().device_name() == "cuda"
        if "triton" in self.OP.runs_on and on_gpu and importlib.util.find_spec("triton") is None:
            command = install_hint("triton", extra="triton")
            return f"Triton was not found: {command}, for GPU kernels instead of PyTorch operations."
        if "native" in self.OP.runs_on and native.library() is None:
            return (
                "The native library was not built with this package: install a C++20 compiler (Debian: apt "
                "install g++), then reinstall the package."
            )
        return ""

    def builder(self) -> Any:
        """Return a setuptools Extension with the op's sources, for projects that build it themselves."""
        from setuptools import Extension  # slow to import

        if not self.sources():
            raise NotImplementedError(
                self.why_not() or f"The op {self.NAME} has no native sources: it runs on {self.path()}."
            )
        # Contracting a * b + c would make results depend on the instruction set.
        flags = ["-std=c++20", "-O3", "-ffp-contract=off"]
        return Extension(
            self.absolute_name(), self.sources(), include_dirs=["csrc/include"], extra_compile_args=flags
        )

    def load(self, verbose: bool = False) -> ModuleType:
        """Return the op's module. NotImplementedError, naming the alternative, if it cannot be used."""
        reason = self.why_not()
        if reason or self.OP.module is None:
            raise NotImplementedError(reason)
        module = importlib.import_module(self.OP.module)
        if verbose:
            logger.info(f"The op {self.NAME} runs on {self.path()}.")
        return module

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Return whether torch was built for ROCm."""
        return torch.version.hip is not None

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """Return the ROCm version that torch was built for; (0, 0) if none."""
        major, minor, *_ = (torch.version.hip or "0.0").split(".")
        return int(major), int(minor)


ISA_TITLES = {"avx512": "AVX-512", "avx2": "AVX2", "plain": "C++"}
