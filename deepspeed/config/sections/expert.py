"""The `expert_parallel` section (AutoEP)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationInfo, field_validator

from deepspeed.config.section import Float, FloatOrAuto, Int, IntOrAuto, LenientConfigModel, key

ABSENT = "<absent>"


class AutoEPConfig(LenientConfigModel):
    """Experts of known mixture-of-experts models spread over ranks without changes to the model."""

    enabled: bool = key(False, "Turn it on.")
    autoep_size: Int = key(1, "Ranks that share the experts of a layer; divides the number of experts.", ge=1)
    expert_tensor_parallel_size: Literal[1] = key(1, "Reserved; only 1.")
    validate_folding_routing: bool = key(False, "Check the routing at every step (for debugging).")
    preset_model: (
        Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"] | None
    ) = key(None, "Model family whose names and rules are used.")
    use_grouped_mm: bool = key(True, "One grouped matrix product for all local experts.")
    disable_triton_grouped_mm: bool = key(False, "Never use the Triton kernel for it.")
    moe_layer_pattern: str | None = key(None, "Regular expression on the names of expert layers.")
    router_pattern: str | None = key(None, "Attribute that holds the router.")
    expert_pattern: str | None = key(None, "Attribute that holds the experts.")
    score_func: Literal["auto", "softmax", "sigmoid"] = key("auto", "From logits to scores.")
    score_apply: Literal["auto", "pre", "post"] = key("auto", "Scores weight the experts' inputs or outputs.")
    combine_impl: Literal["auto", "weighted_sum", "legacy_bmm", "fused_weighted_sum"] = key(
        "auto", "How the experts' outputs are combined."
    )
    row_weighting_impl: Literal["auto", "eager", "fused"] = key(
        "auto", "How the experts' outputs are weighted."
    )
    gate_up_impl: Literal["separate", "fused"] = key("separate", "Whether gate and up are one product.")
    expert_activation: str | None = key(None, "The experts' activation; null: as the preset.")
    async_split_plan: bool = key(False, "Exchange the numbers of tokens in the background.")
    comm_backend: Literal["comm", "deepep"] = key("comm", "What exchanges tokens.")
    comm_num_sm: Int = key(12, "Multiprocessors that it uses.", ge=1)
    comm_qp_margin: Int = key(4, "Queue pairs that it keeps in reserve.", ge=0)
    comm_max_tokens_per_rank: Int = key(0, "Tokens for which it reserves memory.", ge=0)
    route_norm: bool | None = key(None, "Normalize the chosen scores to sum 1; null: as in the preset.")
    route_scale: Float = key(1.0, "Factor on the scores.")
    top_k: IntOrAuto = key("auto", "Experts per token.")
    routed_scaling_factor: FloatOrAuto = key("auto", "Factor on the output of the experts.")
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
    has_shared_experts: bool | None = key(None, "Whether every token also visits shared experts.")
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
    """Check that an engine can train like this on so many ranks; stages, offload and graphs do not matter.

    ValueError: the section is enabled and does not fit them.
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
            f"expert_parallel.enabled cannot be combined with tensor_parallel.autotp_size={tp_size}; experts already "
            "are in parts"
        )
    for name in ATTRIBUTES:
        if getattr(config, name) == "":
            raise ValueError(f"expert_parallel.{name} is empty: give the attribute's name, or leave it out")
