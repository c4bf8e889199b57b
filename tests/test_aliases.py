"""Documented paths: the tables, the import hook behind them, and the refusal of what is not part of this release."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

import deepspeed
from deepspeed.compat.absent import FeatureNotAvailableError
from deepspeed.compat.aliases import MODULES, NAMES, SUBMODULES
from deepspeed.compat.finder import lookup, our_path


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


def test_constants_arrive_with_a_star() -> None:
    """Serving and profiling tools import them so; those of config keys are looked up on use otherwise."""
    names: dict[str, object] = {}
    exec("from deepspeed.runtime.constants import *", names)
    assert names["ZERO_OPTIMIZATION"] == "zero_optimization" and names["GRADIENT_CLIPPING_DEFAULT"] == 1.0
    assert names["FP16_HYSTERESIS"] == "hysteresis" and names["ROUTE_TRAIN"] == "train"
    assert "ValidationMode" in names
    exec("from deepspeed.checkpoint.constants import *", names)
    assert names["DS_VERSION"] == "ds_version" and names["PARAM_SHAPES"] == "param_shapes"


def test_an_error_about_a_name_of_release_0_19_says_what_to_use() -> None:
    """In each form of import, and none where nothing is known of the name."""
    from deepspeed.module_inject import layers

    instead = "autotp_size find a model's layers by its graph"
    with pytest.raises(AttributeError, match=instead):
        _ = layers.Yuan_LinearLayer
    with pytest.raises(ImportError, match=f"cannot import name 'Yuan_LinearLayer'.*{instead}"):
        from deepspeed.module_inject.layers import Yuan_LinearLayer  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="deepspeed.zero.GatheredParameters"):
        importlib.import_module("deepspeed.runtime.zero.contiguous_memory_allocator")
    with pytest.raises(ImportError, match="expert_parallel in the config to distribute"):
        from deepspeed.moe import ep_repack  # noqa: F401
    assert not hasattr(deepspeed, "datastates") and not hasattr(layers, "Yuan_LinearLayer")
    with pytest.raises(ImportError, match="zero_optimization.zenflow in the config"):  # of lazy names
        from deepspeed.ops.adam import ZenFlowSelectiveAdamW  # noqa: F401
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'$"):
        _ = deepspeed.nonsense


def test_a_name_that_scripts_import_without_calling_it_is_refused_when_called() -> None:
    from deepspeed.runtime.checkpoint_engine.nebula_checkpoint_engine import NebulaCheckpointEngine
    from deepspeed.utils.zero_to_fp32 import parse_optim_states

    with pytest.raises(FeatureNotAvailableError, match="Set checkpoint.writer"):
        NebulaCheckpointEngine(None)
    with pytest.raises(NotImplementedError, match="Use get_fp32_state_dict_from_zero_checkpoint"):
        parse_optim_states([], "folder")


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
