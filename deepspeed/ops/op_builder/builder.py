"""The documented builder interface. Nothing is compiled at run time: ``load()`` returns what is already
built.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any, ClassVar

from deepspeed.accelerator import get_accelerator
from deepspeed.ops import native
from deepspeed.ops.op_builder.table import Op
from deepspeed.utils.extras import install_hint
from deepspeed.utils.logging import logger

PYTORCH = "pytorch"


class OpBuilder:
    """One op. Subclasses are generated from the table; ``OP`` is its row."""

    OP: ClassVar[Op]
    NAME: ClassVar[str]
    BUILD_VAR: ClassVar[str]

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        """Documented import path of the op's binary. Here one library holds them all
        (``deepspeed.ops.native``).
        """
        return self.OP.absolute_name

    def sources(self) -> list[str]:
        """C++ files of the source tree from which the op is built, together with the package."""
        return list(self.OP.sources)

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the op can be used here, on any path; ``verbose`` logs why not."""
        reason = self.why_not()
        if reason and verbose:
            logger.warning(reason)
        return not reason

    def why_not(self) -> str:
        """Why the op cannot be used, and what to use instead; empty if it can."""
        if self.OP.module is None:
            return f"The op {self.NAME} is not implemented in this release; until then {self.OP.instead}."
        if not self.OP.fallback and not importlib.import_module(self.OP.module).is_available():
            return f"The op {self.NAME} needs {self.OP.needs}; without it {self.OP.instead}. {self.hint()}".rstrip()
        return ""

    def path(self) -> str:
        """What runs the op here: ``native AVX-512``, ``triton``, ``pytorch``, ...; empty if nothing does."""
        if self.why_not():
            return ""
        if "triton" in self.OP.runs_on and get_accelerator().is_triton_supported():
            return "triton"
        if (
            "native" in self.OP.runs_on
            and not self._device_takes_over()
            and (isa := native.isa()) is not None
        ):
            return f"native {ISA_TITLES.get(isa, isa)}"
        return PYTORCH

    def _device_takes_over(self) -> bool:
        """Whether the op's tensors are on a device that native code cannot access."""
        return self.NAME.startswith("fused_") and get_accelerator().device_name() != "cpu"

    def hint(self) -> str:
        """How to get a faster path than the current one; empty if there is none."""
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
        """A setuptools Extension with the op's sources, for projects that build it themselves."""
        from setuptools import Extension  # slow to import

        if not self.sources():
            raise NotImplementedError(
                self.why_not() or f"The op {self.NAME} has no native sources: it runs in PyTorch."
            )
        # Contraction of a * b + c would make the bits depend on the instruction set.
        flags = ["-std=c++20", "-O3", "-ffp-contract=off"]
        return Extension(
            self.absolute_name(), self.sources(), include_dirs=["csrc/include"], extra_compile_args=flags
        )

    def load(self, verbose: bool = False) -> ModuleType:
        """The module that holds the op. NotImplementedError, with what to use instead, if it cannot be
        used.
        """
        reason = self.why_not()
        if reason or self.OP.module is None:
            raise NotImplementedError(reason)
        module = importlib.import_module(self.OP.module)
        if verbose:
            logger.info(f"The op {self.NAME} runs on {self.path()}.")
        return module


ISA_TITLES = {"avx512": "AVX-512", "avx2": "AVX2", "plain": "C++"}
