"""Mixture of quantization (MoQ): 16-bit weights in fewer and fewer bits, after each update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.logging import log_dist
from deepspeed.compression.utils import (
    ASYMMETRIC,
    NEAREST,
    STOCHASTIC,
    SYMMETRIC,
    BinaryQuantizer,
    TernaryQuantizer,
    quantizer_for,
)

Eigenvalues = Mapping[int, tuple[float, int]]


@dataclass(eq=False)
class MoQQuantizer:
    """Quantizes parameters in place, and lowers their bits step by step.

    A parameter says how far it is in its attributes ``start_bits`` (bits now), ``target_bits`` and ``q_period``: when
    as many calls were made, it loses a bit and its period doubles. With eigenvalues the period also becomes
    1 + floor(4 x eigenvalue) times as long: blocks with more curvature wait longer.

    Args:
        q_groups: groups of values with a scale of their own.
        q_mixed_fp16: mix the quantized value with the value itself, of which less and less remains.
        q_change_ratio: how much less at each call.
        q_type: 0 symmetric, 1 asymmetric.
        q_rounding: 0 nearest, 1 stochastic.
        q_verbose: log each change of bits.
        q_eigenvalue: eigenvalues will be given.
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
        """Share of the value itself in the mixture."""
        self._seen: dict[int, Any] = {}
        self.whole: Callable[[Any], AbstractContextManager[Any]] = nullcontext
        """Of a parameter: a block in which all of it is there, and after which what it was set to stays."""

    def any_precision_switch(self) -> bool:
        """Return whether a parameter may lose a bit in the next call, so that eigenvalues are of use."""
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
        """Quantize the matrices of all groups of parameters that have ``start_bits``. After an ``overflow``, of which
        the weights are as they were, nothing happens."""
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
        """Let a parameter lose a bit if its period is over."""
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
        """The quantized values of a parameter, which loses a bit if its period is over. ``index``: its block.

        ValueError: it has fewer bits than its target.
        """
        self.advance(input, index, factor)
        if input.start_bits < input.target_bits:
            raise ValueError(f"{input.start_bits} bits are fewer than the target, {input.target_bits}")
        return self.quantized(input, index)

    def quantized(self, input: Any, index: int = 0) -> Tensor:
        """The quantized values of a parameter as it is at this step."""
        values = input.data
        if input.start_bits >= 3:
            quantized = self.quantize_highbit(values, input.start_bits)
        else:
            quantized = (
                self.quantize_tenary(values) if input.start_bits == 2 else self.quantize_binary(values)
            )
        return self.mixed_fp16_quantize(values, quantized, index)

    def quantize_highbit(self, inputs: Tensor, num_bits: int) -> Tensor:
        """``inputs`` in at least three bits."""
        rounding = STOCHASTIC if self.q_rounding else NEAREST
        kind = ASYMMETRIC if self.q_type else SYMMETRIC
        # the same noise on every rank, which has the same weights
        return quantizer_for(num_bits, kind).apply(
            inputs, num_bits, None, None, self.q_groups, rounding, self.qsteps
        )

    def quantize_tenary(self, inputs: Tensor) -> Tensor:
        return TernaryQuantizer.apply(inputs, 2, None, None, self.q_groups)

    def quantize_binary(self, inputs: Tensor) -> Tensor:
        return BinaryQuantizer.apply(inputs, 1, None, None, self.q_groups)

    def mixed_fp16_quantize(self, input: Tensor, input_q: Tensor, index: int) -> Tensor:
        """The mixture of a value and its quantized form, if asked for."""
        if not self.q_mixed_fp16 or self.quantize_real_ratio <= 0:
            return input_q
        return input_q + (input - input_q) * self.quantize_real_ratio

    def update_fp16_ratio(self) -> None:
        """Less of the value itself."""
        if self.q_mixed_fp16:
            self.quantize_real_ratio = max(self.quantize_real_ratio - self.q_change_ratio, 0.0)


Quantizer = MoQQuantizer
"""The documented name."""
