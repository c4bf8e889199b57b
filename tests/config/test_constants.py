"""Documented constants of sections: the spelling and the default of a key."""

from __future__ import annotations

import pytest

from deepspeed.config.schema import TrainingConfig
from deepspeed.config.sections import model as checkpointing


def test_of_activation_checkpointing() -> None:
    fields = checkpointing.DeepSpeedActivationCheckpointingConfig.model_fields
    assert set(checkpointing.ACT_CHKPT_DEFAULT) == set(fields)
    for name, field in fields.items():
        assert getattr(checkpointing, f"ACT_CHKPT_{name.upper()}") == name
        assert getattr(checkpointing, f"ACT_CHKPT_{name.upper()}_DEFAULT") == field.get_default()
    assert TrainingConfig.model_fields[checkpointing.ACT_CHKPT].annotation is not None
    with pytest.raises(AttributeError, match="ACT_CHKPT_COLOUR"):
        checkpointing.ACT_CHKPT_COLOUR  # noqa: B018
