"""``deepspeed.initialize``: build an engine from arguments, and resume its state."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from deepspeed import comm as dist
from deepspeed.base.constants import ELASTIC_STATE, TENSOR_PARALLEL_SIZE, TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.base.logging import logger
from deepspeed.base.python_gc import python_gc_manager
from deepspeed.base.sharded import had_dtensors
from deepspeed.base.staged import Staged
from deepspeed.config.arguments import FILLED_IN
from deepspeed.config.axes import sequence_parallel_size, tensor_parallel_size
from deepspeed.config.deepspeed_config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.config.optimizers import check_optimizer
from deepspeed.config.reader import read_config
from deepspeed.config.section import is_auto, note
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.observers.progress.start_report import reporter
from deepspeed.zero.active_contexts import active_contexts

if TYPE_CHECKING:
    from deepspeed.checkpoint.replicas import Replicas


@python_gc_manager.paused()
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | dict[str, Any] | None = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Wrap ``model`` in an engine; return ``(engine, optimizer, training_dataloader, lr_scheduler)``.

    Args:
        args: namespace that may hold ``deepspeed_config`` (a path), ``local_rank`` and ``deepspeed_sparse_attention``
            (False: the section ``sparse_attention`` is left to the model).
        model: the module to train. Its parameters may be DTensors, split over adjacent tensor-parallel ranks. For a
            ``PipelineModule`` the engine is a ``PipelineEngine``.
        optimizer: a torch optimizer, or a callable that takes ``model_parameters`` and returns one; by default the
            config's ``optimizer`` section is used.
        model_parameters: parameters or group dicts for an optimizer created here; default: all of the module's.
        training_data: a dataset, for which a distributed loader is created with ``collate_fn``.
        lr_scheduler: a scheduler, or a callable that takes the optimizer and returns one.
        distributed_port: rendezvous port if this call initialises torch.distributed without a launcher.
        mpu: a Megatron-style model-parallel unit.
        dist_init_required: False asserts that torch.distributed is already initialised.
        config: dict, path to JSON or HJSON, or base64 text; ``config_params`` is its old name.
        mesh_param: sizes of the mesh, (data parallel, sequence parallel); same as the config's ``data_parallel_size``
            and ``sequence_parallel_size``.

    Raises:
        DeepSpeedConfigError: lists all problems of the config, before anything is allocated.
        AssertionError: model or config is missing, or the config is given twice.
    """
    given = _config_argument(args, config if config is not None else config_params)
    if model is None:
        raise AssertionError("deepspeed.initialize requires a model")
    split_over = _take_distributed(model)
    given = _with_recorded_size(given, model, mpu)
    if isinstance(model, Staged):
        mpu = _split_pipeline(model, given, mpu)
    parsed = DeepSpeedConfig(
        given, mpu, mesh_param=mesh_param, split_over=split_over, clients=(optimizer, lr_scheduler)
    )
    _check_unreplaced_sections(parsed, args, optimizer, lr_scheduler)
    # A surrounding zero.Init must not partition modules that the engine builds.
    with active_contexts.suspending():
        dist.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
        trains = optimizer is not None or parsed.optimizer_name is not None
        engine = _engine_class(model, parsed, trains)(
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            mpu=mpu,
            dist_init_required=False,
            collate_fn=collate_fn,
            config=given,
            config_class=parsed,
        )
        begin_run(engine)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _take_distributed(model: Any) -> int | None:
    """Turn DTensors of the model into plain parameters; return the number of ranks that split them, None without
    DTensors."""
    if not isinstance(model, nn.Module) or not had_dtensors(model):
        return None
    from deepspeed.transforms.distributed_tensors import request_local_parts

    return request_local_parts(model)


def _with_recorded_size(given: Any, model: Any, mpu: Any) -> Any:
    """Return the config with the tensor-parallel size of ``tp_model_init``, if that was called."""
    if TENSOR_PARALLEL_SIZE not in vars(model):
        return given
    from deepspeed.parallel.tensor.init_utils import with_recorded_size

    return with_recorded_size(given, model, mpu)


def _check_unreplaced_sections(config: DeepSpeedConfig, args: Any, optimizer: Any, lr_scheduler: Any) -> None:
    """Check the config sections that no argument of ``initialize`` replaces, and apply the flags of ``args``.
    DeepSpeedConfigError: the config's optimizer is unknown, or does not take its parameters."""
    # The script defines the flag, and it was not passed.
    if getattr(args, "deepspeed_sparse_attention", None) is False:
        config.applies_sparse_attention = False
    if optimizer is None:
        _check_optimizer(config)
    if lr_scheduler is None and config.scheduler_name is not None:
        _warn_of_unfilled_auto(config, "scheduler", config.scheduler_name)


def _split_pipeline(model: Staged, given: Any, mpu: Any) -> Any:
    """Split layers and sequences of a pipeline as configured; return its model-parallel unit."""
    if mpu is not None:
        raise AssertionError("a PipelineModule is itself the model-parallel unit: leave out mpu=")
    written = read_config(given).data
    model.share_layers(tensor_parallel_size(written))
    if (ranks := sequence_parallel_size(written)) > 1:
        model.share_sequences(ranks)
    return model.mpu()


def _check_optimizer(config: DeepSpeedConfig) -> None:
    """Raise DeepSpeedConfigError if the config's optimizer is unknown or rejects its parameters."""
    if config.optimizer_name is None:
        return
    _warn_of_unfilled_auto(config, "optimizer", config.optimizer_name)
    problems = check_optimizer(config.optimizer_name, config.optimizer_params)
    if problems:
        raise DeepSpeedConfigError("; ".join(problems))


def _warn_of_unfilled_auto(config: DeepSpeedConfig, section: str, kind: str) -> None:
    """Warn of optimizer or scheduler arguments that are still "auto"."""
    written = config._param_dict[section].get("params") or {}
    left = [
        f"{section}.params.{key}" for key, value in written.items() if is_auto(value) and key in FILLED_IN
    ]
    if left:
        note(f"{', '.join(left)}: 'auto' was not filled in by a client; using the default of {kind}")


def _engine_class(model: nn.Module, config: DeepSpeedConfig, trains: bool) -> type[DeepSpeedEngine]:
    if config.hybrid_engine.enabled:
        if isinstance(model, Staged):
            raise DeepSpeedConfigError(
                "hybrid_engine.enabled=true with a PipelineModule: pipeline stages do not generate"
            )
        if trains or callable(getattr(type(model), "generate", None)):
            from deepspeed.engine.hybrid_engine import DeepSpeedHybridEngine  # imports of generation

            return DeepSpeedHybridEngine
        # clients such as TRL use one config for all models: this one only scores
        note(f"hybrid_engine.enabled has no effect on {type(model).__name__}, which has no generate()")
    if not isinstance(model, Staged):
        return DeepSpeedEngine
    from deepspeed.engine.pipeline.dualpipev import DualPipeVEngine, DualPipeVModule  # imports of pipelines
    from deepspeed.engine.pipeline.engine import PipelineEngine

    return DualPipeVEngine if isinstance(model, DualPipeVModule) else PipelineEngine


def _config_argument(args: Any, config: Any) -> Any:
    """Return the config, which must be given in exactly one of two places."""
    from_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if config is not None and from_args is not None:
        raise AssertionError(
            "the config is given twice: as config= and as args.deepspeed_config; keep one of them."
        )
    config = config if config is not None else from_args
    if config is None:
        raise AssertionError(
            "deepspeed.initialize requires a config: pass config= (dict, path or base64 text), or --deepspeed_config."
        )
    return config


def begin_run(engine: DeepSpeedEngine) -> None:
    """Resume from the newest state, in memory or in ``checkpoint.folder``, if configured, and attach the observers
    that save states. Collective if configured."""
    settings = engine._config.checkpoint_config
    memory = os.environ.get(ELASTIC_STATE)
    replicas = _replicas(engine, memory)
    if replicas is not None and (tag := replicas.newest()) is not None:
        engine.load_checkpoint(str(replicas.folder), tag)
        reporter(engine)(f"resumed at step {engine.global_steps}, from the state in memory")
    elif settings.resume and settings.folder is not None:
        _resume(engine, settings.folder)
    if memory is not None:
        from deepspeed.engine.observers.elastic import ElasticRun  # rarely used

        ElasticRun(engine, Path(memory), replicas)
    if settings.save_at_sigterm or settings.save_before is not None:
        from deepspeed.engine.observers.last_save import LastSave

        LastSave(engine)


def _replicas(engine: DeepSpeedEngine, memory: str | None) -> Replicas | None:
    section = engine._config.elasticity_config
    if section is None or not section.replicate_state or engine.core is None:
        return None
    if memory is None:
        if engine.global_rank == 0:
            logger.warning(
                "elasticity.replicate_state has no effect: start the run with deepspeed --elastic_training"
            )
        return None
    from deepspeed.checkpoint.replicas import Replicas

    return Replicas(Path(memory))


def _resume(engine: DeepSpeedEngine, folder: str) -> None:
    from deepspeed.checkpoint.names import LATEST
    from deepspeed.checkpoint.ranks import Ranks

    mirror, found = engine.checkpoints.mirror(folder), False
    ranks = Ranks(node_local=mirror is not None)
    with ranks.together("looking for a checkpoint"):
        if mirror is None:
            found = Path(folder, LATEST).exists()
        elif ranks.keeps_folder:
            found = mirror.has_checkpoint()
    if ranks.any(found):
        engine.load_checkpoint(folder)
        reporter(engine)(f"checkpoint.resume: resumed at step {engine.global_steps}")
    else:
        reporter(engine)(f"checkpoint.resume: no checkpoint in {folder} yet: starting fresh")
