"""Documented members of the engine, each by name, including its smaller methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.comm.sparse_tensor import SparseTensor
from deepspeed.engine.surface import EngineSettings
from tests.engine.test_engine import data, make_config, make_model, same, start, weights
from tests.pool import distributed

# API.md area 2: attributes, then getters and what they answer for the config below.
ATTRIBUTES = (
    "module optimizer basic_optimizer lr_scheduler training_dataloader config _config client_optimizer "
    "client_lr_scheduler mpu device local_rank global_rank world_size dp_world_size mp_world_size seq_dp_world_size "
    "global_steps global_samples micro_steps skipped_steps losses monitor timers tput_timer checkpoint_engine "
    "has_moe_layers param_names warn_unscaled_loss enable_backward_allreduce pipeline_parallelism "
    "torch_autocast_z0_gradscaler is_compiled communication_data_type save_non_zero_checkpoint save_zero_checkpoint"
).split()
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "steps_per_print": 7,
    "gradient_clipping": 0.5,
    "gradient_predivide_factor": 2.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.25, "betas": [0.8, 0.9]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    "fp16": {"loss_scale_window": 9, "initial_scale_power": 3, "hysteresis": 4},
    "checkpoint": {"tag_validation": "Fail", "use_node_local_storage": True},
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": 1000,
        "allgather_bucket_size": 2000,
        "sub_group_size": 3000,
        "stage3_max_live_parameters": 4000,
        "stage3_gather_16bit_weights_on_model_save": True,
        "round_robin_gradients": True,
    },
}
ANSWERS: dict[str, Any] = {
    "train_batch_size": 6,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "managed_gradient_accumulation": True,
    "steps_per_print": 7,
    "gradient_clipping": 0.5,
    "gradient_predivide_factor": 2.0,
    "postscale_gradients": True,
    "optimizer_name": "adamw",
    "optimizer_params": {"lr": 0.25, "betas": [0.8, 0.9]},
    "optimizer_legacy_fusion": False,
    "scheduler_name": "WarmupLR",
    "scheduler_params": {"warmup_num_steps": 5},
    "zero_optimization": True,
    "zero_optimization_stage": 2,
    "zero_optimization_partition_gradients": True,
    "zero_optimization_partition_weights": False,
    "zero_reduce_bucket_size": 1000,
    "zero_allgather_bucket_size": 2000,
    "zero_sub_group_size": 3000,
    "zero_max_live_parameters": 4000,
    "zero_gather_16bit_weights_on_model_save": True,
    "zero_round_robin_gradients": True,
    "zero_reduce_scatter": True,
    "zero_offload_optimizer": None,
    "zero_offload_param": None,
    "zero_cpu_offload": False,
    "zero_nvme_offload_optimizer": False,
    "zero_partial_offload": 1.0,
    "cpuadam_cores_perc": 0.9,
    "is_first_weights_partition_group": False,
    "is_sanity_checks_enabled": False,
    "zero_allgather_sequential": False,
    "zero_legacy_stage1": False,
    "zero_log_trace_cache_warnings": False,
    "zero_module_granularity_threshold": 0,
    "zero_save_muon_momentum_buffer_in_memory": False,
    "zeropp_loco_param": None,
    "bf16_master_weights_and_gradients": False,
    "bf16_optimizer_states": False,
    "zero_use_cpu_optimizer": False,
    "super_offload": False,
    "swap_tensor_config": None,
    "fp16_enabled": False,
    "bfloat16_enabled": False,
    "amp_enabled": False,
    "torch_autocast_enabled": False,
    "loss_scale": 0.0,
    "dynamic_loss_scale": True,
    "initial_dynamic_scale": 8.0,
    "dynamic_loss_scale_args": {
        "init_scale": 8,
        "scale_window": 9,
        "delayed_shift": 4,
        "consecutive_hysteresis": False,
        "min_scale": 1,
    },
    "sparse_gradients_enabled": False,
    "wall_clock_breakdown": False,
    "memory_breakdown": False,
    "dump_state": False,
    "log_level": None,
    "dataloader_drop_last": False,
    "checkpoint_tag_validation_enabled": True,
    "checkpoint_tag_validation_fail": True,
    "use_node_local_storage": True,
    "load_universal_checkpoint": False,
    "elasticity_enabled": False,
    "is_elastic_model_parallel_supported": False,
    "pld_enabled": False,
    "eigenvalue_enabled": False,
    "curriculum_enabled_legacy": False,
    "curriculum_learning_enabled": False,
    "data_efficiency_enabled": False,
    "data_sampling_enabled": False,
    "random_ltd_enabled": False,
    "flops_profiler_enabled": False,
    "flops_profiler_profile_step": 1,
    "autotuning_enabled": False,
    "autotuning_metric": "throughput",
    "autotp_size": 0,
    "mics_shard_size": -1,
    "zero_hpz_partition_size": 1,
    "get_compile_time": [],
    "get_pld_theta": None,
    "is_deepcompile_enabled": False,
    "is_deepcompile_active": False,
}


@pytest.mark.parametrize("stage", [0, 1, 3])
@distributed(world_size=2)
def test_who_writes_the_files_of_a_checkpoint(stage: int, tmp_path: Path) -> None:
    engine = start(stage)
    writes = [engine.save_non_zero_checkpoint, engine.save_zero_checkpoint]
    assert writes == [stage == 3 or dist.get_rank() == 0, stage > 0]
    engine.save_checkpoint(str(tmp_path), tag="one")
    expected = {Path(engine._get_ckpt_name(str(tmp_path), "one"))} if writes[0] else set()
    expected |= {Path(engine._get_zero_ckpt_name(str(tmp_path), "one"))} if writes[1] else set()
    dist.barrier()
    assert expected <= set((tmp_path / "one").iterdir())
    engine.save_non_zero_checkpoint = True  # as scripts do that write files themselves
    assert engine.save_non_zero_checkpoint
    engine.destroy()


@distributed(world_size=1)
def test_documented_attributes_and_getters() -> None:
    engine, *_ = deepspeed.initialize(model=make_model(), config=CONFIG)
    missing = object()
    assert [name for name in ATTRIBUTES if getattr(engine, name, missing) is missing] == []
    answers = {name: getattr(engine, name)() for name in ANSWERS}
    assert {name: value for name, value in answers.items() if value != ANSWERS[name]} == {}
    getters = [name for name, member in vars(EngineSettings).items() if callable(member) and name[0] != "_"]
    assert len(getters) >= 114
    for name in getters:
        getattr(engine, name)()
    assert torch.distributed.get_world_size(engine.seq_parallel_group) == 1
    assert [method() for method in engine.get_batch_info()] == [6, 2, 3]
    assert engine.get_type() == [None] and engine.get_mom() == [(0.8, 0.9)]
    assert engine.get_data_types() == (torch.float32, torch.float32)
    assert set(engine.param_names.values()) == set(dict(engine.module.named_parameters()))
    engine.destroy()


@distributed(world_size=1)
def test_members_of_later_features_are_refused_by_name() -> None:
    engine = start(0)
    with pytest.raises(RuntimeError, match="curriculum_learning.enabled=true"):
        engine.set_custom_curriculum_learning_schedule({})
    with pytest.raises(NotImplementedError, match="compiled_autograd_enabled"):
        engine.compile(compiled_autograd_enabled=True)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=2)
def test_coalesced_backwards_are_summed_once(stage: int) -> None:
    engine, reference = start(stage), start(stage)
    rank = dist.get_rank()
    communicator = engine.core.reducer.communicator
    engine.backward(engine(data(9, rank)).square().mean())  # agrees on the order of sums
    engine.zero_grad()
    before = communicator.bytes_sent
    with engine.coalesce_grad_reduction():
        for micro in range(3):
            engine.backward(engine(data(micro, rank)).square().mean())
        assert communicator.bytes_sent == before
    once = communicator.bytes_sent - before
    assert once > 0
    engine.step()
    reference.backward(sum(reference(data(micro, rank)).square().mean() for micro in range(3)))
    reference.step()
    for a, b in zip(weights(engine), weights(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    engine.destroy(), reference.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=2)
def test_allreduce_gradients_finishes_what_no_sync_left(stage: int) -> None:
    engine, reference = start(stage), start(stage)
    rank = dist.get_rank()
    with engine.no_sync():
        engine.backward(engine(data(0, rank)).square().mean())
    engine.allreduce_gradients()
    reference.backward(reference(data(0, rank)).square().mean())
    for e in (engine, reference):
        e.step()
    assert same(weights(engine), weights(reference))
    engine.destroy(), reference.destroy()


@pytest.mark.parametrize("stage", [0, 2])
@distributed(world_size=2)
def test_batch_sizes_change_between_steps(stage: int) -> None:
    engine, reference = start(stage), start(stage, gas=2)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (8, 1)
    engine.set_train_batch_size(16)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (16, 2)
    with pytest.raises(ValueError, match="train_batch_size=12 is not a multiple"):
        engine.set_train_batch_size(12)
    for e in (engine, reference):
        for micro in range(2):
            e.backward(e(data(micro, dist.get_rank())).square().mean())
            e.step()
        assert e.global_steps == 1
    assert same(weights(engine), weights(reference))
    engine.set_train_micro_batch_size(3)
    assert (engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()) == (3, 12)
    engine.destroy(), reference.destroy()


@distributed(world_size=2)
def test_loaders_made_by_the_engine_and_their_post_processing() -> None:
    dataset = list(torch.arange(16.0))
    engine, _, loader, _ = deepspeed.initialize(
        model=make_model(), config=make_config(0), training_data=dataset
    )
    engine.set_data_post_process_func(lambda batch, state: batch * 2)
    halves = torch.cat(list(loader))
    every = [torch.empty_like(halves) for _ in range(2)]
    dist.all_gather(every, halves)
    assert sorted(torch.cat(every).tolist()) == [2.0 * i for i in range(16)]
    other = engine.deepspeed_io(dataset, batch_size=2, route="eval", collate_fn=torch.stack)
    assert len(other) == 4 and next(iter(other)).shape == (2,)
    engine.destroy()


@distributed(world_size=1)
def test_gradients_of_stage_0_can_be_clipped_by_hand() -> None:
    engine = start(0, gradient_clipping=0.01)
    engine.backward(engine(data(0)).square().sum())
    engine.clip_fp32_gradients()
    norm = torch.stack([p.grad.norm() for p in engine.module.parameters()]).norm()
    assert norm.item() == pytest.approx(0.01, rel=1e-4)
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(0.01, rel=1e-4)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2])
@distributed(world_size=2)
def test_the_wire_dtype_set_by_a_trainer(stage: int) -> None:
    """Pipeline trainers set it on the engine. At stage 2 its buffers are made already."""
    engine = start(stage)
    engine.communication_data_type = torch.bfloat16
    engine.backward(engine(data(dist.get_rank())).square().sum())
    plain = make_model()
    for rank in range(2):
        (plain(data(rank)).square().sum() / 2).backward()
    rounded = []
    for param, whole in zip(engine.module.parameters(), plain.parameters(), strict=True):
        found = deepspeed.utils.safe_get_full_grad(param)
        torch.testing.assert_close(found, whole.grad, rtol=1e-2, atol=1e-2)
        rounded.append(torch.equal(found, found.bfloat16().float()))
    assert all(rounded) if stage < 2 else not all(rounded)
    assert engine.communication_data_type is (torch.bfloat16 if stage < 2 else torch.float32)
    engine.destroy()


@distributed(world_size=1)
def test_store_checkpoint_is_save_checkpoint(tmp_path: Path) -> None:
    engine = start(1)
    assert engine.store_checkpoint(str(tmp_path), tag="here") is True
    path, _ = engine.load_checkpoint(str(tmp_path))
    assert path is not None and "here" in path
    with pytest.raises(ValueError):
        engine.save_checkpoint("")
    engine.destroy()


@distributed(world_size=1)
def test_train_and_eval_reach_the_module_and_return_the_engine() -> None:
    engine = start(0, model=nn.Sequential(nn.Dropout(1.0), nn.Linear(8, 2)))
    assert engine.eval() is engine and not engine.module[0].training
    assert engine(data(0)).abs().sum() > 0
    assert engine.train() is engine and engine.module[0].training
    engine.empty_partition_cache()  # nothing to do below stage 3
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_a_destroyed_engine_leaves_an_ordinary_module(stage: int) -> None:
    engine = start(stage)
    engine.backward(engine(data(0, dist.get_rank())).square().mean())
    engine.step()
    module = engine.module
    engine.destroy()
    engine.destroy()  # a second time is nothing
    twin = make_model()
    twin.load_state_dict(module.state_dict())
    for m in (module, twin):
        m.zero_grad()
        m(data(1)).square().mean().backward()
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q) and torch.equal(p.grad, q.grad)
        assert p.untyped_storage().nbytes() == p.numel() * p.element_size()
    with pytest.raises(RuntimeError, match=r"after engine.destroy\(\)"):
        engine.step()


@distributed(world_size=2)
def test_scale_wrt_gas() -> None:
    """The result of `backward` is divided by the accumulation steps, unless the caller has already divided the loss."""
    engine, reference = start(1, gas=2), start(1, gas=2)
    for step in range(4):
        loss = engine(data(step, dist.get_rank())).square().mean()
        assert torch.equal(engine.backward(loss), loss / 2)
        engine.step()
        loss = reference(data(step, dist.get_rank())).square().mean() / 2
        assert reference.backward(loss, scale_wrt_gas=False) is loss
        reference.step()
    assert same(weights(engine), weights(reference))
    engine.destroy(), reference.destroy()


@distributed(world_size=2)
def test_whole_tensors_through_the_optimizer_of_stage_3() -> None:
    engine = start(3)
    weight = engine.module[0].weight
    engine.backward(engine(data(0, dist.get_rank())).square().mean())
    model = make_model()
    sum(model(data(0, rank)).square().mean() for rank in range(2)).div(2).backward()
    expected = model[0].weight.grad
    torch.testing.assert_close(
        engine.optimizer.get_fp32_grad_for_param(weight), expected, rtol=1e-5, atol=1e-7
    )
    assert torch.equal(engine.optimizer.get_full_hp_param(weight), model[0].weight)
    engine.step()
    moment = engine.optimizer.get_full_hp_param(weight, "exp_avg")
    torch.testing.assert_close(moment, 0.1 * expected, rtol=1e-5, atol=1e-7)
    engine.destroy()


@pytest.mark.parametrize("averages", [True, False])
@distributed(world_size=2)
def test_rows_that_a_script_sums_itself(averages: bool) -> None:
    engine, *_ = deepspeed.initialize(model=make_model(), config=make_config())
    engine.gradient_average = averages
    rank = dist.get_rank()
    dense = torch.zeros(6, 3)
    dense[rank] = dense[3] = 1.0 + rank
    dense[4 if rank else 3] = 5.0
    expected = dense.clone()
    dist.all_reduce(expected)
    expected /= 2 if averages else 1
    sparse = SparseTensor(dense)
    assert torch.equal(engine.sparse_allreduce(sparse, engine.data_parallel_group).to_dense(), expected)
    torchs = dense.to_sparse(1)
    engine.sparse_allreduce_no_retain(map(SparseTensor, (dense, torchs)), engine.data_parallel_group)
    assert torch.equal(dense, expected) and torch.equal(torchs.to_dense(), expected)
    lengths = engine.all_gather_scalar(torch.tensor(rank), engine.data_parallel_group)
    assert [int(length) for length in lengths] == [0, 1]
    parts = engine.sparse_all_gather(torch.ones(rank, 2), engine.data_parallel_group)
    assert [tuple(part.shape) for part in parts] == [(0, 2), (1, 2)]
