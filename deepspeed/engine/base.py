"""What an engine consists of, and what it says about itself. Its other halves and its observers see it as this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.base.events import Events
from deepspeed.base.exceptions import NoOptimizerError
from deepspeed.config.plan import GradientPlan, Plan
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.engine.accessors import EngineAccessors
from deepspeed.engine.half_loaded import HalfLoaded
from deepspeed.transforms.progressive_layer_drop import LayerDropInputs, ProgressiveLayerDrop
from deepspeed.zero.accumulation import AccumulationClock
from deepspeed.zero.gradients.sparse import sparse_parameters
from deepspeed.zero.tensor_norms import clip_grad_norm_

if TYPE_CHECKING:
    from deepspeed.base.accelerator.abstract_accelerator import DeepSpeedAccelerator
    from deepspeed.checkpoint.files.background import BackgroundWriter
    from deepspeed.checkpoint.storage import CheckpointEngine
    from deepspeed.comm.collectives import Network
    from deepspeed.comm.mesh import ProcessMesh
    from deepspeed.config.deepspeed_config import DeepSpeedConfig
    from deepspeed.engine.assembly import TrainingCore
    from deepspeed.transforms import Transforms
    from deepspeed.zero.gathering.sharded_model import ShardedModel
    from deepspeed.zero.replica_groups import Scopes


class EngineBase(EngineAccessors, nn.Module):
    """The parts of an engine and its counters. Attribute access falls through to the wrapped module."""

    _config: DeepSpeedConfig
    plan: Plan
    events: Events
    clock: AccumulationClock
    # where it runs
    accelerator: DeepSpeedAccelerator
    mesh: ProcessMesh
    _network: Network
    scopes: Scopes
    device: torch.device
    local_rank: int
    global_rank: int
    world_size: int
    dp_world_size: int
    """Ranks with different data."""
    seq_dp_world_size: int
    """Ranks that share gradients and state."""
    mp_world_size: int
    mpu: Any
    # what it trains
    module: nn.Module
    module_transforms: Transforms
    param_names: dict[nn.Parameter, str]
    num_experts: list[int]
    """Of each mixture-of-experts layer, in the order of the module."""
    has_moe_layers: bool
    experts_of_stages: frozenset[str] = frozenset()
    """The ``kinds_of_experts`` of all stages of a pipeline."""
    basic_optimizer: Optimizer | None
    optimizer: Any
    lr_scheduler: Any
    training_dataloader: Any
    collate_fn: Callable[..., Any] | None
    core: TrainingCore | None
    """None without an optimizer, and after ``destroy``: such an engine only runs forward."""
    _destroyed = False
    sharded: ShardedModel | None
    """Stage 3."""
    checkpoint_engine: CheckpointEngine
    background_writer: BackgroundWriter | None
    # made by observers
    timers: Any
    tput_timer: Any
    compression_scheduler: Any
    quantizer: Any
    random_ltd_scheduler: Any
    """With the section ``data_efficiency.data_routing.random_ltd``."""
    random_ltd: Any = None
    parts: dict[str, Any]
    """Observers that keep something from step to step, which goes into checkpoints (``state_dict``: plain numbers)."""
    loss_weight: Callable[[], float] | None = None
    """How much the micro-batch that is trained now counts in its batch, if they vary; 1: as one of equal ones."""
    agreed_loss: Tensor | None = None
    """Of the batch that ends, in an engine whose ranks agree on it before the update."""
    curve_axis: Any = None
    """Of what the engine writes to its monitors."""
    live_page: Any = None
    """With ``monitor.live``."""
    flops_profiler: Any = None
    """With the section ``flops_profiler``; its numbers are there once the step has been profiled."""

    def _begin_counting(self) -> None:
        """Initialize the counters: nothing has happened yet."""
        self._scaled_loss = False  # engine.scale was called, and its backward has not ended
        self._step_applied = False
        self._global_norm: float | None = None
        self._averages: bool | None = None
        self.parts = {}
        self.half_loaded = HalfLoaded(self.events)
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        self.losses: Tensor | float = 0.0
        self.warn_unscaled_loss = True
        self.enable_backward_allreduce = True
        self.pipeline_parallelism = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__"):
                raise
            return getattr(module, name)

    def _require_core(self, what: str) -> TrainingCore:
        if self.core is not None:
            return self.core
        if self._destroyed:
            raise RuntimeError(
                f"engine.{what}() after engine.destroy(): this engine trains no more. Make another one of its module "
                "with deepspeed.initialize, or call destroy() later."
            )
        if self._config.optimizer_name is not None:
            raise NoOptimizerError(
                f"engine.{what}() needs trainable parameters: all of the model were frozen (requires_grad=False) when "
                "deepspeed.initialize was called, so the engine only runs forward. Unfreeze some before that call."
            )
        raise NoOptimizerError(
            f"engine.{what}() needs an optimizer and trainable parameters: pass optimizer=, or model_parameters= "
            "with an 'optimizer' section in the config, to deepspeed.initialize. Without them the engine only "
            "runs forward."
        )

    @property
    def micro_steps(self) -> int:
        return self.clock.micro_steps

    @micro_steps.setter
    def micro_steps(self, value: int) -> None:
        self.clock.micro_steps = value

    def layer_writer(self, exclude_frozen: bool) -> Callable[[Path], None] | None:
        """What also writes the files of single layers into the folder of a checkpoint, if this engine has any."""
        return None

    def position_in_batch(self) -> str:
        """Of an engine that runs whole batches: at what it is, for a report about a hang."""
        return ""

    def of_all_stages(self, weights: Any) -> Any:
        """For an export: ``weights`` of this rank's module, with those of other ranks' modules if there are any."""
        return weights

    # Facts --------------------------------------------------------------------------------------------------

    def get_global_grad_norm(self) -> float | None:
        """Gradient norm before clipping at the last step (inf if that step was skipped); None before the first."""
        return self._global_norm

    def was_step_applied(self) -> bool:
        return self._step_applied

    def _groups(self) -> list[dict[str, Any]]:
        return self.basic_optimizer.param_groups if self.basic_optimizer is not None else []

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self._groups()]

    def get_type(self) -> list[Any]:
        return [group.get("type") for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """Betas of each group, or its momentum if it has no betas."""
        return [group.get("betas", group.get("momentum")) for group in self._groups()]

    @property
    def progressive_layer_drop(self) -> ProgressiveLayerDrop | None:
        """The schedule of progressive layer dropping, if the config asks for it."""
        inputs = self.module_transforms.inputs
        return next((each.schedule for each in inputs if isinstance(each, LayerDropInputs)), None)

    def random_ltd_initialize(self) -> None:
        """Have the converted layers drop tokens; ``convert_to_random_ltd(engine, ...)`` calls it.

        DeepSpeedConfigError: the config does not ask for it, or for other layers than there are.
        """
        if self.random_ltd is None:
            raise DeepSpeedConfigError(
                "random_ltd_initialize() needs data_efficiency.data_routing.random_ltd: set enabled to true there, in "
                "data_routing and in data_efficiency"
            )
        self.random_ltd.initialize()

    def get_pld_theta(self) -> float | None:
        schedule = self.progressive_layer_drop
        return schedule.get_theta() if schedule is not None else None

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(model dtype, dtype in which gradients accumulate)."""
        model = self.plan.precision.param or torch.float32
        return model, self.plan.precision.accumulate or model

    @property
    def communication_data_type(self) -> torch.dtype:
        return self.plan.precision.reduce or self.plan.precision.param or torch.float32

    @communication_data_type.setter
    def communication_data_type(self, value: torch.dtype) -> None:
        if value != self.communication_data_type:
            raise ValueError(
                f"communication_data_type={value} cannot be set on an engine, whose buffers are made for "
                f"{self.communication_data_type}: set the config key communication_data_type before initialize."
            )

    @property
    def gradient_average(self) -> bool:
        """Whether the gradients of a step are averaged over the ranks, and not summed. The config says it first
        (``gradient_allreduce_op``); it can be set at the stages and with the sections with which that can be "sum"."""
        return self.plan.gradients.mean if self._averages is None else self._averages

    @gradient_average.setter
    def gradient_average(self, value: bool) -> None:
        if bool(value) == self.gradient_average:
            return
        config = self._config
        if config.zero_optimization_stage == 3 or config.zero_config.zenflow is not None:
            raise ValueError(
                f"gradient_average={value!r}: with ZeRO stage 3 or ZenFlow gradients are always averaged. Scale the "
                "loss instead, or use a lower stage."
            )
        buckets = self._require_core("gradient_average").reducer.buckets
        self._averages = bool(value)
        for bucket in buckets:
            bucket.factors = self.gradient_rule.factors(self.scopes[bucket.layout.scope].divisor)

    @property
    def gradient_rule(self) -> GradientPlan:
        """How gradients are summed: as planned, or as ``gradient_average`` has been set."""
        return replace(self.plan.gradients, mean=self.gradient_average)

    def clip_fp32_gradients(self) -> None:
        """Clip what is in ``param.grad`` now (stage 0). ``step`` itself clips at every stage."""
        if self.gradient_clipping() > 0:
            clip_grad_norm_(self.module.parameters(), self.gradient_clipping(), mpu=self.mpu)

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Embeddings of whose gradients only the rows that were used travel (``sparse_gradients``), as
        ``emb.weight``."""
        if not self._config.sparse_gradients_enabled:
            return set()
        weights = sparse_parameters(self.module)
        return {name for name, param in self.module.named_parameters() if param in weights}

    @property
    def state_access(self) -> Any:
        """Weights, gradients and optimizer state by parameter (``zero/states/access.py``), or None."""
        return self.core.access if self.core is not None else None

    @property
    def data_parallel_group(self) -> Any:
        return self.mesh.group("dp")

    @property
    def seq_data_parallel_group(self) -> Any:
        """The ranks that share gradients and state."""
        return self.mesh.group("dp", "sp")

    @property
    def expert_parallel_group(self) -> dict[str, Any]:
        """Name of a group of experts -> the ranks that share one set of them; empty without experts."""
        return self._expert_groups(same=False)

    @property
    def expert_data_parallel_group(self) -> dict[str, Any]:
        """Name of a group of experts -> the ranks that hold the same ones; empty without experts."""
        return self._expert_groups(same=True)

    def _expert_groups(self, *, same: bool) -> dict[str, Any]:
        experts = [p for p in self.module.parameters() if not getattr(p, "allreduce", True)]
        sizes = {name: int(name.rpartition("_")[2]) for name in sorted({str(p.group_name) for p in experts})}  # type: ignore[attr-defined]
        return {
            name: self.mesh.among(self.mesh.sharing_experts(size, same=same)).group
            for name, size in sizes.items()
        }

    def get_data_parallel_rank(self) -> int:
        return self.mesh.rank("dp")

    def get_model_parallel_rank(self) -> int:
        return self.mesh.rank("tp")

    get_tensor_parallel_rank = get_model_parallel_rank

    def get_sequence_parallel_group(self) -> Any:
        return self.mesh.group("sp")

    @property
    def seq_parallel_group(self) -> Any:
        """The ranks that share each sequence."""
        return self.mesh.group("sp")

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Mean milliseconds of each timer (needs ``wall_clock_breakdown``)."""
        return {name: timer.mean() for name, timer in self.timers.get_timers().items()}
