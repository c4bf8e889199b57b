"""Configs in the form in which client libraries and example scripts write them."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed.config.sections.parallel import PipelineConfig
from deepspeed.config.sections.precision import DeepSpeedFP16Config
from deepspeed.tools.config.command import check_config

OFF = {"device": "none", "nvme_path": None}

ACCELERATE: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 1,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": OFF,
        "offload_param": OFF,
        "stage3_gather_16bit_weights_on_model_save": False,
    },
    "gradient_clipping": 1.0,
    "steps_per_print": float("inf"),
    "fp16": {"enabled": False, "auto_cast": True},
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
    "seq_parallel_communication_data_type": "bf16",
    "msamp": {"enabled": False, "opt_level": "O2"},
}

LIGHTNING: dict[str, Any] = {
    "activation_checkpointing": {
        "partition_activations": False,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": False,
        "synchronize_checkpoint_boundary": False,
    },
    "aio": {
        "block_size": 1048576,
        "queue_depth": 8,
        "single_submit": False,
        "overlap_events": True,
        "thread_count": 1,
    },
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 200_000_000,
        "reduce_bucket_size": 200_000_000,
        "sub_group_size": 1_000_000_000_000,
    },
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.0,
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
}

TRL: dict[str, Any] = ACCELERATE | {
    "zero_optimization.reduce_bucket_size": 1024 * 1024,
    "zero_optimization.stage3_param_persistence_threshold": 10 * 1024,
    "zero_optimization.stage3_prefetch_bucket_size": 0,
}

CHAT: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 1,
    "steps_per_print": 10,
    "zero_optimization": {
        "stage": 2,
        "offload_param": {"device": "none"},
        "offload_optimizer": {"device": "none"},
        "stage3_param_persistence_threshold": 1e4,
        "stage3_max_live_parameters": 3e7,
        "stage3_prefetch_bucket_size": 3e7,
        "memory_efficient_linear": False,
    },
    "bfloat16": {"enabled": True},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "wall_clock_breakdown": False,
    "hybrid_engine": {
        "enabled": False,
        "max_out_tokens": 512,
        "inference_tp_size": 1,
        "release_inference_cache": False,
        "pin_parameters": True,
        "tp_gather_partition_size": 8,
    },
    "tensorboard": {"enabled": False, "output_path": "/tmp/tb/", "job_name": "step1_tensorboard"},
}

BERT: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 64,
    "steps_per_print": 1000,
    "prescale_gradients": False,
    "optimizer": {
        "type": "Adam",
        "params": {
            "lr": 6e-3,
            "betas": [0.9, 0.99],
            "eps": 1e-8,
            "weight_decay": 0.01,
            "bias_correction": False,
        },
    },
    "gradient_clipping": 1.0,
    "wall_clock_breakdown": False,
    "fp16": {"enabled": True, "loss_scale": 0},
    "sparse_gradients": True,
    "flops_profiler": {
        "enabled": False,
        "profile_step": 1,
        "module_depth": -1,
        "top_modules": 3,
        "detailed": True,
    },
}

COMPRESSION: dict[str, Any] = {
    "train_batch_size": 32,
    "fp16": {"enabled": False},
    "compression_training": {
        "layer_reduction": {
            "enabled": False,
            "keep_number_layer": 6,
            "module_name_prefix": "bert.encoder.layer",
            "teacher_layer": [1, 3, 5, 7, 9, 11],
            "other_module_name": ["bert.pooler", "bert.embeddings", "classifier"],
        },
        "weight_quantization": {
            "shared_parameters": {
                "enabled": False,
                "quantizer_kernel": False,
                "schedule_offset": 0,
                "quantize_groups": 64,
                "quantize_verbose": True,
                "quantization_type": "symmetric",
                "quantize_weight_in_forward": True,
                "rounding": "nearest",
                "fp16_mixed_quantize": {"enabled": False, "quantize_change_ratio": 0.001},
            },
            "different_groups": {
                "wq1": {
                    "params": {"start_bits": 8, "target_bits": 8, "quantization_period": 0},
                    "modules": ["attention.self", "intermediate"],
                }
            },
        },
        "head_pruning": {
            "shared_parameters": {
                "enabled": False,
                "schedule_offset": 2000,
                "method": "topk",
                "num_heads": 12,
            },
            "different_groups": {
                "rp1": {
                    "params": {"dense_ratio": 0.5},
                    "modules": ["attention.output.dense"],
                    "related_modules": [["self.query", "self.key", "self.value"]],
                }
            },
        },
    },
    "quantize_training": {"enabled": True, "quantize_verbose": True, "quantizer_kernel": False},
}

DATA_EFFICIENCY: dict[str, Any] = {
    "train_batch_size": 256,
    "data_efficiency": {
        "enabled": True,
        "seed": 1234,
        "data_routing": {
            "enabled": True,
            "random_ltd": {
                "enabled": True,
                "total_layer_num": 12,
                "random_ltd_layer_num": 10,
                "random_ltd_layer_id": list(range(1, 11)),
                "model_mask_name": None,
                "model_type": "decoder",
                "hidden_state_order": "batch_seq_dim",
                "random_ltd_schedule": {
                    "min_value": 32,
                    "max_value": 197,
                    "schedule_type": "fixed_linear",
                    "schedule_config": {"require_steps": 3910, "seq_per_step": 8},
                },
            },
        },
    },
}

CONFIGS = {
    "accelerate": ACCELERATE,
    "lightning": LIGHTNING,
    "trl": TRL,
    "chat": CHAT,
    "bert": BERT,
    "compression": COMPRESSION,
    "data efficiency": DATA_EFFICIENCY,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_accepted_without_a_word(name: str) -> None:
    report = check_config(CONFIGS[name], 4 if name == "chat" else 1)
    assert [str(problem) for problem in report.errors] == []
    allowed = ["config key 'bfloat16' is deprecated, use 'bf16'"] if name == "chat" else []
    assert report.warnings == allowed


# Unknown keys and other spellings in published configs, with which 0.19 trains.
READ_WITH_A_WORD = {
    "true for a number": (
        {"fp16": {"enabled": True, "initial_scale_power": True}},
        "config key 'fp16.initial_scale_power': true is read as 1, as in release 0.19, so the loss scale starts at 2; "
        "the default is 16",
    ),
    "a section that is not data_types": (
        {"data_type": {"enabled": True, "loss_scale_window": 100}},
        "config key 'data_type' is unknown and ignored",
    ),
    "the learning rate at top level": (
        {"lr": 1e-3},
        "config key 'lr' is unknown and ignored; it belongs to 'optimizer.params.lr'",
    ),
    "the learning rate under another name": (
        {"learning_rate": 1e-3},
        "config key 'learning_rate' is unknown and ignored; did you mean 'optimizer.params.lr'?",
    ),
    "accumulation without its end": (
        {"gradient_accumulation": 4},
        "config key 'gradient_accumulation' is unknown and ignored; did you mean 'gradient_accumulation_steps'?",
    ),
    "another spelling beside a valid section": (
        {"zero_optimization": {"stage": 1}, "zero_optimisation": {"stage": 3}},
        "config key 'zero_optimisation' is unknown and ignored; did you mean 'zero_optimization'?",
    ),
    "an argument outside of params": (
        {"optimizer": {"type": "SGD", "params": {"lr": 0.1}, "momentum": 0.9}},
        "config key 'optimizer.momentum' is unknown and ignored; it belongs to 'optimizer.params.momentum'",
    ),
    "clipping under the name of others": (
        {"max_grad_norm": 1.0},
        "config key 'max_grad_norm' is unknown and ignored; did you mean 'gradient_clipping'?",
    ),
    "a schedule under the name of others": (
        {"lr_scheduler": {"type": "WarmupLR", "params": {}}},
        "config key 'lr_scheduler' is unknown and ignored; did you mean 'scheduler'?",
    ),
    "a section of another tool under a name of ours": (
        {"gradient_compression": {"enabled": False}},
        "config section 'gradient_compression' is ignored, as in release 0.19: none of its keys (enabled) is "
        "supported in this section",
    ),
    "monitors under one roof": (
        {"monitor": {"enabled": True, "wandb": {"enabled": True}}},
        "config section 'monitor' is ignored, as in release 0.19: none of its keys (enabled, wandb) is "
        "supported in this section",
    ),
    "a device of the optimizer": (
        {"optimizer": {"type": "Adam", "params": {"lr": 1.0}, "device": "cuda:0"}},
        "config key 'optimizer.device' is unknown and ignored",
    ),
    "half of a name": (
        {"micro_batch_size_per_gpu": 1},
        "config key 'micro_batch_size_per_gpu' is unknown and ignored; did you mean 'train_micro_batch_size_per_gpu'?",
    ),
}


@pytest.mark.parametrize("name", READ_WITH_A_WORD)
def test_accepted_with_one_word(name: str) -> None:
    config, told = READ_WITH_A_WORD[name]
    report = check_config({"train_batch_size": 1} | config, 1)
    assert [str(problem) for problem in report.errors] == []
    assert report.warnings == [told]


def test_the_scale_starts_where_true_says() -> None:
    config = DeepSpeedFP16Config(enabled=True, initial_scale_power=True)
    assert config.initial_dynamic_scale() == 2
    with pytest.raises(ValueError, match="boolean"):
        DeepSpeedFP16Config(enabled=True, initial_scale_power=False)


@pytest.mark.parametrize(
    "value", [{"grad_accum_dtype": "fp32"}, {"enabled": True, "grad_accum_dtype": "fp32"}]
)
def test_a_misspelt_section_is_still_refused(value: dict[str, Any]) -> None:
    (problem,) = check_config({"train_batch_size": 1, "data_type": value}, 1).errors
    assert "did you mean 'data_types'?" in problem.message


def test_the_pipeline_schedule_in_capitals() -> None:
    report = check_config({"train_batch_size": 1, "pipeline": {"schedule": "1F1B", "chunks": 2}}, 1)
    assert not report.errors and not report.warnings
    assert PipelineConfig(schedule="1F1B").schedule == "1f1b"
    assert check_config({"train_batch_size": 1, "pipeline": {"schedule": "GPipe"}}, 1).errors


@pytest.mark.parametrize("section", [{"codek": "int8"}, {"enabled": True, "codec": "int8"}, {}])
def test_a_section_of_ours_is_still_checked(section: dict[str, Any]) -> None:
    assert check_config({"train_batch_size": 1, "gradient_compression": section}, 1).errors


def test_hints_for_words_that_many_sections_have() -> None:
    (problem,) = check_config({"train_batch_size": 1, "zero_optimization": {"enabled": False}}, 1).errors
    assert "belongs to" not in problem.message
    (problem,) = check_config({"train_batch_size": 1, "bf16": {"loss_scale": 0}}, 1).errors
    assert "belongs to 'fp16.loss_scale'" in problem.message


def test_infinity_in_quotes() -> None:
    report = check_config({"train_batch_size": 1, "steps_per_print": "inf"}, 1)
    assert not report.errors and not report.warnings
    assert report.config is not None and report.config.steps_per_print == float("inf")
    assert check_config({"train_batch_size": 1, "steps_per_print": "often"}, 1).errors
