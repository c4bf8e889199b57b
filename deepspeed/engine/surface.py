"""The methods of the engine that its parts answer, in one list: the engine's own file holds what it does itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from deepspeed.engine.parts.accumulation import Accumulation
from deepspeed.engine.parts.compiling import Compilation
from deepspeed.engine.parts.data import EngineData
from deepspeed.engine.parts.sparse_sums import SparseSums
from deepspeed.engine.parts.state import Checkpoints, StateMoves

_P = ParamSpec("_P")
_R = TypeVar("_R")


def answered_by(part: str, method: Callable[Concatenate[Any, _P], _R]) -> Callable[Concatenate[Any, _P], _R]:
    """A method of the engine with the signature and the docstring of ``method``, which is called on the engine's
    attribute ``part``: ``compile = answered_by("compilation", Compilation.compile)``."""
    name = method.__name__

    @functools.wraps(method)
    def answer(engine: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return getattr(getattr(engine, part), name)(*args, **kwargs)

    return answer


class EngineSurface:
    """Documented methods of ``DeepSpeedEngine``, by the part that answers them."""

    accumulation: Accumulation
    data: EngineData
    compilation: Compilation
    checkpoints: Checkpoints
    moves: StateMoves
    sparse_sums: SparseSums

    is_gradient_accumulation_boundary = answered_by(
        "accumulation", Accumulation.is_gradient_accumulation_boundary
    )
    set_gradient_accumulation_boundary = answered_by(
        "accumulation", Accumulation.set_gradient_accumulation_boundary
    )
    no_sync = answered_by("accumulation", Accumulation.no_sync)
    coalesce_grad_reduction = answered_by("accumulation", Accumulation.coalesce_grad_reduction)
    allreduce_gradients = answered_by("accumulation", Accumulation.allreduce_gradients)
    set_all_reduce_hook = answered_by("accumulation", Accumulation.set_all_reduce_hook)
    set_train_batch_size = answered_by("accumulation", Accumulation.set_train_batch_size)
    set_train_micro_batch_size = answered_by("accumulation", Accumulation.set_train_micro_batch_size)

    deepspeed_io = answered_by("data", EngineData.deepspeed_io)
    set_data_post_process_func = answered_by("data", EngineData.set_data_post_process_func)
    set_custom_curriculum_learning_schedule = answered_by(
        "data", EngineData.set_custom_curriculum_learning_schedule
    )
    add_input_transform = answered_by("data", EngineData.add_input_transform)
    remove_input_transform = answered_by("data", EngineData.remove_input_transform)
    compile = answered_by("compilation", Compilation.compile)  # type: ignore[assignment]
    follow_passes = answered_by("compilation", Compilation.follow_passes)
    register_compile_pass = answered_by("compilation", Compilation.register_compile_pass)
    get_compile_time = answered_by("compilation", Compilation.get_compile_time)
    is_deepcompile_enabled = answered_by("compilation", Compilation.is_deepcompile_enabled)
    is_deepcompile_active = answered_by("compilation", Compilation.is_deepcompile_active)

    save_checkpoint = answered_by("checkpoints", Checkpoints.save_checkpoint)
    store_checkpoint = save_checkpoint
    load_checkpoint = answered_by("checkpoints", Checkpoints.load_checkpoint)
    save_16bit_model = answered_by("checkpoints", Checkpoints.save_16bit_model)
    save_fp16_model = answered_by("checkpoints", Checkpoints.save_fp16_model)
    module_state_dict = answered_by("checkpoints", Checkpoints.module_state_dict)
    load_module_state_dict = answered_by("checkpoints", Checkpoints.load_module_state_dict)
    whole_tensor = answered_by("checkpoints", Checkpoints.whole_tensor)
    _consolidated_16bit_state_dict = answered_by("checkpoints", Checkpoints._consolidated_16bit_state_dict)
    _zero3_consolidated_16bit_state_dict = answered_by(
        "checkpoints", Checkpoints._zero3_consolidated_16bit_state_dict
    )
    _get_ckpt_name = answered_by("checkpoints", Checkpoints._get_ckpt_name)
    _get_all_ckpt_names = answered_by("checkpoints", Checkpoints._get_all_ckpt_names)
    _get_zero_ckpt_name = answered_by("checkpoints", Checkpoints._get_zero_ckpt_name)
    _get_optimizer_ckpt_name = answered_by("checkpoints", Checkpoints._get_optimizer_ckpt_name)
    _change_recovery_script_permissions = answered_by(
        "checkpoints", Checkpoints._change_recovery_script_permissions
    )

    all_gather_scalar = answered_by("sparse_sums", SparseSums.all_gather_scalar)
    sparse_all_gather = answered_by("sparse_sums", SparseSums.sparse_all_gather)
    sparse_allreduce = answered_by("sparse_sums", SparseSums.sparse_allreduce)
    sparse_allreduce_bucket = answered_by("sparse_sums", SparseSums.sparse_allreduce_bucket)
    sparse_allreduce_no_retain = answered_by("sparse_sums", SparseSums.sparse_allreduce_no_retain)

    offload_states = answered_by("moves", StateMoves.offload_states)
    reload_states = answered_by("moves", StateMoves.reload_states)

    @functools.cached_property
    def save_non_zero_checkpoint(self) -> bool:
        """Whether this rank writes a file with model states. Scripts that write files themselves set it."""
        return self.checkpoints.writes_model_file()

    @functools.cached_property
    def save_zero_checkpoint(self) -> bool:
        """Whether this rank writes a file with its part of what the optimizer keeps."""
        return self.checkpoints.writes_optimizer_file()

    @property
    def is_compiled(self) -> bool:
        return self.compilation.compiled
