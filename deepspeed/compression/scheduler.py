"""Schedule of compression: at which step each technique starts, and the bit width at each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from deepspeed.base.logging import log_dist
from deepspeed.compression.techniques import Compressible
from deepspeed.compression.utils import seed_of
from deepspeed.config import compression_constants as keys


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
        self.make_init()
        self.check_all_modules()

    def make_init(self) -> None:
        """Collect the prepared modules."""
        found = {name: each for name, each in self.model.named_modules() if isinstance(each, Compressible)}
        self.modules = list(found.values())
        self._seeds = [seed_of(name) for name in found]
        self._logged: set[str] = set()
        self._bits: tuple[int, ...] = ()

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

    def check_weight_quantization(self) -> None:
        shared = self._active(keys.WEIGHT_QUANTIZATION)
        self.weight_quantization_enabled = shared is not None
        if shared is None:
            return self._switch("weight_quantization", lambda module: False)
        step = self.training_steps - shared[keys.TECHNIQUE_SCHEDULE_OFFSET]
        mixed = shared["fp16_mixed_quantize"] or {"enabled": False}
        share = quantized_share(step, mixed["quantize_change_ratio"]) if mixed["enabled"] else 1.0
        now = set()
        for seed, module in zip(self._seeds, self.modules, strict=True):
            if module.weight_bits is None:
                continue
            module.weight_quantize_seed = (seed << 32) + step
            module.weight_quantization_enabled = True
            module.weight_quantize_bits = bits_at(step, *module.weight_bits)
            module.weight_quantize_share = share
            now.add(module.weight_quantize_bits)
        bits = tuple(sorted(now))
        if shared["quantize_verbose"] and bits != self._bits:
            log_dist(f"compression: weights have {bits} bits at step {self.training_steps}", ranks=[0])
        self._bits = bits
        return None

    def check_activation_quantization(self) -> None:
        self._check(keys.ACTIVATION_QUANTIZATION, "activation_quantization", "activation_quantizer")

    def check_sparse_pruning(self) -> None:
        self._check(keys.SPARSE_PRUNING, "sparse_pruning", "sparse_pruning_method")

    def check_head_pruning(self) -> None:
        self._check(keys.HEAD_PRUNING, "head_pruning", "head_pruning_method")

    def check_row_pruning(self) -> None:
        self._check(keys.ROW_PRUNING, "row_pruning", "row_pruning_method")

    def check_channel_pruning(self) -> None:
        self._check(keys.CHANNEL_PRUNING, "channel_pruning", "channel_pruning_method")

    def _check(self, technique: str, name: str, prepared: str) -> None:
        on = self._active(technique) is not None
        self._switch(name, lambda module: on and getattr(module, prepared, None) is not None)

    def _switch(self, name: str, on: Any) -> None:
        for module in self.modules:
            if hasattr(module, f"{name}_enabled"):
                setattr(module, f"{name}_enabled", on(module))

    def check_all_modules(self) -> None:
        """Switch every technique on or off for the current step."""
        self.check_weight_quantization()
        self.check_activation_quantization()
        self.check_sparse_pruning()
        self.check_head_pruning()
        self.check_row_pruning()
        self.check_channel_pruning()

    def step(self, step_zero_check: bool = False) -> None:
        """Count a step (unless ``step_zero_check``), then switch the techniques."""
        if not step_zero_check:
            self.training_steps += 1
        self.check_all_modules()
