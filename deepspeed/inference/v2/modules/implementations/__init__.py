"""Parts computed by PyTorch, on any device and in any dtype, under the documented names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed.base.accelerator import get_accelerator
from deepspeed.inference.v2.inference_parameter import InferenceParameter
from deepspeed.inference.v2.inference_utils import ActivationType, NormTypeEnum, is_gated
from deepspeed.inference.v2.modules.configs import DSLinearConfig, DSMoEConfig, DSNormConfig
from deepspeed.inference.v2.modules.interfaces import (
    DSLinearBase,
    DSLinearRegistry,
    DSMoEBase,
    DSMoERegistry,
    DSPostNormBase,
    DSPostNormRegistry,
    DSPreNormBase,
    DSPreNormRegistry,
)

__all__ = [
    "BlasFPLinear",
    "DSMultiGemmMoE",
    "DSPostLNCUDAModule",
    "DSPreLNCUDAModule",
    "DSPreRMSCUDAModule",
]

_FUNCTIONS = {
    ActivationType.GELU: lambda x: F.gelu(x, approximate="tanh"),
    ActivationType.RELU: F.relu,
    ActivationType.SILU: F.silu,
    ActivationType.GEGLU: lambda x: F.gelu(x, approximate="tanh"),
    ActivationType.ReGLU: F.relu,
    ActivationType.SiGLU: F.silu,
    ActivationType.IDENTITY: lambda x: x,
}


def activate(inputs: Tensor, kind: ActivationType | int) -> Tensor:
    """A gated activation takes pairs of neighbouring elements: the gate, and what it is multiplied with."""
    kind = ActivationType(kind)
    if not is_gated(kind):
        return _FUNCTIONS[kind](inputs)
    pairs = inputs.unflatten(-1, (-1, 2))
    return _FUNCTIONS[kind](pairs[..., 0]) * pairs[..., 1]


def _buffer(tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(tokens, width, dtype=dtype, device=get_accelerator().current_device_name())


def _as(param: Tensor, dtype: torch.dtype) -> InferenceParameter:
    device = get_accelerator().current_device_name()
    return InferenceParameter.initialize(param.to(device=device, dtype=dtype))


@DSLinearRegistry.register_module
class BlasFPLinear(DSLinearBase):
    """One product; input and output have one dtype."""

    def __init__(self, config: DSLinearConfig, implementation_config: dict[str, Any]) -> None:
        super().__init__(config, implementation_config)
        self._output = _buffer(self._config.max_tokens, config.out_channels, self._config.output_dtype)

    @staticmethod
    def name() -> str:
        return "blas_fp_linear"

    @staticmethod
    def supports_config(config: Any) -> bool:
        return (
            config.input_dtype == config.output_dtype
            and config.input_dtype.is_floating_point
            and config.activation != ActivationType.InvalidType
        )

    def transform_param(self, param: Tensor) -> InferenceParameter:
        return _as(param, self._config.output_dtype)

    def forward(self, hidden_states: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        product = F.linear(hidden_states, w.as_subclass(Tensor), None if b is None else b.as_subclass(Tensor))
        return activate(product, self._config.activation)

    @property
    def output(self) -> Tensor:
        return self._output


class _Norm:
    """Of both kinds of norms, in fp32."""

    _config: Any

    @staticmethod
    def _is_plain(config: Any, kind: NormTypeEnum) -> bool:
        return NormTypeEnum(config.type) is kind and (
            config.residual_dtype == config.input_dtype == config.output_dtype
        )

    def transform_param(self, param: Tensor) -> InferenceParameter:
        return _as(param, self._config.residual_dtype)

    def _normed(self, inputs: Tensor, gamma: Tensor, beta: Tensor | None) -> Tensor:
        wide, weight = inputs.float(), gamma.as_subclass(Tensor).float()
        if NormTypeEnum(self._config.type) is NormTypeEnum.LayerNorm:
            bias = None if beta is None else beta.as_subclass(Tensor).float()
            made = F.layer_norm(wide, wide.shape[-1:], weight, bias, self._config.eps)
        else:
            made = F.rms_norm(wide, wide.shape[-1:], weight, self._config.eps)
        return made.to(inputs.dtype)


@DSPostNormRegistry.register_module
class DSPostLNCUDAModule(_Norm, DSPostNormBase):
    def __init__(self, config: DSNormConfig, implementation_config: dict[str, Any]) -> None:
        super().__init__(config, implementation_config)

    @staticmethod
    def name() -> str:
        return "cuda_post_ln"

    @staticmethod
    def supports_config(config: Any) -> bool:
        return _Norm._is_plain(config, NormTypeEnum.LayerNorm)

    def forward(
        self, residual: Tensor, hidden_states: Tensor, gamma: Tensor, beta: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """``residual`` itself is changed."""
        residual.copy_(self._normed(residual + hidden_states, gamma, beta))
        return residual, residual


class _PreNorm(_Norm, DSPreNormBase):
    def forward(
        self,
        residual: Tensor,
        hidden_states: Tensor | None,
        gamma: Tensor,
        beta: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A new sum; ``residual`` stays as it is."""
        total = residual if hidden_states is None else residual + hidden_states
        return total, self._normed(total, gamma, beta)


@DSPreNormRegistry.register_module
class DSPreLNCUDAModule(_PreNorm):
    def __init__(self, config: DSNormConfig, implementation_config: dict[str, Any]) -> None:
        super().__init__(config, implementation_config)

    @staticmethod
    def name() -> str:
        return "cuda_pre_ln"

    @staticmethod
    def supports_config(config: Any) -> bool:
        return _Norm._is_plain(config, NormTypeEnum.LayerNorm)


@DSPreNormRegistry.register_module
class DSPreRMSCUDAModule(_PreNorm):
    def __init__(self, config: DSNormConfig, implementation_config: dict[str, Any]) -> None:
        super().__init__(config, implementation_config)

    @staticmethod
    def name() -> str:
        return "cuda_pre_rms"

    @staticmethod
    def supports_config(config: Any) -> bool:
        return _Norm._is_plain(config, NormTypeEnum.RMSNorm)


@DSMoERegistry.register_module
class DSMultiGemmMoE(DSMoEBase):
    """The experts one after the other, each with its tokens. ``implementation_config``: ``weight_dtype`` and
    ``transpose_weight`` (weights come as [experts, outputs, inputs], which is what is computed with)."""

    def __init__(self, config: DSMoEConfig, implementation_config: dict[str, Any]) -> None:
        super().__init__(config, implementation_config)
        self._output = _buffer(self._config.max_tokens, config.model_dim, self._config.output_dtype)

    @staticmethod
    def name() -> str:
        return "cutlass_multi_gemm_moe"

    @staticmethod
    def supports_config(config: Any) -> bool:
        return config.input_dtype == config.output_dtype and 1 <= config.top_k <= config.n_experts

    def transform_gate_param(self, param: Tensor) -> InferenceParameter:
        return _as(param, self._config.input_dtype)

    def transform_moe_mlp_1_param(self, param: Tensor) -> InferenceParameter:
        return _as(param, self._config.input_dtype)

    def transform_moe_mlp_2_param(self, param: Tensor) -> InferenceParameter:
        return _as(param, self._config.input_dtype)

    def forward(self, hidden_states: Tensor, *weights: Any, **named: Any) -> Tensor:
        """``forward(hidden_states, gate_w, mlp_1_w, mlp_2_w, mlp_1_b=None, mlp_2_b=None)``; a ``batch_metadata``
        behind ``hidden_states`` is not needed."""
        if weights and not isinstance(weights[0], Tensor):
            weights = weights[1:]
        names = ("gate_w", "mlp_1_w", "mlp_2_w", "mlp_1_b", "mlp_2_b")
        given = {**dict(zip(names, weights, strict=False)), **named}
        return self._computed(hidden_states, **{name: given.get(name) for name in names})

    def _computed(
        self,
        hidden_states: Tensor,
        gate_w: Any,
        mlp_1_w: Any,
        mlp_2_w: Any,
        mlp_1_b: Tensor | None,
        mlp_2_b: Tensor | None,
    ) -> Tensor:
        gate, first, second = (each.as_subclass(Tensor) for each in (gate_w, mlp_1_w, mlp_2_w))
        scores = F.linear(hidden_states, gate).float().softmax(-1)
        weights, chosen = scores.topk(self._config.top_k, -1)
        if self._config.normalize_scores:
            weights = weights / weights.sum(-1, keepdim=True)
        output = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
        for expert in chosen.unique().tolist():
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            inner = F.linear(hidden_states[tokens], first[expert], _of(mlp_1_b, expert))
            inner = activate(inner, self._config.activation)
            made = F.linear(inner, second[expert], _of(mlp_2_b, expert)).float()
            output.index_add_(0, tokens, made * weights[tokens, place, None])
        return output.to(self._config.output_dtype)

    @property
    def output(self) -> Tensor:
        return self._output


def _of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias.as_subclass(Tensor)[expert]
