"""The `zero_optimization` section (Rajbhandari et al. 2020 for the stages, 2021 for offload), with its
`leaf_module` and `zenflow`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from deepspeed.config.section import (
    DeepSpeedConfigModel,
    Elements,
    Float,
    Int,
    IntOrAuto,
    deprecated,
    key,
    note,
    pp_int,
    section,
)
from deepspeed.config.sections.offload import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)


class ZenFlowConfig(DeepSpeedConfigModel):
    """Asynchronous offloaded updates (ZenFlow)."""

    topk_ratio: Float = key(0.1, "Fraction of the gradient columns to update on the device.", ge=0.0, le=1.0)
    select_strategy: Literal["auto", "step", "epoch"] = key("auto", "When to reselect the columns.")
    select_interval: IntOrAuto = key("auto", "Steps or epochs between selections.")
    update_interval: IntOrAuto = key("auto", "Steps between host updates.")
    overlap_step: bool = key(False, "Run the host update in parallel with the next steps.")
    offload: bool = key(False, "Keep the state of the selected columns in host memory.")
    auto_ratio: Float = key(0.99, "Threshold for `update_interval: auto`.", ge=0.0, le=1.0)
    full_warm_up_rounds: Int = key(
        0,
        "Initial rounds that update everything; `auto` or unset: until a round changes the weights little.",
        ge=0,
    )
    pt_reserved_cores_perc: Float = key(0.5, "Fraction of the cores left to PyTorch.", ge=0.0, le=1.0)
    steps_per_epoch: Int | None = key(None, "Steps of an epoch; null: those of `training_data`.", ge=1)


DEFAULT_LEAF_MODULE_CLASSES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)
DEFAULT_LEAF_MODULE_NAMES: tuple[str, ...] = ()
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: tuple[str, ...] = ()


def _as_list(value: Any) -> Any:
    """Accept a single string where a list of strings is expected."""
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], BeforeValidator(_as_list)]


class DeepSpeedZeroLeafModuleConfig(DeepSpeedConfigModel):
    """Modules that are leaves: their parameters are fetched together, however few of them one forward
    uses.
    """

    classes: Texts = key(
        list(DEFAULT_LEAF_MODULE_CLASSES),
        "Full names of module classes (sparse mixture-of-experts blocks by default).",
    )
    names: Texts = key(list(DEFAULT_LEAF_MODULE_NAMES), "Names of single modules, as in `named_modules()`.")
    name_suffixes: Texts = key(list(DEFAULT_LEAF_MODULE_NAME_SUFFIXES), "Suffixes of module names.")


ZERO_OPTIMIZATION = "zero_optimization"


class ZeroStageEnum(int, Enum):
    """State that is partitioned across the data-parallel ranks; each stage adds to the previous one."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3  # noqa: PIE796 - documented second name


class ZeroPPLoCoConfig(DeepSpeedConfigModel):
    """Error feedback of quantized gradients (LoCo)."""

    err_beta: Float = key(0.8, "Weight of the accumulated quantization error.", ge=0.0, le=1.0)
    reset_T: Int = key(1024, "Steps after which the accumulated error is reset.", ge=1)


def _offload_param(on: bool) -> DeepSpeedZeroOffloadParamConfig | None:
    return DeepSpeedZeroOffloadParamConfig(device=OffloadDeviceEnum.cpu) if on else None


def _offload_optimizer(on: bool) -> DeepSpeedZeroOffloadOptimizerConfig | None:
    return DeepSpeedZeroOffloadOptimizerConfig(device=OffloadDeviceEnum.cpu) if on else None


class DeepSpeedZeroConfig(DeepSpeedConfigModel):
    """Partitioning of optimizer state, gradients and parameters across ranks. Sizes count elements, not bytes."""

    stage: ZeroStageEnum = key(
        ZeroStageEnum.disabled,
        "0: nothing is partitioned; 1: optimizer state; 2: gradients too; 3: parameters too.",
    )
    contiguous_gradients: bool = key(True, "No effect: gradients are always collected in buffers.")
    reduce_scatter: bool = key(True, "Reduce gradients with reduce-scatter; false: all-reduce.")
    reduce_bucket_size: Elements = key(pp_int(5e8), "Maximum number of elements per reduction.", gt=0)
    use_multi_rank_bucket_allreduce: bool = key(True, "No effect: one call reduces a bucket for all ranks.")
    allgather_partitions: bool = key(True, "No effect: updated parameters are always gathered.")
    allgather_bucket_size: Elements = key(pp_int(5e8), "Maximum number of elements per all-gather.", ge=0)
    overlap_comm: bool | None = key(
        None, "Reduce gradients while backward runs; null becomes true at stage 3 and false below."
    )
    compute_grad_norm: bool = key(
        True,
        "false: the norm is not needed (stages 1, 2; no clipping). No effect: computing it costs little.",
    )
    load_from_fp32_weights: bool = key(True, "Restore master weights from the fp32 values of a checkpoint.")
    elastic_checkpoint: bool = deprecated(
        False,
        "No effect: every checkpoint loads at any number of ranks.",
        message="every checkpoint is elastic",
    )
    offload_param: DeepSpeedZeroOffloadParamConfig | None = key(
        None, "Keep parameters outside device memory (stage 3)."
    )
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = key(
        None, "Keep the optimizer state, and update it, outside device memory (stages 1 to 3)."
    )
    zenflow: ZenFlowConfig | None = key(None, "ZenFlow: asynchronous offloaded updates.")
    sub_group_size: Elements = key(pp_int(1e9), "Number of elements updated at a time.", ge=0)
    prefetch_bucket_size: Elements = key(
        pp_int(5e7), "Maximum number of elements to prefetch.", ge=0, alias="stage3_prefetch_bucket_size"
    )
    param_persistence_threshold: Elements = key(
        pp_int(1e5),
        "Parameters with fewer elements stay gathered between uses.",
        ge=0,
        alias="stage3_param_persistence_threshold",
    )
    model_persistence_threshold: Elements = key(
        pp_int(sys.maxsize, "sys.maxsize"),
        "Limit on the total elements of parameters that stay gathered.",
        ge=0,
        alias="stage3_model_persistence_threshold",
    )
    max_live_parameters: Elements = key(
        pp_int(1e9),
        "Maximum number of elements gathered at a time.",
        ge=0,
        alias="stage3_max_live_parameters",
    )
    max_reuse_distance: Elements = key(
        pp_int(1e9),
        "Do not release a parameter that is used again within this many elements.",
        ge=0,
        alias="stage3_max_reuse_distance",
    )
    gather_16bit_weights_on_model_save: bool = key(
        False,
        "Allow `save_16bit_model` to gather full weights at stage 3.",
        alias="stage3_gather_16bit_weights_on_model_save",
    )
    stage3_gather_fp16_weights_on_model_save: bool = deprecated(
        False,
        "Old name of `stage3_gather_16bit_weights_on_model_save`.",
        new_param="gather_16bit_weights_on_model_save",
    )
    module_granularity_threshold: Int = key(
        pp_int(0),
        "Modules with fewer parameters per descendant are gathered as a whole; 0: off.",
        ge=0,
        alias="stage3_module_granularity_threshold",
    )
    use_all_reduce_for_fetch_params: bool = key(
        False, "No effect: parameters are gathered.", alias="stage3_use_all_reduce_for_fetch_params"
    )
    allgather_sequential: bool = key(
        False,
        "No effect; `stage3_prefetch_bucket_size: 0` turns prefetching off.",
        alias="stage3_allgather_sequential",
    )
    cpu_offload: bool | None = deprecated(
        None,
        "Old switch of `offload_optimizer`.",
        new_param="offload_optimizer",
        new_param_fn=_offload_optimizer,
    )
    cpu_offload_param: bool | None = deprecated(
        None, "Old switch of `offload_param`.", new_param="offload_param", new_param_fn=_offload_param
    )
    cpu_offload_use_pin_memory: bool | None = deprecated(
        None, "No effect.", message="no effect; set 'pin_memory' in 'offload_param' or 'offload_optimizer'"
    )
    ignore_unused_parameters: bool = key(True, "Accept parameters without a gradient.")
    legacy_stage1: bool = key(False, "True is refused: the old stage 1 is gone.")
    round_robin_gradients: bool = key(
        False, "Distribute gradients to the ranks round-robin, to balance offload copies."
    )
    zero_hpz_partition_size: Int = key(
        1, "Ranks among which a secondary copy of the shards is kept (ZeRO++ hpZ); 1: off.", ge=0
    )
    zero_quantized_weights: bool = key(False, "Gather weights in 8 bits (ZeRO++ qwZ).")
    zero_quantized_weights_bits: Literal[4, 8] = key(8, "Bits of quantized weights; 4 is less accurate.")
    zero_quantized_nontrainable_weights: bool = key(False, "Keep frozen weights in 8 bits.")
    zero_quantized_gradients: bool = key(False, "Exchange gradients in 4 bits (ZeRO++ qgZ).")
    zero_quantized_rounding: Literal["nearest", "stochastic"] = key(
        "nearest", "Rounding of quantized weights and gradients; stochastic: at random, unbiased."
    )
    zeropp_loco_param: ZeroPPLoCoConfig | None = key(None, "Error feedback for quantized gradients.")
    mics_shard_size: Int = key(-1, "Ranks per copy of the sharded states (MiCS); -1: off.")
    mics_hierarchical_params_gather: bool = key(False, "No effect.")
    memory_efficient_linear: bool = key(
        True, "No effect: at stage 3 linear layers never keep their weight for backward."
    )
    pipeline_loading_checkpoint: bool = key(
        False, "No effect: each rank reads only its own part, so all load at once."
    )
    override_module_apply: bool = key(
        True, "No effect: `Module.apply` always gathers parameters under `zero.Init`."
    )
    log_trace_cache_warnings: bool = key(
        False, "No effect: modules may always run in a different order than recorded."
    )
    enable_sanity_checks: bool = key(False, "Extra checks at run time.")
    save_muon_momentum_buffer_in_memory: bool = key(
        False, "No effect: momentum is kept with the other states."
    )
    leaf_module: DeepSpeedZeroLeafModuleConfig = section("Modules that stage 3 gathers as a whole.")
    parameter_alignment: bool = key(False, "No effect: parameters always begin at aligned addresses.")
    grad_hooks: bool = deprecated(True, "No effect.", message="no effect")

    @model_validator(mode="after")
    def resolve_overlap(self) -> DeepSpeedZeroConfig:
        """Replace null by the stage's default, which still does not count as given (`model_fields_set`)."""
        if self.overlap_comm is None:
            object.__setattr__(self, "overlap_comm", self.stage == ZeroStageEnum.weights)
        return self


def read_zero_config_deprecated(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the old form, a boolean: true is stage 1, with the top-level `allgather_size`; false is stage 0."""
    section: dict[str, Any] = {"stage": 1 if param_dict[ZERO_OPTIMIZATION] else 0}
    if section["stage"]:
        section["allgather_bucket_size"] = param_dict.get("allgather_size", 500_000_000)
    note(
        f"config key '{ZERO_OPTIMIZATION}': a boolean is deprecated, write {{\"stage\": 0, 1, 2 or 3}}; "
        f"read as stage {section['stage']}"
    )
    return section


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    section = param_dict.get(ZERO_OPTIMIZATION, {})
    if isinstance(section, bool):
        section = read_zero_config_deprecated(param_dict)
    return DeepSpeedZeroConfig(**section)
