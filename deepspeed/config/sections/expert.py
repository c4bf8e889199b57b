"""The `expert_parallel` section (AutoEP)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from deepspeed.config.section import Float, FloatOrAuto, Int, IntOrAuto, LenientConfigModel

ABSENT = "<absent>"


class AutoEPConfig(LenientConfigModel):
    """Experts of known mixture-of-experts models spread over ranks without changes to the model."""

    enabled: bool = Field(default=False, description="Turn it on.")
    autoep_size: Int = Field(
        default=1, ge=1, description="Ranks that share the experts of a layer; divides the number of experts."
    )
    expert_tensor_parallel_size: Literal[1] = Field(default=1, description="Reserved; only 1.")
    validate_folding_routing: bool = Field(
        default=False, description="Check the routing at every step (for debugging)."
    )
    preset_model: (
        Literal["mixtral", "qwen3_moe", "qwen3_5_moe", "deepseek_v2", "deepseek_v3", "minimax_m3"] | None
    ) = Field(default=None, description="Model family whose names and rules are used.")
    use_grouped_mm: bool = Field(
        default=True, description="One grouped matrix product for all local experts."
    )
    disable_triton_grouped_mm: bool = Field(default=False, description="Never use the Triton kernel for it.")
    moe_layer_pattern: str | None = Field(
        default=None, description="Regular expression on the names of expert layers."
    )
    router_pattern: str | None = Field(default=None, description="Attribute that holds the router.")
    expert_pattern: str | None = Field(default=None, description="Attribute that holds the experts.")
    score_func: Literal["auto", "softmax", "sigmoid"] = Field(
        default="auto", description="From logits to scores."
    )
    score_apply: Literal["auto", "pre", "post"] = Field(
        default="auto", description="Scores weight the experts' inputs or outputs."
    )
    combine_impl: Literal["auto", "weighted_sum", "legacy_bmm", "fused_weighted_sum"] = Field(
        default="auto", description="How the experts' outputs are combined."
    )
    row_weighting_impl: Literal["auto", "eager", "fused"] = Field(
        default="auto", description="How the experts' outputs are weighted."
    )
    gate_up_impl: Literal["separate", "fused"] = Field(
        default="separate", description="Whether gate and up are one product."
    )
    expert_activation: str | None = Field(
        default=None, description="The experts' activation; null: as the preset."
    )
    async_split_plan: bool = Field(
        default=False, description="Exchange the numbers of tokens in the background."
    )
    comm_backend: Literal["comm", "deepep"] = Field(default="comm", description="What exchanges tokens.")
    comm_num_sm: Int = Field(default=12, ge=1, description="Multiprocessors that it uses.")
    comm_qp_margin: Int = Field(default=4, ge=0, description="Queue pairs that it keeps in reserve.")
    comm_max_tokens_per_rank: Int = Field(default=0, ge=0, description="Tokens for which it reserves memory.")
    route_norm: bool | None = Field(
        default=None, description="Normalize the chosen scores to sum 1; null: as in the preset."
    )
    route_scale: Float = Field(default=1.0, description="Factor on the scores.")
    top_k: IntOrAuto = Field(default="auto", description="Experts per token.")
    routed_scaling_factor: FloatOrAuto = Field(
        default="auto", description="Factor on the output of the experts."
    )
    num_expert_groups: Int | None = Field(
        default=None, ge=1, description="Groups of experts for limited routing."
    )
    num_limited_groups: Int | None = Field(
        default=None, ge=1, description="Groups a token may use; at most `num_expert_groups`."
    )
    load_balance_coeff: None = Field(default=None, description="Reserved; only null.")
    expert_w1: str | None = Field(default=None, description="Name of the gate (and up) weight.")
    expert_w2: str | None = Field(default=None, description="Name of the down weight.")
    expert_w3: str | None = Field(
        default=ABSENT,
        description="Name of the up weight; null: fused with the gate; left out: as in the preset.",
    )
    num_experts_attr: str | None = Field(
        default=None, description="Attribute of the model's config that holds the number of experts."
    )
    top_k_attr: str | None = Field(
        default=None,
        description="Attribute of the model's config that holds the number of experts per token.",
    )
    has_shared_experts: bool | None = Field(
        default=None, description="Whether every token also visits shared experts."
    )
    shared_experts_pattern: str | None = Field(
        default=None, description="Attribute that holds the shared experts."
    )
    shared_experts_gate_pattern: str | None = Field(
        default=None, description="Attribute that holds their gate."
    )

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
