"""The engine's interface for its parts and observers, which cannot import its class: the engine imports them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from deepspeed.base.accelerator.abstract_accelerator import DeepSpeedAccelerator
    from deepspeed.base.events import Events
    from deepspeed.checkpoint.files.background import BackgroundWriter
    from deepspeed.comm.collectives import Network
    from deepspeed.comm.mesh import ProcessMesh
    from deepspeed.comm.sparse_tensor import SparseTensor
    from deepspeed.config.deepspeed_config import DeepSpeedConfig
    from deepspeed.config.plan import Plan
    from deepspeed.engine.assembly import TrainingCore
    from deepspeed.engine.load_guard import LoadGuard
    from deepspeed.transforms.record import Transforms
    from deepspeed.zero.accumulation import AccumulationClock
    from deepspeed.zero.gathering.sharded_model import ShardedModel
    from deepspeed.zero.replica_groups import ReplicaGroups


class Engine(Protocol):
    """The members of ``DeepSpeedEngine`` that parts and observers use; documented in ``engine/engine.py``."""

    _config: DeepSpeedConfig
    plan: Plan
    events: Events
    clock: AccumulationClock
    load_guard: LoadGuard
    facts: Any  # parts.facts.EngineFacts and parts.compiling.Compilation, which import this module
    compilation: Any

    accelerator: DeepSpeedAccelerator
    mesh: ProcessMesh
    _network: Network
    replica_groups: ReplicaGroups
    device: torch.device
    local_rank: int
    global_rank: int
    world_size: int
    dp_world_size: int
    seq_dp_world_size: int
    mp_world_size: int
    mpu: Any

    module: nn.Module
    module_transforms: Transforms
    param_names: dict[nn.Parameter, str]
    num_experts: list[int]
    has_moe_layers: bool
    experts_of_stages: frozenset[str]
    basic_optimizer: Optimizer | None
    optimizer: Any
    lr_scheduler: Any
    training_dataloader: Any
    collate_fn: Callable[..., Any] | None
    core: TrainingCore | None
    sharded: ShardedModel | None
    checkpoint_engine: Any
    background_writer: BackgroundWriter | None
    checkpoints: Any  # parts.state.Checkpoints, likewise

    global_steps: int
    global_samples: int
    skipped_steps: int
    losses: Tensor | float

    checkpointed_observers: dict[str, Any]
    timers: Any
    tput_timer: Any
    monitor: Any
    live_page: Any
    curve_axis: Any
    flops_profiler: Any
    compression_scheduler: Any
    quantizer: Any
    random_ltd: Any
    random_ltd_scheduler: Any
    agreed_loss: Tensor | None

    # Training
    def _require_core(self, what: str) -> TrainingCore: ...
    def _recover(self) -> None: ...
    def abandon_update(self, error: BaseException | None = None) -> None: ...
    def no_sync(self) -> AbstractContextManager[None]: ...
    def allreduce_gradients(self) -> None: ...
    def zero_grad(self) -> None: ...
    def sparse_allreduce(self, sparse: SparseTensor, *args: Any, **kwargs: Any) -> SparseTensor: ...
    def sparse_allreduce_bucket(
        self, bucket: Iterable[SparseTensor], *args: Any, **kwargs: Any
    ) -> list[SparseTensor]: ...

    # State
    def save_checkpoint(self, save_dir: str, *args: Any, **kwargs: Any) -> bool: ...
    def save_16bit_model(self, save_dir: str, *args: Any, **kwargs: Any) -> bool: ...
    def layer_writer(self, exclude_frozen: bool) -> Callable[[Path, Mapping[str, Any]], None] | None: ...
    def of_all_stages(self, weights: Any) -> Any: ...
    def _get_ckpt_name(self, checkpoints_path: Any, tag: str, mp_placeholder: str | None = None) -> str: ...

    # Facts
    @property
    def state_access(self) -> Any: ...
    def position_in_batch(self) -> str: ...
    def is_gradient_accumulation_boundary(self) -> bool: ...
    def was_step_applied(self) -> bool: ...
    def get_global_grad_norm(self) -> float | None: ...
    def get_lr(self) -> list[float]: ...
    def get_mom(self) -> list[Any]: ...
