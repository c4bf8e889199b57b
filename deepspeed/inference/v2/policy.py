"""Building of a model from a weight source."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.base.accelerator import get_accelerator
from deepspeed.inference.kernels import keep_integers
from deepspeed.inference.loading import load_weights
from deepspeed.inference.v2.checkpoint.huggingface_engine import CheckpointEngineBase
from deepspeed.transforms.on_device import OnDevice


class InferenceV2Policy:
    """Builds the causal Transformers model that ``checkpoint_engine.model_config`` describes; all models share this
    policy. With ``keeps_integers``, weights of folders quantized by other libraries stay integers if kernels compute
    with them."""

    def __init__(
        self,
        checkpoint_engine: CheckpointEngineBase,
        *,
        dtype: torch.dtype | None = None,
        keeps_integers: bool = False,
    ) -> None:
        self._checkpoint_engine = checkpoint_engine
        self._dtype = dtype
        self._keep = keep_integers if keeps_integers else None

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights: the given one, else as the model's config says, else fp32."""
        if self._dtype is not None:
            return self._dtype
        found: Any = getattr(self._checkpoint_engine.model_config, "dtype", None)
        return found if isinstance(found, torch.dtype) else torch.float32

    def build_model(self, device: torch.device | str | None = None) -> nn.Module:
        """Return the model with all weights, in evaluation mode, on ``device`` (None: the accelerator).

        DeepSpeedConfigError: weights are missing, or have other shapes.
        """
        from transformers import AutoModelForCausalLM

        source: Any = self._checkpoint_engine
        with OnDevice(dtype=self.dtype, device="meta"):
            module = AutoModelForCausalLM.from_config(source.model_config, dtype=self.dtype)
        name = getattr(source, "model_name_or_path", type(source).__name__)
        load_weights(module, source.parameters(), str(name), keep=self._keep)
        generation = getattr(source, "generation_config", None)
        if generation is not None:
            module.generation_config = generation
        return module.eval().to(get_accelerator().current_device_name() if device is None else device)
