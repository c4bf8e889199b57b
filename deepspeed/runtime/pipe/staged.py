"""How ``deepspeed.initialize`` recognises a pipeline, without importing pipelines."""

from __future__ import annotations

from typing import Any


class Staged:
    """A module that is one stage of a model, and a model-parallel unit itself."""

    def mpu(self) -> Any:
        raise NotImplementedError
