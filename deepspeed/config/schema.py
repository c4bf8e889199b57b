"""The whole config as one model: every top-level key with its default, and the section models below it."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from deepspeed.base.dtypes import Dtype
from deepspeed.config.arguments import FILLED_IN
from deepspeed.config.section import (
    AllowedValues,
    DtypeOrNull,
    Float,
    FloatOrInfinity,
    Int,
    LenientConfigModel,
    SumDtypeOrNull,
    is_auto,
    key,
    lower,
    section,
)
from deepspeed.config.sections.autotuning import DeepSpeedAutotuningConfig
from deepspeed.config.sections.checkpoint import CheckpointConfig, DeepSpeedNebulaConfig
from deepspeed.config.sections.comm import CommConfig, CommsLoggerConfig, GradientCompressionConfig
from deepspeed.config.sections.compression import CompressionConfig, QuantizeTrainingConfig, WeightQuantConfig
from deepspeed.config.sections.data import (
    CurriculumLegacyConfig,
    DataEfficiencyConfig,
    ProgressiveLayerDropConfig,
)
from deepspeed.config.sections.elasticity import ElasticityConfig
from deepspeed.config.sections.model import (
    CompileConfig,
    DeepSpeedActivationCheckpointingConfig,
    HybridEngineConfig,
    SparseAttentionConfig,
    TiledComputeConfig,
)
from deepspeed.config.sections.monitor import (
    AimConfig,
    CometConfig,
    CSVConfig,
    MlflowConfig,
    MonitorConfig,
    TensorBoardConfig,
    TrackioConfig,
    WandbConfig,
)
from deepspeed.config.sections.offload import AioConfig
from deepspeed.config.sections.parallel import AutoEPConfig, PipelineConfig, TPTrainingConfig
from deepspeed.config.sections.precision import (
    AmpConfig,
    DataTypesConfig,
    DeepSpeedBF16Config,
    DeepSpeedFP16Config,
    Float8Config,
    NativeProductsConfig,
    TorchAutocastConfig,
)
from deepspeed.config.sections.profiling import (
    AuditConfig,
    DeepSpeedFlopsProfilerConfig,
    TimersConfig,
    TraceConfig,
)
from deepspeed.config.sections.zero import DeepSpeedZeroConfig


def _without_auto(value: Any) -> Any:
    """Drop "auto" arguments that a client was to fill in and did not. Those with unknown names are kept, so that they
    are reported as unknown."""
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if not (is_auto(item) and key in FILLED_IN)}
    return value


def _print_period(value: Any) -> int | float | None:
    if value is None:
        return None
    if value == "inf":  # Accelerate's infinity, written to a file by hand: JSON has no number for it
        value = math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError("must be a number above 0 (infinity: never) or null")
    return int(value) if math.isfinite(value) and float(value).is_integer() else float(value)


def _spelled_in_any_case(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Validate a word in lower case, and keep it as written: `engine.log_level()` returns it."""
    check(lower(value))
    return value


def _choices(value: Any) -> Any:
    if value is False or isinstance(value, dict):
        return value
    raise ValueError("must be an object or false")


Arguments = Annotated[dict[str, Any] | None, BeforeValidator(_without_auto)]


class OptimizerConfig(LenientConfigModel):
    """The optimizer that the engine makes when none is passed to `initialize`."""

    type: str | None = key(
        None,
        "Name (case-insensitive) of a built-in optimizer (adam, adamw, lamb, lion, adagrad, sgd, ...), or "
        "the name of a class in `torch.optim`.",
    )
    params: Arguments = key(None, "Arguments of the constructor (`lr`, `betas`, `weight_decay`, ...).")
    legacy_fusion: bool = key(False, "No effect; selected an older way of flattening.")


class SchedulerConfig(LenientConfigModel):
    """The learning-rate schedule that the engine makes and steps when none is passed to `initialize`."""

    type: str | None = key(
        None,
        "LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, "
        "or the name of a class in `torch.optim.lr_scheduler`.",
    )
    params: Arguments = key(None, "Arguments of the constructor.")


class TrainingConfig(LenientConfigModel):
    """Top level of `ds_config.json`."""

    model_config = ConfigDict(extra="ignore")

    train_batch_size: Int | None = key(
        None,
        "Samples per optimizer step over all ranks: micro-batch x accumulation x "
        "data-parallel ranks. "
        "Derived when missing; this or `train_micro_batch_size_per_gpu` must be given.",
        gt=0,
    )
    train_micro_batch_size_per_gpu: Int | None = key(
        None, "Samples per rank in one forward and backward. Derived when missing.", gt=0
    )
    gradient_accumulation_steps: Int | None = key(
        None,
        "Micro-batches per optimizer step. Derived when missing; 1 if only one batch size is given.",
        gt=0,
    )
    managed_gradient_accumulation: bool = key(
        True,
        "The engine counts micro-batches and only the last `step()` updates. False: every `step()` updates. "
        "False excludes `compile.deepcompile`, `amp`, and `overlap_comm` unless at stage 2.",
    )
    optimizer: OptimizerConfig | None = key(None, "Optimizer created by the engine.")
    scheduler: SchedulerConfig | None = key(None, "Learning-rate schedule created by the engine.")
    communication_data_type: SumDtypeOrNull = key(
        None, "Dtype of gradients on the wire; null: the training dtype."
    )
    seq_parallel_communication_data_type: DtypeOrNull = key(
        Dtype.fp32, "No effect: `communication_data_type` applies to all ranks."
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], BeforeValidator(lower)] = key(
        "mean",
        "Average or sum gradients over the ranks; no sum with stage 3, ZenFlow, DeepCompile.",
    )
    prescale_gradients: bool = key(False, "Divide gradients before the reduction instead of after it.")
    gradient_predivide_factor: Float = key(
        1.0, "Divide by this before the reduction and by the rest after it.", gt=0, le=1e6
    )
    sparse_gradients: bool = key(False, "Reduce gradients of `nn.Embedding` as indices and values.")
    disable_allgather: bool = key(False, "No effect; kept for old files.")
    fp16: DeepSpeedFP16Config = section("Training in fp16.")
    bf16: DeepSpeedBF16Config = section("Training in bf16. Old spelling: `bfloat16`.")
    fp8: Float8Config = section("Linear layers with 8-bit matrix products; with any precision and stage.")
    native_products: NativeProductsConfig = section(
        "Faster fp32 linear layers on some processors; see transformer_kernels.md.",
    )
    amp: AmpConfig = section("Mixed precision by `torch.amp`; not with fp16, bf16 or ZeRO.")
    torch_autocast: TorchAutocastConfig = section("Forward under `torch.autocast`.")
    gradient_clipping: FloatOrInfinity = key(
        1.0, "Maximum global gradient norm; 0 or infinity: no clipping.", ge=0
    )
    data_types: DataTypesConfig = section("Override the dtypes that the precision implies.")
    zero_optimization: DeepSpeedZeroConfig = key(
        DeepSpeedZeroConfig(), "ZeRO. The old form, a boolean, means stage 1 or 0."
    )
    zero_allow_untested_optimizer: bool = key(
        False,
        "true: partition a client's optimizer unchecked; explicit false: accept only torch's optimizers and ours.",
    )
    zero_force_ds_cpu_optimizer: bool = key(
        True,
        "Explicit true: with optimizer offload, refuse a client's optimizer not made for the host.",
    )
    aio: AioConfig = section("File access for NVMe offload.")
    tensor_parallel: TPTrainingConfig = section("AutoTP.")
    sequence_parallel_size: Int | None = key(None, "Ranks that share a sequence.", ge=1)
    data_parallel_size: Int | None = key(
        None, "Data-parallel ranks; with `sequence_parallel_size` it defines the device mesh.", ge=1
    )
    use_data_before_expert_parallelism: bool = key(
        False, "Rank order: data-parallel groups inside expert groups."
    )
    expert_parallel: AutoEPConfig = section("AutoEP.")
    hybrid_engine: HybridEngineConfig = section("Training and generation in one engine.")
    steps_per_print: Annotated[
        int | float | None,
        PlainValidator(_print_period),
        AllowedValues("a number above 0 (infinity: never) or null"),
    ] = key(None, "Steps between progress lines; null: chosen automatically, see logging.md.")
    wall_clock_breakdown: bool = key(False, "Time forward, backward and step; implied by `flops_profiler`.")
    memory_breakdown: bool = key(False, "Report memory around forward, backward and step.")
    dump_state: bool = key(False, "Print the config at the start.")
    disable_python_gc: bool = key(
        False,
        "Turn Python's garbage collector off until the engine is destroyed, because a full collection on "
        "one rank delays all ranks; `engine.collect_python_gc()` runs one.",
    )
    log_level: Annotated[
        Literal["debug", "info", "warning", "error", "critical"] | None, WrapValidator(_spelled_in_any_case)
    ] = key(None, "Log level; null: unchanged. `warning` and above hide the progress.")
    vocabulary_size: Int | None = key(None, "Only used for a check: multiples of 8 are faster on GPUs.", ge=1)
    dataloader_drop_last: bool = key(False, "The engine's loader drops an incomplete last batch.")
    graph_harvesting: bool = key(False, "Run the optimizer step as a CUDA graph.")
    timers: TimersConfig = section("Timers.")
    autotuning: DeepSpeedAutotuningConfig = section("Autotuner.")
    flops_profiler: DeepSpeedFlopsProfilerConfig = section("FLOPs profiler.")
    gradient_compression: GradientCompressionConfig | None = key(
        None, "Gradients in a few bits per element; see slow_links.md."
    )
    audit: AuditConfig | None = key(None, "Fingerprints of every step, for `ds diff`; see diff.md.")
    trace: TraceConfig | None = key(None, "Timeline of some steps, for `ds trace`; see profiling.md.")
    activation_checkpointing: DeepSpeedActivationCheckpointingConfig = section("Activation checkpointing.")
    tiled_compute: TiledComputeConfig = section("Process long sequences in tiles.")
    sparse_attention: SparseAttentionConfig | None = key(None, "Block-sparse attention.")
    data_efficiency: DataEfficiencyConfig = section("Data efficiency library.")
    curriculum_learning: CurriculumLegacyConfig | None = key(
        None, "Curriculum on sequence length (older form)."
    )
    progressive_layer_drop: ProgressiveLayerDropConfig | None = key(None, "Progressive layer dropping.")
    tensorboard: TensorBoardConfig = section("Curves for TensorBoard.")
    wandb: WandbConfig = section("Curves for Weights & Biases.")
    csv_monitor: CSVConfig = section("Curves in CSV files.")
    comet: CometConfig = section("Curves for Comet.")
    trackio: TrackioConfig = section("Curves for Trackio.")
    mlflow: MlflowConfig = section("Curves for MLflow.")
    aim: AimConfig = section("Curves for Aim.")
    monitor: MonitorConfig = section("Live page (see live.md); x axis of the curves.")
    comm: CommConfig = section("Communication.")
    comms_logger: CommsLoggerConfig | None = key(None, "Log of communication.")
    elasticity: ElasticityConfig | None = key(None, "Elastic batch size.")
    compression_training: CompressionConfig = section("Compression.")
    quantize_training: QuantizeTrainingConfig | None = key(
        None, "The first form of MoQ's section, kept for old files."
    )
    checkpoint: CheckpointConfig = section("Checkpoints.")
    pipeline: PipelineConfig = section("Pipeline engine.")
    nebula: DeepSpeedNebulaConfig = section("Checkpoints through Azure Nebula.")
    datastates_ckpt: Annotated[Any, PlainValidator(_choices), AllowedValues("an object or false")] = key(
        False, "Checkpoints through DataStates; anything but false turns it on."
    )
    weight_quantization: WeightQuantConfig | None = key(None, "Quantized weights for inference with ZeRO.")
    compile: CompileConfig = section("DeepCompile.")
    inference: Any = key(None, "Not read here; Transformers looks for `inference.tensor_parallel.tp_size`.")
    msamp: Any = key(None, "Not read here; Accelerate writes it for MS-AMP.")

    @model_validator(mode="after")
    def profiler_needs_timers(self) -> TrainingConfig:
        if self.flops_profiler.enabled:
            object.__setattr__(self, "wall_clock_breakdown", True)
        return self
