"""The sections `data_efficiency`, `curriculum_learning` and `progressive_layer_drop`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from deepspeed.config.section import Float, Int, LenientConfigModel, LenientSwitched, key, required, section


class CurriculumScheduleConfig(LenientConfigModel):
    """Growth of the difficulty; `schedule_type` decides which keys are needed."""

    total_curriculum_step: Int | None = key(None, "Steps until the end (fixed_linear, fixed_root).", ge=1)
    difficulty_step: Int | None = key(
        None, "Step of the difficulty: values are multiples of this (fixed_linear, fixed_root).", ge=1
    )
    root_degree: Int | None = key(None, "Degree of the root (fixed_root).", ge=1)
    difficulty: list[Int] | None = key(None, "The difficulties in order (fixed_discrete).")
    max_step: list[Int] | None = key(
        None, "Last step of each difficulty except the final one (fixed_discrete)."
    )


NEEDED = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}
"""schedule_type -> required keys of schedule_config."""


def wrong_curriculum(kind: str, details: Mapping[str, Any]) -> str:
    """Return the mistake in the ``schedule_config`` of a curriculum of this ``schedule_type``; empty: none."""
    missing = [key for key in NEEDED[kind] if details.get(key) is None]
    if missing:
        return f"a curriculum with schedule_type={kind!r} needs schedule_config.{missing[0]}"
    if kind == "fixed_discrete":
        levels, steps = len(details["difficulty"]), len(details["max_step"])
        if levels != steps + 1:
            return (
                "a curriculum with schedule_type='fixed_discrete' needs one max_step for each difficulty but the last: "
                f"schedule_config.difficulty has {levels} entries, max_step {steps}"
            )
    return ""


class CurriculumMetricConfig(LenientConfigModel):
    """One measure of difficulty."""

    index_to_sample_path: str = Field(description="Index file from difficulty to samples.")
    index_to_metric_path: str = Field(description="Index file from difficulty to value.")
    difficulty_type: Literal["value", "percentile"] = Field(
        description="Whether difficulties are values or percentiles."
    )
    clustering_type: Literal["schedule_based", "single_cluster"] = Field(description="Grouping of samples.")
    min_difficulty: Int = Field(description="Difficulty at the start.")
    max_difficulty: Int = Field(description="Difficulty at the end.")
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] = Field(
        description="Growth schedule."
    )
    schedule_config: CurriculumScheduleConfig | None = key(None, "Details of `schedule_type`.")


class DataSamplingCurriculumConfig(LenientSwitched):
    """Curriculum over any metric: easy samples first."""

    data_cluster_path: str | None = required("Folder of the sample clusters.")
    curriculum_metrics: dict[str, CurriculumMetricConfig] | None = required("Difficulty metrics by name.")


class DynamicBatchingConfig(LenientSwitched):
    """Batches of about equal length in tokens, with the learning rate to match."""

    metrics_path: str | None = key(None, "Folder of the measured sequence lengths.")
    lr_scaling_method: Literal["linear", "sqrt", "none"] = key(
        "linear", "How the learning rate follows the batch size."
    )
    min_batch_size: Int = key(1, "Smallest batch.", ge=1)
    max_batch_size: Int | None = key(None, "Largest batch.", ge=1)
    sequence_picking_order: Literal["random", "seqlen", "dataloader"] = key(
        "dataloader", "Order of the samples."
    )
    max_tokens: Int | None = required("Maximum number of tokens in a batch.")
    loss_weighting: Literal["samples", "tokens", "predictions", "none"] = key(
        "samples",
        "Unit of equal weight in a batch: samples, tokens, all tokens but the first, or micro-batches.",
    )
    verbose: bool = key(False, "Log every batch.")


class DataSamplingConfig(LenientSwitched):
    """Choice and order of samples."""

    num_epochs: Int = key(1000, "Maximum number of passes over the data.", ge=1)
    num_workers: Int = key(0, "Loader processes.", ge=0)
    pin_memory: bool = key(False, "Page-locked batches.")
    curriculum_learning: DataSamplingCurriculumConfig = section(
        "Curriculum over any metric: easy samples first."
    )
    dynamic_batching: DynamicBatchingConfig = section("Batches sized by tokens.")


class RandomLTDScheduleDetails(LenientConfigModel):
    """Growth of the kept length."""

    require_steps: Int | None = key(None, "Steps from min_value to max_value.", ge=1)
    seq_per_step: Int | None = key(None, "The kept length is a multiple of this.", ge=1)


class RandomLTDScheduleConfig(LenientConfigModel):
    """Number of tokens that the middle layers keep."""

    min_value: Int | None = key(None, "Tokens at the start.", ge=1)
    max_value: Int | None = key(None, "Tokens at the end.", ge=1)
    schedule_type: Literal["fixed_linear"] | None = key(None, "Growth schedule.")
    schedule_config: RandomLTDScheduleDetails | None = key(None, "Speed of the schedule.")


def wrong_lengths(schedule: Mapping[str, Any]) -> str:
    """Return the mistake in a ``random_ltd_schedule``; empty: none."""
    details = schedule.get("schedule_config") or {}
    missing = [key for key in ("min_value", "max_value", "schedule_type") if schedule.get(key) is None]
    missing += [
        f"schedule_config.{key}" for key in ("require_steps", "seq_per_step") if details.get(key) is None
    ]
    if missing:
        return f"random_ltd.random_ltd_schedule.{missing[0]} is missing"
    if schedule["min_value"] > schedule["max_value"]:
        return (
            f"random_ltd.random_ltd_schedule.min_value={schedule['min_value']} is above "
            f"max_value={schedule['max_value']}: the kept length must grow"
        )
    return ""


WARMUPS = ("linear", "log")


def wrong_warmup(kind: str, warmup: int, total: int) -> str:
    """Return the mistake in the warm-up of a ``layer_token_lr_schedule``, in layer tokens; empty: none."""
    section = "random_ltd.layer_token_lr_schedule"
    if kind not in WARMUPS:
        return f"{section}.warmup_type={kind!r}: must be {' or '.join(WARMUPS)}"
    if warmup >= total:
        return f"{section}.warmup_layer_tokens={warmup} must be less than total_layer_tokens={total}"
    return ""


class LayerTokenLRScheduleConfig(LenientSwitched):
    """A learning rate that follows the tokens processed by all layers."""

    total_layer_tokens: Int | None = key(None, "Tokens x layers until the end of the schedule.", ge=1)
    warmup_type: str | None = key(None, "Shape of the warm-up.")
    warmup_layer_tokens: Int | None = key(None, "Tokens x layers of the warm-up.", ge=0)


class RandomLTDConfig(LenientSwitched):
    """Random layer token dropping."""

    total_layer_num: Int | None = required("Number of layers of the model.")
    random_ltd_layer_num: Int | None = required("Number of layers that drop tokens.")
    random_ltd_layer_id: list[Int] | None = required("Indices of the layers that drop tokens.")
    model_mask_name: str | None = required("Name of the attention-mask argument; null: none.")
    model_type: Literal["encoder", "decoder"] | None = required("Model type.")
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] | None = required(
        "Order of the dimensions."
    )
    random_ltd_schedule: RandomLTDScheduleConfig | None = required("Schedule of the number of tokens kept.")
    layer_token_lr_schedule: LayerTokenLRScheduleConfig = section(
        "Learning-rate schedule over processed tokens."
    )
    micro_batch_size: Int | None = key(None, "Filled in by the engine.", ge=1)
    global_batch_size: Int | None = key(None, "Filled in by the engine.", ge=1)


class DataRoutingConfig(LenientSwitched):
    """Choice of the tokens that pass through each layer."""

    random_ltd: RandomLTDConfig = section("Random layer token dropping.")


class DataEfficiencyConfig(LenientSwitched):
    """Data efficiency library."""

    seed: Int = key(1234, "Seed of the random choices.")
    data_sampling: DataSamplingConfig = section("Selection of samples.")
    data_routing: DataRoutingConfig = section("Selection of the tokens that layers process.")


class CurriculumLegacyConfig(LenientSwitched):
    """Sequences that grow (the older curriculum)."""

    curriculum_type: Literal["seqlen"] | None = required("What the curriculum controls.")
    min_difficulty: Int | None = required("Difficulty at the start.")
    max_difficulty: Int | None = required("Difficulty at the end.")
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None = required(
        "Growth schedule."
    )
    schedule_config: CurriculumScheduleConfig | None = required(
        "Details of `schedule_type`; `custom` needs none."
    )

    def _needs(self, name: str) -> bool:
        return not (name == "schedule_config" and self.schedule_type == "custom")


class ProgressiveLayerDropConfig(LenientSwitched):
    """Dropping layers at random, more of them as training proceeds (Zhang and He 2020)."""

    theta: Float = key(1.0, "Final probability of keeping a layer.", ge=0.0, le=1.0)
    gamma: Float = key(0.001, "How quickly `theta` is reached.", ge=0.0)


def get_data_efficiency_config(param_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the section ``data_efficiency`` of a whole config, with defaults."""
    return DataEfficiencyConfig(**param_dict.get("data_efficiency", {})).model_dump()
