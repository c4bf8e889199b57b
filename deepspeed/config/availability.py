"""Features that are in the schema but not in this release yet. One row per feature, deleted when the feature
arrives.

A feature that could change a training run's numerics is refused by name; one that cannot (monitors,
profilers, other ways of writing checkpoints) only gets one warning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepspeed.config.schema import TrainingConfig
from deepspeed.moe.config import AutoEPConfig
from deepspeed.runtime.tensor_parallel.config import TPPartitionConfig

Predicate = Callable[[TrainingConfig], object]


@dataclass(frozen=True, slots=True)
class Missing:
    """`asked_for(config)` is true when the config wants the feature that `key` turns on."""

    key: str
    asked_for: Predicate
    instead: str
    changes_numbers: bool = True
    value: str = ""
    """Which values of the key are meant, where it has others that are fine (for docs/config.md)."""

    @property
    def message(self) -> str:
        if self.changes_numbers:
            return f"not implemented in this release; {self.instead}"
        return f"not implemented in this release and has no effect; {self.instead}"


def _optimizer(*names: str) -> Predicate:
    return lambda c: c.optimizer is not None and (c.optimizer.type or "").lower() in names


def _compression(technique: str) -> Predicate:
    return lambda c: getattr(c.compression_training, technique).shared_parameters.enabled


def _expert_parallel(key: str) -> Predicate:
    """Whether the section is on and says something else than "as the model does"."""
    default = AutoEPConfig.model_fields[key].default
    return lambda c: c.expert_parallel.enabled and getattr(c.expert_parallel, key) != default


def _partition_config(key: str) -> Predicate:
    default = TPPartitionConfig.model_fields[key].default

    def says_otherwise(config: TrainingConfig) -> bool:
        rules = config.tensor_parallel.partition_config
        return rules is not None and getattr(rules, key) != default

    return says_otherwise


ROUTING = (
    "score_func", "score_apply", "route_norm", "route_scale", "top_k", "routed_scaling_factor", "num_expert_groups",
    "num_limited_groups",
)  # fmt: skip
NAMING = (
    "preset_model", "moe_layer_pattern", "router_pattern", "expert_pattern", "expert_w1", "expert_w2", "expert_w3",
    "num_experts_attr", "top_k_attr", "has_shared_experts", "shared_experts_pattern", "shared_experts_gate_pattern",
)  # fmt: skip

_OTHER_OPTIMIZER = "choose another optimizer.type"
_REMOVE = "remove it or set it to false"

MISSING: tuple[Missing, ...] = (
    # ZeRO
    Missing(
        "zero_optimization.zero_hpz_partition_size",
        lambda c: c.zero_optimization.zero_hpz_partition_size > 1,
        "use 1",
    ),
    Missing(
        "zero_optimization.zero_quantized_weights",
        lambda c: c.zero_optimization.zero_quantized_weights,
        _REMOVE,
    ),
    Missing(
        "zero_optimization.zero_quantized_nontrainable_weights",
        lambda c: c.zero_optimization.zero_quantized_nontrainable_weights,
        _REMOVE,
    ),
    Missing(
        "zero_optimization.zero_quantized_gradients",
        lambda c: c.zero_optimization.zero_quantized_gradients,
        _REMOVE,
    ),
    Missing(
        "zero_optimization.zeropp_loco_param",
        lambda c: c.zero_optimization.zeropp_loco_param is not None,
        "set it to null",
    ),
    # Optimizers
    Missing(
        "optimizer.type",
        _optimizer("onebitadam", "onebitlamb", "zerooneadam"),
        _OTHER_OPTIMIZER,
        value="OneBitAdam, OneBitLamb, ZeroOneAdam",
    ),
    # Parallelism
    *(
        Missing(
            f"expert_parallel.{key}", _expert_parallel(key), "remove it: the model's own router decides this"
        )
        for key in ROUTING
    ),
    Missing(
        "hybrid_engine.inference_tp_size",
        lambda c: c.hybrid_engine.enabled and c.hybrid_engine.inference_tp_size > 1,
        "use 1, or share the layers in training as well (tensor_parallel.autotp_size)",
    ),
    Missing("elasticity.enabled", lambda c: c.elasticity is not None and c.elasticity.enabled, _REMOVE),
    # Compression and data efficiency
    Missing(
        "compression_training.layer_reduction.enabled",
        lambda c: c.compression_training.layer_reduction.enabled,
        _REMOVE,
    ),
    *(
        Missing(
            f"compression_training.{technique}.shared_parameters.enabled", _compression(technique), _REMOVE
        )
        for technique in (
            "weight_quantization",
            "activation_quantization",
            "sparse_pruning",
            "row_pruning",
            "head_pruning",
            "channel_pruning",
        )
    ),
    Missing(
        "quantize_training.eigenvalue.enabled",
        lambda c: (
            c.quantize_training is not None
            and c.quantize_training.eigenvalue
            and c.quantize_training.eigenvalue.enabled
        ),
        _REMOVE,
    ),
    Missing(
        "weight_quantization.enabled",
        lambda c: c.weight_quantization is not None and c.weight_quantization.enabled,
        _REMOVE,
    ),
    Missing("data_efficiency.enabled", lambda c: c.data_efficiency.enabled, _REMOVE),
    Missing(
        "curriculum_learning.enabled",
        lambda c: c.curriculum_learning is not None and c.curriculum_learning.enabled,
        _REMOVE,
    ),
    Missing(
        "progressive_layer_drop.enabled",
        lambda c: c.progressive_layer_drop is not None and c.progressive_layer_drop.enabled,
        _REMOVE,
    ),
    Missing("sparse_attention", lambda c: c.sparse_attention is not None, "remove the section"),
    # Compiler and tuner
    Missing("compile.deepcompile", lambda c: c.compile.deepcompile, "use engine.compile() without it"),
    Missing("autotuning.enabled", lambda c: c.autotuning.enabled, _REMOVE),
    # What cannot change the numerics
    *(
        Missing(
            f"expert_parallel.{key}",
            _expert_parallel(key),
            "experts are found by their stacked weights, and everything around them stays as it is",
            False,
        )
        for key in NAMING
    ),
    *(
        Missing(
            f"tensor_parallel.partition_config.{key}",
            _partition_config(key),
            "embeddings and heads are found by the model's graph and split by their vocabulary",
            False,
        )
        for key in ("lm_head_patterns", "embedding_partition_dim")
    ),
    Missing(
        "tensor_parallel.tp_overlap_comm",
        lambda c: c.tensor_parallel.tp_overlap_comm,
        "sums are waited for where they are needed",
        False,
    ),
    Missing("flops_profiler.enabled", lambda c: c.flops_profiler.enabled, "nothing is profiled", False),
    Missing("nebula.enabled", lambda c: c.nebula.enabled, "checkpoints are written the ordinary way", False),
    Missing(
        "datastates_ckpt",
        lambda c: c.datastates_ckpt is not False,
        "checkpoints are written the ordinary way",
        False,
    ),
    Missing(
        "checkpoint.writer",
        lambda c: c.checkpoint.writer is not None,
        "checkpoints are written the ordinary way",
        False,
    ),
    Missing("graph_harvesting", lambda c: c.graph_harvesting, "the step runs without a CUDA graph", False),
)


def missing_features(config: TrainingConfig) -> list[Missing]:
    return [row for row in MISSING if row.asked_for(config)]
