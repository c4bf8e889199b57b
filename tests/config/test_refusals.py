"""Refusals of training that `ds_check` knows: a row for each place outside `deepspeed/config` that has one."""

from __future__ import annotations

import ast
import copy
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import deepspeed
from deepspeed.config.keys import walk
from deepspeed.config.schema import TrainingConfig

PACKAGE = Path(deepspeed.__file__).parent
OTHER_CONFIGS = (
    "config/section.py",
    "inference/",
    "compat/module_inject/",
    "planning/variants.py",
    "tools/plan.py",
    "tools/starter/",
    "transforms/weight_quantization/",
)
"""What knows the config itself, has another one, or is a command with arguments."""
REFUSALS = ("DeepSpeedConfigError", "ElasticityConfigError")


def keys() -> re.Pattern[str]:
    paths = [".".join(path) for path, _ in walk(TrainingConfig)]
    named = {path for path in paths if "." in path or "_" in path}
    return re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, named))})(?!\w)")


def refusals() -> Iterator[str]:
    """`file:function` for each `raise` of a config's error, or of a ValueError that names a key of the config."""
    named = keys()
    for file in sorted(PACKAGE.rglob("*.py")):
        where = file.relative_to(PACKAGE).as_posix()
        if not where.startswith(OTHER_CONFIGS):
            yield from _raises(ast.parse(file.read_text(encoding="utf-8")), where + ":", named)


def _raises(node: ast.AST, name: str, named: re.Pattern[str]) -> Iterator[str]:
    for below in ast.iter_child_nodes(node):
        inner = name
        if isinstance(below, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            inner = f"{name}{'' if name.endswith(':') else '.'}{below.name}"
        if isinstance(below, ast.Raise) and isinstance(below.exc, ast.Call):
            kind, text = ast.unparse(below.exc.func), ast.unparse(below.exc)
            if kind in REFUSALS or kind == "ValueError" and named.search(text):
                yield name
        yield from _raises(below, inner, named)


def changed(section: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of a section with another value at a dotted path."""
    copied = copy.deepcopy(section)
    *above, last = path.split(".")
    below = copied
    for part in above:
        below = below.setdefault(part, {})
    below[last] = value
    return copied


def curriculum(**change: Any) -> dict[str, Any]:
    return {
        "curriculum_learning": {
            "enabled": True,
            "curriculum_type": "seqlen",
            "min_difficulty": 8,
            "max_difficulty": 16,
            "schedule_type": "fixed_linear",
            "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
            **change,
        }
    }


def random_ltd(path: str = "", value: Any = None) -> dict[str, Any]:
    section = {
        "enabled": True,
        "total_layer_num": 4,
        "random_ltd_layer_num": 2,
        "random_ltd_layer_id": [1, 2],
        "model_mask_name": "attention_mask",
        "model_type": "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": 8,
            "max_value": 16,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": 10, "seq_per_step": 8},
        },
    }
    if path:
        section = changed(section, path, value)
    return {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": section}}}


SAMPLING = {
    "data_efficiency": {
        "enabled": True,
        "data_sampling": {"enabled": True, "dynamic_batching": {"enabled": True}},
    }
}
TWICE_SAMPLED = changed(
    changed(SAMPLING, "data_efficiency.data_sampling.dynamic_batching.max_tokens", 10),
    "data_efficiency.data_sampling.curriculum_learning",
    {"enabled": True, "data_cluster_path": "clusters", "curriculum_metrics": {}},
)
CONTIGUOUS = {"activation_checkpointing": {"contiguous_memory_optimization": True}}
IN_FP32 = {
    "compression_training": {
        "weight_quantization": {
            "shared_parameters": {"enabled": True},
            "different_groups": {"all": {"params": {"start_bits": 8, "target_bits": 8}}},
        }
    }
}
TOKEN_RATES = random_ltd("layer_token_lr_schedule", {"enabled": True, "total_layer_tokens": 100})
ONE_BIT = {"optimizer": {"type": "OneBitAdam"}}
NO_ARGUMENT = {"optimizer": {"type": "AdamW", "params": {"no_argument": 1}}}

Row = str | tuple[str, dict[str, Any]]
"""What else a refusal depends on: model, optimizer, data, ranks, the machine (with its files, packages and
environment) or a call of the client; otherwise the key that `ds_check` names, and a config with that fault."""
ROWS: dict[str, tuple[Row, ...]] = {
    "observe/audit/compare.py:compare": ("call",),
    "transforms/compile/backend.py:make_backend": ("call",),
    "transforms/compile/init_z3.py:init_z3": ("call",),
    "transforms/compile/schedule.py:_period": ("call",),
    "compression/compress.py:_check_not_split": ("model",),
    "config/elastic_batch.py:_section_of": (
        ("elasticity.version", {"elasticity": {"enabled": True, "version": "x"}}),
        (
            "elasticity.micro_batch_sizes",
            {"elasticity": {"enabled": True, "max_train_batch_size": 4, "micro_batch_sizes": [7]}},
        ),
    ),
    "config/elastic_batch.py:_widest_batch": (
        (
            "elasticity",
            {
                "elasticity": {
                    "enabled": True,
                    "max_train_batch_size": 10,
                    "micro_batch_sizes": [7],
                    "min_gpus": 2,
                }
            },
        ),
    ),
    "config/elastic_batch.py:_world_size_of_environment": ("machine",),
    "config/elastic_batch.py:ensure_immutable_elastic_config": ("machine", "machine"),
    "config/sections/parallel.py:validate_autoep_config": (
        "ranks",
        (
            "expert_parallel.enabled",
            {"expert_parallel": {"enabled": True, "autoep_size": 2}, "tensor_parallel": {"autotp_size": 2}},
        ),
        ("expert_parallel.expert_w1", {"expert_parallel": {"enabled": True, "expert_w1": ""}}),
    ),
    "parallel/expert/transform.py:ExpertParallelism.apply": ("model",),
    "parallel/expert/transform.py:_layers_to_spread": ("model", "model"),
    "observe/live/server.py:PageServer._listen": ("machine",),
    "transforms/recompute/budget.py:Budget.decide": ("model",),
    "transforms/recompute/budget.py:MemoryBudget.apply": ("model",),
    "transforms/recompute/budget.py:budget_blocks": ("model",),
    "transforms/recompute/budget.py:refuse_own_checkpoints": ("model",),
    "transforms/recompute/checkpointing.py:_section_of": ("call",),
    "transforms/recompute/checkpointing.py:configure": (
        ("activation_checkpointing.contiguous_memory_optimization", CONTIGUOUS),
        (
            "activation_checkpointing.contiguous_memory_optimization",
            changed(CONTIGUOUS, "activation_checkpointing.partition_activations", True),
        ),
    ),
    "config/axes.py:_identity": ("ranks",),
    "config/reader.py:load_source": ("machine",),
    "data/requested_samplers.py:varies_batches": (
        ("data_efficiency.data_sampling.dynamic_batching", TWICE_SAMPLED),
    ),
    "data/curriculum_scheduler.py:CurriculumScheduler.__init__": (
        ("curriculum_learning", curriculum(min_difficulty=None)),
        ("curriculum_learning.schedule_type", curriculum(schedule_type="unknown")),
        ("curriculum_learning", curriculum(schedule_config={})),
    ),
    "data/data_routing/basic_layer.py:RandomLayerTokenDrop.init_config": ("model",),
    "data/data_routing/basic_layer.py:_check_choice": (
        ("data_efficiency.data_routing.random_ltd.model_type", random_ltd("model_type", "unknown")),
    ),
    "data/data_routing/layer_token_lr.py:LayerTokenLR.__init__": (
        (
            "data_efficiency.data_routing.random_ltd.layer_token_lr_schedule",
            random_ltd(
                "layer_token_lr_schedule",
                {"enabled": True, "total_layer_tokens": 100, "warmup_layer_tokens": 100},
            ),
        ),
    ),
    "data/data_routing/scheduler.py:RandomLTDScheduler.__init__": (
        (
            "data_efficiency.data_routing.random_ltd.random_ltd_schedule",
            random_ltd("random_ltd_schedule.min_value", 32),
        ),
    ),
    "data/data_sampling/variable_batch_size_and_lr.py:BatchFollower.__call__": ("call",),
    "data/data_sampling/clusters.py:MetricIndex.__init__": ("data",),
    "data/data_sampling/clusters.py:_opened": ("data",),
    "data/data_sampling/data_sampler.py:DeepSpeedDataSampler.__init__": ("data",),
    "data/data_sampling/data_sampler.py:DeepSpeedDataSampler._index": ("data",),
    "data/data_sampling/data_sampler.py:DeepSpeedDataSampler._check_not_empty": ("data",),
    "data/data_sampling/sequence_lengths.py:_checked": ("data",),
    "data/data_sampling/sequence_lengths.py:length_of": ("data",),
    "data/data_sampling/variable_batch_size_and_lr.py:_check_section": (
        ("data_efficiency.data_sampling.dynamic_batching", SAMPLING),
        "data",
    ),
    "data/data_sampling/variable_batch_size_and_lr.py:_packs": ("data",),
    "engine/parts/accumulation.py:Accumulation.set_train_batch_size": ("call",),
    "engine/parts/data.py:EngineData.random_ltd_initialize": ("call",),
    "engine/optimizer.py:check_optimizer": ("optimizer",),
    "engine/optimizer.py:require_optimizer": ("call",),
    "engine/optimizer.py:require_trainable": ("model",),
    "transforms/float8_linears.py:Float8Linears.apply": ("machine", "model"),
    "engine/hybrid_engine.py:DeepSpeedHybridEngine.__init__": ("model",),
    "engine/hybrid_engine.py:DeepSpeedHybridEngine._generate_together": ("call",),
    "engine/hybrid_engine.py:DeepSpeedHybridEngine._ranks_that_share_layers": (
        (
            "hybrid_engine.inference_tp_size",
            {
                "hybrid_engine": {"enabled": True, "inference_tp_size": 4},
                "tensor_parallel": {"autotp_size": 2},
            },
        ),
        "ranks",
    ),
    "engine/hybrid_engine.py:_prompts": ("call",),
    "engine/initialize.py:_check_optimizer": (("optimizer.params.no_argument", NO_ARGUMENT),),
    "engine/initialize.py:_engine_class": ("model",),
    "engine/observers/compression.py:CompressionSchedule._find_written": (
        ("compression_training.weight_quantization.shared_parameters.quantize_weight_in_forward", IN_FP32),
    ),
    "engine/observers/compression.py:attach_compression": ("model",),
    "engine/observers/last_save.py:_deadline": ("machine",),
    "engine/observers/quantization.py:QuantizedUpdates.__init__": (
        "optimizer",
        "model",
    ),
    "engine/observers/random_ltd.py:RandomLTD._learning_rate": (
        (
            "data_efficiency.data_routing.random_ltd",
            {**TOKEN_RATES, "scheduler": {"type": "WarmupLR"}},
        ),
        "optimizer",
    ),
    "engine/observers/random_ltd.py:RandomLTD.initialize": ("model",),
    "engine/observers/random_ltd.py:_check_axes": (
        ("data_efficiency.data_routing.random_ltd.enabled", {**random_ltd(), "sequence_parallel_size": 2}),
        "model",
    ),
    "optim/elementwise.py:_check_groups": (
        ("optimizer.type", {**ONE_BIT, "zero_optimization": {"stage": 3}}),
        ("optimizer.type", {**ONE_BIT, "zero_optimization": {"stage": 1}}),
    ),
    "optim/elementwise.py:check_partitioning": ("optimizer",),
    "optim/elementwise.py:require_elementwise": ("optimizer",),
    "zero/optimizer_registry.py:set_optimizer_flags": ("model",),
    "optim/mu_parametrization.py:_grouped_by_width": ("machine", "model"),
    "zero/optimizer_registry.py:build_optimizer": (
        ("optimizer.params.no_argument", NO_ARGUMENT),
        "optimizer",
    ),
    "parallel/pipeline/causal_lm.py:CutModel.shard_sequences": ("model",),
    "parallel/pipeline/schedules/choice.py:OrderChoice.__post_init__": ("model",),
    "parallel/pipeline/schedules/choice.py:OrderChoice._make": ("model",),
    "engine/pipeline/base.py:PipelineEngineBase._checked_module": ("model",),
    "parallel/pipeline/module.py:PipelineModule.share_layers": ("model", "model"),
    "parallel/pipeline/schedules/instructions.py:check_dual_pipe": ("model",),
    "comm/topology.py:PipelineParallelGrid.share_sequences": ("ranks",),
    "transforms/progressive_layer_drop.py:LayerDrop.apply": ("model",),
    "engine/rollout/serving_rollout.py:_check_ranks": ("call",),
    "optim/scheduler_choice.py:_class_of": (("scheduler.type", {"scheduler": {"type": "Unknown"}}),),
    "optim/scheduler_choice.py:resolve_scheduler": (
        ("scheduler.params.no_argument", {"scheduler": {"type": "WarmupLR", "params": {"no_argument": 1}}}),
        ("scheduler.params.step_size", {"scheduler": {"type": "StepLR", "params": {}}}),
    ),
    "parallel/sequence/hf/attention.py:UlyssesSPAttentionHF._check": ("data",),
    "parallel/sequence/hf/attention.py:UlyssesSPAttentionHF.register_with_transformers": ("call",),
    "parallel/sequence/hf/attention.py:_ring_attention": ("model",),
    "parallel/sequence/hf/parallel_state_sp.py:initialize_sequence_parallel": (
        ("sequence_parallel_size", {"sequence_parallel_size": 3}),
    ),
    "parallel/sequence/tiled/attention_chunks.py:ChunkedForward.__call__": ("data", "model"),
    "parallel/sequence/tiled/model_transform.py:TiledModel._tile_layers": ("model",),
    "parallel/sequence/tiled/model_transform.py:TiledModel._tile_loss": ("model",),
    "parallel/sequence/tiled/model_transform.py:_chunk_attention": ("model",),
    "transforms/sparse_attention.py:SparseAttention.apply": (
        ("sparse_attention", {"sparse_attention": {"mode": "fixed"}, "sequence_parallel_size": 2}),
        (
            "sparse_attention.different_layout_per_head",
            {
                "sparse_attention": {"mode": "fixed", "different_layout_per_head": True},
                "tensor_parallel": {"autotp_size": 2},
            },
        ),
    ),
    "parallel/tensor/init_utils.py:_check_dtype": ("call",),
    "parallel/tensor/init_utils.py:with_recorded_size": ("call", "call"),
    "transforms/distributed_tensors.py:_check_axis": ("model",),
    "parallel/sequence/transform.py:InputSharding._with_labels": ("model",),
    "parallel/sequence/transform.py:_balance": ("model",),
    "parallel/sequence/transform.py:_drop_full_mask": ("data",),
    "zero/update_context.py:SegmentSums._check_copies": ("ranks",),
    "zero/update_context.py:UpdateContextBuilder.rebuild": ("model",),
    "config/deepspeed_config.py:DeepSpeedConfig._configure_train_batch_size": ("call",),
    "engine/optimizer.py:_check_parts": ("optimizer",),
    "zero/gathering/init_context.py:_swap_file": ("call",),
    "zero/gathering/init_context.py:read_config": ("call",),
    "zero/mics.py:MiCS_Init.__init__": ("call",),
    "zero/offload/zenflow.py:ZenFlowStepExecutor.__init__": (
        (
            "zero_optimization.zenflow",
            {
                "optimizer": {"type": "NAdam"},
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": {}},
            },
        ),
    ),
    "zero/replica_groups.py:ReplicaGroup.mics": ("ranks",),
    "zero/replica_groups.py:ReplicaGroups.__init__": ("ranks",),
    "parallel/sequence/assignment.py:shard_lengths": ("data",),
    "parallel/sequence/layer.py:DistributedAttention._check": ("model",),
}
KNOWN = [
    pytest.param(*row, id=f"{place.rpartition('/')[2]}-{number}")
    for place, rows in ROWS.items()
    for number, row in enumerate(rows)
    if not isinstance(row, str)
]


def test_every_refusal_has_a_row() -> None:
    """A new refusal gets a row: a config that `ds_check` reports, or what else than the config it depends on."""
    assert Counter(refusals()) == {place: len(rows) for place, rows in ROWS.items()}
    words = {row for rows in ROWS.values() for row in rows if isinstance(row, str)}
    assert words == {"model", "optimizer", "data", "ranks", "machine", "call"}


@pytest.mark.parametrize(("key", "config"), KNOWN)
def test_what_the_config_decides_is_known_in_advance(key: str, config: dict[str, Any]) -> None:
    sizes = {} if "elasticity" in config else {"train_micro_batch_size_per_gpu": 2}
    found = deepspeed.check_config({**sizes, **config}, 4)
    told = [problem.key for problem in found.errors] + [str(warning) for warning in found.warnings]
    assert any(key in each for each in told), told


@pytest.mark.parametrize(
    "name", ["random_ltd_layer_id", "total_layer_num", "model_type", "hidden_state_order"]
)
def test_null_is_not_enough_for_what_is_needed(name: str) -> None:
    found = deepspeed.check_config({"train_micro_batch_size_per_gpu": 2, **random_ltd(name)}, 4)
    assert any(name in problem.message for problem in found.errors)


@pytest.mark.parametrize(
    "config", [curriculum(), random_ltd(), TOKEN_RATES], ids=["curriculum", "random_ltd", "rates"]
)
def test_the_sections_that_are_broken_above_are_fine_themselves(config: dict[str, Any]) -> None:
    found = deepspeed.check_config({"train_micro_batch_size_per_gpu": 2, **config}, 4)
    assert not found.errors and not found.warnings
