"""Documented paths: the tables, the import hook behind them, and the refusal of what comes later."""

from __future__ import annotations

import enum
import importlib
import inspect
import subprocess
import sys

import pytest

from deepspeed.compat import later
from deepspeed.compat.aliases import MODULES, NAMES, SUBMODULES
from deepspeed.compat.finder import lookup, our_path
from deepspeed.compat.later_table import INSTEAD, LATER

LATER_NAMES = [(module, name) for module in LATER for name in later.names(module)]


@pytest.mark.parametrize(("documented", "ours"), MODULES.items())
def test_a_module_row_is_the_same_module_object(documented: str, ours: str) -> None:
    module = importlib.import_module(documented)
    assert module is importlib.import_module(ours) is sys.modules[documented]
    assert module.__name__ == ours
    assert module.__spec__ is not None and module.__spec__.name == ours


def test_submodules_follow_their_package() -> None:
    assert our_path("deepspeed.zero.config") == "deepspeed.config.sections.zero"
    assert our_path("deepspeed.runtime.zero.layout") == "deepspeed.zero.layout"
    assert our_path("deepspeed.zero.layout") is None
    assert our_path("deepspeed") is None
    via_alias = importlib.import_module("deepspeed.zero.config")
    assert via_alias is importlib.import_module("deepspeed.runtime.zero.config")


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in NAMES for name in NAMES[module]])
def test_a_name_row_resolves(module: str, name: str) -> None:
    path, _, renamed = NAMES[module][name].partition(":")
    ours = getattr(importlib.import_module(path), renamed or name)
    assert getattr(importlib.import_module(module), name) is ours


@pytest.mark.parametrize(
    ("package", "name"), [(p, name) for p, names in SUBMODULES.items() for name in names]
)
def test_a_submodule_row_is_an_attribute(package: str, name: str) -> None:
    assert inspect.ismodule(getattr(importlib.import_module(package), name))


@pytest.mark.parametrize(("module", "name"), LATER_NAMES)
def test_what_comes_later_imports_has_a_signature_and_is_refused_by_name(module: str, name: str) -> None:
    found = getattr(importlib.import_module(module), name)
    assert found is getattr(importlib.import_module(module), name)
    assert found.__module__ == module and found.__name__ == name
    if isinstance(found, type) and issubclass(found, (enum.Enum, Exception)):
        return
    assert isinstance(inspect.signature(found), inspect.Signature)
    with pytest.raises(NotImplementedError, match=f"{module}.{name} is documented but not implemented"):
        found()


def test_a_refusal_says_what_to_use_instead() -> None:
    from deepspeed.module_inject.layers import Yuan_LinearLayer

    assert str(inspect.signature(Yuan_LinearLayer)).startswith("(module, mp_group=None")
    with pytest.raises(NotImplementedError, match="autotp_size find a model.s layers"):
        Yuan_LinearLayer(None)
    assert not isinstance(object(), Yuan_LinearLayer)

    class Derived(Yuan_LinearLayer):
        pass

    with pytest.raises(NotImplementedError, match="deepspeed.module_inject.layers.Yuan_LinearLayer is"):
        Derived(None)


def test_every_hint_belongs_to_a_module_that_comes_later() -> None:
    assert [prefix for prefix in INSTEAD if not any(module.startswith(prefix) for module in LATER)] == []


def test_signatures_keep_every_kind_of_parameter() -> None:
    text = "(a, /, b, c=1, *args, d, e='x', f=torch.device('cpu'), **kwargs)"
    assert str(later.signature(text)) == text
    assert str(later.signature("(a=None, *, b)")) == "(a=None, *, b)"


def test_unknown_names_stay_unknown() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        lookup("deepspeed.moe.layer", "no_such_name")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("deepspeed.moe.no_such_module")
    with pytest.raises(ImportError):
        from deepspeed.moe.layer import no_such_name  # noqa: F401


def test_the_order_of_imports_does_not_matter() -> None:
    code = (
        "import deepspeed.zero.config as alias, deepspeed.runtime.zero.config as real; assert alias is real; "
        "import deepspeed.runtime.zero as zero, deepspeed; "
        "assert deepspeed.zero is zero is deepspeed.runtime.zero"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
