"""The weights of filled containers as one tensor of bytes, and back.

The containers' weights become views of that tensor; they keep their strides. A description says where each one lies, so
that the bytes and it are enough to fill new containers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.config.section import DeepSpeedConfigModel
from deepspeed.inference.v2.inference_parameter import InferenceParameter
from deepspeed.inference.v2.model_implementations.layer_container_base import LayerContainer

__all__ = [
    "LayerMetadata",
    "ModelMetadata",
    "ParameterMetadata",
    "TensorMetadata",
    "flatten_inference_model",
    "make_metadata_filename",
    "make_model_config_filename",
    "make_param_filename",
    "pad_to_aligned_offset",
    "restore_inference_model",
]

_NOTHING = -1
"""Offset of a weight that a layer does not have."""


class TensorMetadata(DeepSpeedConfigModel):
    """``dtype``: such as "torch.float16". ``offset``: in bytes; -1: there is no tensor."""

    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    offset: int


class ParameterMetadata(DeepSpeedConfigModel):
    """A weight, and what belongs to it, by name."""

    core_param: TensorMetadata | None = None
    aux_params: dict[str, TensorMetadata] = {}


class LayerMetadata(DeepSpeedConfigModel):
    """By the name of the weight."""

    params: dict[str, ParameterMetadata] = {}


class ModelMetadata(DeepSpeedConfigModel):
    """``policy``: the name of the class that knows the model. ``layers``: "transformer_layer_0" and so on, and
    "non_transformer"."""

    policy: str = ""
    layers: dict[str, LayerMetadata] = {}


def pad_to_aligned_offset(offset: int, alignment: int = 256) -> int:
    """The next multiple of ``alignment``."""
    return -(-offset // alignment) * alignment


def make_param_filename(base: str, rank: int, n_ranks: int) -> str:
    """Where a rank's bytes are kept."""
    return str(Path(base) / f"params_rank_{rank}_of_{n_ranks}.pt")


def make_metadata_filename(base: str, rank: int, n_ranks: int) -> str:
    """Where their description is kept."""
    return str(Path(base) / f"metadata_rank_{rank}_of_{n_ranks}.json")


def make_model_config_filename(base: str) -> str:
    """Where the model's config is kept."""
    return str(Path(base) / "ds_model_config.json")


def flatten_inference_model(
    transformer_containers: Iterable[LayerContainer],
    non_transformer_container: LayerContainer,
    policy_name: str,
) -> tuple[Tensor, ModelMetadata]:
    """The bytes, on the device, and their description. ValueError: a container is not filled."""
    layers = dict(_named(transformer_containers, non_transformer_container))
    described = ModelMetadata(policy=policy_name)
    end = 0
    for name, container in layers.items():
        if not container.is_populated:
            raise ValueError(f"{name} is not filled: a {type(container).__name__} lacks weights")
        described.layers[name], end = _describe(container, end)
    buffer = torch.empty(end, dtype=torch.uint8, device=get_accelerator().current_device_name())
    for name, container in layers.items():
        for weight, where in described.layers[name].params.items():
            given = getattr(container, weight)
            if given is None:
                continue
            views = {key: _view(buffer, each) for key, each in where.aux_params.items()}
            for key, view in views.items():
                view.copy_(given.aux_attrs[key])
            core = _view(buffer, where.core_param).copy_(given.as_subclass(Tensor))
            setattr(container, weight, InferenceParameter.initialize(core, **views))
    return buffer, described


def restore_inference_model(
    buffer: Tensor,
    metadata: ModelMetadata,
    transformer_containers: Iterable[LayerContainer],
    non_transformer_container: LayerContainer,
) -> None:
    """Fill empty containers with views of ``buffer``; nothing is copied."""
    for name, container in _named(transformer_containers, non_transformer_container):
        for weight, where in metadata.layers[name].params.items():
            assert where.core_param is not None
            found = None
            if where.core_param.offset != _NOTHING:
                views = {key: _view(buffer, each) for key, each in where.aux_params.items()}
                found = InferenceParameter.initialize(_view(buffer, where.core_param), **views)
            container.direct_injection(weight, found)


def _named(
    transformer_containers: Iterable[LayerContainer], non_transformer_container: LayerContainer
) -> Iterator[tuple[str, LayerContainer]]:
    for number, container in enumerate(transformer_containers):
        yield f"transformer_layer_{number}", container
    yield "non_transformer", non_transformer_container


def _describe(container: LayerContainer, start: int) -> tuple[LayerMetadata, int]:
    """Its weights one after the other from ``start``, and where they end."""
    layer, end = LayerMetadata(), start

    def place(tensor: Tensor) -> TensorMetadata:
        nonlocal end
        offset, end = end, pad_to_aligned_offset(end + _extent(tensor) * tensor.element_size())
        return TensorMetadata(
            dtype=str(tensor.dtype),
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            offset=offset,
        )

    for name in container.annotation_attrs:
        weight = getattr(container, name)
        if weight is None:
            layer.params[name] = ParameterMetadata(core_param=TensorMetadata(offset=_NOTHING))
            continue
        core = place(weight)
        others = {key: place(value) for key, value in weight.aux_attrs.items()}
        layer.params[name] = ParameterMetadata(core_param=core, aux_params=others)
    return layer, end


def _extent(tensor: Tensor) -> int:
    """Elements from the first to the last, with those that its strides leave out."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 0 if not tensor.numel() else 1 + sum((size - 1) * stride for size, stride in steps)


def _view(buffer: Tensor, where: TensorMetadata | None) -> Tensor:
    assert where is not None and where.dtype and where.shape is not None and where.strides is not None
    dtype: torch.dtype = getattr(torch, where.dtype.removeprefix("torch."))
    count = (
        0
        if 0 in where.shape
        else 1 + sum((n - 1) * s for n, s in zip(where.shape, where.strides, strict=True))
    )
    part = buffer[where.offset : where.offset + count * dtype.itemsize].view(dtype)
    return part.as_strided(where.shape, where.strides, part.storage_offset())
