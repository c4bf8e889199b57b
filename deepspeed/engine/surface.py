"""The methods of the engine that its parts answer, in one list: the engine's own file holds what it does itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

import torch

from deepspeed.engine.parts.accumulation import Accumulation, SparseSums, ZeroGrads
from deepspeed.engine.parts.compiling import Compilation
from deepspeed.engine.parts.data import EngineData
from deepspeed.engine.parts.facts import Facts
from deepspeed.engine.parts.state import Checkpoints, StateMoves
from deepspeed.engine.settings import EngineSettings

if TYPE_CHECKING:
    from deepspeed.transforms.progressive_layer_drop import ProgressiveLayerDrop

_P = ParamSpec("_P")
_R = TypeVar("_R")


PARTS = {
    Facts: "facts",
    Accumulation: "accumulation",
    ZeroGrads: "zero_grads",
    EngineData: "data",
    Compilation: "compilation",
    Checkpoints: "checkpoints",
    SparseSums: "sparse_sums",
    StateMoves: "moves",
}
"""Attribute of the engine that holds the part of each class."""
_PART_OF = {kind.__name__: attribute for kind, attribute in PARTS.items()}


def answered_by(method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """Make a method of the engine with the signature and the docstring of ``method``, which is called on the engine's
    part of that class: ``compile = answered_by(Compilation.compile)``."""
    part, name = _PART_OF[method.__qualname__.split(".")[0]], method.__name__

    @functools.wraps(method)
    def answer(engine: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return getattr(getattr(engine, part), name)(*args, **kwargs)

    return answer


class Shown(Generic[_R]):
    """An attribute of the engine that its part ``part`` has under the same name: reads and writes go there."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self.__doc__ = f"``{name}`` of ``engine.{self._part}``."

    def __get__(self, engine: Any, kind: Any = None) -> _R:
        return self if engine is None else getattr(getattr(engine, self._part), self._name)  # type: ignore[return-value]

    def __set__(self, engine: Any, value: _R) -> None:
        setattr(getattr(engine, self._part), self._name, value)


class EngineSurface(EngineSettings):
    """Documented members of ``DeepSpeedEngine`` by the part that answers them; those of the config are inherited."""

    get_global_grad_norm = answered_by(Facts.get_global_grad_norm)
    was_step_applied = answered_by(Facts.was_step_applied)
    get_lr = answered_by(Facts.get_lr)
    get_type = answered_by(Facts.get_type)
    get_mom = answered_by(Facts.get_mom)
    get_wall_clock_timers = answered_by(Facts.get_wall_clock_timers)
    micro_steps = Shown[int]("clock")
    position_in_batch = answered_by(Facts.position_in_batch)
    progressive_layer_drop: Shown[ProgressiveLayerDrop | None] = Shown("facts")
    get_pld_theta = answered_by(Facts.get_pld_theta)
    get_data_types = answered_by(Facts.get_data_types)
    sparse_tensor_module_names = Shown[set[str]]("facts")
    communication_data_type = Shown[torch.dtype]("facts")
    gradient_average = Shown[bool]("facts")
    data_parallel_group = property(lambda engine: engine.mesh.group("dp"))
    seq_data_parallel_group = property(lambda engine: engine.mesh.group("dp", "sp"))
    seq_parallel_group = property(lambda engine: engine.mesh.group("sp"))
    expert_parallel_group = Shown[dict[str, Any]]("facts")
    expert_data_parallel_group = Shown[dict[str, Any]]("facts")

    def get_sequence_parallel_group(self) -> Any:
        """Return the process group of the ranks that share each sequence."""
        return self.seq_parallel_group

    def get_data_parallel_rank(self) -> int:
        """Return this rank's number among those with different data."""
        return self.mesh.rank("dp")  # type: ignore[attr-defined]

    def get_model_parallel_rank(self) -> int:
        """Return this rank's number among the tensor-parallel ones."""
        return self.mesh.rank("tp")  # type: ignore[attr-defined]

    get_tensor_parallel_rank = get_model_parallel_rank

    is_gradient_accumulation_boundary = answered_by(Accumulation.is_gradient_accumulation_boundary)
    set_gradient_accumulation_boundary = answered_by(Accumulation.set_gradient_accumulation_boundary)
    no_sync = answered_by(Accumulation.no_sync)
    coalesce_grad_reduction = answered_by(Accumulation.coalesce_grad_reduction)
    allreduce_gradients = answered_by(Accumulation.allreduce_gradients)
    clip_fp32_gradients = answered_by(Accumulation.clip_fp32_gradients)
    zero_grad = answered_by(ZeroGrads.zero_grad)
    set_all_reduce_hook = answered_by(Accumulation.set_all_reduce_hook)
    set_train_batch_size = answered_by(Accumulation.set_train_batch_size)
    set_train_micro_batch_size = answered_by(Accumulation.set_train_micro_batch_size)

    deepspeed_io = answered_by(EngineData.deepspeed_io)
    set_data_post_process_func = answered_by(EngineData.set_data_post_process_func)
    set_custom_curriculum_learning_schedule = answered_by(EngineData.set_custom_curriculum_learning_schedule)
    add_input_transform = answered_by(EngineData.add_input_transform)
    remove_input_transform = answered_by(EngineData.remove_input_transform)
    random_ltd_initialize = answered_by(EngineData.random_ltd_initialize)

    compile = answered_by(Compilation.compile)  # type: ignore[assignment]
    is_compiled = Shown[bool]("compilation")
    follow_passes = answered_by(Compilation.follow_passes)
    register_compile_pass = answered_by(Compilation.register_compile_pass)
    get_compile_time = answered_by(Compilation.get_compile_time)
    is_deepcompile_enabled = answered_by(Compilation.is_deepcompile_enabled)
    is_deepcompile_active = answered_by(Compilation.is_deepcompile_active)

    save_checkpoint = answered_by(Checkpoints.save_checkpoint)
    store_checkpoint = save_checkpoint
    load_checkpoint = answered_by(Checkpoints.load_checkpoint)
    save_non_zero_checkpoint = Shown[bool]("checkpoints")
    save_zero_checkpoint = Shown[bool]("checkpoints")
    save_16bit_model = answered_by(Checkpoints.save_16bit_model)
    save_fp16_model = answered_by(Checkpoints.save_fp16_model)
    module_state_dict = answered_by(Checkpoints.module_state_dict)
    load_module_state_dict = answered_by(Checkpoints.load_module_state_dict)
    layer_writer = answered_by(Checkpoints.layer_writer)
    of_all_stages = answered_by(Checkpoints.of_all_stages)
    whole_tensor = answered_by(Checkpoints.whole_tensor)
    _consolidated_16bit_state_dict = answered_by(Checkpoints._consolidated_16bit_state_dict)
    _zero3_consolidated_16bit_state_dict = answered_by(Checkpoints._zero3_consolidated_16bit_state_dict)
    _get_ckpt_name = answered_by(Checkpoints._get_ckpt_name)
    _get_all_ckpt_names = answered_by(Checkpoints._get_all_ckpt_names)
    _get_zero_ckpt_name = answered_by(Checkpoints._get_zero_ckpt_name)
    _get_optimizer_ckpt_name = answered_by(Checkpoints._get_optimizer_ckpt_name)
    _change_recovery_script_permissions = answered_by(Checkpoints._change_recovery_script_permissions)

    all_gather_scalar = answered_by(SparseSums.all_gather_scalar)
    sparse_all_gather = answered_by(SparseSums.sparse_all_gather)
    sparse_allreduce = answered_by(SparseSums.sparse_allreduce)
    sparse_allreduce_bucket = answered_by(SparseSums.sparse_allreduce_bucket)
    sparse_allreduce_no_retain = answered_by(SparseSums.sparse_allreduce_no_retain)

    offload_states = answered_by(StateMoves.offload_states)
    reload_states = answered_by(StateMoves.reload_states)
    empty_partition_cache = answered_by(StateMoves.empty_partition_cache)
    collect_python_gc = answered_by(StateMoves.collect_python_gc)
