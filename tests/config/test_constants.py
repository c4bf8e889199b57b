"""Documented constants of sections: the spelling and the default of a key."""

from __future__ import annotations

import pytest

from deepspeed.checkpoint import constants as states
from deepspeed.comm import constants as comm
from deepspeed.compat import io_constants as files
from deepspeed.compat import profiling_constants as profiling
from deepspeed.compat.autotuning import constants as autotuning
from deepspeed.config.schema import TrainingConfig
from deepspeed.config.sections import activation_checkpointing as checkpointing
from deepspeed.config.sections import data as config
from deepspeed.config.sections.autotuning import DeepSpeedAutotuningConfig
from deepspeed.config.sections.comm import CommsLoggerConfig
from deepspeed.data import constants as data
from deepspeed.tools.nvme import ds_aio_constants as engines
from deepspeed.tools.nvme.engines import HANDLES


def test_keys_and_defaults() -> None:
    assert profiling.FLOPS_PROFILER_TOP_MODULES == "top_modules"
    assert profiling.FLOPS_PROFILER_MODULE_DEPTH_DEFAULT == -1
    assert autotuning.AUTOTUNING_NUM_TUNING_MICRO_BATCH_SIZES == "num_tuning_micro_batch_sizes"
    assert autotuning.AUTOTUNING_METRIC_DEFAULT == autotuning.AUTOTUNING_METRIC_THROUGHPUT == "throughput"
    assert autotuning.MODEL_INFO_HIDDEN_SIZE == "hidden_size"
    assert (
        autotuning.MODEL_INFO_PROFILE_DEFAULT is False and autotuning.AUTOTUNING_METRIC_PATH_DEFAULT is None
    )
    assert data.DATA_SAMPLING_NUM_EPOCHS_DEFAULT == 1000 and data.DATA_EFFICIENCY_SEED == "seed"
    assert data.RANDOM_LTD_LAYER_TOKEN_LR_ENABLED_DEFAULT is False
    with pytest.raises(AttributeError, match="FLOPS_PROFILER_COLOUR"):
        profiling.FLOPS_PROFILER_COLOUR  # noqa: B018


def test_of_activation_checkpointing() -> None:
    fields = checkpointing.DeepSpeedActivationCheckpointingConfig.model_fields
    assert set(checkpointing.ACT_CHKPT_DEFAULT) == set(fields)
    for name, field in fields.items():
        assert getattr(checkpointing, f"ACT_CHKPT_{name.upper()}") == name
        assert getattr(checkpointing, f"ACT_CHKPT_{name.upper()}_DEFAULT") == field.get_default()
    assert TrainingConfig.model_fields[checkpointing.ACT_CHKPT].annotation is not None
    with pytest.raises(AttributeError, match="ACT_CHKPT_COLOUR"):
        checkpointing.ACT_CHKPT_COLOUR  # noqa: B018


def test_of_files_and_checkpoints() -> None:
    assert set(HANDLES) < set(engines.VALID_ENGINES)
    names = {name: value for name, value in vars(states).items() if name.startswith(("AUTOEP_", "FOLDING_"))}
    assert len(names) == 38 and names["AUTOEP_LAYERS_KEY"] == "ds_autoep_layers"
    assert states.AUTOEP_ZERO12_REQUIRED_FIELDS[1:] == ("num_experts", "num_local_experts", "ep_size")
    assert (states.FOLDING_METADATA_KEY, states.FOLDING_ETP_RANK) == ("folding", "etp_rank")
    assert states.AUTOEP_AFFINE_MAPS == "affine_maps" and states.EP_NUM_EXPERTS == "ep_num_experts"
    assert (files.SAVE_STORAGE_SEC_KEY, files.STORAGE_OBJ_SIZE) == ("save_storage_secs", 8)


def test_every_key_of_the_section_is_there() -> None:
    for name, field in DeepSpeedAutotuningConfig.model_fields.items():
        if name != "metric":  # values of it have constants, too
            assert getattr(autotuning, f"AUTOTUNING_{name.upper()}") == name
        expected = field.get_default(call_default_factory=True)
        assert getattr(autotuning, f"AUTOTUNING_{name.upper()}_DEFAULT") == expected
    for name, field in CommsLoggerConfig.model_fields.items():
        assert getattr(comm, f"COMMS_LOGGER_{name.upper()}") == name
        default = getattr(comm, f"COMMS_LOGGER_{name.upper()}_DEFAULT")
        assert (list(default) if isinstance(default, tuple) else default) == field.get_default()


def test_literal_names_are_keys() -> None:
    """Those that are not spelled as their key."""
    metric = config.DataSamplingCurriculumConfig.model_fields
    assert data.CURRICULUM_LEARNING_CLUSTER_PATH in metric and data.CURRICULUM_LEARNING_METRICS in metric
    schedule = config.RandomLTDScheduleConfig.model_fields
    assert {data.RANDOM_LTD_MIN_VALUE, data.RANDOM_LTD_MAX_VALUE, data.RANDOM_LTD_SCHEDULER_TYPE} <= set(
        schedule
    )
    details = config.RandomLTDScheduleDetails.model_fields
    assert {data.RANDOM_LTD_INCREASE_STEP, data.RANDOM_LTD_REQUIRE_STEP} == set(details)
    assert data.RANDOM_LTD_SCHEDULER in config.RandomLTDConfig.model_fields
