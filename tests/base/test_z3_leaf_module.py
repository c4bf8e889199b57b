from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from deepspeed.config.sections.zero import DeepSpeedZeroLeafModuleConfig
from deepspeed.zero.gathering.leaf_modules import (
    apply_zero_leaf_module_config,
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)


class Narrow(nn.Linear):
    pass


@pytest.fixture
def model() -> Any:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(Narrow(2, 2), nn.ReLU()))


def names(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if z3_leaf_module(module)]


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        ([nn.Linear], ["0", "1.0"]),  # subclasses count
        ([Narrow], ["1.0"]),
        (["Linear"], ["0"]),  # a name means that very class
        (["torch.nn.modules.container.Sequential"], ["", "1"]),
        ([nn.ReLU, "Narrow"], ["1.0", "1.1"]),
        ([nn.ReLU, "Absent"], ["1.1"]),
    ],
)
def test_by_class(model: Any, classes: list[Any], expected: list[str]) -> None:
    marked = set_z3_leaf_modules(model, classes)
    assert names(model) == expected and marked == get_z3_leaf_modules(model)
    assert all(module._z3_leaf is True for module in marked)
    assert unset_z3_leaf_modules(model, classes) == marked
    assert get_z3_leaf_modules(model) == []


def test_by_name(model: Any) -> None:
    marked, missing = set_z3_leaf_modules_by_name(model, ["1.0", "absent", ""])
    assert marked == [model[1][0], model] and missing == ["absent"] and names(model) == ["", "1.0"]
    set_z3_leaf_modules_by_name(model, ["1.0"], flag=False)
    assert names(model) == [""]


def test_by_suffix(model: Any) -> None:
    marked, missing = set_z3_leaf_modules_by_suffix(model, [".0", "absent"])
    assert marked == [model[1][0]] and missing == ["absent"]
    set_z3_leaf_modules_by_suffix(model, ["0"])
    assert names(model) == ["0", "1.0"]


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (set_z3_leaf_modules, ["Absent"]),
        (unset_z3_leaf_modules, [nn.Conv2d]),
        (set_z3_leaf_modules_by_name, ["absent"]),
        (set_z3_leaf_modules_by_suffix, ["absent"]),
    ],
)
def test_nothing_found(model: Any, function: Callable[..., Any], what: list[Any]) -> None:
    with pytest.raises(ValueError, match="Sequential has no module .*(Absent|absent|Conv2d)"):
        function(model, what)
    found = function(model, what, raise_if_not_found=False)
    assert found in ([], ([], ["absent"]))


def test_wrong_kind_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="holds 3"):
        set_z3_leaf_modules(model, [3])  # type: ignore[list-item]


def test_one_module_and_parameters(model: Any) -> None:
    set_z3_leaf_module(model[0], True)
    assert names(model) == ["0"]
    assert not z3_leaf_parameter(model[0].weight)  # nothing gathers it yet


def test_config_section(model: Any) -> None:
    section = DeepSpeedZeroLeafModuleConfig(
        classes=["Absent", "Narrow"], names=["0"], name_suffixes=[".1", ".0"]
    )
    assert apply_zero_leaf_module_config(model, section) == [model[1][0], model[0], model[1][1]]
    assert names(model) == ["0", "1.0", "1.1"]
    assert apply_zero_leaf_module_config(model, None) == []
    plain = nn.Linear(1, 1)
    assert apply_zero_leaf_module_config(plain, DeepSpeedZeroLeafModuleConfig.model_validate({})) == []
