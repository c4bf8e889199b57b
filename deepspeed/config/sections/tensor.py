"""The `tensor_parallel` section (AutoTP)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from deepspeed.base.dtypes import Dtype
from deepspeed.config.section import (
    AllowedValues,
    DeepSpeedConfigModel,
    Int,
    LenientConfigModel,
    key,
    parse_dtype,
)

PresetModel = Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"]


class AUTOTP_MODE(Enum):
    """Purpose of layers that are split over ranks."""

    TRAINING = "TRAINING"
    INFERENCE = "INFERENCE"


def _dtype(value: Any) -> Dtype:
    dtype = parse_dtype(value, ("fp16", "bf16", "fp32", "int8"))
    if dtype is None:
        raise ValueError("must be a dtype")
    return dtype


class TPLayerSpec(LenientConfigModel):
    """One rule: which parameters, and how they are partitioned."""

    patterns: list[str] = key([], "Regular expressions on the parameter's name.")
    partition_type: Literal["row", "column", "skip"] = key(
        "column", "Partition by rows, by columns, or not at all."
    )
    shape: list[Any] | None = key(None, "Shape of the parts of a fused weight.")
    partition_dim: Int | None = key(None, "Dimension of `shape` that is partitioned.")
    model_types: list[str] | None = key(None, "Only for these values of the model's `config.model_type`.")
    gather_output: bool = key(False, "Whole outputs on every rank (column).")
    grad_allreduce: bool = key(False, "Sum the gradient of a whole parameter (skip).")


class TPPartitionConfig(LenientConfigModel):
    """Your own rules for what is partitioned, and how."""

    use_default_specs: bool = key(True, "Use the rules of the preset too.")
    strict_mode: bool = key(False, "A parameter without a rule is an error.")
    lm_head_patterns: list[str] = key(["lm_head", "embed_out"], "Names of output heads.")
    embedding_partition_dim: Int = key(1, "Dimension along which embeddings are partitioned.")
    layer_specs: list[TPLayerSpec] = key([], "The rules; the first match applies.")


class TPConfig(DeepSpeedConfigModel):
    """Tensor-parallel groups at run time."""

    tp_size: Int = key(1, "No effect in training: use `autotp_size`.", ge=1)
    tp_grain_size: Int = key(1, "Shard boundaries fall on multiples of this many columns.", ge=1)
    mpu: Any = key(None, "No effect in training: pass it to `initialize`.")
    tp_group: Any = key(None, "No effect in training, likewise.")


class TPTrainingConfig(DeepSpeedConfigModel):
    """Layers partitioned across ranks without changes to the model."""

    dtype: Annotated[Dtype, PlainValidator(_dtype), AllowedValues("a dtype such as 'bf16'")] = key(
        Dtype.fp16, "Dtype that `tp_model_init` was called with."
    )
    autotp_size: Int = key(0, "Ranks that share each layer; 0: off.", ge=0)
    preset_model: PresetModel | None = key(None, "Built-in rules of a model family.")
    tp_overlap_comm: bool = key(False, "Overlap the all-reduce of one layer with the work of the next.")
    partition_config: TPPartitionConfig | None = key(None, "Your own rules.")
    vocab_parallel_lm_head: bool = key(
        False,
        "Refuse a model whose output head cannot be split by words. (Heads that can be are, always: their "
        "loss takes logits in parts.)",
    )
    tensor_parallel: TPConfig = key(TPConfig.model_construct(), "Groups at run time.", alias="tp")
    injection_policy_tuple: tuple[Any, ...] | None = key(
        None, "Layers whose output is summed over the ranks."
    )
    keep_module_on_host: bool = key(False, "No effect: weights are split where they are.")
    replace_with_kernel_inject: bool = key(
        False, "No effect in training; an argument of `init_inference`.", alias="kernel_inject"
    )


class _AsTorch:
    """The field `dtype` as scripts read it, a dtype of torch; the schema itself holds the short name."""

    def __get__(self, section: TPTrainingConfig | None, owner: type | None = None) -> Any:
        if section is None:  # as for any field: pydantic's classes do not have them as attributes
            raise AttributeError("dtype")
        return section.__dict__["dtype"].torch

    def __set__(self, section: TPTrainingConfig, value: Any) -> None:
        """Never called: pydantic validates what is assigned. With it, reading comes here before the values."""
        raise AttributeError("dtype")


TPTrainingConfig.dtype = _AsTorch()  # type: ignore[assignment]


def _get_hf_tp_plan(model: Any) -> dict[str, str] | None:
    """The plan that a model carries: ``config.base_model_tp_plan``, and what its own ``_tp_plan`` names besides; None:
    it carries none. An entry of ``_tp_plan`` that only puts a prefix before one of the config's is that one."""
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    own = getattr(model, "_tp_plan", None)
    found: dict[str, str] = dict(base) if isinstance(base, Mapping) else {}
    for name, style in (own if isinstance(own, Mapping) else {}).items():
        if not any(f".{name}".endswith(f".{known}") for known in found):
            found[name] = style
    return found or None
