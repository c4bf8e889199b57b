"""Offload changes only where state is kept: the same losses, norms and weights, bit for bit."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import shutil
import signal
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.compat.offload_states import get_state_devices
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.sections.offload import OffloadStateTypeEnum
from deepspeed.ops.aio.engine import AioFailure, AioOptions
from deepspeed.zero.gathering import param_storage, sharded_model
from deepspeed.zero.gradients import factory
from deepspeed.zero.offload import state_moves, swap_file, tiers
from deepspeed.zero.offload.swap_file import SwapFile
from deepspeed.zero.offload.tiers import OffloadedTier, device_share
from deepspeed.zero.states.store import ResidentTier
from tests import forked
from tests.pool import distributed
from tests.zero.models import assert_same, batch, config_for, engine_losses, make_zoo

STEPS = 5


def offloaded(config: dict[str, Any], folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    zero = {**config["zero_optimization"], "sub_group_size": 100}
    for name, section in sections.items():
        path = {"nvme_path": str(folder)} if section["device"] == "nvme" else {}
        zero[name] = {**path, **section}
    return {**config, "zero_optimization": zero}


def plain_config(stage: int, precision: str = "fp32", **options: Any) -> dict[str, Any]:
    config = config_for(stage, stage3_param_persistence_threshold=0, **options)
    return {**config, "bf16": {"enabled": True}} if precision == "bf16" else config


@contextlib.contextmanager
def pretend_device() -> Iterator[None]:
    """Take the CPU for a device whose memory is not host memory: the paths of a GPU, with plain copies."""
    modules = (param_storage, sharded_model, state_moves, tiers, factory)
    saved = [(module, module.has_own_memory) for module in modules]
    for module in modules:
        module.has_own_memory = lambda _: True
    try:
        yield
    finally:
        for module, function in saved:
            module.has_own_memory = function


def assert_equal_runs(left: Any, right: Any) -> None:
    assert (left[0], left[2]) == (right[0], right[2])
    assert_same(left[1], right[1])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=[1, 2])
def test_state_on_storage(world_size: int, stage: int, precision: str, tmp_path: Path) -> None:
    config = plain_config(stage, precision, gas=2)
    swapped = offloaded(config, tmp_path, offload_optimizer={"device": "nvme"})
    expected = engine_losses(make_zoo, config, STEPS, groups=True)
    assert_equal_runs(engine_losses(make_zoo, swapped, STEPS, groups=True), expected)
    assert not list(tmp_path.rglob("deepspeed_swap*"))


@pytest.mark.slow
@pytest.mark.parametrize("stage, params", [(2, "none"), (3, "none"), (3, "cpu"), (3, "nvme")])
@pytest.mark.parametrize("optimizer", ["cpu", "nvme"])
@distributed(world_size=2, timeout=240)
def test_a_hundred_steps(stage: int, optimizer: str, params: str, tmp_path: Path) -> None:
    config = plain_config(stage)
    sections: dict[str, Any] = {"offload_optimizer": {"device": optimizer}}
    if params != "none":
        sections["offload_param"] = {"device": params, "max_in_cpu": 0}
    expected = engine_losses(make_zoo, config, 100)
    assert_equal_runs(engine_losses(make_zoo, offloaded(config, tmp_path, **sections), 100), expected)
    if optimizer == "cpu":
        with pretend_device():
            found = engine_losses(make_zoo, offloaded(config, tmp_path, **sections), 100)
        assert_equal_runs(found, expected)


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("write", [True, False])
@distributed(world_size=1)
def test_with_and_without_pipelining(read: bool, write: bool, tmp_path: Path) -> None:
    section = {"device": "nvme", "pipeline_read": read, "pipeline_write": write}
    config = plain_config(2, "bf16")
    expected = engine_losses(make_zoo, config, STEPS)
    assert_equal_runs(
        engine_losses(make_zoo, offloaded(config, tmp_path, offload_optimizer=section), STEPS), expected
    )


@pytest.mark.parametrize("optimizer", [None, "nvme"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@distributed(world_size=[1, 2])
def test_parameters_on_storage(
    world_size: int, precision: str, optimizer: str | None, tmp_path: Path
) -> None:
    config = plain_config(3, precision)
    # budgets 0: every shard is read again for every use
    config["zero_optimization"] |= {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
    sections: dict[str, Any] = {"offload_param": {"device": "nvme", "max_in_cpu": 0}}
    if optimizer:
        sections["offload_optimizer"] = {"device": optimizer}
    expected = engine_losses(make_zoo, config, STEPS)
    assert_equal_runs(engine_losses(make_zoo, offloaded(config, tmp_path, **sections), STEPS), expected)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage, ratio", [(1, 1.0), (2, 1.0), (3, 1.0), (3, 0.5)])
@distributed(world_size=[1, 2])
def test_host_memory_beside_a_device(
    world_size: int, stage: int, precision: str, ratio: float, tmp_path: Path
) -> None:
    config = plain_config(stage, precision, gas=2)
    sections: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "ratio": ratio}}
    if stage == 3:
        sections["offload_param"] = {"device": "cpu"}
    expected = engine_losses(make_zoo, config, STEPS, groups=True)
    with pretend_device():
        found = engine_losses(make_zoo, offloaded(config, tmp_path, **sections), STEPS, groups=True)
    assert_equal_runs(found, expected)


@distributed(world_size=2)
def test_gradients_leave_the_device(tmp_path: Path) -> None:
    """Host link: the gradient shard once per micro-batch down, the weights once per step up."""
    config = offloaded(plain_config(2, "bf16"), tmp_path, offload_optimizer={"device": "cpu"})
    with pretend_device():
        engine, *_ = deepspeed.initialize(model=make_zoo(), config=config)
        buckets = engine.core.reducer.buckets
        engine.backward(engine(batch(0, 0, engine.global_rank)))
        copies = buckets[0].host
        assert copies is not None
        assert copies.bytes == sum(2 * bucket.layout.shard_numel for bucket in buckets)
        used = engine.core.reducer.used
        updated = sum(o.fragment.numel for o in engine.core.store.fragments if used[o.param_index])
        engine.step()
        assert engine.core.store.tier.bytes_to_device == 2 * updated
        for sub_group in engine.core.store.tier.sub_groups:
            staged = list(sub_group.views.values())
            assert sum(view.numel() for view in staged) in (
                0,
                sum(o.fragment.numel for o in sub_group.fragments),
            )
            assert {view.dtype for view in staged} <= {torch.bfloat16}
        assert any(sub_group.views for sub_group in engine.core.store.tier.sub_groups)


@pytest.mark.parametrize("stage, filed", [(1, False), (2, True), (3, True)])
@distributed(world_size=2)
def test_gradients_rest_on_storage(stage: int, filed: bool, tmp_path: Path) -> None:
    """From stage 2 on what is kept of a gradient is a shard, and it takes no memory of the process."""
    config = offloaded(plain_config(stage, "bf16", gas=2), tmp_path, offload_optimizer={"device": "nvme"})
    engine, *_ = deepspeed.initialize(model=make_zoo(), config=config)
    swap = engine.core.store.tier.swap
    for micro in range(2):
        engine.backward(engine(batch(0, micro, engine.global_rank)))
        engine.core.reducer.finish()
        assert {swap.holds(t) for bucket in engine.core.reducer.buckets for t in bucket.held()} == {filed}
    engine.step()


@distributed(world_size=1)
def test_disk_that_fills_up_in_backward(tmp_path: Path) -> None:
    """The space of gradients is taken at the first backward: an error there, no signal from the mapping later."""
    config = offloaded(plain_config(2, "bf16"), tmp_path, offload_optimizer={"device": "nvme"})
    with mock.patch.object(swap_file, "GROW_BYTES", swap_file.PAGE):
        engine, *_ = deepspeed.initialize(model=make_zoo(), config=config)
        full = OSError(errno.ENOSPC, "No space left on device")
        with (
            mock.patch("os.posix_fallocate", side_effect=full),
            pytest.raises(OSError, match="offload_optimizer.nvme_path.*has no room for"),
        ):
            engine.backward(engine(batch(0, 0, 0)))
            engine.step()


@distributed(world_size=1)
def test_cpu_state_of_a_cpu_run_does_not_move(tmp_path: Path) -> None:
    config = offloaded(plain_config(2), tmp_path, offload_optimizer={"device": "cpu"})
    engine, *_ = deepspeed.initialize(model=make_zoo(), config=config)
    assert type(engine.core.store.tier) is ResidentTier


def test_share_of_the_device() -> None:
    from deepspeed.zero.layout import CutPolicy, ParamSpec, cut

    specs = [
        ParamSpec(index=i, name=str(i), numel=1600, dtype=torch.float32, unit=i, wire_dtype=torch.float32)
        for i in range(10)
    ]
    layouts = cut(specs, CutPolicy(max_numel=1600), 2)
    assert device_share(layouts, 1.0) == frozenset()
    assert device_share(layouts, 0.7) == {0, 1, 2}
    assert device_share(layouts, 0.0) == set(range(10))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "Lion", "Adagrad", "Adamax"])
@distributed(world_size=2)
def test_elementwise_optimizers_can_be_swapped(name: str, tmp_path: Path) -> None:
    config = plain_config(2, "bf16")
    config["optimizer"] = {"type": name, "params": {"lr": 1e-3}}
    expected = engine_losses(make_zoo, config, STEPS)
    swapped = offloaded(config, tmp_path, offload_optimizer={"device": "nvme"})
    assert_equal_runs(engine_losses(make_zoo, swapped, STEPS), expected)


@pytest.mark.parametrize("name", ["Lamb", "Muon"])
@distributed(world_size=2)
def test_optimizers_of_whole_tensors_can_be_swapped(name: str, tmp_path: Path) -> None:
    config = plain_config(2)
    config["optimizer"] = {"type": name, "params": {"lr": 1e-3}}
    expected = engine_losses(make_zoo, config, STEPS)
    swapped = offloaded(config, tmp_path, offload_optimizer={"device": "nvme"})
    assert_equal_runs(engine_losses(make_zoo, swapped, STEPS), expected)


def trained(config: dict[str, Any], steps: range, load: Path | None = None, save: Path | None = None) -> Any:
    engine, *_ = deepspeed.initialize(model=make_zoo(), config=config)
    if load is not None:
        assert engine.load_checkpoint(str(load))[0] is not None
    losses = []
    for step in steps:
        loss = engine(batch(step, 0, engine.global_rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if save is not None:
        engine.save_checkpoint(str(save))
    engine.destroy()
    return losses


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@distributed(world_size=2)
def test_checkpoints_go_between_tiers(precision: str, tmp_path: Path) -> None:
    plain = plain_config(2, precision)
    nvme: dict[str, Any] = {"device": "nvme"}
    swapped = offloaded(plain_config(3, precision), tmp_path, offload_optimizer=nvme)
    both = offloaded(
        plain_config(3, precision), tmp_path, offload_optimizer=nvme, offload_param={**nvme, "max_in_cpu": 0}
    )
    expected = trained(plain, range(6))
    assert trained(swapped, range(2), save=tmp_path / "a") == expected[:2]
    assert trained(both, range(2, 4), load=tmp_path / "a", save=tmp_path / "b") == expected[2:4]
    assert trained(plain, range(4, 6), load=tmp_path / "b") == expected[4:]
    assert trained(plain, range(4), save=tmp_path / "c") == expected[:4]
    assert trained(swapped, range(4, 6), load=tmp_path / "c") == expected[4:]


@distributed(world_size=2)
def test_state_can_be_read_and_written_where_it_rests(tmp_path: Path) -> None:
    config = offloaded(plain_config(3), tmp_path, offload_optimizer={"device": "nvme"})
    engine, *_ = deepspeed.initialize(model=make_zoo(), config=config)
    assert isinstance(engine.core.store.tier, OffloadedTier)
    for step in range(2):
        engine.backward(engine(batch(step, 0, engine.global_rank)))
        engine.step()
    weight = engine.module.twice.weight
    moment = deepspeed.utils.safe_get_full_optimizer_state(weight, "exp_avg")
    assert moment.abs().max() > 0
    deepspeed.utils.safe_set_full_optimizer_state(weight, torch.ones(12, 12), "exp_avg")
    assert torch.equal(deepspeed.utils.safe_get_full_optimizer_state(weight, "exp_avg"), torch.ones(12, 12))
    deepspeed.utils.safe_set_full_optimizer_state(weight, torch.ones(12, 12), "exp_avg_sq")
    deepspeed.utils.safe_set_full_fp32_param(weight, torch.full((12, 12), 0.5))
    engine.backward(engine(batch(2, 0, engine.global_rank)))
    engine.step()
    after = deepspeed.utils.safe_get_full_optimizer_state(weight, "exp_avg")
    assert 0.8 < after.mean() < 1.0  # 0.9 * 1 + 0.1 * a clipped gradient
    master = deepspeed.utils.safe_get_full_fp32_param(weight)
    assert 0.4 < master.mean() < 0.5
    engine.destroy()


@pytest.mark.parametrize("section", ["offload_optimizer", "offload_param"])
@distributed(world_size=1)
def test_folder_that_is_not_there(section: str, tmp_path: Path) -> None:
    """It may be where a disk was to be mounted: it is not made, and the system's disk does not fill up."""
    config = offloaded(plain_config(3), tmp_path / "disk" / "nvme", **{section: {"device": "nvme"}})
    with pytest.raises(
        FileNotFoundError, match=f"zero_optimization.{section}.nvme_path='.*nvme': the folder and its parent"
    ):
        deepspeed.initialize(model=make_zoo(), config=config)
    assert not (tmp_path / "disk").exists()


@distributed(world_size=2)
def test_the_last_folder_of_a_path_is_made(tmp_path: Path) -> None:
    """As scripts written for release 0.19 expect."""
    config = offloaded(plain_config(3), tmp_path / "nvme", offload_optimizer={"device": "nvme"})
    engine = deepspeed.initialize(model=make_zoo(), config=config)[0]
    assert (tmp_path / "nvme").is_dir()
    engine.destroy()


@pytest.mark.parametrize("section", ["offload_optimizer", "offload_param"])
@distributed(world_size=1)
def test_folder_that_cannot_be_used(section: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    config = offloaded(plain_config(3), file, **{section: {"device": "nvme"}})
    with pytest.raises(OSError, match=f"zero_optimization.{section}.nvme_path.*choose another folder"):
        deepspeed.initialize(model=make_zoo(), config=config)


@distributed(world_size=1)
def test_full_disk(tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    config = offloaded(plain_config(2, "bf16"), tmp_path, offload_optimizer={"device": "nvme"})
    message = "offload_optimizer.nvme_path.*has no room for"
    with mock.patch("os.posix_fallocate", full), pytest.raises(OSError, match=message) as caught:
        deepspeed.initialize(model=make_zoo(), config=config)
    assert caught.value.errno == errno.ENOSPC


@distributed(world_size=1)
def test_nothing_stays_when_an_engine_goes(tmp_path: Path) -> None:
    import os

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    config = offloaded(
        plain_config(3, "bf16"),
        tmp_path,
        offload_optimizer={"device": "nvme"},
        offload_param={"device": "nvme", "max_in_cpu": 0},
    )
    trained(config, range(2))
    gc.collect()
    before = descriptors()
    for _ in range(3):
        trained(config, range(2))
    gc.collect()
    assert descriptors() <= before


@distributed(world_size=[1, 2])
def test_model_built_on_storage(world_size: int, tmp_path: Path) -> None:
    def build(config: dict[str, Any]) -> torch.nn.Module:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = make_zoo()
        assert all(
            param.ds_tensor.numel() == -(-param.ds_numel // world_size) for param in model.parameters()
        )
        return model

    config = plain_config(3, "bf16")
    swapped = offloaded(config, tmp_path, offload_param={"device": "nvme", "max_in_cpu": 0})
    expected = engine_losses(partial(build, config), config, STEPS)
    assert_equal_runs(engine_losses(partial(build, swapped), swapped, STEPS), expected)


@distributed(world_size=1)
def test_building_on_storage_needs_a_folder() -> None:
    with pytest.raises(DeepSpeedConfigError, match="offload_param.nvme_path"):
        deepspeed.zero.Init(remote_device="nvme")


@pytest.mark.parametrize("include", [None, ["hp_params"], ["optim_states", "lp_grads"], ["lp_params"]])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=2)
def test_states_leave_the_device_and_come_back(stage: int, precision: str, include: list[str] | None) -> None:
    config = plain_config(stage, precision)
    expected = trained(config, range(4))
    with pretend_device():
        engine, *_ = deepspeed.initialize(model=make_zoo(), config=config)
        losses = []
        for step in range(4):
            kinds = None if include is None else [OffloadStateTypeEnum(kind) for kind in include]
            masters = engine.core.store.fragments[0].master.data_ptr()
            engine.offload_states(include=kinds)
            moved = engine.core.store.fragments[0].master.data_ptr() != masters
            if include in (None, ["hp_params"]):
                assert moved == (
                    precision == "bf16" or include is None
                )  # in fp32 the weights are the masters
            with pytest.raises(RuntimeError, match=r"are offloaded: call engine.reload_states\(\)"):
                engine(batch(step, 0, engine.global_rank))
            engine.reload_states()
            loss = engine(batch(step, 0, engine.global_rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
    assert losses == expected


def weight_storages(engine: Any) -> list[weakref.ref]:
    """The memory of the weights that this rank holds. References die with it, not with the objects made here.

    None at stage 3 on several ranks: on CPUs those read each other's shards, whose server keeps them."""
    if engine.sharded is not None and engine.world_size > 1:
        return []
    held = [param for param in engine.parameters() if param.requires_grad or hasattr(param, "ds_tensor")]
    tensors = [*held, *(getattr(param, "ds_tensor", param) for param in held)]
    return [weakref.ref(tensor.untyped_storage()) for tensor in tensors if tensor.numel()]


def in_memory(reference: weakref.ref) -> bool:
    storage = reference()
    return storage is not None and storage.nbytes() > 0


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=[1, 2])
def test_weights_leave_nothing_on_the_device(world_size: int, stage: int, persistent: bool) -> None:
    config = plain_config(stage, "bf16")
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 10_000 if persistent else 0
    with pretend_device():
        engine, *_ = deepspeed.initialize(model=make_zoo(), config=config)
        before = weight_storages(engine)
        assert all(map(in_memory, before))
        engine.offload_states(include=[OffloadStateTypeEnum.lp_params])
        assert not any(map(in_memory, before))
        engine.reload_states()
        engine.backward(engine(batch(0, 0, engine.global_rank)))
        engine.step()
        for param in engine.parameters():
            if stage == 3:  # the documented attribute follows the weights
                assert torch.equal(param.ds_tensor, param.ds_owner.local_part(param.ds_position))
        assert not any(bucket.detached() for bucket in engine.core.param_buckets)
        engine.destroy()


@distributed(world_size=1)
def test_a_replaced_weight_is_still_noticed_after_a_move() -> None:
    with pretend_device():
        engine, *_ = deepspeed.initialize(model=make_zoo(), config=plain_config(2))
        param = max((p for p in engine.parameters() if p.requires_grad), key=torch.numel)
        param.data = torch.full_like(param, 0.5)
        engine.offload_states(include=["lp_params"])
        engine.reload_states()
        assert sum(len(bucket.detached()) for bucket in engine.core.param_buckets) == 1
        assert param.eq(0.5).all()
        engine.destroy()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@distributed(world_size=[1, 2])
def test_weights_of_an_engine_without_optimizer(world_size: int, precision: str, persistent: bool) -> None:
    """As of a reference model, which gives the device to the policy in between."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 10_000 if persistent else 0,
        },
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    inputs = torch.linspace(-1, 1, 26).view(2, 13)
    with pretend_device(), torch.no_grad():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(13, 13), torch.nn.ReLU(), torch.nn.Linear(13, 13))
        engine, *_ = deepspeed.initialize(model=model.requires_grad_(False), config=config)
        engine.eval()
        expected = engine(inputs)
        engine.reload_states()  # nothing is away
        for include in (None, [OffloadStateTypeEnum.lp_params]):
            memory = weight_storages(engine)
            for _ in range(2):
                engine.offload_states(include=include)
            assert not any(map(in_memory, memory))
            assert get_state_devices(engine, OffloadStateTypeEnum.lp_params) == {torch.device("cpu")}
            with pytest.raises(RuntimeError, match=r"lp_params.*call engine.reload_states"):
                engine(inputs)
            for _ in range(2):
                engine.reload_states()
            assert torch.equal(engine(inputs), expected)
        engine.offload_states(include=[])
        assert torch.equal(engine(inputs), expected)
        engine.offload_states()
        engine.destroy()  # while they are away
    assert torch.equal(model(inputs.to(model[0].weight.dtype)), expected)


@distributed(world_size=1)
def test_states_that_cannot_be_moved(tmp_path: Path) -> None:
    config = offloaded(plain_config(3), tmp_path, offload_param={"device": "cpu"})
    engine, *_ = deepspeed.initialize(model=make_zoo(), config=config)
    with pytest.raises(AssertionError, match="offload_param"):
        engine.offload_states()
    engine, *_ = deepspeed.initialize(model=make_zoo(), config=plain_config(0))
    with pytest.raises(AssertionError, match="ZeRO stage 1, 2 or 3"):
        engine.offload_states()
    engine, *_ = deepspeed.initialize(model=make_zoo(), config=plain_config(2))
    with pytest.raises(ValueError, match="only be moved to 'cpu'"):
        engine.offload_states(device="nvme")


@distributed(world_size=1)
def test_folder_that_vanishes_while_training(tmp_path: Path) -> None:
    """The open file does not need its folder."""
    config = plain_config(3, "bf16")
    nvme: dict[str, Any] = {"device": "nvme"}
    (tmp_path / "a").mkdir()
    swapped = offloaded(
        config, tmp_path / "a", offload_optimizer=nvme, offload_param={**nvme, "max_in_cpu": 0}
    )
    expected = trained(config, range(4))
    engine, *_ = deepspeed.initialize(model=make_zoo(), config=swapped)
    shutil.rmtree(tmp_path / "a")
    losses = []
    for step in range(4):
        loss = engine(batch(step, 0, 0))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses == expected


KILLED = """
import os, signal, sys, torch, deepspeed
sys.path.insert(0, {root!r})
from tests.zero.models import batch, make_zoo
engine, *_ = deepspeed.initialize(model=make_zoo(), config={config!r})
for step in range(3):
    engine.backward(engine(batch(step, 0, 0)))
    engine.step()
print("trained", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_after_a_kill(tmp_path: Path) -> None:
    nvme: dict[str, Any] = {"device": "nvme"}
    config = offloaded(plain_config(3, "bf16"), tmp_path, offload_optimizer=nvme, offload_param=nvme)
    root = str(Path(__file__).parents[2])
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    for _ in range(2):  # the second run starts where the first was killed
        script = KILLED.format(root=root, config=config)
        done = forked.run(["-c", script], env=environment)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert "trained" in done.stdout
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@distributed(world_size=1)
def test_a_failed_write_names_the_file(tmp_path: Path) -> None:
    """A disk that fails during the step: an OSError with errno and folder, and the state rests again."""
    config = offloaded(plain_config(2, "bf16"), tmp_path, offload_optimizer={"device": "nvme"})
    engine, *_ = deepspeed.initialize(model=make_zoo(), config=config)
    engine.backward(engine(batch(0, 0, 0)))
    engine.step()
    swap = engine.core.store.tier.swap
    engine.backward(engine(batch(1, 0, 0)))
    with (
        mock.patch.object(swap._engine, "finish", side_effect=AioFailure(errno.EIO, 4096)),
        pytest.raises(
            OSError, match="Input/output error while .*ing the swap file in .*at byte 4096"
        ) as caught,
    ):
        engine.step()
    assert caught.value.errno == errno.EIO
    assert all(not swap.holds(s.buffer) for s in engine.core.store.tier.slots)
    assert all(swap.holds(owned.master) for owned in engine.core.store.fragments)


@distributed(world_size=2)
def test_weights_on_storage_can_be_edited_evaluated_and_exported(tmp_path: Path) -> None:
    def run(config: dict[str, Any], out: Path) -> tuple[float, dict[str, Any]]:
        engine, *_ = deepspeed.initialize(model=make_zoo(), config=config)
        engine.backward(engine(batch(0, 0, engine.global_rank)))
        engine.step()
        with deepspeed.zero.GatheredParameters(engine.module.twice.weight, modifier_rank=0):
            if engine.global_rank == 0:
                engine.module.twice.weight.data.fill_(0.25)
        engine.eval()
        with torch.inference_mode():
            loss = engine(batch(1, 0, engine.global_rank)).item()
        engine.train()
        engine.backward(engine(batch(2, 0, engine.global_rank)))
        engine.step()
        engine.save_16bit_model(str(out), "model.bin")
        engine.destroy()
        return loss, torch.load(out / "model.bin", weights_only=True)

    config = plain_config(3, "bf16")
    nvme: dict[str, Any] = {"device": "nvme"}
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    swapped = offloaded(config, tmp_path, offload_optimizer=nvme, offload_param={**nvme, "max_in_cpu": 0})
    expected = run(config, tmp_path / "plain")
    found = run(swapped, tmp_path / "swapped")
    assert found[0] == expected[0]
    assert_same(found[1], expected[1])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@distributed(world_size=1)
def test_state_that_was_forgotten_and_made_again(precision: str, tmp_path: Path) -> None:
    """A checkpoint from before the first step drops all state; new tensors may get the old addresses."""
    plain = plain_config(2, precision)
    swapped = offloaded(plain, tmp_path, offload_optimizer={"device": "nvme"})
    trained(plain, range(0), save=tmp_path / "fresh")
    expected = trained(plain, range(5))
    engine, *_ = deepspeed.initialize(model=make_zoo(), config=swapped)
    for again in range(2):
        losses = []
        for step in range(3):
            loss = engine(batch(step, 0, 0))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert losses == expected[:3]
        if not again:
            engine.load_checkpoint(str(tmp_path / "fresh"))
    engine.save_checkpoint(str(tmp_path / "later"))
    assert trained(plain, range(3, 5), load=tmp_path / "later") == expected[3:]


def test_tensors_in_a_file_take_no_descriptor_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small `sub_group_size` makes tens of thousands of them, and a process has 1024 descriptors as a rule."""
    monkeypatch.setattr(swap_file, "GROW_BYTES", 64 * swap_file.PAGE)
    outside = len(os.listdir("/proc/self/fd"))
    swap = SwapFile(tmp_path, AioOptions(), key="key")
    before = len(os.listdir("/proc/self/fd"))
    tensors = [swap.new(n, torch.float32) for n in (100, 3000, 100_000) for _ in range(100)]
    of_large_ones = 100  # the file grows for each
    assert len(os.listdir("/proc/self/fd")) - before < 1.5 * of_large_ones
    for value, tensor in enumerate(tensors):
        swap.finish(swap.write(torch.full_like(tensor, float(value)), tensor))
    assert all(tensor.eq(float(value)).all() for value, tensor in enumerate(tensors))
    swap.close()
    del tensors, tensor
    gc.collect()
    assert (
        len(os.listdir("/proc/self/fd")) == outside
    )  # nor is one kept, and the disk space with it, after them


def test_addresses_that_are_given_out_again(tmp_path: Path) -> None:
    swap = SwapFile(tmp_path, AioOptions(), key="key")
    for value in range(20):
        tensor = swap.new(5000, torch.float32)
        swap.finish(swap.write(torch.full((5000,), float(value)), tensor))
        # The mapping sees what the transfer wrote.
        assert torch.equal(tensor, torch.full((5000,), float(value)))
        del tensor
    kept = [swap.new(n, torch.float32) for n in (1, 5000, 3)]
    offsets = [swap.offset_of(tensor) for tensor in kept]
    assert len(set(offsets)) == 3 and all(offset % 4096 == 0 for offset in offsets)
    assert swap.offset_of(kept[1][100:]) == offsets[1] + 400
    assert not swap.holds(torch.empty(3))
    swap.close()
