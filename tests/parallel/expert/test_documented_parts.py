"""The section for experts, read and checked by the functions of its documented module."""

from __future__ import annotations

import pytest

from deepspeed.config.sections.parallel import ABSENT


def test_a_section_by_its_documented_names() -> None:
    from deepspeed.compat.module_inject import auto_ep_config as documented

    config = documented.parse_autoep_config({"enabled": True, "autoep_size": 3, "expert_w3": None})
    assert isinstance(config, documented.AutoEPConfig) and config.expert_w3 is None
    assert documented.parse_autoep_config({}).expert_w3 is ABSENT
    documented.validate_autoep_config(config, 6, 2, 1, 1)
    with pytest.raises(ValueError, match="must divide the stage size"):
        documented.validate_autoep_config(config, 8, 1, 1, 1)
    with pytest.raises(ValueError, match="autotp_size=2"):
        documented.validate_autoep_config(config, 6, 1, 2, 1)
    unnamed = documented.parse_autoep_config({"enabled": True, "expert_w1": ""})
    with pytest.raises(ValueError, match="expert_w1 is empty"):
        documented.validate_autoep_config(unnamed, 8, 1, 1, 1)
    documented.validate_autoep_config(documented.parse_autoep_config({"autoep_size": 3}), 8, 1, 1, 1)
