from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed.config.deepspeed_config as config_module
from deepspeed.base.environment import this_process
from deepspeed.base.logging import logger, this_rank
from deepspeed.config.deepspeed_config import (
    DeepSpeedConfig,
    DeepSpeedConfigError,
    DeepSpeedConfigWriter,
    global_rank,
    world_size,
)
from deepspeed.tools.config.command import check_config
from tests.pool import distributed

LAUNCHER = (
    "WORLD_SIZE",
    "RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE",
    "PMI_RANK",
    "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_RANK",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", said.append)
    return said


def make(**keys: Any) -> DeepSpeedConfig:
    return DeepSpeedConfig({"train_batch_size": 8, **keys})


def test_defaults_of_the_seam() -> None:
    config = make()
    expected = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": True,
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "gradient_allreduce_op": "mean",
        "communication_data_type": None,
        "seq_parallel_communication_data_type": torch.float32,
        "sparse_gradients_enabled": False,
        "disable_allgather": False,
        "optimizer_name": None,
        "optimizer_params": None,
        "optimizer_legacy_fusion": False,
        "scheduler_name": None,
        "scheduler_params": None,
        "zero_optimization_stage": 0,
        "zero_enabled": False,
        "zero_allow_untested_optimizer": False,
        "zero_force_ds_cpu_optimizer": True,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "dump_state": False,
        "log_level": None,
        "dataloader_drop_last": False,
        "checkpoint_tag_validation_enabled": True,
        "checkpoint_tag_validation_fail": False,
        "checkpoint_parallel_write_pipeline": False,
        "use_node_local_storage": False,
        "load_universal_checkpoint": False,
        "fp16_enabled": False,
        "bfloat16_enabled": False,
        "amp_enabled": False,
        "amp_params": {},
        "torch_autocast_enabled": False,
        "torch_autocast_dtype": None,
        "grad_accum_dtype": None,
        "param_dtype": None,
        "buffer_dtype": None,
        "pld_enabled": False,
        "curriculum_enabled_legacy": False,
        "data_efficiency_enabled": False,
        "weight_quantization_config": None,
        "global_rank": 0,
        "world_size": 1,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert not config.monitor_config.enabled
    assert config.timers_config.enabled and config.timers_config.synchronized
    assert config.comms_config.comms_logger_enabled is False
    assert config.pipeline == {
        "stages": "auto",
        "partition": "best",
        "seed_layers": False,
        "activation_checkpoint_interval": 0,
        "pipe_partitioned": True,
        "grad_partitioned": True,
        "schedule": "1f1b",  # this and the next are ours
        "max_held": 0,
    }
    assert config.aio_config == {
        "block_size": 1048576,
        "queue_depth": 8,
        "intra_op_parallelism": 1,
        "single_submit": False,
        "overlap_events": True,
        "use_gds": False,
    }


def test_values_arrive() -> None:
    config = make(
        gradient_clipping=0,
        communication_data_type="BF16",
        optimizer={"type": "AdamW", "params": {"lr": 1e-3}},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 0}},
        data_types={"grad_accum_dtype": "fp32", "buffer_dtype": "bf16"},
        fp16={"enabled": True, "loss_scale": 128},
        zero_optimization={"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": True},
        torch_autocast={"dtype": "torch.bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]},
        amp={"enabled": False, "opt_level": "O1"},
        checkpoint={
            "tag_validation": "fail",
            "use_node_local_storage": True,
            "parallel_write": {"pipeline_stage": True},
        },
        comms_logger={"enabled": True, "prof_ops": ["all_reduce"]},
        pipeline={"my_option": 3, "use_reentrant": False},
        steps_per_print=float("inf"),
        compression_training={},
    )
    assert config.gradient_clipping == 0.0
    assert config.communication_data_type is torch.bfloat16
    assert config.seq_parallel_communication_data_type is torch.float32
    assert (config.optimizer_name, config.optimizer_params) == ("adamw", {"lr": 1e-3})
    assert (config.scheduler_name, config.scheduler_params) == ("WarmupLR", {"warmup_num_steps": 0})
    assert (config.grad_accum_dtype, config.buffer_dtype) == (torch.float32, torch.bfloat16)
    assert config.float16_config.loss_scale == 128
    assert config.float16_config.dynamic_loss_scale_args()["min_scale"] == 1
    assert (config.zero_optimization_stage, config.zero_enabled, config.zero_config.overlap_comm) == (
        2,
        True,
        True,
    )
    assert config.torch_autocast.dtype == "bf16" and config.torch_autocast_dtype is torch.bfloat16
    assert config.torch_autocast_lower_precision_safe_modules == ["torch.nn.Linear"]
    assert config.amp.params == {"opt_level": "O1"}
    assert config.checkpoint_tag_validation_fail and config.checkpoint_tag_validation_enabled
    assert config.use_node_local_storage and config.checkpoint_parallel_write_pipeline
    assert config.comms_config.comms_logger_enabled and config.comms_config.comms_logger.prof_ops == [
        "all_reduce"
    ]
    assert config.pipeline["my_option"] == 3 and config.pipeline["use_reentrant"] is False
    assert config.steps_per_print == float("inf")
    assert config._param_dict["gradient_clipping"] == 0 and "fp16" in config._param_dict


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("AdamW", "adamw"),
        ("LAMB", "lamb"),
        ("SGD", "SGD"),
        ("RMSprop", "RMSprop"),
        ("FusedAdam", "FusedAdam"),
    ],
)
def test_optimizer_names(written: str, name: str) -> None:
    assert make(optimizer={"type": written}).optimizer_name == name


def test_sizes_that_scripts_compute() -> None:
    zero = make(zero_optimization={"stage": 3, "stage3_prefetch_bucket_size": 0.9 * 64 * 64}).zero_config
    assert zero.prefetch_bucket_size == 3686
    for wrong in (True, -0.5, float("inf")):
        with pytest.raises(DeepSpeedConfigError, match="stage3_prefetch_bucket_size"):
            make(zero_optimization={"stage": 3, "stage3_prefetch_bucket_size": wrong})


def test_null_sections_count_as_absent() -> None:
    config = make(
        optimizer=None,
        scheduler=None,
        comms_logger=None,
        elasticity=None,
        zero_optimization={"offload_param": None},
    )
    assert config.optimizer_name is None and config.scheduler_name is None


# ------------------------------------------------------------------------------------------------- "auto"

TRAINER_CONFIG: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "none", "nvme_path": None, "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "sub_group_size": 1e9,
    },
    "gradient_accumulation_steps": 1,
    "gradient_clipping": "auto",
    "steps_per_print": float("inf"),
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 1,
    "wall_clock_breakdown": False,
    "zero_allow_untested_optimizer": True,
}


def test_auto_values_that_nobody_filled_in_are_defaults(warnings: list[str]) -> None:
    config = DeepSpeedConfig(TRAINER_CONFIG)
    assert (config.gradient_clipping, config.train_batch_size) == (1.0, 1)
    assert config.optimizer_params == {} and config.scheduler_params == {}
    assert not config.fp16_enabled and not config.bfloat16_enabled
    assert config.zero_config.reduce_bucket_size == 500_000_000
    assert config.zero_config.gather_16bit_weights_on_model_save is False
    assert config._param_dict["gradient_clipping"] == "auto"
    assert warnings == []


def test_whole_sections_may_be_auto() -> None:
    config = make(
        fp16="auto",
        bf16="auto",
        zero_optimization="auto",
        optimizer="auto",
        gradient_accumulation_steps="auto",
    )
    assert config.zero_optimization_stage == 0 and config.optimizer_name is None


def test_auto_batch_sizes_need_somebody() -> None:
    with pytest.raises(
        DeepSpeedConfigError, match=r"train_micro_batch_size_per_gpu is 'auto', and no value was filled in"
    ):
        DeepSpeedConfig({"train_micro_batch_size_per_gpu": "auto"})


# ------------------------------------------------------------------------------------------ old spellings


def test_bfloat16_section(warnings: list[str]) -> None:
    assert make(bfloat16={"enabled": True}).bfloat16_enabled
    assert ["'bfloat16'" in warning for warning in warnings] == [True]
    assert not make(bfloat16={"enabled": True}, bf16={"enabled": False}).bfloat16_enabled


def test_misspelling_inside_the_old_section() -> None:
    with pytest.raises(DeepSpeedConfigError, match=r"bfloat16\.enabeld: .*'bfloat16\.enabled'"):
        make(bfloat16={"enabeld": True})


@pytest.mark.parametrize("key", ["train_batch_size", "gradient_clipping"])
def test_a_boolean_that_is_no_number_is_refused_once(key: str) -> None:
    with pytest.raises(DeepSpeedConfigError, match=f"{key}: true is not allowed; expected an? [^(]*$"):
        DeepSpeedConfig({"train_batch_size": 8, key: True})


def test_zero_as_a_boolean(warnings: list[str]) -> None:
    config = make(zero_optimization=True, allgather_size=1000)
    assert config.zero_optimization_stage == 1 and config.zero_config.allgather_bucket_size == 1000
    assert len(warnings) == 1


def test_one_note_per_old_key(warnings: list[str]) -> None:
    make(
        zero_optimization={
            "stage": 1,
            "stage3_gather_fp16_weights_on_model_save": True,
            "cpu_offload_use_pin_memory": True,
        }
    )
    assert sorted("deprecated" in warning for warning in warnings) == [True, True]


def test_warnings_on_rank_zero_only(warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert make(wandb={"enabled": True}).global_rank == 1
    assert warnings == []


# ------------------------------------------------------------------------------------ the number of ranks


class Mpu:
    def __init__(self, **sizes: int) -> None:
        for name, size in sizes.items():
            setattr(self, f"get_{name}_parallel_world_size", lambda size=size: size)


class Mesh:
    mesh_dim_names = ("data_parallel", "sequence_parallel")

    def __init__(self, size: int) -> None:
        self._size = size

    def __getitem__(self, name: str) -> Mesh:
        assert name == "data_parallel"
        return self

    def size(self) -> int:
        return self._size


LAUNCHERS = [
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
]


@pytest.mark.parametrize("rank, size", LAUNCHERS)
def test_launcher_environment_counts_before_init(
    rank: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(rank, "3")
    monkeypatch.setenv(size, "4")
    assert global_rank() == this_rank() == 3
    config = DeepSpeedConfig({"train_batch_size": 8})
    assert (config.world_size, config.train_micro_batch_size_per_gpu) == (4, 2)
    with pytest.raises(DeepSpeedConfigError, match="from the launcher's environment"):
        DeepSpeedConfig(
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
        )


def test_a_batch_script_of_slurm_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """In it SLURM_NTASKS tells of the allocation, not of this process: only srun starts one rank per task."""
    for name, value in {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NPROCS": "4"}.items():
        monkeypatch.setenv(name, value)
    config = DeepSpeedConfig({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2})
    assert (config.world_size, config.gradient_accumulation_steps) == (1, 4)
    assert config.world_size == this_process(os.environ).world_size


def test_sources_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranks(data: dict[str, Any], *args: Any) -> tuple[int, str]:
        axes = DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **data}, *args).axes
        return axes.data_parallel, axes.origin

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert ranks({}, Mpu(data=2)) == (2, "from mpu")
    assert ranks({}, Mpu(sequence=4)) == (2, "from mpu")
    assert ranks({}, None, Mesh(3)) == (3, "from the device mesh")
    assert ranks({}) == (8, "from the launcher's environment")
    assert ranks({"sequence_parallel_size": 2})[0] == 4
    assert ranks({"sequence_parallel_size": 2}, Mpu(data=8))[0] == 8
    assert ranks({"sequence_parallel_size": "auto"})[0] == 8
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("RANK")
    assert ranks({}) == (1, "no launcher and no process group found")


def test_nonsense_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The config says what `init_distributed` would say; the logger has no rank to complain about, and is 0."""
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(DeepSpeedConfigError, match="RANK is not set: set both"):
        world_size()
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(DeepSpeedConfigError, match="WORLD_SIZE='many': expected an integer"):
        global_rank()
    assert "WORLD_SIZE='many'" in str(check_config({"train_batch_size": 8}))
    assert this_rank() == 0


@distributed(world_size=2)
def test_process_group_counts() -> None:
    config = DeepSpeedConfig({"train_batch_size": 8})
    assert (config.world_size, config.train_micro_batch_size_per_gpu) == (2, 4)
    assert config.global_rank == torch.distributed.get_rank()
    assert world_size()[1] == "from torch.distributed"


# ------------------------------------------------------------------------------------------------- the rest


def test_error_class() -> None:
    with pytest.raises(AssertionError):
        DeepSpeedConfig({})
    with pytest.raises(ValueError, match="neither train_batch_size nor"):
        DeepSpeedConfig({})
    with pytest.raises(DeepSpeedConfigError) as caught:
        make(bf61={}, fp16={"enabled": 3})
    assert str(caught.value).startswith(
        "2 errors in DeepSpeed config:\n  bf61: unknown key; did you mean 'bf16'?"
    )
    assert [problem.key for problem in caught.value.problems] == ["bf61", "fp16.enabled"]


def test_a_key_under_both_its_names() -> None:
    with pytest.raises(DeepSpeedConfigError, match="given twice, also as 'stage3_prefetch_bucket_size'"):
        make(zero_optimization={"stage": 3, "prefetch_bucket_size": 5, "stage3_prefetch_bucket_size": 5})


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_says_which_config_is_meant(count: int, tmp_path: Path) -> None:
    wrong = {"train_batch_size": 8, **dict(list({"bf61": {}, "steps_per_print": "x"}.items())[:count])}
    text = json.dumps(wrong)
    file = tmp_path / "ds.json"
    file.write_text(text)
    errors = "1 error" if count == 1 else "2 errors"
    for given, called in (
        (wrong, "DeepSpeed config"),
        (str(file), f"DeepSpeed config {file}"),
        (base64.urlsafe_b64encode(text.encode()).decode(), "DeepSpeed base64 config"),
    ):
        with pytest.raises(DeepSpeedConfigError) as caught:
            DeepSpeedConfig(given)
        assert str(caught.value).splitlines()[0] == f"{errors} in {called}:"
        assert len(str(caught.value).splitlines()) == 1 + count
        with pytest.raises(DeepSpeedConfigError) as checked:
            check_config(given).raise_for_errors()
        assert str(checked.value).splitlines()[0] == f"{errors} in {called}:"


@pytest.mark.parametrize("as_file", [True, False])
def test_duplicate_keys_say_which_config_is_meant(as_file: bool, tmp_path: Path) -> None:
    text = '{"train_batch_size": 8,\n "train_batch_size": 16}'
    file = tmp_path / "ds.json"
    file.write_text(text)
    given = str(file) if as_file else base64.urlsafe_b64encode(text.encode()).decode()
    called = f"DeepSpeed config {file}" if as_file else "DeepSpeed base64 config"
    with pytest.raises(DeepSpeedConfigError) as caught:
        DeepSpeedConfig(given)
    assert str(caught.value) == f"Duplicate keys in {called}: 'train_batch_size' (lines 1, 2)"


def test_config_dict_is_left_alone() -> None:
    raw = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 1, "cpu_offload": False},
        "bfloat16": {"enabled": True},
    }
    before = json.dumps(raw)
    DeepSpeedConfig(raw)
    assert json.dumps(raw) == before


def test_configs_share_nothing() -> None:
    one, two = make(), make()
    one.zero_config.leaf_module.names.append("x")
    one.comms_config.comms_logger.prof_ops.append("y")
    assert two.zero_config.leaf_module.names == make().zero_config.leaf_module.names == []
    assert two.comms_config.comms_logger.prof_ops == make().comms_config.comms_logger.prof_ops == []


def test_printing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logger, "info", said.append)
    make(steps_per_print=2000).print("MyConfig")
    assert said[0] == "MyConfig:"
    assert any("train_batch_size" in line and " 8" in line for line in said)
    assert '"steps_per_print": 2.000000e+03' in said[-1]


def test_writer(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    writer = DeepSpeedConfigWriter()
    writer.data["train_batch_size"] = 8
    writer.write_config(str(file))
    assert DeepSpeedConfig(str(file)).train_batch_size == 8


def test_names_that_clients_import() -> None:
    assert config_module.LAMB_OPTIMIZER == "lamb" and config_module.ONEBIT_LAMB_OPTIMIZER == "onebitlamb"
    assert config_module.ADAM_OPTIMIZER == "adam" and config_module.MUON_OPTIMIZER == "muon"
    import deepspeed

    assert deepspeed.DeepSpeedConfig is DeepSpeedConfig
    assert deepspeed.DeepSpeedConfigError is DeepSpeedConfigError


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ((32, 16, None), (32, 16, 2)),
        ((None, 16, 2), (32, 16, 2)),
        ((32, None, None), (32, 32, 1)),
        ((33, 17, 2), None),
        ((None, None, 2), None),
    ],
)
def test_batch_sizes_of_the_attributes(given: Any, sizes: Any) -> None:
    config = DeepSpeedConfig({"train_batch_size": 2})
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for name, value in zip(names, given, strict=True):
        setattr(config, name, value)
    if sizes is None:
        with pytest.raises(AssertionError):
            config._configure_train_batch_size()
        return
    config._configure_train_batch_size()
    assert tuple(getattr(config, name) for name in names) == sizes


def test_importing_and_making_a_config_stays_light() -> None:
    """No compiler, tokenizer or monitor comes along, no process group, no device memory."""
    code = (
        "import sys, torch; from deepspeed.config.deepspeed_config import DeepSpeedConfig;"
        "DeepSpeedConfig({'train_batch_size': 8});"
        "heavy = {'triton', 'tokenizers', 'transformers', 'tensorboard', 'wandb', 'hjson', "
        "'torch._dynamo', 'rich'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "assert not torch.distributed.is_initialized() and not torch.cuda.is_initialized()"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=120)
