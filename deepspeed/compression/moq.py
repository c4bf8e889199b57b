"""Mixture of quantization (MoQ): quantizes the 16-bit weights after each update, to fewer and fewer bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.logging import log_dist
from deepspeed.compression import utils

Eigenvalues = Mapping[int, tuple[float, int]]


@dataclass(eq=False)
class MoQQuantizer:
    """Quantizes parameters in place, lowering their bit width over time.

    A parameter's schedule is in its attributes ``start_bits`` (current bits), ``target_bits`` and ``q_period``: after
    that many calls it loses a bit and the period doubles. With eigenvalues the period is also multiplied by
    1 + floor(4 x eigenvalue): blocks with more curvature keep their bits longer.

    Args:
        q_groups: number of groups of values, each with its own scale.
        q_mixed_fp16: mix the quantized value with the unquantized one, whose share decays.
        q_change_ratio: decay of that share per call.
        q_type: 0 symmetric, 1 asymmetric.
        q_rounding: 0 nearest, 1 stochastic.
        q_verbose: log each change of bit width.
        q_eigenvalue: whether eigenvalues will be given.
        use_quantizer_kernel: accepted; the arithmetic is the same.
        layer_num: number of blocks with eigenvalues, 0 if there are none.
    """

    q_groups: int = 1
    q_mixed_fp16: bool = False
    q_change_ratio: float = 0.01
    q_type: int = 0
    q_rounding: int = 0
    q_verbose: bool = False
    q_eigenvalue: bool = False
    use_quantizer_kernel: bool = False
    layer_num: int = 0

    def __post_init__(self) -> None:
        self.qsteps = 0
        self.quantize_real_ratio = 1.0
        """Share of the unquantized value in the mixture."""
        self._seen: dict[int, Any] = {}
        self.whole: Callable[[Any], AbstractContextManager[Any]] = nullcontext
        """Context manager for a parameter, inside which it is whole; writes to it persist."""

    def any_precision_switch(self) -> bool:
        """Return whether a parameter may lose a bit in the next call, i.e. whether eigenvalues are needed."""
        if self.layer_num == 0:
            return True
        return any(self._switches(param, self.qsteps + 1) for param in self._seen.values()) or not self._seen

    def _switches(self, param: Any, step: int) -> bool:
        return param.start_bits != param.target_bits and step >= param.q_period

    def quantize(
        self,
        parameter_group: Iterable[Iterable[Any]],
        overflow: bool,
        eigenvalue_enabled: bool,
        block_eigenvalue: Eigenvalues = {},  # noqa: B006 - the documented default, never written to
    ) -> None:
        """Quantize the matrices in all parameter groups that have ``start_bits``. No-op after an ``overflow`` (the
        weights did not change), unless ``eigenvalue_enabled``."""
        if overflow and not eigenvalue_enabled:
            return
        self.step()
        self.update_fp16_ratio()
        for group in parameter_group:
            for param in group:
                if not getattr(param, "start_bits", 0):
                    continue
                eigenvalue, block = block_eigenvalue.get(id(param), (None, 0))
                factor = 1 if eigenvalue is None else 1 + int(eigenvalue * 4)
                with torch.no_grad(), self.whole(param):
                    if param.dim() > 1:
                        self._seen[id(param)] = param
                        param.data.copy_(self.compute_quantization(param, block, factor))

    def step(self) -> None:
        self.qsteps += 1

    def advance(self, param: Any, index: int = 0, factor: int = 1) -> None:
        """Lower a parameter's bits by one if its period is over."""
        if not self._switches(param, self.qsteps):
            return
        self.quantize_real_ratio = 1.0
        param.q_period = (param.q_period << 1) * factor
        param.start_bits -= 1
        if self.q_verbose:
            log_dist(
                f"quantization: block {index} has {param.start_bits} bits at step {self.qsteps}, next after "
                f"{param.q_period}",
                ranks=[0],
            )

    def compute_quantization(self, input: Any, index: int = 0, factor: int = 1) -> Tensor:
        """Return the quantized values of a parameter, after lowering its bits if its period is over. ``index``: its
        block.

        ValueError: it has fewer bits than its target.
        """
        self.advance(input, index, factor)
        if input.start_bits < input.target_bits:
            raise ValueError(f"{input.start_bits} bits are fewer than the target, {input.target_bits}")
        return self.quantized(input, index)

    def quantized(self, input: Any, index: int = 0) -> Tensor:
        """Return the values of a parameter quantized to its current bits."""
        values = input.data
        if input.start_bits >= 3:
            quantized = self.quantize_highbit(values, input.start_bits)
        else:
            quantized = (
                self.quantize_tenary(values) if input.start_bits == 2 else self.quantize_binary(values)
            )
        return self.mixed_fp16_quantize(values, quantized, index)

    def quantize_highbit(self, inputs: Tensor, num_bits: int) -> Tensor:
        """Quantize ``inputs`` to three or more bits."""
        rounding = utils.STOCHASTIC if self.q_rounding else utils.NEAREST
        kind = utils.ASYMMETRIC if self.q_type else utils.SYMMETRIC
        # seeded by the step: replicas of the weights get the same noise on every rank
        return utils.quantizer_for(num_bits, kind).apply(
            inputs, num_bits, None, None, self.q_groups, rounding, self.qsteps
        )

    def quantize_tenary(self, inputs: Tensor) -> Tensor:
        return utils.TernaryQuantizer.apply(inputs, 2, None, None, self.q_groups)

    def quantize_binary(self, inputs: Tensor) -> Tensor:
        return utils.BinaryQuantizer.apply(inputs, 1, None, None, self.q_groups)

    def mixed_fp16_quantize(self, input: Tensor, input_q: Tensor, index: int) -> Tensor:
        """Mix values with their quantized form if ``q_mixed_fp16`` is set; else return the quantized form."""
        if not self.q_mixed_fp16 or self.quantize_real_ratio <= 0:
            return input_q
        return input_q + (input - input_q) * self.quantize_real_ratio

    def update_fp16_ratio(self) -> None:
        """Decay the share of the unquantized value."""
        if self.q_mixed_fp16:
            self.quantize_real_ratio = max(self.quantize_real_ratio - self.q_change_ratio, 0.0)


Quantizer = MoQQuantizer
"""The documented name."""
