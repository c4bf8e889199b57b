"""The `autotuning` section."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ValidationInfo, field_validator

from deepspeed.config.section import Int, LenientConfigModel, LenientSwitched, key, lower


def _or(default: str) -> BeforeValidator:
    """Read null as the default, as in one of the documents' examples."""
    return BeforeValidator(lambda value: default if value is None else value)


class AutotuningModelInfoConfig(LenientConfigModel):
    """Facts about the model, given or to be measured."""

    profile: bool = key(False, "Measure these model facts in a first run.")
    num_params: Int | None = key(None, "Parameters.", ge=0)
    hidden_size: Int | None = key(None, "Hidden size.", ge=1)
    num_layers: Int | None = key(None, "Layers.", ge=1)


class DeepSpeedAutotuningConfig(LenientSwitched):
    """Search for the fastest configuration."""

    fast: bool = key(
        True,
        "Tune only ZeRO stage, micro-batch size and what `tuning_space` lists; false: also accumulation, "
        "offload, activations, buckets and threads.",
    )
    tuning_space: dict[str, list[Any]] = key(
        {}, "Values to try: a list per dotted config key or environment variable."
    )
    memory_per_rank: Int | None = key(
        None, "Device memory that a rank may use, in bytes; null: its share of what is free.", ge=1
    )
    results_dir: Annotated[str, _or("autotuning_results")] = key(
        "autotuning_results", "Folder of the results; null: the default."
    )
    exps_dir: Annotated[str, _or("autotuning_exps")] = key(
        "autotuning_exps", "Folder of the configurations tried; null: the default."
    )
    overwrite: bool = key(
        False, "Replace earlier results; false: reuse them, and resume after an interruption."
    )
    metric: Annotated[Literal["latency", "throughput", "flops"], BeforeValidator(lower)] = key(
        "throughput", "Metric to optimize."
    )
    start_profile_step: Int = key(3, "First timed step.", ge=0)
    end_profile_step: Int = key(5, "Last timed step; not before the first.", ge=0)
    tuner_type: Literal["gridsearch", "random", "model_based"] = key("model_based", "Search strategy.")
    tuner_early_stopping: Int = key(5, "Stop after this many trials without improvement.", ge=0)
    tuner_num_trials: Int = key(50, "Maximum number of trials.", ge=1)
    max_train_batch_size: Int | None = key(None, "Largest global batch to try.", ge=1)
    min_train_batch_size: Int = key(1, "Smallest global batch to try.", ge=1)
    max_train_micro_batch_size_per_gpu: Int = key(1024, "Largest micro-batch to try.", ge=1)
    min_train_micro_batch_size_per_gpu: Int = key(1, "Smallest micro-batch to try.", ge=1)
    num_tuning_micro_batch_sizes: Int = key(3, "Micro-batch sizes to try per stage.", ge=1)
    num_nodes: Int | None = key(None, "Number of machines to use; null: all.", ge=1)
    num_gpus: Int | None = key(None, "Ranks per machine; null: all.", ge=1)
    mp_size: Int = key(1, "Ranks that share one copy of the model.", ge=1)
    arg_mappings: dict[str, Any] | None = key(
        None, "Maps config keys to command-line flags of the user's script."
    )
    metric_path: str | None = key(None, "File to which a run writes its metric.")
    model_info_path: str | None = key(None, "File to which a run writes its model facts.")
    model_info: AutotuningModelInfoConfig | None = key(None, "Known facts about the model.")
    variants: list[dict[str, Any]] = key(
        [], "Config changes for which the first run plans memory; written by the autotuner."
    )

    @field_validator("end_profile_step")
    @classmethod
    def after_the_start(cls, value: int, info: ValidationInfo) -> int:
        start = info.data.get("start_profile_step", 0)
        if value < start:
            raise ValueError(f"must not be less than start_profile_step ({start})")
        return value
