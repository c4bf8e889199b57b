"""Selection of the transforms that a config asks for.

Each is imported only if it is asked for: tensor and sequence parallelism alone are sixty modules, and importing them
would delay the start of every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed.config.deepspeed_config import DeepSpeedConfig
    from deepspeed.transforms.module_transforms import ModuleTransform


def expert_parallelism(config: DeepSpeedConfig) -> ModuleTransform | None:
    section = config.expert_parallel_config
    if not section.enabled:
        return None
    from deepspeed.parallel.expert.transform import ExpertParallelism

    return ExpertParallelism(section)


def tensor_parallelism(config: DeepSpeedConfig) -> ModuleTransform | None:
    section = config.tensor_parallel_config
    if section.autotp_size <= 1:
        return None
    from deepspeed.parallel.tensor.transform import TensorParallelism

    return TensorParallelism(section)


def sparse_attention(config: DeepSpeedConfig) -> ModuleTransform | None:
    section = config.sparse_attention
    if section is None or not config.applies_sparse_attention:
        return None
    from deepspeed.transforms.sparse_attention import SparseAttention

    return SparseAttention(section)


def sequence_shards(config: DeepSpeedConfig) -> ModuleTransform | None:
    if config.sequence_parallel_size <= 1:
        return None
    from deepspeed.parallel.sequence.transform import ShardedSequences

    return ShardedSequences()


def float8_linears(config: DeepSpeedConfig) -> ModuleTransform | None:
    section = config.schema.fp8
    if not section.enabled:
        return None
    from deepspeed.transforms.float8_linears import Float8Linears

    return Float8Linears(section)


def tiled_compute(config: DeepSpeedConfig) -> ModuleTransform | None:
    section = config.schema.tiled_compute
    if not section.enabled:
        return None
    from deepspeed.parallel.sequence.tiled.model_transform import TiledModel

    return TiledModel(section)


def memory_budget(config: DeepSpeedConfig) -> ModuleTransform | None:
    limit = config.activation_checkpointing_config.memory_budget
    if limit is None:
        return None
    from deepspeed.transforms.recompute.budget import MemoryBudget

    return MemoryBudget(limit)


def native_products(config: DeepSpeedConfig) -> ModuleTransform | None:
    if not config.schema.native_products.enabled:
        return None
    from deepspeed.transforms.native_linears import NativeLinears

    return NativeLinears()


def layer_drop(config: DeepSpeedConfig) -> ModuleTransform | None:
    section = config.pld_config
    if section is None or not section.enabled:
        return None
    from deepspeed.transforms.progressive_layer_drop import LayerDrop

    return LayerDrop(section.theta, section.gamma)


def weight_quantization(config: DeepSpeedConfig) -> ModuleTransform | None:
    section = config.weight_quantization_config
    if section is None or not section.enabled:
        return None
    from deepspeed.transforms.weight_quantization.quantization import WeightQuantization

    return WeightQuantization(section)


Factory = Callable[["DeepSpeedConfig"], "ModuleTransform | None"]
FROM_CONFIG: tuple[Factory, ...] = (
    expert_parallelism, tensor_parallelism, sparse_attention, sequence_shards, float8_linears, tiled_compute,
    memory_budget, native_products, layer_drop, weight_quantization,
)  # fmt: skip
"""Each returns a transform, or None if the config does not ask for it."""


def from_config(config: DeepSpeedConfig) -> list[ModuleTransform]:
    """Return the transforms that the config asks for, in the order of ``FROM_CONFIG``."""
    return [made for make in FROM_CONFIG if (made := make(config)) is not None]
