"""Rules that tie several sections of a config together.

Every rule yields what it finds as `Finding(keys, message)`: the first key is the one to report, the others
are those the rule looked at (a finding is dropped if one of its keys is itself invalid). Rules within a
single section live in the model.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.config.rules.data import curricula_fit, dropped_tokens, one_choice_of_samples
from deepspeed.config.rules.findings import Finding, Rule
from deepspeed.config.rules.optimizers import (
    arguments_make_sense,
    one_bit_needs_copies,
    optimizer_is_known,
    scheduler_is_known,
)
from deepspeed.config.rules.precision import (
    autocast_beside_16_bit,
    low_precision_masters,
    no_norm_wanted,
    one_precision,
    quantizes_16_bits,
    summed_gradients,
    unmanaged_accumulation,
)
from deepspeed.config.rules.zero import (
    compiled_passes,
    even_gathers,
    mics_needs_slices,
    offload_makes_sense,
    old_stage_one,
    payloads_make_sense,
    zenflow_makes_sense,
)
from deepspeed.config.schema import TrainingConfig
from deepspeed.config.sections.elasticity import ElasticityConfigError
from deepspeed.config.sections.expert import ATTRIBUTES


def check_rules(config: TrainingConfig) -> list[Finding]:
    return [finding for rule in RULES for finding in rule(config)]


def contiguous_checkpoints(config: TrainingConfig) -> Iterator[Finding]:
    section, prefix = config.activation_checkpointing, "activation_checkpointing."
    if not section.contiguous_memory_optimization:
        return
    for name, given in (
        ("partition_activations", section.partition_activations),
        ("number_checkpoints", section.number_checkpoints),
    ):
        if not given:
            yield Finding(
                (prefix + "contiguous_memory_optimization", prefix + name),
                f"needs {prefix}{name}; without it, inputs are kept one by one",
                is_error=False,
            )


def elastic_batch(config: TrainingConfig) -> Iterator[Finding]:
    section = config.elasticity
    if section is None or not section.enabled:
        return
    for name, message in section.problems():
        yield Finding((f"elasticity.{name}",), message)
    if not section.ignore_non_elastic_batch_info:
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            if getattr(config, name) is not None:
                yield Finding(
                    (name, "elasticity.enabled"),
                    "is decided by elasticity: remove it, or set elasticity.ignore_non_elastic_batch_info",
                    raised_as=ElasticityConfigError,
                )


def saves_by_itself(config: TrainingConfig) -> Iterator[Finding]:
    section = config.checkpoint
    for name in ("resume", "save_at_sigterm", "save_before"):
        if getattr(section, name) and section.folder is None:
            keys = (f"checkpoint.{name}", "checkpoint.folder")
            yield Finding(keys, "needs checkpoint.folder, the folder of this run's checkpoints")


def expert_and_tensor_parallel(config: TrainingConfig) -> Iterator[Finding]:
    if config.expert_parallel.enabled and config.tensor_parallel.autotp_size > 1:
        keys = ("expert_parallel.enabled", "tensor_parallel.autotp_size")
        yield Finding(
            keys, f"cannot be combined with tensor_parallel.autotp_size {config.tensor_parallel.autotp_size}"
        )


def sparse_and_parallel(config: TrainingConfig) -> Iterator[Finding]:
    """Warnings, as a model that reads the section itself may have its own way of sharing attention."""
    section, key = config.sparse_attention, "sparse_attention"
    if section is None:
        return
    if (config.sequence_parallel_size or 1) > 1:
        yield Finding(
            (key, "sequence_parallel_size"),
            f"with sequence_parallel_size {config.sequence_parallel_size} is refused for models of Transformers: use "
            "one of them",
            is_error=False,
        )
    if section.different_layout_per_head and config.tensor_parallel.autotp_size > 1:
        yield Finding(
            (f"{key}.different_layout_per_head", "tensor_parallel.autotp_size"),
            "true is refused for models of Transformers whose heads are shared by ranks: set it to false",
            is_error=False,
        )


def names_of_experts(config: TrainingConfig) -> Iterator[Finding]:
    section = config.expert_parallel
    for name in ATTRIBUTES if section.enabled else ():
        if getattr(section, name) == "":
            yield Finding(
                (f"expert_parallel.{name}",), "is empty: give the attribute's name, or leave it out"
            )


def shared_generation(config: TrainingConfig) -> Iterator[Finding]:
    """A warning, as models that only score do not generate."""
    size, layers = config.hybrid_engine.inference_tp_size, config.tensor_parallel.autotp_size
    if config.hybrid_engine.enabled and layers > 1 and size not in (1, layers):
        yield Finding(
            ("hybrid_engine.inference_tp_size", "tensor_parallel.autotp_size"),
            f"{size} is refused in training, where {layers} ranks share each layer: leave it out, or use {layers}",
            is_error=False,
        )


def even_vocabulary(config: TrainingConfig) -> Iterator[Finding]:
    if config.vocabulary_size and config.vocabulary_size % 8:
        yield Finding(
            ("vocabulary_size",),
            f"{config.vocabulary_size} is not a multiple of 8: matrix products on GPUs are slower",
            False,
        )


RULES: tuple[Rule, ...] = (
    one_precision,
    autocast_beside_16_bit,
    low_precision_masters,
    unmanaged_accumulation,
    quantizes_16_bits,
    compiled_passes,
    summed_gradients,
    offload_makes_sense,
    zenflow_makes_sense,
    mics_needs_slices,
    payloads_make_sense,
    even_gathers,
    old_stage_one,
    optimizer_is_known,
    one_bit_needs_copies,
    scheduler_is_known,
    arguments_make_sense,
    no_norm_wanted,
    contiguous_checkpoints,
    elastic_batch,
    saves_by_itself,
    expert_and_tensor_parallel,
    names_of_experts,
    sparse_and_parallel,
    shared_generation,
    curricula_fit,
    one_choice_of_samples,
    dropped_tokens,
    even_vocabulary,
)
