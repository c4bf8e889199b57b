"""Every name that clients import or call, one row each: it is there by attribute, of its kind, with its parameters.

The rows are the merged list of what Transformers, Accelerate, Lightning, TRL, PEFT, MII and the example scripts touch;
members of engines, optimizers and parameters are in `test_surface_members.py`. Needs none of the clients.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib
import inspect
import io
import logging
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

import deepspeed


def found(path: str) -> Any:
    """By attribute from `deepspeed`, importing a submodule where clients write an import statement."""
    value: Any = deepspeed
    walked = "deepspeed"
    for part in path.split(".")[1:]:
        walked += f".{part}"
        value = getattr(value, part) if hasattr(value, part) else importlib.import_module(walked)
    return value


# ------------------------------------------------------------------- names that need no process group

MODULE, CLASS, CALLABLE = types.ModuleType, type, "callable"

# name -> its kind; the parameters that clients pass by keyword, in the order of those they pass by position
NAMES: dict[str, tuple[Any, str]] = {
    "deepspeed": (MODULE, ""),
    "deepspeed.DeepSpeedConfig": (CLASS, "config mpu"),
    "deepspeed.DeepSpeedEngine": (
        CLASS,
        "args model optimizer model_parameters training_data lr_scheduler config",
    ),
    "deepspeed.OnDevice": (CLASS, "dtype device enabled"),
    "deepspeed.accelerator.get_accelerator": (CALLABLE, ""),
    "deepspeed.add_config_arguments": (CALLABLE, "parser"),
    "deepspeed.checkpoint.utils.clone_tensors_for_torch_save": (CALLABLE, "item device"),
    "deepspeed.runtime.data_pipeline.data_routing.helper.convert_to_random_ltd": (
        CALLABLE,
        "model convert_type",
    ),
    "deepspeed.runtime.data_pipeline.data_routing.helper.save_without_random_ltd": (CALLABLE, "model"),
    "deepspeed.moe.layer.MoE": (
        CLASS,
        "hidden_size expert num_experts ep_size k min_capacity use_residual noisy_gate_policy",
    ),
    "deepspeed.moe.utils.split_params_into_different_moe_groups_for_optimizer": (CALLABLE, "param_groups"),
    "deepspeed.compression.compress.init_compression": (
        CALLABLE,
        "model deepspeed_config teacher_model mpu",
    ),
    "deepspeed.compression.compress.redundancy_clean": (CALLABLE, "model deepspeed_config mpu"),
    "deepspeed.compression.helper.recursive_getattr": (CALLABLE, "model module_name"),
    "deepspeed.compression.helper.recursive_setattr": (CALLABLE, "model module_name module"),
    "deepspeed.checkpointing.configure": (
        CALLABLE,
        "mpu_ deepspeed_config partition_activations contiguous_checkpointing num_checkpoints checkpoint_in_cpu "
        "synchronize profile",
    ),
    "deepspeed.comm": (MODULE, ""),
    "deepspeed.comm.all_reduce": (CALLABLE, "tensor op group async_op"),
    "deepspeed.comm.all_to_all_single": (
        CALLABLE,
        "output tensor output_split_sizes input_split_sizes group async_op",
    ),
    "deepspeed.comm.barrier": (CALLABLE, "group"),
    "deepspeed.comm.broadcast": (CALLABLE, "tensor src group async_op"),
    "deepspeed.comm.destroy_process_group": (CALLABLE, "group"),
    "deepspeed.comm.get_local_rank": (CALLABLE, ""),
    "deepspeed.comm.get_rank": (CALLABLE, "group"),
    "deepspeed.comm.get_world_size": (CALLABLE, "group"),
    "deepspeed.comm.init_distributed": (
        CALLABLE,
        "dist_backend auto_mpi_discovery distributed_port verbose timeout init_method dist_init_required config rank "
        "world_size",
    ),
    "deepspeed.comm.irecv": (CALLABLE, "tensor src group tag"),
    "deepspeed.comm.is_initialized": (CALLABLE, ""),
    "deepspeed.comm.isend": (CALLABLE, "tensor dst group tag"),
    "deepspeed.comm.recv": (CALLABLE, "tensor src group tag"),
    "deepspeed.comm.send": (CALLABLE, "tensor dst group tag"),
    "deepspeed.get_accelerator": (CALLABLE, ""),
    "deepspeed.inference.DeepSpeedTPConfig": (CLASS, ""),
    "deepspeed.inference.RaggedInferenceEngineConfig": (CLASS, ""),
    "deepspeed.inference.InferenceEngineV2": (CLASS, "policy engine_config"),
    "deepspeed.inference.build_hf_engine": (CALLABLE, "path engine_config debug_level"),
    "deepspeed.inference.config.DtypeEnum": (enum.EnumMeta, ""),
    "deepspeed.inference.config.DtypeEnum.from_str": (CALLABLE, "value"),
    "deepspeed.inference.engine.InferenceEngine": (CLASS, "model config"),
    "deepspeed.inference.engine.InferenceEngine.forward": (CALLABLE, ""),
    "deepspeed.inference.engine.InferenceEngine.generate": (CALLABLE, ""),
    "deepspeed.inference.v2.engine_v2.InferenceEngineV2.flush": (CALLABLE, "uid"),
    "deepspeed.inference.v2.engine_v2.InferenceEngineV2.free_blocks": (property, ""),
    "deepspeed.inference.v2.engine_v2.InferenceEngineV2.get_remaining_block_capacity": (CALLABLE, "uid"),
    "deepspeed.inference.v2.engine_v2.InferenceEngineV2.put": (
        CALLABLE,
        "batch_uids batch_tokens do_checks",
    ),
    "deepspeed.inference.v2.engine_v2.InferenceEngineV2.query": (
        CALLABLE,
        "uid max_request_tokens max_request_blocks",
    ),
    "deepspeed.inference.v2.ragged.DSStateManagerConfig": (CLASS, ""),
    "deepspeed.init_inference": (CALLABLE, "model config"),
    "deepspeed.runtime.hybrid_engine.DeepSpeedHybridEngine.generate": (CALLABLE, ""),
    "deepspeed.init_distributed": (
        CALLABLE,
        "dist_backend auto_mpi_discovery distributed_port verbose timeout",
    ),
    "deepspeed.initialize": (
        CALLABLE,
        "args model optimizer model_parameters training_data lr_scheduler distributed_port mpu dist_init_required "
        "collate_fn config mesh_param config_params",
    ),
    "deepspeed.launcher.runner.fetch_hostfile": (CALLABLE, "hostfile_path"),
    "deepspeed.ops.adagrad.DeepSpeedCPUAdagrad": (CLASS, "model_params lr eps weight_decay"),
    "deepspeed.ops.adam.DeepSpeedCPUAdam": (CLASS, "model_params lr bias_correction betas eps weight_decay"),
    "deepspeed.ops.adam.FusedAdam": (CLASS, "params lr bias_correction betas eps adam_w_mode weight_decay"),
    "deepspeed.ops.aio.AsyncIOBuilder": (CLASS, ""),
    "deepspeed.ops.lion.DeepSpeedCPULion": (CLASS, "model_params lr betas weight_decay"),
    "deepspeed.ops.op_builder.AsyncIOBuilder": (CLASS, ""),
    "deepspeed.runtime.base_optimizer.DeepSpeedOptimizer": (CLASS, ""),
    "deepspeed.runtime.config.DeepSpeedConfig": (CLASS, "config mpu"),
    "deepspeed.runtime.config_utils.DeepSpeedConfigModel": (CLASS, ""),
    "deepspeed.runtime.engine.DeepSpeedEngine": (CLASS, ""),
    "deepspeed.runtime.lr_schedules.WarmupLR": (
        CLASS,
        "optimizer warmup_min_lr warmup_max_lr warmup_num_steps warmup_type last_batch_iteration",
    ),
    "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF": (CLASS, ""),
    "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF.register_with_transformers": (
        CALLABLE,
        "model_name_or_path core_attn_implementation sequence_parallel_size micro_batch_size seq_length "
        "seq_length_is_variable disable_in_eval",
    ),
    "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPDataLoaderAdapter": (
        CLASS,
        "dl sp_rank sp_group sp_world_size device",
    ),
    "deepspeed.runtime.utils.move_to_device": (CALLABLE, "item device"),
    "deepspeed.runtime.utils.see_memory_usage": (CALLABLE, "message force"),
    "deepspeed.runtime.zero.config.ZeroStageEnum": (enum.EnumMeta, ""),
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum": (enum.EnumMeta, ""),
    "deepspeed.runtime.zero.offload_config.OffloadStateTypeEnum": (enum.EnumMeta, ""),
    "deepspeed.runtime.zero.partition_parameters": (MODULE, ""),
    "deepspeed.runtime.zero.partition_parameters.ZeroParamStatus": (enum.EnumMeta, ""),
    "deepspeed.runtime.zero.partition_parameters.get_accelerator": (CALLABLE, ""),
    "deepspeed.runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor": (
        CALLABLE,
        "fn target_fp_dtype target_device",
    ),
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": (CLASS, ""),
    "deepspeed.tp_model_init": (CALLABLE, "model tp_size dtype config"),
    "deepspeed.utils.RepeatingLoader": (CLASS, "loader"),
    "deepspeed.utils.groups": (MODULE, ""),
    "deepspeed.utils.groups._get_sequence_parallel_group": (CALLABLE, ""),
    "deepspeed.utils.groups._get_sequence_parallel_rank": (CALLABLE, ""),
    "deepspeed.utils.groups._get_sequence_parallel_world_size": (CALLABLE, ""),
    "deepspeed.utils.logger": (logging.Logger, ""),
    "deepspeed.utils.logger.info": (CALLABLE, ""),
    "deepspeed.utils.logger.setLevel": (CALLABLE, ""),
    "deepspeed.utils.logging.logger": (logging.Logger, ""),
    "deepspeed.utils.logging.logger.info": (CALLABLE, ""),
    "deepspeed.utils.logging.logger.setLevel": (CALLABLE, ""),
    "deepspeed.utils.safe_get_full_grad": (CALLABLE, "param"),
    "deepspeed.utils.set_z3_leaf_modules": (CALLABLE, "model leaf_module_classes raise_if_not_found"),
    "deepspeed.utils.timer.SynchronizedWallClockTimer": (CLASS, ""),
    "deepspeed.utils.zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict": (
        CALLABLE,
        "checkpoint_dir output_dir max_shard_size safe_serialization tag exclude_frozen_parameters",
    ),
    "deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint": (
        CALLABLE,
        "checkpoint_dir tag exclude_frozen_parameters lazy_mode",
    ),
    "deepspeed.utils.zero_to_fp32.get_model_state_file": (CALLABLE, "checkpoint_dir zero_stage"),
    "deepspeed.utils.zero_to_fp32.get_optim_files": (CALLABLE, "checkpoint_dir"),
    "deepspeed.utils.zero_to_fp32.load_state_dict_from_zero_checkpoint": (
        CALLABLE,
        "model checkpoint_dir tag",
    ),
    "deepspeed.zero.GatheredParameters": (CLASS, "params modifier_rank fwd_module enabled"),
    "deepspeed.zero.Init": (
        CLASS,
        "module data_parallel_group mem_efficient_linear remote_device pin_memory config_dict_or_path config enabled "
        "dtype mpu",
    ),
    "deepspeed.zero.register_external_parameter": (CALLABLE, "module parameter"),
}


@pytest.mark.parametrize("name", NAMES)
def test_name(name: str) -> None:
    kind, wanted = NAMES[name]
    value = found(name)
    assert callable(value) if kind is CALLABLE else isinstance(value, kind)
    if wanted:
        parameters = list(inspect.signature(value).parameters)
        assert [key for key in parameters if key in wanted.split()] == wanted.split(), parameters


# name -> what it is
VALUES: dict[str, Callable[[Any], bool]] = {
    "deepspeed.__version__": lambda v: str(Version(str(v))) == str(v),
    "deepspeed.launcher.runner.DEEPSPEED_ENVIRONMENT_NAME": lambda v: v == ".deepspeed_env",
    "deepspeed.launcher.runner.DLTS_HOSTFILE": lambda v: v == "/job/hostfile",
    "deepspeed.ops.__compatible_ops__": lambda v: (
        v["async_io"] in (True, False) and v["cpu_adam"] in (True, False)
    ),
    "deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES": lambda v: (
        sorted(v) == ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
    ),
    "deepspeed.runtime.zero.config.ZeroStageEnum.weights": lambda v: v == 3,
    "deepspeed.runtime.zero.offload_config.OffloadDeviceEnum.cpu": lambda v: v == "cpu",
    "deepspeed.runtime.zero.partition_parameters.ZeroParamStatus.AVAILABLE": lambda v: v.name == "AVAILABLE",
    "deepspeed.runtime.zero.partition_parameters.ZeroParamStatus.NOT_AVAILABLE": lambda v: (
        v.name == "NOT_AVAILABLE"
    ),
    "deepspeed.runtime.zero.partition_parameters.ZeroParamStatus.INFLIGHT": lambda v: v.name == "INFLIGHT",
    "deepspeed.runtime.zero.partition_parameters._orig_torch_arange": lambda v: v is torch.arange,
}


@pytest.mark.parametrize("name", VALUES)
def test_value(name: str) -> None:
    assert VALUES[name](found(name))


ACCELERATOR = """
_name communication_backend_name manual_seed_all Event Stream current_device device_count set_device synchronize
empty_cache is_available current_device_name device_name memory_allocated max_memory_allocated memory_reserved
max_memory_reserved reset_peak_memory_stats total_memory""".split()


@pytest.mark.parametrize("name", ACCELERATOR)
def test_accelerator(name: str) -> None:
    """deepspeed.accelerator.abstract_accelerator.DeepSpeedAccelerator: in the class, and answered by the CPU's."""
    assert name == "_name" or hasattr(
        found("deepspeed.accelerator.abstract_accelerator.DeepSpeedAccelerator"), name
    )
    accelerator = deepspeed.get_accelerator()
    if accelerator._name != "cpu":
        pytest.skip("what the CPU answers")
    expected = {
        "communication_backend_name": "gloo",
        "current_device_name": "cpu",
        "device_name": "cpu",
        "is_available": True,
    }
    if name in ("Event", "Stream", "_name"):
        assert hasattr(accelerator, name)
    else:
        value = getattr(accelerator, name)(*({"manual_seed_all": [1], "set_device": [0]}.get(name, [])))
        assert value == expected.get(name, value)


# ------------------------------------------------------------------------------------------- the rest

LAUNCHER_FLAGS = """
--hostfile --include --exclude --num_nodes --num_gpus --master_addr --master_port --node_rank --launcher
--launcher_args --no_ssh --no_ssh_check --no_local_rank --no_python --module --force_multi --bind_cores_to_rank
--autotuning""".split()


@pytest.mark.parametrize("flag", LAUNCHER_FLAGS)
def test_launcher_flag(flag: str) -> None:
    """CLI: deepspeed"""
    from deepspeed.launcher.runner import main

    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and flag in text.getvalue()


def test_report_command() -> None:
    """CLI: ds_report"""
    from deepspeed.env_report import cli_main

    assert callable(cli_main)


def test_config_arguments() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    assert parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json"]).deepspeed_config == "x.json"


def test_aio_handle(tmp_path: Path) -> None:
    """aio handle: new_cpu_locked_tensor, free_cpu_locked_tensor, sync_pread, sync_pwrite"""
    handle = found("deepspeed.ops.op_builder.AsyncIOBuilder")().load().aio_handle(4096, 4, False, False, 1)
    written = handle.new_cpu_locked_tensor(4096, torch.empty(0, dtype=torch.uint8))
    written.copy_(torch.arange(4096) % 251)
    read = handle.new_cpu_locked_tensor(4096, torch.empty(0, dtype=torch.uint8))
    assert handle.sync_pwrite(written, os.fspath(tmp_path / "data")) == 1
    assert handle.sync_pread(read, os.fspath(tmp_path / "data")) == 1
    assert torch.equal(read, written)
    assert handle.free_cpu_locked_tensor(written) and handle.free_cpu_locked_tensor(read)
