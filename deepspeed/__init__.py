"""Public interface of the package, resolved on first use (PEP 562).

`import deepspeed` loads nothing but this table: no torch, no device, no process, no file. A name costs its
import when it is first read and is an ordinary module attribute afterwards.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

from deepspeed.compat import finder as _finder
from deepspeed.version import __version__, git_branch, git_hash, version

__all__ = ["__version__", "git_branch", "git_hash", "version"]  # the lazy names are added below

# torch then asks NVML, not the CUDA runtime, for the number of devices: no context before a fork.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

_finder.install()

__git_hash__ = git_hash
__git_branch__ = git_branch
__version_major__, __version_minor__, __version_patch__ = (int(part) for part in __version__.split(".")[:3])

# Modules that are attributes of the package without having been imported by name.
_MODULES = {
    "accelerator": "deepspeed.accelerator",
    "checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
    "comm": "deepspeed.comm",
    "domino": "deepspeed.runtime.domino",
    "inference": "deepspeed.inference",
    "module_inject": "deepspeed.module_inject",
    "moe": "deepspeed.moe",
    "ops": "deepspeed.ops",
    "pipe": "deepspeed.pipe",
    "runtime": "deepspeed.runtime",
    "types": "types",
    "utils": "deepspeed.utils",
    "zero": "deepspeed.zero",
}

# name -> module that defines it
_NAMES = {
    "ADAM_OPTIMIZER": "deepspeed.runtime.config",
    "DeepSpeedConfig": "deepspeed.runtime.config",
    "DeepSpeedConfigError": "deepspeed.runtime.config",
    "DeepSpeedDataLoader": "deepspeed.runtime.dataloader",
    "DeepSpeedEngine": "deepspeed.runtime.engine",
    "DeepSpeedHybridEngine": "deepspeed.runtime.hybrid_engine",
    "DeepSpeedInferenceConfig": "deepspeed.inference.config",
    "DeepSpeedOptimizer": "deepspeed.runtime.base_optimizer",
    "DeepSpeedOptimizerCallable": "deepspeed.runtime.engine",
    "DeepSpeedSchedulerCallable": "deepspeed.runtime.engine",
    "DeepSpeedTransformerConfig": "deepspeed.ops.transformer.transformer",
    "DeepSpeedTransformerLayer": "deepspeed.ops.transformer.transformer",
    "DualPipeVEngine": "deepspeed.engine.pipeline.dualpipev",
    "DualPipeVModule": "deepspeed.engine.pipeline.dualpipev",
    "InferenceEngine": "deepspeed.inference.engine",
    "LAMB_OPTIMIZER": "deepspeed.runtime.config",
    "MUON_OPTIMIZER": "deepspeed.runtime.config",
    "OnDevice": "deepspeed.utils.init_on_device",
    "PipelineEngine": "deepspeed.runtime.pipe.engine",
    "PipelineModule": "deepspeed.runtime.pipe.module",
    "TORCH_DISTRIBUTED_DEFAULT_PORT": "deepspeed.constants",
    "add_config_arguments": "deepspeed.engine.arguments",
    "add_tuning_arguments": "deepspeed.runtime.lr_schedules",
    "check_config": "deepspeed.tools.config.command",
    "default_inference_config": "deepspeed.inference.entry",
    "get_accelerator": "deepspeed.accelerator",
    "init_distributed": "deepspeed.comm",
    "init_inference": "deepspeed.inference.entry",
    "initialize": "deepspeed.engine.initialize",
    "is_compile_supported": "deepspeed.runtime.compiler",
    "log_dist": "deepspeed.utils",
    "logger": "deepspeed.utils",
    "replace_transformer_layer": "deepspeed.compat.module_inject.replacing",
    "revert_transformer_layer": "deepspeed.module_inject.replace_module",
    "set_autotp_mode": "deepspeed.module_inject.layers",
    "set_optimizer_flags": "deepspeed.zero.optimizer_registry",
    "tp_model_init": "deepspeed.runtime.tensor_parallel.init_utils",
}

_COMPUTED = ("HAS_TRITON", "dist")

__all__ += [*_MODULES, *_NAMES, *_COMPUTED]


def __getattr__(name: str) -> Any:
    if name == "dist":
        return _dist()
    if name == "HAS_TRITON":
        value: Any = importlib.util.find_spec("triton") is not None
    elif name in _MODULES:
        value = _load(_MODULES[name])
    elif name in _NAMES:
        value = getattr(_load(_NAMES[name]), name)
    elif not name.startswith("_") and _finder.exists(f"deepspeed.{name}"):
        value = _load(f"deepspeed.{name}")
    else:
        raise AttributeError(f"module 'deepspeed' has no attribute {name!r}")
    globals()[name] = value
    return value


def _load(path: str) -> Any:
    from deepspeed.base.python_gc import python_gc_manager  # not needed by `import deepspeed` alone

    with python_gc_manager.paused():
        return importlib.import_module(path)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _dist() -> Any:
    """`deepspeed.dist`: `deepspeed.comm` once a process group exists, None before."""
    comm = importlib.import_module("deepspeed.comm")
    return comm if comm.is_initialized() else None
