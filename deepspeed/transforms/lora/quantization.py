"""Frozen weights that are stored quantized and dequantized for use."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.sharded import is_zero_param
from deepspeed.ops.formats.linear import frozen_linear as product_of_frozen
from deepspeed.ops.fp_quantizer import FP_Quantize, Quantizer
from deepspeed.transforms.lora.config import QuantizationConfig
from deepspeed.zero.gathering.gathered_parameters import GatheredParameters


class QuantizedParameter(nn.Parameter):
    """A frozen parameter that is quantized once it is on the accelerator (which may be the host): uint8 [groups, bytes
    of a group and its scale]. ``dequantized()`` returns its value.

    Args:
        data: floating-point values.
        requires_grad: False.
        quantization_config: None: the default one.
        quantizer: None: an `FP_Quantize`.
        full_shape, full_dtype: of the values, if ``data`` is already quantized: clients copy a parameter as
            ``QuantizedParameter(p.data, **p.__dict__)``.

    Raises:
        ValueError: ``requires_grad``.
    """

    quantizer: Quantizer
    quantization_config: QuantizationConfig
    full_shape: torch.Size
    full_dtype: torch.dtype

    def __new__(
        cls,
        data: Tensor | None = None,
        requires_grad: bool = False,
        quantization_config: QuantizationConfig | None = None,
        quantizer: Quantizer | None = None,
        full_shape: torch.Size | None = None,
        full_dtype: torch.dtype | None = None,
    ) -> QuantizedParameter:
        if requires_grad:
            raise ValueError("a quantized parameter is frozen: it cannot have requires_grad=True")
        values = torch.empty(0) if data is None else data
        made = super().__new__(cls, values, False)
        made.quantization_config = quantization_config or QuantizationConfig()
        made.quantizer = quantizer or FP_Quantize(made.quantization_config)
        made.full_shape, made.full_dtype = full_shape or values.shape, full_dtype or values.dtype
        made._quantize_if_due()
        return made

    @property
    def is_quantized_now(self) -> bool:
        return self.dtype == self.quantization_config.q_dtype

    def dequantized(self) -> Tensor:
        """Return the values, dequantized in every call."""
        return self.values_on(self.device)

    def values_on(self, device: torch.device) -> Tensor:
        """Return the values on a device: the quantized bytes are moved and dequantized there."""
        data = self.data.to(device)
        if not self.is_quantized_now:
            return data
        out = torch.empty(self.full_shape, dtype=self.full_dtype, device=device)
        config = self.quantization_config
        return self.quantizer.dequantize(data, out, config.q_bits, config.mantissa_bits)

    def offload(self, revert: bool = False) -> None:
        """Move the data to host memory, or (``revert``) back to the accelerator."""
        accelerator = get_accelerator()
        target = accelerator.current_device_name() if revert else "cpu"
        self.data = self.data.to(target)

    def cuda(self, device: Any = None, non_blocking: bool = False) -> QuantizedParameter:
        return self.to(device="cuda" if device is None else device, non_blocking=non_blocking)

    def to(self, *args: Any, **kwargs: Any) -> QuantizedParameter:
        """Do as ``Tensor.to``, except that quantized data keeps its dtype."""
        wanted = torch.empty(0, dtype=self.full_dtype, device=self.device).to(*args, **kwargs)
        stays = self.is_quantized_now
        return self._with(self.data.to(wanted.device) if stays else self.data.to(wanted.device, wanted.dtype))

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedParameter:
        made = self._with(self.data.clone())
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = (self.data, self.quantization_config, self.full_shape, self.full_dtype)
        return _restored, state

    def _with(self, data: Tensor) -> QuantizedParameter:
        dtype = self.full_dtype if self.is_quantized_now else data.dtype
        made = _restored(data, copy.copy(self.quantization_config), self.full_shape, dtype)
        made._quantize_if_due()
        return made

    def _quantize_if_due(self) -> None:
        config = self.quantization_config
        if self.is_quantized_now or not self.numel() or not get_accelerator().on_accelerator(self.data):
            return
        quantized = self.quantizer.quantize(self.data, config.q_bits, config.mantissa_bits)
        assert isinstance(quantized, Tensor)
        self.data = quantized


def _restored(
    data: Tensor, config: QuantizationConfig, shape: torch.Size, dtype: torch.dtype
) -> QuantizedParameter:
    made: Any = nn.Parameter.__new__(QuantizedParameter, data, False)
    made.quantization_config, made.quantizer = config, FP_Quantize(config)
    made.full_shape, made.full_dtype = shape, dtype
    return made


def _values(weight: Tensor, like: Tensor) -> Tensor:
    own = weight.values_on(like.device) if isinstance(weight, QuantizedParameter) else weight.detach()
    return own.to(like.device, like.dtype)


def frozen_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer with a frozen weight, which may be quantized and may be in host memory."""
    if not isinstance(weight, QuantizedParameter) and weight.device == input.device:
        return functional.linear(input, weight, bias)
    out = product_of_frozen(input, partial(_values, weight))
    return out if bias is None else out + bias


def make_quantized(data: Tensor, config: QuantizationConfig | None) -> QuantizedParameter:
    """Make a `QuantizedParameter` from ``data``."""
    make: Any = QuantizedParameter  # torch's metaclass hides its arguments from type checkers
    return make(data, quantization_config=config)


def quantize_gathered(weight: nn.Parameter, config: QuantizationConfig) -> QuantizedParameter:
    """Quantize ``weight``; if ``zero.Init`` has partitioned it, it is gathered first (collective). On the meta device
    the result only has the right size, for planning."""
    if weight.is_meta:
        made = make_quantized(weight.data, config)
        groups = -(-weight.numel() // config.group_size)
        size = config.group_size * config.q_bits // 8 + 4  # codes and a scale
        made.data = torch.empty(groups, size, dtype=config.q_dtype, device="meta")
        return made
    with GatheredParameters(weight):
        return make_quantized(weight.data.clone() if is_zero_param(weight) else weight.data, config)


def quantize_assigned(value: Any, config: QuantizationConfig | None) -> Any:
    """Return the value to store when a loader sets a layer's weight: a plain parameter with values is quantized,
    keeping attributes that the loader has set on it."""
    plain = isinstance(value, nn.Parameter) and not isinstance(value, QuantizedParameter)
    if not plain or not value.is_floating_point() or value.is_meta or is_zero_param(value):
        return value
    made = make_quantized(value.data, config)
    for name, note in value.__dict__.items():
        setattr(made, name, note)
    return made


class FrozenLinear(nn.Linear):
    """A linear layer whose weight is frozen, and may be a `QuantizedParameter`."""

    weight: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        return frozen_linear(input, self.weight, self.bias)


class QuantizedLinear(FrozenLinear):
    """A linear layer whose weight is a `QuantizedParameter`.

    Its state dict has the quantized weight; loading takes that, or floating-point values [outputs, inputs].

    Args:
        input_dim, output_dim: sizes.
        bias: whether the layer has a bias, which is trained.
        quantization_config: None: the default one.
        dtype: of the bias and the dequantized values.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        bias: bool = False,
        quantization_config: QuantizationConfig | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(input_dim, output_dim, bias=bias, dtype=dtype)
        self.quantization_config = quantization_config or QuantizationConfig()
        self.weight = make_quantized(self.weight.data, quantization_config)
        self.register_load_state_dict_pre_hook(quantize_state_dict)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and "quantization_config" in self.__dict__:
            value = quantize_assigned(value, self.quantization_config)
        super().__setattr__(name, value)


def quantize_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Quantize floating-point values for ``module.weight`` in a state dict to be loaded (a pre-hook)."""
    weight, given = module.weight, state_dict.get(f"{prefix}weight")
    if not isinstance(weight, QuantizedParameter) or not isinstance(given, Tensor):
        return
    if given.is_floating_point() and given.shape == weight.full_shape and weight.is_quantized_now:
        values = given.to(weight.device, weight.full_dtype)
        state_dict[f"{prefix}weight"] = make_quantized(values, weight.quantization_config).data
