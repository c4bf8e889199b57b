"""The documented rules: which parameter has which, and what is refused."""

from __future__ import annotations

import pytest

import deepspeed
from deepspeed.module_inject import (
    AutoTPConfig,
    AutoTPPresets,
    PartitionType,
    TPLayerSpec,
    merge_autotp_configs,
)

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
    assert fused is not None and fused.has_unequal_sub_params() and fused.get_partition_dim() == 0
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
    from deepspeed.module_inject.layers import LinearLayer

    assert deepspeed.module_inject.LinearLayer is LinearLayer
