"""The `autotuning` section."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from deepspeed.config.section import Int, LenientConfigModel


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value  # the documents write "FLOPS"


def _or(default: str) -> BeforeValidator:
    """Null stands for the default, as in one of the documents' examples."""
    return BeforeValidator(lambda value: default if value is None else value)


class AutotuningModelInfoConfig(LenientConfigModel):
    """Facts about the model, given or to be measured."""

    profile: bool = Field(default=False, description="Measure these facts in a first run.")
    num_params: Int | None = Field(default=None, ge=0, description="Parameters.")
    hidden_size: Int | None = Field(default=None, ge=1, description="Hidden size.")
    num_layers: Int | None = Field(default=None, ge=1, description="Layers.")


class DeepSpeedAutotuningConfig(LenientConfigModel):
    """Search for the fastest configuration."""

    enabled: bool = Field(default=False, description="Turn it on.")
    fast: bool = Field(
        default=True,
        description="Only ZeRO stage and micro-batch size are tuned, and what `tuning_space` lists; false: also "
        "accumulation, offload, activations, buckets and threads.",
    )
    tuning_space: dict[str, list[Any]] = Field(
        default={},
        description="Values to try: dotted key of the config, or name of an environment variable, to a list.",
    )
    memory_per_rank: Int | None = Field(
        default=None,
        ge=1,
        description="Bytes that a rank may use where the model computes; null: its share of what is free.",
    )
    results_dir: Annotated[str, _or("autotuning_results")] = Field(
        default="autotuning_results", description="Folder of the results; null: the default."
    )
    exps_dir: Annotated[str, _or("autotuning_exps")] = Field(
        default="autotuning_exps", description="Folder of the configurations tried; null: the default."
    )
    overwrite: bool = Field(
        default=False,
        description="Replace earlier results; false: reuse them, and resume after an interruption.",
    )
    metric: Annotated[Literal["latency", "throughput", "flops"], BeforeValidator(_lower)] = Field(
        default="throughput", description="What is optimized."
    )
    start_profile_step: Int = Field(default=3, ge=0, description="First step that is timed.")
    end_profile_step: Int = Field(
        default=5, ge=0, description="Last step that is timed; not before the first."
    )
    tuner_type: Literal["gridsearch", "random", "model_based"] = Field(
        default="model_based", description="How the space is searched."
    )
    tuner_early_stopping: Int = Field(
        default=5, ge=0, description="Stop after this many trials without improvement."
    )
    tuner_num_trials: Int = Field(default=50, ge=1, description="Maximum number of trials.")
    max_train_batch_size: Int | None = Field(
        default=None, ge=1, description="Largest global batch that is tried."
    )
    min_train_batch_size: Int = Field(default=1, ge=1, description="Smallest global batch that is tried.")
    max_train_micro_batch_size_per_gpu: Int = Field(
        default=1024, ge=1, description="Largest micro-batch that is tried."
    )
    min_train_micro_batch_size_per_gpu: Int = Field(
        default=1, ge=1, description="Smallest micro-batch that is tried."
    )
    num_tuning_micro_batch_sizes: Int = Field(
        default=3, ge=1, description="Micro-batch sizes tried per stage."
    )
    num_nodes: Int | None = Field(default=None, ge=1, description="Number of machines to use; null: all.")
    num_gpus: Int | None = Field(default=None, ge=1, description="Ranks per machine; null: all.")
    mp_size: Int = Field(default=1, ge=1, description="Ranks that share one copy of the model.")
    arg_mappings: dict[str, Any] | None = Field(
        default=None, description="Config key to the command-line flag of the user's script."
    )
    metric_path: str | None = Field(default=None, description="File that a run writes its metric to.")
    model_info_path: str | None = Field(
        default=None, description="File that a run writes what it learned about the model to."
    )
    model_info: AutotuningModelInfoConfig | None = Field(
        default=None, description="Known facts about the model."
    )
    variants: list[dict[str, Any]] = Field(
        default=[], description="Changes of the config that the first run plans; written by the autotuner."
    )

    @field_validator("end_profile_step")
    @classmethod
    def after_the_start(cls, value: int, info: ValidationInfo) -> int:
        start = info.data.get("start_profile_step", 0)
        if value < start:
            raise ValueError(f"must not be less than start_profile_step ({start})")
        return value
