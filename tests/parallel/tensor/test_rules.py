"""The documented rules: which parameter has which, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import deepspeed
from deepspeed.compat.module_inject import (
    AutoTPConfig,
    AutoTPPresets,
    PartitionType,
    TPLayerSpec,
    merge_autotp_configs,
)
from deepspeed.config.sections.parallel import _get_hf_tp_plan
from deepspeed.parallel.tensor.planning.rules import TPPlanConverter

QKV = "model.layers.0.self_attn.qkv_proj.weight"


def test_a_section() -> None:
    config = AutoTPConfig.from_dict(
        {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": [r".*o_proj\.weight$"], "partition_type": "row"},
                {"patterns": [r".*qkv_proj\.weight$"], "shape": [[64, 16, 16], -1], "partition_dim": 0},
                {"patterns": [r".*up\.weight$"], "shape": [2, -1], "model_types": ["Phi3"]},
                {"patterns": [r".*gate\.weight$"], "partition_type": "skip"},
            ],
        }
    )
    row = config.find_matching_spec("layers.0.o_proj.weight")
    assert row is not None and row.partition_type is PartitionType.ROW and row.get_partition_dim() == 1
    fused = config.find_matching_spec(QKV)
    assert fused is not None and fused.get_partition_dim() == 0
    assert fused.get_sub_param_sizes() == (64, 16, 16) and fused.get_num_sub_params() == 3
    assert config.find_matching_spec("up.weight", "llama") is None
    halves = config.find_matching_spec("mlp.up.weight", "phi3")
    assert halves is not None and halves.get_num_sub_params() == 2 and halves.get_sub_param_sizes() is None
    assert config.find_matching_spec("norm.weight") is None
    config.strict_mode = True
    with pytest.raises(ValueError, match=r"no rule of layer_specs matches norm\.weight"):
        config.find_matching_spec("norm.weight")


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ({"layer_spec": []}, "unknown key 'layer_spec'"),
        ({"layer_specs": [{"partition_type": "row"}]}, "needs patterns"),
        ({"layer_specs": [{"patterns": ["x"], "partition_type": "diagonal"}]}, "'diagonal'"),
        ({"layer_specs": [{"patterns": ["x"], "dim": 0}]}, "unknown key 'dim'"),
    ],
)
def test_mistakes(section: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        AutoTPConfig.from_dict(section)


def test_presets_and_merging() -> None:
    for family in ("llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"):
        preset = AutoTPPresets.get_preset(family)
        assert preset is not None and preset.layer_specs
    assert AutoTPPresets.get_preset("no_such_family") is None
    gqa = AutoTPPresets.llama_gqa(8, 2, 4).find_matching_spec(QKV)
    assert gqa is not None and gqa.get_sub_param_sizes() == (32, 8, 8)

    own = AutoTPConfig(layer_specs=[TPLayerSpec([r".*o_proj.*"], PartitionType.SKIP)], tp_size=2)
    merged = merge_autotp_configs(AutoTPPresets.llama(), own)
    found = merged.find_matching_spec("model.layers.0.self_attn.o_proj.weight")
    assert found is own.layer_specs[0] and merged.tp_size == 2
    assert merged.find_matching_spec("model.layers.0.mlp.up_proj.weight") is not None
    own.use_default_specs = False
    assert merge_autotp_configs(AutoTPPresets.llama(), own).layer_specs == own.layer_specs


def test_documented_paths() -> None:
    from deepspeed.compat.module_inject.layers import LinearLayer

    assert deepspeed.compat.module_inject.LinearLayer is LinearLayer
    from deepspeed.module_inject import auto_tp

    assert auto_tp.TPLayerSpec is TPLayerSpec and auto_tp.AutoTPConfig is AutoTPConfig


def test_a_plan_of_transformers_as_rules() -> None:
    plan = {
        "layers.*.o_proj": "rowwise",
        "layers.*.q_proj.weight": "colwise",
        "lm_head": "colwise_rep",
        "layers.*.q_norm": "replicated_with_grad_allreduce",
        "layers.*.router": "ep_router",
    }
    rules = TPPlanConverter.convert(plan)
    assert rules is not None and [rule.partition_type.value for rule in rules] == [
        "row",
        "column",
        "column",
        "skip",
        "skip",
    ]
    assert [rule.gather_output for rule in rules] == [False, False, True, False, False]
    assert [rule.grad_allreduce for rule in rules] == [False, False, False, True, False]
    assert rules[0].matches("model.layers.12.o_proj.weight") and rules[1].matches("layers.0.q_proj.weight")
    assert not any(rule.matches("model.layers.0.o_proj.bias") for rule in rules)
    assert TPPlanConverter.convert({}) == [] and TPPlanConverter.convert({"a": "local"}) is None


def test_the_plan_that_a_model_carries() -> None:
    config = SimpleNamespace(base_model_tp_plan={"layers.*.q_proj": "colwise"})
    model = SimpleNamespace(
        config=config, _tp_plan={"model.layers.*.q_proj": "colwise", "lm_head": "colwise_rep"}
    )
    assert _get_hf_tp_plan(model) == {"layers.*.q_proj": "colwise", "lm_head": "colwise_rep"}
    assert _get_hf_tp_plan(SimpleNamespace(_tp_plan={"a": "rowwise"})) == {"a": "rowwise"}
    assert _get_hf_tp_plan(SimpleNamespace(_tp_plan={}, config=None)) is None
