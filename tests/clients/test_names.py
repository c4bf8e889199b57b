"""Detection, version gates, config plumbing, and the names and behaviour that clients rely on without asking."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from packaging.version import Version

import deepspeed
from tests.clients.kit import auto_config, clean_clients
from tests.pool import distributed

pytest.importorskip("transformers", reason="the clients extra is not installed")
pytest.importorskip("accelerate", reason="the clients extra is not installed")

NAMES = """
deepspeed.DeepSpeedEngine deepspeed.__version__ deepspeed.accelerator.get_accelerator deepspeed.checkpointing.checkpoint
deepspeed.checkpointing.configure deepspeed.checkpoint.utils.clone_tensors_for_torch_save deepspeed.comm.get_rank
deepspeed.comm.init_distributed deepspeed.comm.is_initialized deepspeed.init_distributed deepspeed.initialize
deepspeed.launcher.runner.DEEPSPEED_ENVIRONMENT_NAME deepspeed.moe.layer.MoE deepspeed.ops.adagrad.DeepSpeedCPUAdagrad
deepspeed.ops.adam.DeepSpeedCPUAdam deepspeed.ops.adam.FusedAdam deepspeed.ops.lion.DeepSpeedCPULion
deepspeed.runtime.base_optimizer.DeepSpeedOptimizer deepspeed.runtime.engine.DeepSpeedEngine
deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES deepspeed.runtime.utils.move_to_device
deepspeed.runtime.zero.partition_parameters.ZeroParamStatus
deepspeed.runtime.zero.partition_parameters._orig_torch_arange
deepspeed.runtime.zero.partition_parameters.get_accelerator
deepspeed.runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor deepspeed.utils.groups
deepspeed.utils.groups._get_sequence_parallel_group deepspeed.utils.groups._get_sequence_parallel_rank
deepspeed.utils.groups._get_sequence_parallel_world_size deepspeed.utils.logger deepspeed.utils.logging.logger
deepspeed.utils.safe_get_full_fp32_param deepspeed.utils.safe_get_full_grad deepspeed.utils.set_z3_leaf_modules
deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
deepspeed.utils.zero_to_fp32.get_model_state_file deepspeed.utils.zero_to_fp32.get_optim_files
deepspeed.zero.GatheredParameters deepspeed.zero.Init deepspeed.zero.register_external_parameter
""".split()


@pytest.mark.parametrize("path", NAMES)
def test_name_resolves_by_attribute(path: str) -> None:
    """Clients write dotted access after `import deepspeed` alone."""
    found: Any = deepspeed
    for part in path.split(".")[1:]:
        found = (
            getattr(found, part) if hasattr(found, part) else importlib.import_module(path.rpartition(".")[0])
        )
    assert found is not None or path.endswith("arange")


def test_clients_see_the_distribution() -> None:
    from accelerate.utils import compare_versions, is_deepspeed_available
    from transformers.integrations import is_deepspeed_available as seen_by_transformers
    from transformers.utils.versions import require_version

    assert is_deepspeed_available() and seen_by_transformers()
    installed = importlib.metadata.version("deepspeed")
    assert installed == str(deepspeed.__version__) and Version(installed) >= Version("0.18.2")
    assert compare_versions("deepspeed", ">=", "0.18.2")
    require_version("deepspeed>=0.9.3")


def test_import_is_quiet_and_starts_nothing() -> None:
    script = (
        "import warnings; warnings.simplefilter('error', FutureWarning)\n"
        "import deepspeed, torch.distributed as dist, threading\n"
        "deepspeed.zero, deepspeed.comm, deepspeed.utils, deepspeed.DeepSpeedEngine\n"
        "assert not dist.is_initialized() and threading.active_count() == 1"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stdout and not done.stderr, done.stderr


def test_logger() -> None:
    from deepspeed.utils import logger
    from deepspeed.utils.logging import logger as same

    assert logger is same and not logger.propagate and logger.level == logging.WARNING


def test_signatures_that_clients_inspect() -> None:
    engine = deepspeed.DeepSpeedEngine
    assert "exclude_frozen_parameters" in inspect.signature(engine.save_checkpoint).parameters
    assert "scale_wrt_gas" in inspect.signature(engine.backward).parameters
    for name in ("param_groups", "defaults", "state"):  # Lightning takes what has them for an optimizer
        assert not hasattr(engine, name)


@distributed(world_size=1)
def test_hf_config_and_auto() -> None:
    """Transformers' own view of a config, and every "auto" filled from the arguments."""
    from transformers import TrainingArguments
    from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

    with clean_clients():
        keep = HfDeepSpeedConfig(auto_config(3))
        assert is_deepspeed_zero3_enabled() and keep.is_zero3() and not keep.is_offload()
        args = TrainingArguments(
            output_dir="unused",
            deepspeed=auto_config(2),
            accelerator_config={"use_configured_state": True},
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            learning_rate=0.25,
            max_grad_norm=0.5,
            report_to=[],
        )
        plumbing = args.hf_deepspeed_config
        plumbing.trainer_config_process(args)
        config = plumbing.config
        assert config["train_micro_batch_size_per_gpu"] == 3 and config["train_batch_size"] == 6
        assert config["optimizer"]["params"]["lr"] == 0.25 and config["gradient_clipping"] == 0.5


@distributed(world_size=1)
def test_unresolved_auto_is_no_error_in_zero_init() -> None:
    with deepspeed.zero.Init(config_dict_or_path=auto_config(3) | {"train_micro_batch_size_per_gpu": 1}):
        layer = torch.nn.Linear(4, 4)
    assert layer.weight.numel() == 0 and tuple(layer.weight.ds_shape) == (4, 4)


@distributed(world_size=1)
def test_constructors_are_wrapped_through_the_module_by_keyword() -> None:
    """Transformers replaces the wrapper to keep the dtype of `arange`; it reads the keyword `target_device`."""
    import deepspeed.runtime.zero.partition_parameters as names

    original, seen = names.zero_wrapper_for_fp_tensor_constructor, {}

    def spy(fn: Any, *args: Any, **kwargs: Any) -> Any:
        seen[fn.__name__] = (args, set(kwargs))
        return original(fn, *args, **kwargs)

    names.zero_wrapper_for_fp_tensor_constructor = spy
    try:
        with deepspeed.zero.Init(dtype=torch.bfloat16):
            assert torch.zeros(2).dtype == torch.bfloat16
    finally:
        names.zero_wrapper_for_fp_tensor_constructor = original
    assert set(seen) == {"tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn"}
    assert all("target_device" in keywords for _, keywords in seen.values())
    assert torch.zeros(2).dtype == torch.float32


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=1)
def test_members_that_clients_read(stage: int) -> None:
    model = torch.nn.Linear(4, 4)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": float("inf"),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "zero_optimization.reduce_bucket_size": 10.0,
        "unknown_section": {},
    }
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config_params=config)
    assert type(engine) is deepspeed.runtime.engine.DeepSpeedEngine and loader is None and scheduler is None
    assert engine.config is config
    for name in ("param_groups", "defaults", "state"):
        assert not hasattr(engine, name)
        assert hasattr(optimizer, name)
    if stage:
        assert optimizer.overflow is False
        flat = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
        assert sum(part.numel() for part in getattr(optimizer, flat)) >= 20
        assert hasattr(optimizer, "fp32_partitioned_groups_flat") == (stage == 3)
        assert hasattr(optimizer, "single_partition_of_fp32_groups") == (stage < 3)
    engine.set_gradient_accumulation_boundary(is_boundary=True)
    engine.backward(engine(torch.ones(1, 4)).sum(), scale_wrt_gas=False)
    engine.step()
    assert float(engine.get_global_grad_norm()) > 0
    engine.lr_scheduler = None


@distributed(world_size=1)
def test_gathering_is_tolerant() -> None:
    """Generators, plain tensors, buffers, duplicates, nothing at all, nested blocks, rebinding inside."""
    with deepspeed.zero.Init():
        model = torch.nn.Linear(4, 4)
    model.weight._is_hf_initialized = True
    gather = deepspeed.zero.GatheredParameters
    with gather([]), gather(model.parameters()), gather([model.weight, model.weight, torch.ones(2)]):
        assert model.weight.shape == (4, 4)
        with gather(model.weight, modifier_rank=None):
            assert model.weight.shape == (4, 4)
        assert model.weight.shape == (4, 4)
    assert model.weight.numel() == 0 and model.weight._is_hf_initialized
    kept = model.weight
    with gather([kept, torch.nn.Parameter(torch.ones(1))], modifier_rank=0):
        model.weight.data.fill_(2.0)
        model.weight = torch.nn.Parameter(torch.zeros(2, 2))
    with gather(kept):
        assert torch.equal(kept, torch.full((4, 4), 2.0))


@distributed(world_size=1)
def test_schedules_that_clients_configure() -> None:
    """`get_last_lr` before a step, and the text Transformers looks for; a warm-up of 0 steps."""
    from deepspeed.runtime.lr_schedules import WarmupLR

    schedule = WarmupLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), warmup_num_steps=0)
    try:
        schedule.get_last_lr()
    except AssertionError as error:
        assert "need to call step" in str(error)
    with pytest.raises(ValueError, match="warmup_num_steps"):
        WarmupLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), warmup_num_steps=-5)


def test_cpu_optimizers() -> None:
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.lion import DeepSpeedCPULion

    for kind, keywords in (
        (DeepSpeedCPUAdam, {"adamw_mode": True}),
        (DeepSpeedCPUAdagrad, {}),
        (DeepSpeedCPULion, {}),
    ):
        param = torch.nn.Parameter(torch.ones(8))
        optimizer = kind([param], lr=0.1, **keywords)
        param.grad = torch.ones(8)
        optimizer.step()
        assert isinstance(optimizer, torch.optim.Optimizer) and (param < 1).all()
