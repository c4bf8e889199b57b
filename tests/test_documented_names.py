"""The documented names that clients use: each imports and takes the documented parameters.

`files/documented_names.txt` lists them by module with their parameters, `files/documented_paths.txt` the dotted paths
that client packages, examples and tests write.
"""

from __future__ import annotations

import ast
import enum
import functools
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from tests.test_architecture import resolve

DATA = Path(__file__).parent / "files"

# Real things whose constructors take other parameters than documented.
_ENGINE_MAKES = "made by the engine only"
_BY_KEYS = "a section of the config is given by its keys, not as the dict that holds it"
OTHER_PARAMETERS = {
    "deepspeed.autotuning.config.DeepSpeedAutotuningConfig": _BY_KEYS,
    "deepspeed.elasticity.config.ElasticityConfig": _BY_KEYS,
    "deepspeed.nebula.config.DeepSpeedNebulaConfig": _BY_KEYS,
    "deepspeed.profiling.config.DeepSpeedFlopsProfilerConfig": _BY_KEYS,
    "deepspeed.runtime.activation_checkpointing.config.DeepSpeedActivationCheckpointingConfig": _BY_KEYS,
    "deepspeed.runtime.bf16_optimizer.BF16_Optimizer": _ENGINE_MAKES,
    "deepspeed.runtime.superoffload.superoffload_stage3.SuperOffloadOptimizer_Stage3": _ENGINE_MAKES,
    "deepspeed.runtime.zenflow.zenflow_stage_1_and_2.ZenFlowZeroOptimizer": _ENGINE_MAKES,
    "deepspeed.runtime.zenflow.zenflow_stage_1_and_2.ZenFlowZeroOptimizerParallel": _ENGINE_MAKES,
    "deepspeed.runtime.zenflow.zenflow_stage_1_and_2.ZenFlowZeroOptimizerSequential": _ENGINE_MAKES,
    "deepspeed.runtime.zero.mics.MiCS_Optimizer": _ENGINE_MAKES,
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload": _ENGINE_MAKES,
    "deepspeed.runtime.zero.parameter_offload.ZeROOrderedDict": _ENGINE_MAKES,
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": _ENGINE_MAKES,
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": _ENGINE_MAKES,
    "deepspeed.utils.zero_to_fp32.GatheredTensor": "made by get_fp32_state_dict_from_zero_checkpoint only",
}


@functools.cache
def documented() -> dict[str, list[str]]:
    """Module -> its rows."""
    rows: dict[str, list[str]] = {}
    current: list[str] = []
    for line in (DATA / "documented_names.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            current = rows.setdefault(line[1:-1], [])
        elif line.startswith(" "):
            current[-1] += f" {line.strip()}"
        elif line and not line.startswith("#"):
            current.append(line)
    return rows


def parts(row: str) -> tuple[str, str, str, list[str]]:
    """kind, name, "(parameters)" or base, methods or members."""
    kind, _, rest = row.partition(" ")
    if kind in ("enum", "error"):
        head, _, members = rest.partition(" ")
        name, _, base = head.rstrip(")").partition("(")
        return kind, name, base, members.split()
    name, _, rest = rest.partition("(")
    parameters, _, methods = rest.rpartition(")")
    return kind, name, f"({parameters})", methods.lstrip(": ").split()


def parameter_names(text: str) -> list[str]:
    arguments = ast.parse(f"def f{text}: ...").body[0].args  # type: ignore[attr-defined]
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args) if a.arg != "self"]


def problems(module: str, row: str) -> Iterator[str]:
    kind, name, text, extra = parts(row)
    path = f"{module}.{name}"
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        yield f"{path}: {type(error).__name__}: {error}"
        return
    if kind == "enum":
        yield from enum_problems(path, found, text, extra)
    elif kind == "error":
        if not (isinstance(found, type) and issubclass(found, Exception)):
            yield f"{path} is no exception"
    elif (kind == "class") != isinstance(found, type) and path not in OTHER_PARAMETERS:
        yield f"{path} is {type(found).__name__}, not a {kind}"
    elif path not in OTHER_PARAMETERS:
        yield from parameter_problems(path, found, text)


def enum_problems(path: str, found: Any, base: str, members: list[str]) -> Iterator[str]:
    if not (isinstance(found, type) and issubclass(found, enum.Enum)):
        yield f"{path} is no enum"
        return
    expected = {name: ast.literal_eval(value) for name, _, value in (m.partition("=") for m in members)}
    if (
        told := {name: found.__members__[name].value for name in expected if name in found.__members__}
    ) != expected:
        yield f"{path} has {told}, not {expected}"
    if base and not issubclass(found, {"int": int, "str": str}[base]):
        yield f"{path} is no {base}"


def parameter_problems(path: str, found: Any, text: str) -> Iterator[str]:
    expected = parameter_names(text)
    try:
        ours = [name for name in inspect.signature(found).parameters if name != "self"]
    except ValueError:
        return
    if ours[: len(expected)] != expected:
        yield f"{path} has the parameters {ours}, not {expected}"


@pytest.mark.parametrize("module", documented())
def test_every_documented_name_of_a_module(module: str) -> None:
    importlib.import_module(module)
    assert [problem for row in documented()[module] for problem in problems(module, row)] == []


def listed(file: str) -> list[str]:
    lines = (DATA / file).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("path", listed("documented_paths.txt"))
def test_every_documented_path_leads_somewhere(path: str) -> None:
    found = resolve(path)
    assert found is not None or path in (
        "deepspeed.dist",
        "deepspeed.runtime.constants.STEPS_PER_PRINT_DEFAULT",
    )


def test_documented_constants_have_values() -> None:
    from deepspeed.checkpoint import constants as keys
    from deepspeed.runtime import config, constants
    from deepspeed.runtime.zero import leaf_module_config as leaves

    assert (config.GRADIENT_CLIPPING, config.GRADIENT_CLIPPING_DEFAULT) == ("gradient_clipping", 1.0)
    assert config.get_gradient_clipping({}) == constants.GRADIENT_CLIPPING_DEFAULT
    assert config.get_gradient_clipping({"gradient_clipping": 0.5}) == 0.5
    assert constants.TRAIN_BATCH_SIZE == "train_batch_size" and constants.TRAIN_BATCH_SIZE_DEFAULT is None
    assert constants.ZERO_ALLOW_UNTESTED_OPTIMIZER_DEFAULT is False
    assert constants.FP16_DEFAULT["enabled"] is False
    with pytest.raises(AttributeError, match="NO_SUCH_KEY"):
        _ = constants.NO_SUCH_KEY
    with pytest.raises(ImportError):
        from deepspeed.runtime.config import no_such_getter  # noqa: F401
    assert leaves.DeepSpeedZeroLeafModuleConfig().classes == list(leaves.DEFAULT_LEAF_MODULE_CLASSES)
    assert (leaves.DEFAULT_LEAF_MODULE_NAMES, leaves.DEFAULT_LEAF_MODULE_NAME_SUFFIXES) == ((), ())
    assert (keys.OPTIMIZER_STATE_DICT, keys.ZERO_STAGE, keys.PARTITION_COUNT) == (
        "optimizer_state_dict",
        "zero_stage",
        "partition_count",
    )


def test_what_this_installation_is() -> None:
    """Version checks of test suites split these texts and compare the numbers."""
    from deepspeed.git_version_info import (
        accelerator_name,
        compatible_ops,
        installed_ops,
        torch_info,
        version,
    )

    assert version == deepspeed.__version__
    assert torch_info["version"] == ".".join(torch.__version__.split(".")[:2])
    for key in ("version", "cuda_version", "nccl_version", "hip_version"):
        major, minor = map(int, torch_info[key].split(".")[:2])
        assert major >= 0 and minor >= 0
    assert torch_info["bf16_support"] is deepspeed.get_accelerator().is_bf16_supported()
    assert accelerator_name == deepspeed.get_accelerator().device_name()
    assert compatible_ops["cpu_adam"] is installed_ops["cpu_adam"] is True
    assert installed_ops["spatial_inference"] is True and installed_ops["transformer_inference"] is False
