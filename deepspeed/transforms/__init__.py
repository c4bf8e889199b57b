"""Transforms of a module before it is sharded, and of the inputs of its forward (``docs/transforms.md``)."""

from deepspeed.checkpoint.originals import Expression, Joined, LowRank, Part, Transposed, Weight
from deepspeed.transforms.errors import TransformError
from deepspeed.transforms.inputs import ForwardFacts, InputChain, InputTransform
from deepspeed.transforms.module_transforms import (
    ModuleTransform,
    TransformContext,
    TransformReport,
    Transforms,
    request,
    transform_module,
    transforms_of,
)

__all__ = [
    "Expression",
    "ForwardFacts",
    "InputChain",
    "InputTransform",
    "Joined",
    "LowRank",
    "ModuleTransform",
    "Part",
    "TransformContext",
    "TransformError",
    "TransformReport",
    "Transforms",
    "Transposed",
    "Weight",
    "request",
    "transform_module",
    "transforms_of",
]
