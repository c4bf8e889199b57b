"""Features that are in the schema but not implemented yet: one row per feature, deleted when it is implemented.

A feature that could change a run's numerics is refused by name; any other (monitors, profilers, other ways of writing
checkpoints) only causes one warning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepspeed.config.schema import TrainingConfig

Predicate = Callable[[TrainingConfig], object]


@dataclass(frozen=True, slots=True)
class Missing:
    """`requested(config)` is true when the config wants the feature that `key` turns on."""

    key: str
    requested: Predicate
    instead: str
    changes_numbers: bool = True
    value: str = ""
    """The refused values, if the key also has accepted ones (for docs/config.md)."""

    @property
    def message(self) -> str:
        if self.changes_numbers:
            return f"not implemented in this release; {self.instead}"
        return f"not implemented in this release and has no effect; {self.instead}"


def _unsplit(config: TrainingConfig) -> bool:
    """Tell whether a compile pass is requested that distributes work which nothing else in the config distributes."""
    wanted = (config.compile.passes or ()) if config.compile.deepcompile else ()
    sequence, layers = config.sequence_parallel_size or 1, config.tensor_parallel.autotp_size
    return ("autosp" in wanted and sequence == 1) or ("autotp" in wanted and layers <= 1)


def _differs(owner: str, key: str) -> Predicate:
    """Return a predicate: the section ``owner`` is present, enabled if it has a switch, and differs from its default in
    ``key``."""

    def requested(config: TrainingConfig) -> bool:
        section: Any = config
        for part in owner.split(".") if owner else ():
            section = getattr(section, part)
        if section is None or owner in SWITCHES and not getattr(section, SWITCHES[owner]):
            return False
        return getattr(section, key) != type(section).model_fields[key].default

    return requested


SWITCHES = {"expert_parallel": "enabled", "compile": "deepcompile"}
"""Switches without which the other keys of a section have no effect."""

ROUTING = """
    score_func score_apply route_norm route_scale top_k routed_scaling_factor num_expert_groups num_limited_groups
"""
NAMING = """
    preset_model moe_layer_pattern router_pattern expert_pattern expert_w1 expert_w2 expert_w3 num_experts_attr
    top_k_attr has_shared_experts shared_experts_pattern shared_experts_gate_pattern expert_activation
"""
COMPUTING = "use_grouped_mm combine_impl row_weighting_impl gate_up_impl validate_folding_routing"
EXCHANGING = "async_split_plan comm_backend comm_num_sm comm_qp_margin comm_max_tokens_per_rank"
COMMUNICATING = """
    symmetric_memory sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather
"""


def _missing(owner: str, keys: str, instead: str, changes_numbers: bool = False) -> tuple[Missing, ...]:
    """Make the rows of a section's keys."""
    return tuple(
        Missing(f"{owner}.{key}".lstrip("."), _differs(owner, key), instead, changes_numbers)
        for key in keys.split()
    )


MISSING: tuple[Missing, ...] = (
    *_missing("expert_parallel", ROUTING, "remove it: the model's own router decides this", True),
    *_missing(
        "compile",
        "offload_activation",
        "set activation_checkpointing.cpu_checkpointing, and checkpoint the blocks",
        True,
    ),
    # Features that cannot change the numerics
    *_missing(
        "expert_parallel",
        NAMING,
        "experts are recognized by their stacked weights, and the surrounding layers are unchanged",
    ),
    *_missing(
        "expert_parallel",
        COMPUTING,
        "each layer's experts always run as one grouped call, and their weighted outputs are summed",
    ),
    *_missing(
        "expert_parallel",
        EXCHANGING,
        "this package has its own token exchange, which chooses the transport",
    ),
    *_missing(
        "tensor_parallel.partition_config",
        "lm_head_patterns embedding_partition_dim",
        "embeddings and heads are found in the model's graph and split along the vocabulary",
    ),
    *_missing("tensor_parallel", "tp_overlap_comm", "all-reduces are awaited where their results are needed"),
    *_missing("compile", COMMUNICATING, "compiled graphs contain no collectives"),
    *_missing(
        "compile",
        "keep_all_input_tensors free_activation",
        "autograd keeps only what the backward of a compiled graph needs, and frees it afterwards",
    ),
    Missing(
        "compile.passes",
        _unsplit,
        "graphs are not split: set sequence_parallel_size or tensor_parallel.autotp_size, which split the model",
        False,
        value="'autosp' without sequence_parallel_size, 'autotp' without autotp_size",
    ),
    *_missing("nebula", "enabled", "checkpoints are written as usual"),
    *_missing("", "graph_harvesting", "the step runs without a CUDA graph"),
)


def missing_features(config: TrainingConfig) -> list[Missing]:
    return [row for row in MISSING if row.requested(config)]
