"""An engine that trains and generates, for reinforcement learning: ``hybrid_engine`` in the config."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.inference.adapters import FusedAdapters
from deepspeed.inference.splitting import check_length, same_random_numbers
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.gathering.gathered import unwrap_model_for_generation

__all__ = ["DeepSpeedHybridEngine"]


class DeepSpeedHybridEngine(DeepSpeedEngine):
    """``generate`` gathers partitioned weights once and not for every token, without a second copy of them, and fuses
    adapters meanwhile. Training goes on as if it had not been called.

    ``engine.module.generate`` does the same. The arguments are those of ``DeepSpeedEngine``.

    Raises:
        DeepSpeedConfigError: the module has no ``generate``.
    """

    def __init__(self, args: Any, model: nn.Module, **kwargs: Any) -> None:
        super().__init__(args, model, **kwargs)
        if not callable(getattr(type(model), "generate", None)):
            raise DeepSpeedConfigError(
                f"hybrid_engine.enabled=true, but {type(model).__name__} has no generate()"
            )
        self.adapters = FusedAdapters(model)
        vars(model)["generate"] = _Generate(model, self)

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the module's ``generate`` returns. At stage 3 a collective on entry and exit: all ranks call it, though
        with prompts and lengths of their own.

        Raises:
            RuntimeError: the prompt is longer than ``hybrid_engine.max_out_tokens``.
        """
        check_length(inputs, kwargs, self._config.hybrid_engine.max_out_tokens)
        kwargs.pop("synced_gpus", None)  # no rank needs another one's weights meanwhile
        fused_before = self.adapters.fused
        group = self.mesh.communicator("tp") if self.mp_world_size > 1 else None
        with unwrap_model_for_generation(self) as module, torch.no_grad(), same_random_numbers(group):
            self.adapters.fuse()
            try:
                return type(module).generate(module, *inputs, synced_gpus=False, **kwargs)  # type: ignore[attr-defined]
            finally:
                if not fused_before:
                    self.adapters.unfuse()

    def fuse_lora_weight(self) -> None:
        """Put adapters into the weights that they adapt until ``unfuse_lora_weight``; ``generate`` does both itself.

        RuntimeError: the weights are partitioned, so that only ``generate`` can.
        """
        if self.sharded is not None:
            raise RuntimeError(
                "at stage 3 adapters are fused inside of generate() only: weights are not whole"
            )
        self.adapters.fuse()

    def unfuse_lora_weight(self) -> None:
        """The weights are those from before ``fuse_lora_weight``."""
        self.adapters.unfuse()

    def retake_inference_cache(self) -> None:
        """Nothing is kept between two calls of ``generate``."""


class _Generate:
    """``module.generate`` of an engine's module. A copy of the module generates by itself."""

    def __init__(self, module: nn.Module, engine: DeepSpeedHybridEngine | None) -> None:
        self._module = weakref.ref(module)
        self._engine = None if engine is None else weakref.ref(engine)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        engine = None if self._engine is None else self._engine()
        if engine is not None:
            return engine.generate(*inputs, **kwargs)
        module: Any = self._module()
        return type(module).generate(module, *inputs, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Generate:
        return _Generate(memo[id(self._module())], None)
