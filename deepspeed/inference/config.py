"""Arguments of `init_inference`: given as keyword arguments, a dict, or a JSON file."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field, PlainValidator

from deepspeed.config.section import AllowedValues, DeepSpeedConfigModel, Int, deprecated, key
from deepspeed.config.sections.zero import DeepSpeedZeroConfig


class DtypeEnum(Enum):
    """Dtypes of inference; each value is a tuple of the torch dtype and its accepted names."""

    fp16 = (torch.float16, "torch.float16", "fp16", "float16", "half")
    fp32 = (torch.float32, "torch.float32", "fp32", "float32", "float")
    bf16 = (torch.bfloat16, "torch.bfloat16", "bf16", "bfloat16", "bfloat")
    int8 = (torch.int8, "torch.int8", "int8")

    @classmethod
    def from_str(cls, value: str) -> DtypeEnum:
        """Return the member named ``value``; ValueError if unknown."""
        for member in cls:
            if value in member.value:
                return member
        raise ValueError(
            f"{value!r} is not a known dtype; expected one of {', '.join(member.name for member in cls)}"
        )


class MoETypeEnum(str, Enum):
    residual = "residual"
    standard = "standard"


class QuantTypeEnum(str, Enum):
    asym = "asymmetric"
    sym = "symmetric"


class DeepSpeedTPConfig(DeepSpeedConfigModel):
    """Tensor parallelism."""

    enabled: bool = key(True, "Turn it on.")
    tp_size: Int = key(1, "Ranks that share each layer.", ge=1)
    tp_grain_size: Int = key(64, "Align shard boundaries to multiples of this many columns.", ge=1)
    mpu: Any = key(None, "Model-parallel unit that provides the groups.")
    tp_group: Any = key(None, "The process group.")


class DeepSpeedMoEConfig(DeepSpeedConfigModel):
    """Mixture of experts."""

    enabled: bool = key(True, "Turn it on.")
    ep_size: Int = key(1, "Ranks that share the experts of a layer.", ge=1)
    moe_experts: list[Int] = key([1], "Number of experts per layer.", alias="num_experts")
    type: MoETypeEnum = key(MoETypeEnum.standard, "Plain experts, or experts alongside a dense layer.")
    ep_mp_group: Any = key(None, "Group of the ranks that share an expert.")
    ep_group: Any = key(None, "Group of the ranks that share the experts.", alias="expert_group")


class BaseQuantConfig(DeepSpeedConfigModel):
    enabled: bool = key(True, "Turn it on.")
    num_bits: Int = key(8, "Bits.", ge=1)
    q_type: QuantTypeEnum = key(QuantTypeEnum.sym, "With or without a zero point.")
    q_groups: Int = key(1, "Number of groups of values, each with its own scale.", ge=1)


class WeightQuantConfig(BaseQuantConfig):
    """Quantized weights."""

    quantized_initialization: dict[str, Any] = key({}, "Quantize while the model is built.")
    post_init_quant: dict[str, Any] = key({}, "Quantize the built model: module name to settings.")


class ActivationQuantConfig(BaseQuantConfig):
    """Quantized activations."""


class QKVQuantConfig(DeepSpeedConfigModel):
    """Quantized attention projections."""

    enabled: bool = key(True, "Turn it on.")


class InferenceQuantConfig(DeepSpeedConfigModel):
    """Quantization."""

    enabled: bool = key(True, "Turn it on.")
    activation: ActivationQuantConfig = key(ActivationQuantConfig(), "Activations.")
    weight: WeightQuantConfig = key(WeightQuantConfig(), "Weights.")
    qkv: QKVQuantConfig = key(QKVQuantConfig(), "Attention projections.")


QuantizationConfig = InferenceQuantConfig
"""The documented name."""


class InferenceCheckpointConfig(DeepSpeedConfigModel):
    """Source of the weights, and folder to save them to."""

    checkpoint_dir: str | None = key(None, "Folder to load from.")
    save_mp_checkpoint_path: str | None = key(None, "Folder for the sharded weights.")
    base_dir: str | None = key(None, "Folder that relative paths start from.")


_DTYPES = f"a torch dtype or its name: {', '.join(member.name for member in DtypeEnum)}"


def _dtype(value: Any) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    if isinstance(value, DtypeEnum):
        return value.value[0]
    if not isinstance(value, str):
        raise TypeError(f"dtype must be {_DTYPES}; not {type(value).__name__}")
    if not any(value in member.value for member in DtypeEnum):
        raise ValueError(f"must be {_DTYPES}")
    return DtypeEnum.from_str(value).value[0]


def _moe_switch(value: Any) -> Any:
    return {"enabled": value} if isinstance(value, bool) else value


def _listed(value: Any) -> Any:
    """Turn a single number into a list: it holds for every layer."""
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


Experts = Annotated[list[Int], BeforeValidator(_listed)]


class DeepSpeedInferenceConfig(DeepSpeedConfigModel):
    """Arguments of `init_inference`."""

    replace_with_kernel_inject: bool = key(
        False, "Use fused kernels for known models.", alias="kernel_inject"
    )
    dtype: Annotated[torch.dtype, PlainValidator(_dtype), AllowedValues(_DTYPES)] = key(
        torch.float16, "Dtype of the weights."
    )
    tensor_parallel: DeepSpeedTPConfig = key(DeepSpeedTPConfig(), "Tensor parallelism.", alias="tp")
    enable_cuda_graph: bool = key(False, "Capture forward as a CUDA graph.")
    use_triton: bool = key(False, "No effect: kernels are chosen by the device and by what is installed.")
    triton_autotune: bool = key(False, "Tune the kernels at startup.")
    zero: DeepSpeedZeroConfig = key(DeepSpeedZeroConfig(), "ZeRO, for weights outside the device.")
    triangular_masking: bool = key(True, "Causal attention in fused kernels.", alias="tm")
    moe: Annotated[DeepSpeedMoEConfig, BeforeValidator(_moe_switch)] = key(
        DeepSpeedMoEConfig(), "Mixture of experts; a boolean stands for `enabled`."
    )
    keep_module_on_host: bool = key(False, "Leave weights in host memory.")
    quant: InferenceQuantConfig = key(InferenceQuantConfig(), "Quantization.")
    checkpoint: str | list[str] | dict[str, Any] | None = key(
        None, "Weight files: a list, an object or a JSON file with it, a file, or a folder."
    )
    base_dir: str = key("", "Folder that relative paths start from.")
    set_empty_params: bool = key(False, "Build the model without weights.")
    save_mp_checkpoint_path: str | None = key(None, "Folder for the sharded weights.")
    checkpoint_config: InferenceCheckpointConfig = key(
        InferenceCheckpointConfig(), "Sources and targets of weight files.", alias="ckpt_config"
    )
    return_tuple: bool = key(True, "Fused layers return a tuple.")
    training_mp_size: Int = key(1, "Ranks that shared each layer when the weights were saved.", ge=1)
    replace_method: str = deprecated("auto", "No effect.", message="no effect; leave it out")
    injection_policy: dict[Any, Any] | None = key(
        None, "Layer class to the names of the layers whose output is summed.", alias="injection_dict"
    )
    injection_policy_tuple: tuple[Any, ...] | None = key(None, "The same for all layers.")
    config: Any = key(None, "Further settings.", alias="args")
    max_out_tokens: Int = key(1024, "Longest sequence, prompt included.", ge=1, alias="max_tokens")
    min_out_tokens: Int = key(1, "Minimum number of new tokens to reserve.", ge=1, alias="min_tokens")
    transposed_mode: bool = key(False, "Keep weights transposed.")
    mp_size: Annotated[Int, Field(ge=1)] = deprecated(
        1, "Old name of `tensor_parallel.tp_size`.", new_param="tensor_parallel.tp_size"
    )
    mpu: Any = deprecated(None, "Old name of `tensor_parallel.mpu`.", new_param="tensor_parallel.mpu")
    ep_size: Annotated[Int, Field(ge=1)] = deprecated(
        1, "Old name of `moe.ep_size`.", new_param="moe.ep_size"
    )
    ep_group: Any = deprecated(
        None, "Old name of `moe.ep_group`.", new_param="moe.ep_group", alias="expert_group"
    )
    ep_mp_group: Any = deprecated(
        None, "Old name of `moe.ep_mp_group`.", new_param="moe.ep_mp_group", alias="expert_mp_group"
    )
    moe_experts: Experts = deprecated([1], "Old name of `moe.moe_experts`.", new_param="moe.moe_experts")
    moe_type: MoETypeEnum = deprecated(MoETypeEnum.standard, "Old name of `moe.type`.", new_param="moe.type")

    quantization_setting: Any = deprecated(
        None, "Groups of quantized weights.", message="no effect: each row of a weight has its own scales"
    )
