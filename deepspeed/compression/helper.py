"""Documented helpers of compression: submodules by dotted name, conversion of GPT-2's `Conv1D` to `nn.Linear`,
compression of single modules, and pruners in a training loop without an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from deepspeed.base.logging import logger
from deepspeed.base.module_utils import move_hooks
from deepspeed.compression.basic_layer import (
    BNLayer_Compress,
    ColumnParallelLinear_Compress,
    Conv2dLayer_Compress,
    Embedding_Compress,
    LinearLayer_Compress,
    RowParallelLinear_Compress,
)
from deepspeed.compression.snip import SnipMomentum
from deepspeed.compression.techniques import SNIP, Compressible
from deepspeed.compression.utils import seed_of
from deepspeed.config import compression_constants as keys
from deepspeed.zero.gathering.gathered_parameters import GatheredParameters

M = TypeVar("M", bound=nn.Module)
Params = Mapping[str, Any]

LAYERS: tuple[tuple[type[nn.Module], type[Compressible]], ...] = (
    (nn.Linear, LinearLayer_Compress),
    (nn.Conv2d, Conv2dLayer_Compress),
    (nn.Embedding, Embedding_Compress),
    (nn.BatchNorm2d, BNLayer_Compress),
)


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return the attribute at a dotted path, `"layers.0.attention.query"`: numbers index containers."""
    found = model
    for name in module_name.split("."):
        found = _child(found, name)
    return found


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Replace the attribute at a dotted path."""
    parent, _, name = module_name.rpartition(".")
    owner = recursive_getattr(model, parent) if parent else model
    if isinstance(owner, list):
        owner[int(name)] = module
    elif isinstance(owner, dict):
        owner[name] = module
    else:
        setattr(owner, name, module)


def _child(owner: Any, name: str) -> Any:
    if isinstance(owner, (list, tuple)):
        return owner[int(name)]
    return owner[name] if isinstance(owner, dict) else getattr(owner, name)


def convert_conv1d_to_linear(model: M, convert_type: type[nn.Module]) -> M:
    """Replace every submodule of class `convert_type` by an `nn.Linear` that computes the same.

    `convert_type` is `transformers.pytorch_utils.Conv1D` or similar: its weight has the shape (in, out), so
    the Linear gets the transpose. Works in place; a wrapper's `.module` is converted too. Returns `model`.
    """
    for name, module in list(model.named_modules()):
        if name and isinstance(module, convert_type):
            recursive_setattr(model, name, _linear_from(module))
    return model


def _linear_from(conv: Any) -> nn.Linear:
    inputs, outputs = conv.weight.shape
    # on `meta`, nothing is initialized and the RNG state does not advance
    linear = nn.Linear(inputs, outputs, bias=conv.bias is not None, device="meta")
    linear.weight = nn.Parameter(conv.weight.detach().t().contiguous(), conv.weight.requires_grad)
    if isinstance(conv.bias, torch.Tensor):
        linear.bias = nn.Parameter(conv.bias.detach(), conv.bias.requires_grad)
    move_hooks(conv, linear)
    return linear.train(conv.training)


# Modules ----------------------------------------------------------------------------------------------------


def _compressed_class(module: nn.Module, mpu: Any = None) -> type[Compressible] | None:
    """Return the class that makes `module` compressible; None if there is none or `module` overrides forward."""
    if mpu is not None:
        for name, compressed in (
            ("ColumnParallelLinear", ColumnParallelLinear_Compress),
            ("RowParallelLinear", RowParallelLinear_Compress),
        ):
            parallel = getattr(mpu, name, None)
            if parallel is not None and isinstance(module, parallel):
                return compressed
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return None  # nn.MultiheadAttention reads its weight instead of calling it
    for plain, compressed in LAYERS:
        if isinstance(module, plain) and type(module).forward is plain.forward:
            embedding = module if isinstance(module, nn.Embedding) else None
            return compressed if embedding is None or embedding.max_norm is None else None
    return None


def is_module_compressible(module: nn.Module, mpu: Any = None) -> bool:
    """Return whether the module is a linear layer, embedding, convolution or batch norm, or one of `mpu`'s parallel
    linears; not a subclass with its own forward, not the output layer of `nn.MultiheadAttention`, which is not called,
    and not an embedding with `max_norm`, which changes its table in forward."""
    return isinstance(module, Compressible) or _compressed_class(module, mpu) is not None


def module_replacement(
    model: nn.Module,
    module_name: str,
    compression_technique: Mapping[str, Params] | None = None,
    mpu: Any = None,
) -> None:
    """Make a module compressible and prepare it for techniques (name -> the group's and the shared parameters,
    merged). The module and its parameters remain the same objects.

    ValueError: the module cannot be compressed, or not by this technique.
    """
    module = recursive_getattr(model, module_name)
    if not isinstance(module, Compressible):
        compressed = _compressed_class(module, mpu)
        if compressed is None:
            raise ValueError(f"{module_name} ({type(module).__name__}) cannot be compressed")
        module = compressed.take(module)
        module.name_seed = seed_of(module_name)
        if isinstance(module, (ColumnParallelLinear_Compress, RowParallelLinear_Compress)):
            module.mpu = mpu
    for technique, params in (compression_technique or {}).items():
        with GatheredParameters([module.weight]):
            try:
                _prepare(module, technique, params)
            except (ValueError, AttributeError) as error:
                raise ValueError(f"{technique} of {module_name}: {error}") from error


_ARGUMENTS = {
    keys.WEIGHT_QUANTIZATION: (
        "start_bits",
        "target_bits",
        "quantization_period",
        "quantize_weight_in_forward",
        "quantization_type",
        "quantize_groups",
        "rounding",
    ),
    keys.ACTIVATION_QUANTIZATION: ("bits", "quantization_type", "range_calibration"),
    keys.HEAD_PRUNING: ("dense_ratio", "method", "num_heads"),
    keys.SPARSE_PRUNING: ("dense_ratio", "method"),
    keys.ROW_PRUNING: ("dense_ratio", "method"),
    keys.CHANNEL_PRUNING: ("dense_ratio", "method"),
}
"""Parameters of a technique that its method ``enable_...`` takes, in order."""


def _prepare(module: Any, technique: str, params: Params) -> None:
    if technique not in _ARGUMENTS:
        raise ValueError(f"unknown technique; expected one of {', '.join(keys.TECHNIQUES)}")
    getattr(module, f"enable_{technique}")(*(params[name] for name in _ARGUMENTS[technique]))


def compression_preparation(
    model: M, compression_technique_list: Sequence[Sequence[Any]], mpu: Any = None
) -> M:
    """Prepare the modules named in the result of `get_compress_methods`, and their related modules."""
    for names, related, techniques in compression_technique_list:
        for name in (name for group in names for name in group):
            module_replacement(model, name, techniques, mpu=mpu)
        connected: Sequence[Any] = related or ()
        for i, patterns in enumerate(connected):
            for group in patterns:
                for main, name in zip(names[i], group, strict=True):
                    module_replacement(model, name, mpu=mpu)
                    follower = recursive_getattr(model, name)
                    if isinstance(follower, BNLayer_Compress):
                        follower.mask_from = (recursive_getattr(model, main),)
    for layer in model.modules():
        encoder = isinstance(layer, nn.TransformerEncoderLayer)
        if encoder and any(isinstance(child, Compressible) for child in layer.children()):
            layer.register_forward_pre_hook(_disable_fast_path)
    return model


def _disable_fast_path(module: nn.Module, inputs: Any) -> None:
    """Do nothing: any hook disables the fast path of torch's encoder layer, which reads weights of submodules in
    evaluation instead of calling them."""


def fix_compression(
    model: nn.Module,
    module_name: str,
    compression_technique: Mapping[str, Params],
    mask: Tensor | None = None,
    dim_reduction: bool = False,
) -> Tensor | None:
    """Make one technique of a module permanent. For row, head and channel pruning, return the boolean mask of what is
    kept, to be passed as `mask` for related modules."""
    module = recursive_getattr(model, module_name)
    if not isinstance(module, Compressible):
        raise ValueError(f"{module_name} was not prepared: call init_compression before training")
    fixed: Any = module
    for technique, params in compression_technique.items():
        if technique == keys.WEIGHT_QUANTIZATION:
            fixed.fix_weight_quantization()
        elif technique == keys.SPARSE_PRUNING:
            fixed.fix_sparse_pruning_helper()
        elif technique == keys.ROW_PRUNING:
            return fixed.fix_row_col_pruning_helper(mask, dim_reduction)
        elif technique == keys.HEAD_PRUNING:
            return fixed.fix_head_pruning_helper(mask, params["num_heads"], dim_reduction)
        elif technique == keys.CHANNEL_PRUNING:
            return fixed.fix_channel_pruning_helper(mask, dim_reduction)
    return None


# Pruners ----------------------------------------------------------------------------------------------------


def make_pruner(shared: Params, model: nn.Module) -> SnipMomentum:
    """Create the pruner of a model, even if it has no module to prune. ``shared``: parameters of `sparse_pruning`."""
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Compressible) and module.sparse_pruning_method == SNIP
    }
    pruner = SnipMomentum(
        modules,
        begin=shared["schedule_offset"],
        end=shared["schedule_offset_end"],
        stride=shared["schedule_offset_stride"],
        pattern=shared["block_pattern"],
        dense_ratio=shared["dense_ratio"],
    )
    for name, module in modules.items():
        with GatheredParameters([module.weight]):
            if not pruner.fits(module.weight):
                logger.warning(
                    f"sparse_pruning leaves {name} dense: its shape {tuple(module.weight.shape)} is not a "
                    f"multiple of the blocks {shared['block_pattern']}"
                )
                del pruner.modules[name]
    return pruner


def rewrite_optimizer_step(opt: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Notify `opt.pruners`, a list that you set, before and after each `opt.step()`. Returns `opt`."""
    plain: Callable[..., Any] = opt.step

    def step(*args: Any, **kwargs: Any) -> Any:
        pruners: Sequence[SnipMomentum] = vars(opt).get("pruners") or ()
        for pruner in pruners:
            pruner.on_before_optimizer_step()
        result = plain(*args, **kwargs)
        for pruner in pruners:
            pruner.on_after_optimizer_step()
        return result

    opt.step = step  # type: ignore[method-assign]
    return opt
