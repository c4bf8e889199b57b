"""`DeepSpeedConfig`: a validated config, with the attributes that the engine and clients read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

from deepspeed.base.dtypes import Dtype, torch_dtype
from deepspeed.base.logging import logger
from deepspeed.config import constants
from deepspeed.config.analysis import PASSED, analyse
from deepspeed.config.axes import axes_of, global_rank, world_size
from deepspeed.config.batch import BatchError, BatchSizes, resolve
from deepspeed.config.constants import (
    ADAGRAD_OPTIMIZER,
    ADAM_OPTIMIZER,
    ADAMW_OPTIMIZER,
    DEEPSPEED_OPTIMIZERS,
    LAMB_OPTIMIZER,
    LION_OPTIMIZER,
    MUADAM_OPTIMIZER,
    MUADAMW_OPTIMIZER,
    MUON_OPTIMIZER,
    MUSGD_OPTIMIZER,
    ONEBIT_ADAM_OPTIMIZER,
    ONEBIT_LAMB_OPTIMIZER,
    ZERO_ONE_ADAM_OPTIMIZER,
    ValidationMode,
)
from deepspeed.config.problems import DeepSpeedConfigError, Problem
from deepspeed.config.reader import load_source
from deepspeed.config.schema import TrainingConfig
from deepspeed.config.section import ScientificNotationEncoder
from deepspeed.config.sections.comm import DeepSpeedCommsConfig
from deepspeed.config.sections.elasticity import ELASTICITY
from deepspeed.config.sections.model import HybridEngineConfig
from deepspeed.config.sections.monitor import MONITORS, DeepSpeedMonitorConfig
from deepspeed.config.sections.zero import DeepSpeedZeroConfig, ZeroStageEnum

__all__ = [
    "ADAGRAD_OPTIMIZER", "ADAMW_OPTIMIZER", "ADAM_OPTIMIZER", "DEEPSPEED_OPTIMIZERS", "LAMB_OPTIMIZER",
    "LION_OPTIMIZER", "MUADAMW_OPTIMIZER", "MUADAM_OPTIMIZER", "MUON_OPTIMIZER", "MUSGD_OPTIMIZER",
    "ONEBIT_ADAM_OPTIMIZER", "ONEBIT_LAMB_OPTIMIZER", "ZERO_ONE_ADAM_OPTIMIZER", "DeepSpeedConfig",
    "DeepSpeedConfigError", "DeepSpeedConfigWriter", "DeepSpeedZeroConfig", "DtypeEnum",
    "HybridEngineConfig", "Problem", "ZeroStageEnum",
]  # fmt: skip


class DtypeEnum(Enum):
    """Torch dtypes under their short names; `DtypeEnum("torch.half")` is fp16, for example."""

    fp16 = torch.float16
    fp32 = torch.float32
    bf16 = torch.bfloat16
    int8 = torch.int8
    fp64 = torch.float64

    @classmethod
    def _missing_(cls, value: Any) -> DtypeEnum | None:
        try:
            return cls[Dtype(value).name]
        except ValueError:
            return None


class DeepSpeedConfig:
    """A config, read, validated and resolved for the ranks of this job. Values do not change afterwards.

    `config` is a dict, the path of a JSON or HJSON file, or urlsafe-base64 JSON text. The number of data-parallel ranks
    comes from `mpu`, else `mesh_device`, else from the world size of `torch.distributed` or the launcher's environment
    (else 1) and the sizes of the other axes (`config/axes.py`); `split_over` is the number of ranks that a model is
    already split over. `clients` are the optimizer and scheduler passed to `initialize`, whose sections are then not
    used. Raises DeepSpeedConfigError listing all mistakes. No process group is created and no memory allocated.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any],
        mpu: Any = None,
        mesh_device: Any = None,
        *,
        mesh_param: Any = None,
        split_over: int | None = None,
        clients: tuple[Any, Any] = (None, None),
    ) -> None:
        source = load_source(config)
        self.global_rank = global_rank()
        self.axes = axes_of(
            source.data,
            *world_size(),
            mpu=mpu,
            mesh_device=mesh_device,
            mesh_param=mesh_param,
            split_over=split_over,
        )
        self.world_size = self.axes.data_parallel
        unused = [name for name, given in zip(PASSED, clients, strict=True) if given is not None]
        analysis = analyse(source, self.axes, unused=unused)
        if analysis.errors or analysis.config is None or analysis.batch is None:
            raise DeepSpeedConfigError.of(analysis.errors, source.name)
        if self.global_rank == 0:
            for warning in analysis.warnings:
                logger.warning(warning)
        self._param_dict: dict[str, Any] = source.data
        self._schema: TrainingConfig = analysis.config
        if self._schema.elasticity is not None and self._schema.elasticity.enabled:
            from deepspeed.config.elastic_batch import ensure_immutable_elastic_config

            ensure_immutable_elastic_config(source.data[ELASTICITY])
        self.batch: BatchSizes = analysis.batch
        self.train_batch_size = self.batch.train
        self.train_micro_batch_size_per_gpu = self.batch.micro
        self.gradient_accumulation_steps = self.batch.accumulation
        self._read_gradients(self._schema)
        self._read_optimizer(self._schema, source.data.get("optimizer") if "optimizer" in unused else None)
        self._read_precision(self._schema)
        self._read_zero(self._schema)
        self._read_parallelism(self._schema)
        self._read_execution(self._schema)
        self._read_data_and_checkpoints(self._schema)
        self._read_logging(self._schema)

    def _configure_train_batch_size(self) -> None:
        """Derive the batch attributes that are None from the others, as subclasses and tests of 0.19 do.
        DeepSpeedConfigError: they do not fit together."""
        given = (self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps)
        try:
            self.batch = batch = resolve(*given, self.world_size)
        except BatchError as error:
            raise DeepSpeedConfigError(str(error)) from None
        self.train_batch_size, self.train_micro_batch_size_per_gpu = batch.train, batch.micro
        self.gradient_accumulation_steps = batch.accumulation

    def _read_gradients(self, c: TrainingConfig) -> None:
        self.managed_gradient_accumulation = c.managed_gradient_accumulation
        self.gradient_clipping = c.gradient_clipping
        self.prescale_gradients = c.prescale_gradients
        self.gradient_predivide_factor = c.gradient_predivide_factor
        self.gradient_allreduce_op = c.gradient_allreduce_op
        self.communication_data_type = torch_dtype(c.communication_data_type)
        self.seq_parallel_communication_data_type = torch_dtype(c.seq_parallel_communication_data_type)
        self.sparse_gradients_enabled = c.sparse_gradients
        self.disable_allgather = c.disable_allgather

    def _read_optimizer(self, c: TrainingConfig, unused: Any) -> None:
        """Read the two sections. ``unused``: the raw section if an optimizer was passed: scripts read its name."""
        optimizer, scheduler = c.optimizer, c.scheduler
        name, self.optimizer_params = (optimizer.type, optimizer.params) if optimizer else (None, None)
        if isinstance(unused, Mapping):
            name, self.optimizer_params = unused.get("type"), unused.get("params")
        is_ours = isinstance(name, str) and name.lower() in DEEPSPEED_OPTIMIZERS
        self.optimizer_name: str | None = name.lower() if name and is_ours else name
        self.optimizer_legacy_fusion = optimizer.legacy_fusion if optimizer else False
        self.scheduler_name = scheduler.type if scheduler else None
        self.scheduler_params = scheduler.params if scheduler else None

    def _read_precision(self, c: TrainingConfig) -> None:
        self.float16_config, self.fp16_enabled = c.fp16, c.fp16.enabled
        self.bfloat16_config, self.bfloat16_enabled = c.bf16, c.bf16.enabled
        self.amp, self.amp_enabled, self.amp_params = c.amp, c.amp.enabled, c.amp.params
        self.torch_autocast = c.torch_autocast
        self.torch_autocast_enabled = c.torch_autocast.enabled
        self.torch_autocast_dtype = torch_dtype(c.torch_autocast.dtype)
        self.torch_autocast_lower_precision_safe_modules = c.torch_autocast.lower_precision_safe_modules
        self.grad_accum_dtype = torch_dtype(c.data_types.grad_accum_dtype)
        self.param_dtype = torch_dtype(c.data_types.param_dtype)
        self.buffer_dtype = torch_dtype(c.data_types.buffer_dtype)

    def _read_zero(self, c: TrainingConfig) -> None:
        self.zero_config = c.zero_optimization
        self.zero_optimization_stage = int(c.zero_optimization.stage)
        self.zero_enabled = self.zero_optimization_stage > 0
        self.zero_allow_untested_optimizer = c.zero_allow_untested_optimizer
        self.zero_force_ds_cpu_optimizer = c.zero_force_ds_cpu_optimizer
        self.aio_config = c.aio.model_dump(exclude={"thread_count"})

    @property
    def schema(self) -> TrainingConfig:
        """The validated keys, as a user writes them; read by new code. The attributes are those of release 0.19, for
        clients; new keys need none."""
        return self._schema

    @property
    def given_keys(self) -> set[str]:
        """Top-level keys present in the config, as opposed to defaults."""
        return self._schema.model_fields_set

    def _read_parallelism(self, c: TrainingConfig) -> None:
        self.tensor_parallel_config = c.tensor_parallel
        self.expert_parallel_config = c.expert_parallel
        self.sequence_parallel_size = c.sequence_parallel_size or 1
        self.use_data_before_expert_parallel_ = c.use_data_before_expert_parallelism
        self.pipeline = c.pipeline.model_dump(exclude_unset=True) | {
            key: value for key, value in c.pipeline.model_dump().items() if key != "use_reentrant"
        }
        self.elasticity_config = c.elasticity
        self.elasticity_enabled = c.elasticity is not None and c.elasticity.enabled

    def _read_execution(self, c: TrainingConfig) -> None:
        """Read the keys for how forward and backward run, and for pruning and quantization of the model."""
        self.compression_config = c.compression_training
        self.weight_quantization_config = c.weight_quantization
        self.eigenvalue_config = eigenvalue = c.quantize_training.eigenvalue if c.quantize_training else None
        self.eigenvalue_enabled = eigenvalue is not None and eigenvalue.enabled
        self.eigenvalue_verbose = eigenvalue is not None and eigenvalue.verbose
        self.activation_checkpointing_config = c.activation_checkpointing
        self.compile_config = c.compile
        self.graph_harvesting = c.graph_harvesting
        self.hybrid_engine = c.hybrid_engine
        self.sparse_attention = c.sparse_attention.model_dump() if c.sparse_attention else None
        self.applies_sparse_attention = c.sparse_attention is not None
        self.pld_config = pld = c.progressive_layer_drop
        self.pld_enabled = pld is not None and pld.enabled
        self.pld_params = pld.model_dump(exclude={"enabled"}) if pld else None
        self.autotuning_config = c.autotuning

    def _read_data_and_checkpoints(self, c: TrainingConfig) -> None:
        self.dataloader_drop_last = c.dataloader_drop_last
        self.vocabulary_size = c.vocabulary_size
        self.nebula_config = c.nebula
        self.data_efficiency_config = c.data_efficiency.model_dump()
        self.data_efficiency_enabled = c.data_efficiency.enabled
        curriculum = c.curriculum_learning
        self.curriculum_enabled_legacy = curriculum is not None and curriculum.enabled
        self.curriculum_params_legacy = curriculum.model_dump(exclude={"enabled"}) if curriculum else None
        self.checkpoint_config = c.checkpoint
        self.checkpoint_tag_validation_enabled = c.checkpoint.tag_validation != ValidationMode.IGNORE
        self.checkpoint_tag_validation_fail = c.checkpoint.tag_validation == ValidationMode.FAIL
        self.checkpoint_parallel_write_pipeline = c.checkpoint.parallel_write.pipeline_stage
        self.load_universal_checkpoint = c.checkpoint.load_universal
        self.use_node_local_storage = c.checkpoint.use_node_local_storage
        self.datastates_config = c.datastates_ckpt

    def _read_logging(self, c: TrainingConfig) -> None:
        """Read the keys for logging and profiling."""
        self.steps_per_print = c.steps_per_print
        self.wall_clock_breakdown = c.wall_clock_breakdown
        self.memory_breakdown = c.memory_breakdown
        self.dump_state = c.dump_state
        self.log_level = c.log_level
        self.monitor_config = DeepSpeedMonitorConfig(**{name: getattr(c, name) for name in MONITORS})
        self.flops_profiler_config = c.flops_profiler
        self.timers_config = c.timers.throughput
        self.comms_config = DeepSpeedCommsConfig({"comms_logger": c.comms_logger})

    def print_user_config(self) -> None:
        """Log the config as the user wrote it."""
        from deepspeed.config.redaction import without_secrets

        text = json.dumps(
            without_secrets(self._param_dict),
            sort_keys=True,
            indent=4,
            cls=ScientificNotationEncoder,
            separators=(",", ":"),
        )
        logger.info(f"  json = {text}")

    def print(self, name: str) -> None:
        """Log every attribute, then the config as written, under the heading `name`."""
        logger.info(f"{name}:")
        for attribute in sorted(vars(self)):
            if not attribute.startswith("_"):
                logger.info(f"  {attribute} {'.' * (29 - len(attribute))} {getattr(self, attribute)}")
        self.print_user_config()


class DeepSpeedConfigWriter:
    """Holds a JSON config for changes, and writes it to a file."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = data if data is not None else {}

    def write_config(self, filename: str) -> None:
        with open(filename, "w", encoding="utf-8") as file:
            json.dump(self.data, file, indent=4)


def __getattr__(name: str) -> Any:
    """Return the constants of config keys, such as `GRADIENT_CLIPPING_DEFAULT`; see `config/constants.py`."""
    if name.isupper():
        return getattr(constants, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
