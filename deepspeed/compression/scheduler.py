"""Schedule of compression: at which step each technique starts, and the bit width at each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from deepspeed.base.logging import log_dist
from deepspeed.compression.techniques import Compressible
from deepspeed.compression.utils import seed_of
from deepspeed.config import compression_constants as keys

_PREPARED = {
    keys.ACTIVATION_QUANTIZATION: "activation_quantizer",
    **{each: f"{each}_method" for each in keys.TECHNIQUES if each.endswith("pruning")},
}
"""The attribute of a module that is set if it is prepared for a technique."""


def bits_at(step: int, start: int, target: int, period: int) -> int:
    """Return the bits after ``step`` steps of quantization: ``start``, less one every ``period`` steps, down to
    ``target``; ``target`` at once if ``period`` is 0."""
    return max(start - step // period, target) if period > 0 else target


def quantized_share(step: int, change_ratio: float) -> float:
    """Return the share of the quantized value in the mixture after ``step`` steps: it grows by ``change_ratio`` per
    step, from ``change_ratio`` up to 1."""
    return min((step + 1) * change_ratio, 1.0)


class compression_scheduler:
    """Enables techniques in the prepared modules of ``model`` once their ``schedule_offset`` is reached.

    ``compression_config``: the section ``compression_training`` with its defaults (``get_compression_config``).
    ``training_steps``: optimizer steps done. An engine sets it and calls ``check_all_modules``; in your own training
    loop, call ``step`` after each update.
    """

    def __init__(self, model: nn.Module, compression_config: Mapping[str, Any]) -> None:
        self.model = model
        self.compression_config = compression_config
        self.training_steps = 0
        self.weight_quantization_enabled = False
        found = {name: each for name, each in model.named_modules() if isinstance(each, Compressible)}
        self._seeds = {module: seed_of(name) for name, module in found.items()}
        self._logged: set[str] = set()
        self._bits: tuple[int, ...] = ()
        self.check_all_modules()

    @property
    def modules(self) -> list[Compressible]:
        """The prepared modules that ``redundancy_clean`` has not made plain layers again."""
        return [module for module in self._seeds if isinstance(module, Compressible)]

    def _active(self, technique: str) -> Mapping[str, Any] | None:
        """Return the shared parameters of a technique if it is on at this step, else None."""
        shared = self.compression_config[technique][keys.SHARED_PARAMETERS]
        if not shared[keys.TECHNIQUE_ENABLED]:
            return None
        if self.training_steps < shared[keys.TECHNIQUE_SCHEDULE_OFFSET]:
            return None
        if technique not in self._logged:
            self._logged.add(technique)
            log_dist(f"compression: {technique} enabled at step {self.training_steps}", ranks=[0])
        return shared

    def _quantize_weights(self) -> None:
        shared = self._active(keys.WEIGHT_QUANTIZATION)
        self.weight_quantization_enabled = shared is not None
        if shared is None:
            for module in self.modules:
                module.weight_quantization_enabled = False
            return
        step = self.training_steps - shared[keys.TECHNIQUE_SCHEDULE_OFFSET]
        mixed = shared["fp16_mixed_quantize"] or {"enabled": False}
        share = quantized_share(step, mixed["quantize_change_ratio"]) if mixed["enabled"] else 1.0
        now = set()
        for module in self.modules:
            if module.weight_bits is None:
                continue
            module.weight_quantize_seed = (self._seeds[module] << 32) + step
            module.weight_quantization_enabled = True
            module.weight_quantize_bits = bits_at(step, *module.weight_bits)
            module.weight_quantize_share = share
            now.add(module.weight_quantize_bits)
        bits = tuple(sorted(now))
        if shared["quantize_verbose"] and bits != self._bits:
            log_dist(f"compression: weights have {bits} bits at step {self.training_steps}", ranks=[0])
        self._bits = bits

    def check_all_modules(self) -> None:
        """Switch every technique on or off for the current step."""
        self._quantize_weights()
        for technique, prepared in _PREPARED.items():
            on = self._active(technique) is not None
            for module in self.modules:
                setattr(module, f"{technique}_enabled", on and getattr(module, prepared) is not None)

    def step(self, step_zero_check: bool = False) -> None:
        """Count a step (unless ``step_zero_check``), then switch the techniques."""
        if not step_zero_check:
            self.training_steps += 1
        self.check_all_modules()
