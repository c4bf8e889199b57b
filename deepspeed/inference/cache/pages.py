"""Tensors of the paged KV cache."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspeed.ops.gpu import usable
from deepspeed.ops.paged_attention import supports


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one token's entry in a layer: ``heads`` keys of ``key_size`` and values of ``value_size`` elements."""

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, key: Tensor, value: Tensor) -> LayerShape:
        """Derive the shape from ``key`` and ``value`` [.., heads, tokens, size]. ValueError: their heads differ."""
        if key.shape[-3] != value.shape[-3]:
            raise ValueError(f"{key.shape[-3]} key heads but {value.shape[-3]} value heads")
        return cls(key.shape[-3], key.shape[-1], value.shape[-1], key.dtype, key.device)

    @property
    def token_bytes(self) -> int:
        return self.heads * (self.key_size + self.value_size) * self.dtype.itemsize


class PagedCache:
    """Keys and values of all layers. Keys are stored transposed, [blocks, heads, key size, block_size], so that a query
    is compared with all keys of a block at once; values are [blocks, heads, block_size, value size].

    Args:
        shapes: by layer number.
    """

    def __init__(self, shapes: Mapping[int, LayerShape], num_blocks: int, block_size: int) -> None:
        self.shapes = dict(shapes)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._pages = {
            index: (
                _zeros((num_blocks, shape.heads, shape.key_size, block_size), shape.dtype, shape.device),
                _zeros((num_blocks, shape.heads, block_size, shape.value_size), shape.dtype, shape.device),
            )
            for index, shape in self.shapes.items()
        }
        self.is_on_host = bool(self.shapes) and all(
            supports(shape.dtype, shape.device) for shape in self.shapes.values()
        )
        """Whether the host kernel can read all pages."""
        pages = [tensor for both in self._pages.values() for tensor in both]
        self.is_on_gpu = bool(pages) and usable(*pages) and all(map(_in_kernel, self.shapes.values()))
        """Whether the Triton kernel can read all pages, from one GPU."""

    @property
    def nbytes(self) -> int:
        return block_bytes(self.shapes, self.block_size) * self.num_blocks

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of one layer. KeyError: the layer has none."""
        return self._pages[layer]

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, key: Tensor, value: Tensor) -> None:
        """Write ``key`` and ``value`` [tokens, heads, size] to the slots ``offsets`` of ``blocks``, both [tokens] (or
        all with a leading dim of sequences)."""
        keys, values = self._pages[layer]
        keys[blocks, :, :, offsets] = key
        values[blocks, :, offsets] = value

    def read(self, layer: int, blocks: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values [heads, stop - start, size] of the tokens ``start`` to ``stop`` of the
        sequence that has ``blocks``."""
        first, last = start // self.block_size, -(-stop // self.block_size)
        inside = slice(start - first * self.block_size, stop - first * self.block_size)
        keys, values = (pages.index_select(0, blocks[first:last]) for pages in self._pages[layer])
        keys = keys.permute(1, 0, 3, 2).reshape(keys.shape[1], -1, keys.shape[2])
        values = values.transpose(0, 1).reshape(values.shape[1], -1, values.shape[3])
        return keys[:, inside], values[:, inside]

    def read_slots(self, layer: int, blocks: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values [batch, heads, tokens, size] of slots ``offsets`` of ``blocks``, [batch,
        tokens]."""
        keys, values = self._pages[layer]
        return keys[blocks, :, :, offsets].transpose(1, 2), values[blocks, :, offsets].transpose(1, 2)


def _in_kernel(shape: LayerShape) -> bool:
    from deepspeed.ops.gpu.softmax_steps import supports as gpu_supports

    return gpu_supports(shape.dtype, shape.key_size, shape.value_size)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros, since unwritten slots may be read under a mask and must be finite. On the host the memory is not
    touched, so the system allocates each page when it is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    untouched = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(untouched).view(dtype).view(shape)


def block_bytes(shapes: Mapping[int, LayerShape], block_size: int) -> int:
    """Return the bytes of one block, over all layers."""
    return block_size * sum(shape.token_bytes for shape in shapes.values())


@dataclass(frozen=True, slots=True)
class PagePiece:
    """Tokens of one sequence for one forward: ``tokens`` from position ``start``; keys and values of earlier tokens are
    in the cache. ``blocks``: of the sequence, with room for ``tokens``. ``span``: of the whole sequence
    (`inference/model/rotations.py`). ``wanted``: number of last tokens whose logits are needed. ``adapter``: of the
    sequence (`inference/model/low_rank.py`)."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    span: int = 0
    wanted: int = 1
    adapter: Any = None

    @property
    def count(self) -> int:
        return len(self.tokens)

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class SwappedBlocks:
    """Host copies of ``count`` blocks, of an idle sequence: ``pages`` has keys and values per layer."""

    count: int
    pages: dict[int, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, cache: PagedCache, blocks: Sequence[int]) -> SwappedBlocks:
        """Copy ``blocks`` to the host."""
        pages = {}
        for layer in cache.shapes:
            keys, values = cache.pages(layer)
            at = torch.tensor(blocks, dtype=torch.int64, device=keys.device)
            pages[layer] = (keys.index_select(0, at).cpu(), values.index_select(0, at).cpu())
        return cls(len(blocks), pages)

    def write(self, cache: PagedCache, blocks: Sequence[int]) -> None:
        """Copy the contents into ``count`` blocks of ``cache``."""
        for layer, (keys, values) in self.pages.items():
            to_keys, to_values = cache.pages(layer)
            at = torch.tensor(blocks, dtype=torch.int64, device=to_keys.device)
            to_keys.index_copy_(0, at, keys.to(to_keys.device))
            to_values.index_copy_(0, at, values.to(to_values.device))
