"""Features that are in the schema but not in this release yet. One row per feature, deleted when the feature
arrives.

A feature that could change a training run's numerics is refused by name; one that cannot (monitors,
profilers, other ways of writing checkpoints) only gets one warning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepspeed.config.schema import TrainingConfig
from deepspeed.config.sections.parallel import AutoEPConfig, TPPartitionConfig

Predicate = Callable[[TrainingConfig], object]


@dataclass(frozen=True, slots=True)
class Missing:
    """`asked_for(config)` is true when the config wants the feature that `key` turns on."""

    key: str
    asked_for: Predicate
    instead: str
    changes_numbers: bool = True
    value: str = ""
    """The values that are refused, if others of the key are not (for docs/config.md)."""

    @property
    def message(self) -> str:
        if self.changes_numbers:
            return f"not implemented in this release; {self.instead}"
        return f"not implemented in this release and has no effect; {self.instead}"


def _expert_parallel(key: str) -> Predicate:
    """Tell whether the section is on and differs from what the model does."""
    default = AutoEPConfig.model_fields[key].default
    return lambda c: c.expert_parallel.enabled and getattr(c.expert_parallel, key) != default


def _partition_config(key: str) -> Predicate:
    default = TPPartitionConfig.model_fields[key].default

    def says_otherwise(config: TrainingConfig) -> bool:
        rules = config.tensor_parallel.partition_config
        return rules is not None and getattr(rules, key) != default

    return says_otherwise


def _compile(key: str) -> Predicate:
    return lambda c: c.compile.deepcompile and getattr(c.compile, key)


def _unsplit(config: TrainingConfig) -> bool:
    """Tell whether a pass is asked for that shares work which nothing else in the config shares."""
    wanted = (config.compile.passes or ()) if config.compile.deepcompile else ()
    sequence, layers = config.sequence_parallel_size or 1, config.tensor_parallel.autotp_size
    return ("autosp" in wanted and sequence == 1) or ("autotp" in wanted and layers <= 1)


ROUTING = (
    "score_func", "score_apply", "route_norm", "route_scale", "top_k", "routed_scaling_factor", "num_expert_groups",
    "num_limited_groups",
)  # fmt: skip
NAMING = (
    "preset_model", "moe_layer_pattern", "router_pattern", "expert_pattern", "expert_w1", "expert_w2",
    "expert_w3", "num_experts_attr", "top_k_attr", "has_shared_experts", "shared_experts_pattern",
    "shared_experts_gate_pattern", "expert_activation",
)  # fmt: skip
COMPUTING = (
    "use_grouped_mm",
    "combine_impl",
    "row_weighting_impl",
    "gate_up_impl",
    "validate_folding_routing",
)
EXCHANGING = ("async_split_plan", "comm_backend", "comm_num_sm", "comm_qp_margin", "comm_max_tokens_per_rank")

_AUTOGRAD = "autograd keeps of a compiled graph what its backward needs, and frees it then"

MISSING: tuple[Missing, ...] = (
    # Parallelism
    *(
        Missing(
            f"expert_parallel.{key}", _expert_parallel(key), "remove it: the model's own router decides this"
        )
        for key in ROUTING
    ),
    # Compiler
    Missing(
        "compile.offload_activation",
        lambda c: c.compile.deepcompile and c.compile.offload_activation,
        "set activation_checkpointing.cpu_checkpointing, and checkpoint the blocks",
    ),
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
            f"expert_parallel.{key}",
            _expert_parallel(key),
            "a layer's products are always one call, and its outputs are summed by their weights",
            False,
        )
        for key in COMPUTING
    ),
    *(
        Missing(
            f"expert_parallel.{key}",
            _expert_parallel(key),
            "tokens are exchanged by this package's own exchange, which chooses its transport",
            False,
        )
        for key in EXCHANGING
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
    *(
        Missing(f"compile.{key}", _compile(key), "compiled graphs communicate outside of themselves", False)
        for key in (
            "symmetric_memory",
            "sync_before_reduce",
            "sync_after_reduce",
            "sync_before_allgather",
            "sync_after_allgather",
        )
    ),
    Missing("compile.keep_all_input_tensors", _compile("keep_all_input_tensors"), _AUTOGRAD, False),
    Missing("compile.free_activation", _compile("free_activation"), _AUTOGRAD, False),
    Missing(
        "compile.passes",
        _unsplit,
        "graphs are not split: set sequence_parallel_size or tensor_parallel.autotp_size, which split the model",
        False,
        value="'autosp' without sequence_parallel_size, 'autotp' without autotp_size",
    ),
    Missing("nebula.enabled", lambda c: c.nebula.enabled, "checkpoints are written the ordinary way", False),
    Missing("graph_harvesting", lambda c: c.graph_harvesting, "the step runs without a CUDA graph", False),
)


def missing_features(config: TrainingConfig) -> list[Missing]:
    return [row for row in MISSING if row.asked_for(config)]
