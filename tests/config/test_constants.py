"""Documented constants of sections: the spelling and the default of a key."""

from __future__ import annotations

import pytest

from deepspeed.compat import data_constants as data
from deepspeed.config.schema import TrainingConfig
from deepspeed.config.sections import activation_checkpointing as checkpointing
from deepspeed.config.sections import data as config


def test_of_activation_checkpointing() -> None:
    fields = checkpointing.DeepSpeedActivationCheckpointingConfig.model_fields
    assert set(checkpointing.ACT_CHKPT_DEFAULT) == set(fields)
    for name, field in fields.items():
        assert getattr(checkpointing, f"ACT_CHKPT_{name.upper()}") == name
        assert getattr(checkpointing, f"ACT_CHKPT_{name.upper()}_DEFAULT") == field.get_default()
    assert TrainingConfig.model_fields[checkpointing.ACT_CHKPT].annotation is not None
    with pytest.raises(AttributeError, match="ACT_CHKPT_COLOUR"):
        checkpointing.ACT_CHKPT_COLOUR  # noqa: B018


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
