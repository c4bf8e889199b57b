"""``zero.Init``: shard parameters across the ranks as soon as the module that owns them is built.

This module is also ``deepspeed.zero.gathering.init_context``: client libraries replace
``zero_wrapper_for_fp_tensor_constructor`` and read ``get_accelerator`` and ``_orig_torch_arange`` in it, so a context
looks those names up here when it is entered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from deepspeed import comm as dist
from deepspeed.base.accelerator import get_accelerator
from deepspeed.base.sharded import is_zero_param
from deepspeed.comm.collectives import Communicator, communicator
from deepspeed.config import reader as config_reader
from deepspeed.config.plan import storage_options
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.sections.offload import get_aio_config
from deepspeed.zero.active_contexts import active_contexts
from deepspeed.zero.gathering.gathered_parameters import GatheredParameters
from deepspeed.zero.gathering.standalone_shard import shard_standalone
from deepspeed.zero.offload.swap_file import SwapFile
from deepspeed.zero.parameter_offload import register_external_parameter, unregister_external_parameter
from deepspeed.zero.params import (
    CHECKS_WRITES,
    MultipleAllGatherHandles,
    ZeroParamStatus,
    ZeroParamType,
    is_castable,
    set_secondary_group,
)
from deepspeed.zero.replica_groups import ReplicaGroup

__all__ = [
    "DeepSpeedTensorOverride", "GatheredParameters", "Init", "InsertPostInitMethodToModuleSubClasses",
    "MultipleAllGatherHandles", "ZeroParamStatus", "ZeroParamType", "get_accelerator", "get_all_subclasses",
    "is_zero_param", "partitioned_param_data_shape", "register_external_parameter", "restore_init_context",
    "shutdown_init_context", "unregister_external_parameter", "zero_wrapper_for_fp_tensor_constructor",
]  # fmt: skip

_CONSTRUCTORS = ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")
_ORIGINALS = {name: getattr(torch, name) for name in _CONSTRUCTORS}
_orig_torch_arange = torch.arange
_to_empty = nn.Module.to_empty
_ALWAYS_FLOATING = (torch.empty, torch.zeros, torch.ones, torch.eye)
"""Constructors whose default dtype is independent of their arguments, and their values of the dtype."""

partitioned_param_data_shape = [0]
"""Shape of a parameter that exists only as this rank's shard."""

_DEPTH = "_ds_init_depth"
NVME_PATH = "zero_optimization.offload_param.nvme_path"


class DeepSpeedTensorOverride(Enum):
    """Properties of tensors created inside a context that it overrides."""

    dtype = 1
    device = 2


DEFAULT_TENSOR_OVERRIDES = frozenset(DeepSpeedTensorOverride)


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Tensor], target_fp_dtype: torch.dtype, target_device: torch.device | None = None
) -> Callable[..., Tensor]:
    """Wrap ``fn`` to create its result on ``target_device`` (unless a device is given) and, if floating, in the
    dtype."""

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Tensor:
        if target_device is not None and kwargs.get("device") is None:
            kwargs["device"] = target_device
        if fn in _ALWAYS_FLOATING and kwargs.get("dtype") is None and kwargs.get("out") is None:
            kwargs["dtype"] = target_fp_dtype  # no cast afterwards, when both copies would have to fit
        made = fn(*args, **kwargs)
        if is_castable(made) and made.dtype != target_fp_dtype:
            made.data = made.data.to(target_fp_dtype)
        return made

    return wrapped


def get_all_subclasses(cls: type, include_root: bool = True) -> set[type]:
    found: set[type] = set()
    waiting = [cls]
    while waiting:
        for sub in waiting.pop().__subclasses__():
            if sub not in found:
                found.add(sub)
                waiting.append(sub)
    return found | {cls} if include_root else found


class InsertPostInitMethodToModuleSubClasses:
    """Context that runs a method after the constructor of every module, including classes defined inside.

    Contexts nest; patches are applied once and always undone, even after an error.
    """

    def __init__(
        self,
        enabled: bool = True,
        mem_efficient_linear: bool = True,
        ds_config: Any = None,
        dtype: Any = None,
    ) -> None:
        self.enabled = enabled
        self.mem_efficient_linear = mem_efficient_linear
        self.dtype: torch.dtype = dtype or _dtype_of(ds_config)
        self.device: torch.device | None = None
        self.overrides = DEFAULT_TENSOR_OVERRIDES

    def _post_init_method(self, module: nn.Module) -> None:
        raise NotImplementedError

    def __enter__(self) -> Any:
        if self.enabled:
            active_contexts.contexts.append(self)
            active_contexts.unpatch()
            _patch()
        return self

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> None:
        if self.enabled:
            active_contexts.unpatch()
            active_contexts.contexts.pop()
            if active_contexts.contexts and not active_contexts.suspended:
                _patch()

    def patch_init_and_builtins(self) -> None:
        active_contexts.unpatch()
        _patch()

    def unpatch_init_and_builtins(self) -> None:
        active_contexts.unpatch()


class Init(InsertPostInitMethodToModuleSubClasses):
    """Partition parameters while a model is being built, so that it never exists whole.

    Args:
        module: existing module to partition at once.
        data_parallel_group, sequence_data_parallel_group: ranks to shard across; default: all.
        config_dict_or_path, config: config (dict or path) that sets the dtype; ``dtype`` overrides it.
        remote_device: "cpu" builds and keeps the shards in host memory, "nvme" builds in host memory and keeps them
            in a file under the config's ``zero_optimization.offload_param.nvme_path``; default: the ``offload_param``
            section.
        enabled: False makes the context do nothing.
        mpu: model-parallel unit whose data-parallel group is used.
        The other arguments are accepted as documented.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = DEFAULT_TENSOR_OVERRIDES,
    ) -> None:
        settings = read_config(config_dict_or_path if config_dict_or_path is not None else config)
        super().__init__(enabled, mem_efficient_linear, settings, dtype)
        if not enabled:
            return
        remote_device = remote_device or _offload_param(settings).get("device")
        self.swap = _swap_file(settings) if remote_device == "nvme" else None
        dist.init_distributed()
        self.communicator = _communicator_of(sequence_data_parallel_group or data_parallel_group, mpu)
        self.overrides = frozenset(tensor_overrides)
        zero = settings.get("zero_optimization") or {}
        self.checks_writes = bool(zero.get("enable_sanity_checks"))
        self.group_size = int(zero.get("zero_hpz_partition_size", 1))
        on_host = remote_device in ("cpu", "nvme")
        self.device = torch.device("cpu" if on_host else get_accelerator().device_name(dist.get_local_rank()))
        if module is not None:
            for param in module.parameters():
                self._shard(param)

    def _post_init_method(self, module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            self._shard(param)

    def _shard(self, param: nn.Parameter) -> None:
        if is_zero_param(param):
            return
        if param.is_meta:
            return  # left for the caller to fill; initialize() partitions it later
        assert self.device is not None
        dtype = self.dtype if is_castable(param) else param.dtype
        param.data = param.data.to(self.device, dtype)
        self._shard_whole(param)
        if self.checks_writes:
            setattr(param, CHECKS_WRITES, True)

    def _shard_whole(self, param: nn.Parameter) -> None:
        shard_standalone(param, self.communicator, swap=self.swap)
        if self.group_size > 1:
            near = self.secondary_group
            set_secondary_group(param, near.group, all_holders=near is self.communicator)

    @functools.cached_property
    def secondary_group(self) -> Communicator:
        """Ranks of this rank's group (``zero_hpz_partition_size``), or all ranks."""
        levels = ReplicaGroup.whole(self.communicator).grouped(self.group_size).levels
        return self.communicator if levels is None else levels.near

    # Documented names ---------------------------------------------------------------------------------------

    def get_partition_dp_group(self, param: Any) -> Any:
        return param.ds_process_group

    def get_partition_rank(self) -> int:
        return self.communicator.rank

    @property
    def num_partitions(self) -> int:
        return self.communicator.size

    def get_dp_process_group(self) -> Any:
        return self.communicator.group


# The patches ------------------------------------------------------------------------------------------------


def _patch() -> None:
    context = active_contexts.contexts[-1]
    for cls in get_all_subclasses(nn.Module, include_root=False):
        if "__init__" in cls.__dict__:
            _wrap_init(cls)
    _replace(nn.Module, "__init_subclass__", classmethod(_init_subclass))
    _replace(nn.Module, "apply", _apply_gathered)
    _replace(nn.Module, "to_empty", _to_empty_sharded)
    if DeepSpeedTensorOverride.dtype in context.overrides:
        device = context.device if DeepSpeedTensorOverride.device in context.overrides else None
        for name in _CONSTRUCTORS:
            wrapped = zero_wrapper_for_fp_tensor_constructor(
                _ORIGINALS[name], context.dtype, target_device=device
            )
            _replace(torch, name, wrapped)


def _replace(owner: Any, name: str, value: Any) -> None:
    missing = object()
    before = owner.__dict__.get(name, missing)

    def restore() -> None:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    setattr(owner, name, value)
    active_contexts.restores.append(restore)


def _init_subclass(cls: type, **kwargs: Any) -> None:
    super(nn.Module, cls).__init_subclass__(**kwargs)  # type: ignore[arg-type]
    if "__init__" in cls.__dict__:
        _wrap_init(cls)


def _wrap_init(cls: Any) -> None:
    """Run the context's method after the constructor of ``cls``.

    [Note: torch's composites] ``nn.MultiheadAttention`` and ``nn.Transformer`` initialize their children's parameters
    again, which would have no effect on parameters already sharded. So modules that torch's own classes build are
    sharded once the composite is complete.
    """
    original = cls.__dict__["__init__"]
    torchs_own = _builds_children(cls)

    @functools.wraps(original)
    def __init__(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        # A constructor calls those of its base classes: only the outermost one shards.
        depth = module.__dict__.get(_DEPTH, 0)
        module.__dict__[_DEPTH] = depth + 1
        active_contexts.composing += torchs_own
        try:
            original(module, *args, **kwargs)
        finally:
            active_contexts.composing -= torchs_own
            if depth:
                module.__dict__[_DEPTH] = depth
            else:
                module.__dict__.pop(_DEPTH, None)
        if depth or active_contexts.composing or not active_contexts.contexts or active_contexts.suspended:
            return
        composite = any(map(_builds_children, type(module).__mro__))
        for part in reversed(list(module.modules())) if composite else [module]:
            active_contexts.contexts[-1]._post_init_method(part)

    _replace(cls, "__init__", __init__)


def _builds_children(cls: type) -> bool:
    """Return whether the constructor of ``cls`` is torch's, but not a container's (which only stores given modules)."""
    own = cls is not nn.Module and "__init__" in cls.__dict__
    return (
        own and cls.__module__.startswith("torch.nn.modules.") and not cls.__module__.endswith(".container")
    )


def _apply_gathered(self: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    """Replace ``module.apply`` during construction: gather each module's own parameters while ``fn`` runs on it."""
    for child in self.children():
        child.apply(fn)
    with GatheredParameters(list(self.parameters(recurse=False)), modifier_rank=0):
        fn(self)
    return self


def _to_empty_sharded(
    self: nn.Module, *, device: torch.device | str | int | None, recurse: bool = True
) -> nn.Module:
    """Replace ``module.to_empty`` (``torch.nn.utils.skip_init``), and shard the parameters that it materializes from
    ``meta``."""
    _to_empty(self, device=device, recurse=recurse)
    if active_contexts.contexts and not active_contexts.suspended:
        for part in self.modules() if recurse else [self]:
            active_contexts.contexts[-1]._post_init_method(part)
    return self


def shutdown_init_context() -> None:
    """Suspend the active contexts (``initialize`` builds its own tensors)."""
    active_contexts.suspend()


def restore_init_context() -> None:
    """Undo ``shutdown_init_context``."""
    active_contexts.resume()


def read_config(config: Any) -> dict[str, Any]:
    """Return the settings of anything ``initialize`` accepts as a config: a dict, a JSON or HJSON file, base64 text,
    a config object, or None."""
    if config is None:
        return {}
    if isinstance(config, dict):
        return config
    if hasattr(config, "_param_dict"):
        return config._param_dict
    try:
        return config_reader.read_config(config).data
    except config_reader.UnreadableConfig as error:
        raise DeepSpeedConfigError(f"zero.Init(config_dict_or_path=...): {error}") from None


def _dtype_of(config: Any) -> torch.dtype:
    """Return fp16 or bf16 if the config enables it ("auto" counts as off), else the default dtype."""
    for section, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16)):
        if ((config or {}).get(section) or {}).get("enabled", False) is True:
            return dtype
    return torch.get_default_dtype()


def _offload_param(config: dict[str, Any]) -> dict[str, Any]:
    return (config.get("zero_optimization") or {}).get("offload_param") or {}


def _swap_file(config: dict[str, Any]) -> SwapFile:
    folder = _offload_param(config).get("nvme_path")
    if folder is None:
        raise DeepSpeedConfigError(
            f"{NVME_PATH} is needed for zero.Init(remote_device='nvme'): pass a config that names a folder for the "
            "swap files"
        )
    return SwapFile(
        Path(folder) / "deepspeed" / "param", storage_options(get_aio_config(config)), key=NVME_PATH
    )


def _communicator_of(group: Any, mpu: Any) -> Communicator:
    if group is None and mpu is not None:
        group = mpu.get_data_parallel_group()
    return communicator(group if group is not None else torch.distributed.group.WORLD)
