"""Sections about parallelism inside a model: `tensor_parallel` (AutoTP), `expert_parallel` (AutoEP), `pipeline`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, PlainValidator, ValidationInfo, field_validator

from deepspeed.base.dtypes import Dtype
from deepspeed.config.section import (
    AllowedValues,
    DeepSpeedConfigModel,
    Float,
    FloatOrAuto,
    Int,
    IntOrAuto,
    LenientConfigModel,
    LenientSwitched,
    key,
    parse_dtype,
)

# The `tensor_parallel` section (AutoTP).

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
    shape: list[Any] | None = key(None, "Shape of a fused weight's parts.")
    partition_dim: Int | None = key(None, "Dimension of `shape` that is partitioned.")
    model_types: list[str] | None = key(None, "Only for these values of the model's `config.model_type`.")
    gather_output: bool = key(False, "Gather the outputs on every rank (column).")
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
    tp_grain_size: Int = key(1, "Align shard boundaries to multiples of this many columns.", ge=1)
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
        "Refuse a model whose output head cannot be split along the vocabulary. (Heads that can be split "
        "always are, and their loss takes sharded logits.)",
    )
    tensor_parallel: TPConfig = key(TPConfig.model_construct(), "Process groups at run time.", alias="tp")
    injection_policy_tuple: tuple[Any, ...] | None = key(
        None, "Layers whose output is summed over the ranks."
    )
    keep_module_on_host: bool = key(False, "No effect: weights are split in place.")
    replace_with_kernel_inject: bool = key(
        False, "No effect in training; an argument of `init_inference`.", alias="kernel_inject"
    )


class _AsTorch:
    """Descriptor that returns the field `dtype` as a torch dtype to scripts; the schema holds the short name."""

    def __get__(self, section: TPTrainingConfig | None, owner: type | None = None) -> Any:
        if section is None:  # as for any field: pydantic classes do not have fields as attributes
            raise AttributeError("dtype")
        return section.__dict__["dtype"].torch

    def __set__(self, section: TPTrainingConfig, value: Any) -> None:
        """Never called, as pydantic validates assignments. Makes this a data descriptor, read before the values."""
        raise AttributeError("dtype")


TPTrainingConfig.dtype = _AsTorch()  # type: ignore[assignment]


def _get_hf_tp_plan(model: Any) -> dict[str, str] | None:
    """Return a model's own plan: ``config.base_model_tp_plan`` plus additional entries of ``_tp_plan``; None if there
    is none. An entry of ``_tp_plan`` that only prefixes one of the config's is the same entry."""
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    own = getattr(model, "_tp_plan", None)
    found: dict[str, str] = dict(base) if isinstance(base, Mapping) else {}
    for name, style in (own if isinstance(own, Mapping) else {}).items():
        if not any(f".{name}".endswith(f".{known}") for known in found):
            found[name] = style
    return found or None


# The `expert_parallel` section (AutoEP).


ABSENT = "<absent>"


class AutoEPConfig(LenientSwitched):
    """Experts of known mixture-of-experts models spread over ranks without changes to the model."""

    autoep_size: Int = key(1, "Ranks that share the experts of a layer; divides the number of experts.", ge=1)
    expert_tensor_parallel_size: Literal[1] = key(1, "Reserved; only 1.")
    validate_folding_routing: bool = key(False, "Check the routing at every step (for debugging).")
    preset_model: (
        Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"] | None
    ) = key(None, "Model family whose names and rules are used.")
    use_grouped_mm: bool = key(True, "Grouped GEMM for all local experts.")
    disable_triton_grouped_mm: bool = key(False, "Do not use the Triton kernel for it.")
    moe_layer_pattern: str | None = key(None, "Regular expression on the names of expert layers.")
    router_pattern: str | None = key(None, "Attribute that holds the router.")
    expert_pattern: str | None = key(None, "Attribute that holds the experts.")
    score_func: Literal["auto", "softmax", "sigmoid"] = key("auto", "Score function applied to the logits.")
    score_apply: Literal["auto", "pre", "post"] = key("auto", "Weight the experts' inputs or outputs.")
    combine_impl: Literal["auto", "weighted_sum", "legacy_bmm", "fused_weighted_sum"] = key(
        "auto", "How to combine the experts' outputs."
    )
    row_weighting_impl: Literal["auto", "eager", "fused"] = key("auto", "How to weight the experts' outputs.")
    gate_up_impl: Literal["separate", "fused"] = key(
        "separate", "Whether the gate and up projections are fused."
    )
    expert_activation: str | None = key(None, "The experts' activation; null: as in the preset.")
    async_split_plan: bool = key(False, "Exchange the token counts in the background.")
    comm_backend: Literal["comm", "deepep"] = key("comm", "Backend of the token exchange.")
    comm_num_sm: Int = key(12, "Streaming multiprocessors that it uses.", ge=1)
    comm_qp_margin: Int = key(4, "Queue pairs that it reserves.", ge=0)
    comm_max_tokens_per_rank: Int = key(0, "Tokens for which it reserves memory.", ge=0)
    route_norm: bool | None = key(
        None, "Normalize the selected scores to a sum of 1; null: as in the preset."
    )
    route_scale: Float = key(1.0, "Scaling factor of the scores.")
    top_k: IntOrAuto = key("auto", "Experts per token.")
    routed_scaling_factor: FloatOrAuto = key("auto", "Scaling factor of the experts' output.")
    num_expert_groups: Int | None = key(None, "Groups of experts for limited routing.", ge=1)
    num_limited_groups: Int | None = key(None, "Groups a token may use; at most `num_expert_groups`.", ge=1)
    load_balance_coeff: None = key(None, "Reserved; only null.")
    expert_w1: str | None = key(None, "Name of the gate (and up) weight.")
    expert_w2: str | None = key(None, "Name of the down weight.")
    expert_w3: str | None = key(
        ABSENT, "Name of the up weight; null: fused with the gate; left out: as in the preset."
    )
    num_experts_attr: str | None = key(
        None, "Attribute of the model's config that holds the number of experts."
    )
    top_k_attr: str | None = key(
        None, "Attribute of the model's config that holds the number of experts per token."
    )
    has_shared_experts: bool | None = key(None, "Whether shared experts also process every token.")
    shared_experts_pattern: str | None = key(None, "Attribute that holds the shared experts.")
    shared_experts_gate_pattern: str | None = key(None, "Attribute that holds their gate.")

    @field_validator("num_limited_groups")
    @classmethod
    def at_most_all_groups(cls, value: int | None, info: ValidationInfo) -> int | None:
        groups = info.data.get("num_expert_groups")
        if value is not None and value > (groups or 0):
            raise ValueError(f"must not exceed num_expert_groups ({groups})")
        return value


def parse_autoep_config(param_dict: Mapping[str, Any]) -> AutoEPConfig:
    return AutoEPConfig(**param_dict)


ATTRIBUTES = ("expert_w1", "expert_w2", "expert_w3", "router_pattern", "expert_pattern")
"""Keys that name an attribute of a model."""


def validate_autoep_config(
    config: AutoEPConfig,
    world_size: int,
    pp_size: int,
    tp_size: int,
    sp_size: int,
    *,
    zero_stage: int = 0,
    deepcompile_enabled: bool = False,
    tp_preset_model: str | None = None,
    use_data_before_expert_parallel: bool = False,
    mpu: Any = None,
    zero_offload_optimizer: bool = False,
    zero_offload_param: bool = False,
) -> None:
    """Check an enabled section against the world size and the other axes; stage, offload and graphs do not matter.

    ValueError: it does not fit them.
    """
    if not config.enabled:
        return
    if world_size % pp_size:
        raise ValueError(f"{pp_size} pipeline stages do not divide {world_size} ranks")
    stage = world_size // pp_size
    if stage % config.autoep_size:
        fitting = [size for size in range(1, stage + 1) if stage % size == 0]
        raise ValueError(
            f"expert_parallel.autoep_size={config.autoep_size} must divide the stage size, {stage} ranks: one of "
            f"{fitting}"
        )
    if tp_size > 1:
        raise ValueError(
            f"expert_parallel.enabled cannot be combined with tensor_parallel.autotp_size={tp_size}; expert "
            "weights are already sharded"
        )
    for name in ATTRIBUTES:
        if getattr(config, name) == "":
            raise ValueError(
                f"expert_parallel.{name} is empty: set it to the attribute's name, or leave it out"
            )


# The `pipeline` section.


class PipelineConfig(LenientConfigModel):
    """Pipeline engine. Keys that are not listed are handed to it as they are."""

    model_config = ConfigDict(extra="allow")

    stages: Any = key("auto", "No effect, kept for old files; set by the pipeline module.")
    partition: str = key("best", "No effect, kept for old files; set by the pipeline module.")
    schedule: Literal["1f1b", "interleaved", "zero-bubble", "zero-bubble-v", "auto"] = key(
        "1f1b",
        "Pipeline schedule: one forward, one backward; interleaved over several chunks per stage "
        "(`PipelineModule(chunks=...)`); zero-bubble, where weight gradients fill the bubbles; zero-bubble "
        "over a V of chunks (`zigzag=True`); or the best of these for measured durations.",
        json_schema_extra={"takes_auto": True},
    )
    max_held: Int = key(
        0,
        "Micro-batches whose activations a stage may hold with split backwards; 0: the number of stages, as in 1F1B.",
        ge=0,
    )
    seed_layers: bool = key(False, "Seed the random state per layer.")
    activation_checkpoint_interval: Int = key(0, "Layers per checkpointed region; 0: none.", ge=0)
    pipe_partitioned: bool = key(True, "No effect: each rank sends to its counterpart in the next stage.")
    grad_partitioned: bool = key(True, "No effect, likewise.")
    use_reentrant: bool = key(True, "Variant of activation checkpointing.")

    @field_validator("schedule", mode="before")
    @classmethod
    def any_case(cls, value: Any) -> Any:
        """Accept any case: published files write "1F1B", as the paper does; release 0.19 ignores the key."""
        return value.lower() if isinstance(value, str) else value
