"""Features that do not exist yet: refused by name, or one warning when they cannot change the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed.config.analysis import UNFINISHED, analyse
from deepspeed.config.availability import MISSING
from deepspeed.config.axes import axes_of
from deepspeed.config.keys import field_at
from deepspeed.config.reader import read_config
from deepspeed.config.schema import TrainingConfig

# For every row of the table a config that asks for the feature.
LTD = {"total_layer_num": 1, "random_ltd_layer_num": 1, "random_ltd_layer_id": [0]}
FULL_LTD = {
    **LTD,
    "enabled": True,
    "model_mask_name": "mask",
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {"min_value": 1, "max_value": 2, "schedule_type": "fixed_linear"},
}
ROUTING = {"enabled": True, "data_routing": {"enabled": True, "random_ltd": FULL_LTD}}
ASKING: list[tuple[str, dict[str, Any]]] = [
    ("zero_optimization.stage", {"zero_optimization": {"stage": 3}}),
    (
        "zero_optimization.offload_optimizer.device",
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    ),
    ("zero_optimization.offload_optimizer.device", {"zero_optimization": {"stage": 2, "cpu_offload": True}}),
    (
        "zero_optimization.offload_param.device",
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
    ),
    ("sequence_parallel_size", {"sequence_parallel_size": 2}),
    *(
        (f"expert_parallel.{key}", {"expert_parallel": {"enabled": True, key: value}})
        for key, value in {
            "score_func": "sigmoid",
            "score_apply": "pre",
            "route_norm": True,
            "route_scale": 2.0,
            "top_k": 1,
            "routed_scaling_factor": 2.0,
            "num_expert_groups": 2,
            "preset_model": "mixtral",
            "moe_layer_pattern": "x",
            "router_pattern": "x",
            "expert_pattern": "x",
            "expert_w1": "x",
            "expert_w2": "x",
            "expert_w3": "x",
            "num_experts_attr": "x",
            "top_k_attr": "x",
            "has_shared_experts": True,
            "shared_experts_pattern": "x",
            "shared_experts_gate_pattern": "x",
            "use_grouped_mm": False,
            "combine_impl": "fused_weighted_sum",
            "row_weighting_impl": "fused",
            "gate_up_impl": "fused",
            "validate_folding_routing": True,
            "expert_activation": "silu",
            "async_split_plan": True,
            "comm_backend": "deepep",
            "comm_num_sm": 24,
            "comm_qp_margin": 8,
            "comm_max_tokens_per_rank": 4096,
        }.items()
    ),
    (
        "expert_parallel.num_limited_groups",
        {"expert_parallel": {"enabled": True, "num_expert_groups": 4, "num_limited_groups": 1}},
    ),
    (
        "elasticity.enabled",
        {
            "elasticity": {
                "enabled": True,
                "max_train_batch_size": 8,
                "micro_batch_sizes": [1],
                "ignore_non_elastic_batch_info": True,
            }
        },
    ),
    ("weight_quantization.enabled", {"weight_quantization": {"num_bits": 4}}),
    ("data_efficiency.data_routing.random_ltd.enabled", {"data_efficiency": ROUTING}),
    *(
        (f"compile.{key}", {"compile": {"deepcompile": True, key: True}})
        for key in (
            "offload_activation",
            "symmetric_memory",
            "sync_before_reduce",
            "sync_after_reduce",
            "sync_before_allgather",
            "sync_after_allgather",
            "keep_all_input_tensors",
            "free_activation",
        )
    ),
    ("compile.passes", {"compile": {"deepcompile": True, "passes": ["autosp"]}}),
    ("autotuning.enabled", {"autotuning": {"enabled": True}}),
    ("tensorboard.enabled", {"tensorboard": {"enabled": True}}),
    ("wandb.enabled", {"wandb": {"enabled": True}}),
    ("csv_monitor.enabled", {"csv_monitor": {"enabled": True}}),
    ("comet.enabled", {"comet": {"enabled": True}}),
    ("trackio.enabled", {"trackio": {"enabled": True}}),
    ("mlflow.enabled", {"mlflow": {"enabled": True}}),
    ("aim.enabled", {"aim": {"enabled": True}}),
    ("tensor_parallel.partition_config", {"tensor_parallel": {"partition_config": {}}}),
    ("tensor_parallel.preset_model", {"tensor_parallel": {"preset_model": "llama"}}),
    ("tensor_parallel.injection_policy_tuple", {"tensor_parallel": {"injection_policy_tuple": ["x"]}}),
    (
        "tensor_parallel.partition_config.lm_head_patterns",
        {"tensor_parallel": {"partition_config": {"lm_head_patterns": ["head"]}}},
    ),
    (
        "tensor_parallel.partition_config.embedding_partition_dim",
        {"tensor_parallel": {"partition_config": {"embedding_partition_dim": 0}}},
    ),
    ("tensor_parallel.tp_overlap_comm", {"tensor_parallel": {"tp_overlap_comm": True}}),
    ("flops_profiler.enabled", {"flops_profiler": {"enabled": True}}),
    ("nebula.enabled", {"nebula": {"enabled": True}}),
    ("datastates_ckpt", {"datastates_ckpt": {}}),
    ("checkpoint.writer", {"checkpoint": {"writer": {"type": "fast"}}}),
    ("graph_harvesting", {"graph_harvesting": True}),
]


def test_each_row_is_asked_for_here() -> None:
    asked = {key for key, _ in ASKING}
    assert {row.key for row in MISSING} <= asked, "a row of the table has no test"


@pytest.mark.parametrize("row", MISSING, ids=lambda row: row.key)
def test_rows_name_known_keys(row: Any) -> None:
    assert field_at(TrainingConfig, tuple(row.key.split("."))) is not None
    assert not row.requested(TrainingConfig())


@pytest.mark.parametrize(("key", "keys"), ASKING, ids=lambda value: value if isinstance(value, str) else "")
def test_refused_or_warned_by_name(key: str, keys: dict[str, Any]) -> None:
    rows = [row for row in MISSING if row.key == key]
    found = analyse(read_config({"train_batch_size": 8, **keys}), axes_of({"train_batch_size": 8, **keys}, 1))
    if not rows:  # the feature exists by now
        assert not any("not implemented" in str(problem) for problem in found.errors)
        return
    if rows[0].changes_numbers:
        refusals = [
            problem for problem in found.errors if "not implemented in this release" in problem.message
        ]
        assert key in [problem.key for problem in refusals]
    else:
        assert not found.errors
        assert any(
            key in warning and "not implemented in this release" in warning for warning in found.warnings
        )


def test_required_keys_of_an_enabled_section() -> None:
    config = {
        "train_batch_size": 8,
        "data_efficiency": {"data_routing": {"random_ltd": {"enabled": True, **LTD}}},
    }
    messages = [str(problem) for problem in analyse(read_config(config), axes_of(config, 1)).errors]
    assert any(
        "random_ltd" in text and "model_mask_name" in text and "total_layer_num" not in text
        for text in messages
    )


def test_the_sections_that_are_looked_at() -> None:
    """A config without these keys does not import the table."""
    assert {row.key.partition(".")[0] for row in MISSING} == UNFINISHED
