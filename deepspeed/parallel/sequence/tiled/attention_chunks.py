"""Chunked self-attention for Transformers models, whose attention modules are recognized by what they compute.

A module with Llama's four projections is a candidate. It is replaced by ``deepspeed.parallel.sequence.chunked`` if both
give the same result for random weights and a short sequence: query and key norms, score capping, other position
encodings and the like show up as a difference.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.sharded import full_shape
from deepspeed.comm.collectives import communicator_of
from deepspeed.parallel.sequence.chunked import ChunkedAttentionCall, chunked_self_attention, chunks_of
from deepspeed.transforms.recompute.side_stream import SideStream

_IN, _OUT = ("q_proj", "k_proj", "v_proj"), "o_proj"
_CACHES = ("past_key_values", "past_key_value")
_LENGTH, _BATCH, _TOLERANCE = 11, 2, 1e-4


class NotChunkable(ValueError):
    """A module's attention cannot be chunked; the message says why."""


class ChunkedForward:
    """Replacement ``forward`` of an attention module, causal, with its four projections: chunks of ``chunk`` tokens
    when training on longer sequences.

    NotChunkable: it has a window, dropout, another attention than "sdpa", or projections that are no plain linear
    layers.
    """

    def __init__(self, module: nn.Module, chunk: int) -> None:
        own: Any = module
        for name in (*_IN, _OUT):
            if type(getattr(own, name)) is not nn.Linear or "forward" in vars(getattr(own, name)):
                raise NotChunkable(f"its {name} is not a plain nn.Linear")
        if len({getattr(own, name).bias is None for name in _IN}) > 1:
            raise NotChunkable("only some of its projections have a bias")
        size = getattr(own, "head_dim", None)
        if not isinstance(size, int):
            raise NotChunkable("it has no head_dim")
        config = getattr(own, "config", None)
        window = getattr(own, "sliding_window", getattr(config, "sliding_window", None))
        if window is not None:
            raise NotChunkable(f"it uses a sliding window of {window} tokens")
        if getattr(own, "attention_dropout", 0.0):
            raise NotChunkable(f"it has attention_dropout={own.attention_dropout}; set it to 0")
        core = getattr(config, "_attn_implementation", None)
        if core != "sdpa":
            raise NotChunkable(
                f"its model has attn_implementation={core!r} (or its sequences are sharded), not 'sdpa'"
            )
        self.module, self.chunk, self.size = own, chunk, size
        self.scale = float(getattr(own, "scaling", None) or size**-0.5)
        self.stream = SideStream()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the attention. ValueError: a mask (padding, packed documents), or a cache, with a sequence longer
        than a chunk."""
        module = self.module
        bound = self._signature.bind(module, *args, **kwargs).arguments
        given = {**bound.pop("kwargs", {}), **bound}
        x = given["hidden_states"]
        if x.shape[1] <= self.chunk or not module.training:
            return type(module).forward(module, *args, **kwargs)
        if given.get("attention_mask") is not None:
            raise ValueError(
                f"tiled_compute.attention_chunk={self.chunk}: {type(module).__name__} got an attention mask "
                f"for {x.shape[1]} tokens. Chunked attention is causal, without padding or packed "
                "documents; leave attention_mask and position_ids out, or set attention_chunk to null"
            )
        if any(given.get(name) is not None for name in _CACHES):
            raise ValueError(
                f"tiled_compute.attention_chunk={self.chunk}: {type(module).__name__} got a key-value cache "
                "in training; set model.config.use_cache to False"
            )
        return self.attend(x, given["position_embeddings"], self.chunk), None

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(type(self.module).forward)

    def attend(self, x: Tensor, tables: tuple[Tensor, Tensor], chunk: int) -> Tensor:
        """Map x [batch, tokens, hidden], with cosines and sines [batch or 1, tokens, size], to [batch, tokens,
        hidden]."""
        # Read in every call: at stage 3, the attribute access gathers them.
        projections = [getattr(self.module, name) for name in _IN]
        weights = [each.weight for each in projections]
        biases = [each.bias for each in projections]
        out: nn.Linear = getattr(self.module, _OUT)
        length = x.shape[1]
        call = ChunkedAttentionCall(
            comm=communicator_of(None),
            chunks=chunks_of(length, math.ceil(length / chunk), 1),
            heads=weights[0].shape[0] // self.size,
            kv_heads=weights[1].shape[0] // self.size,
            size=self.size,
            scale=self.scale,
            rotary=(_tokens_first(tables[0]), _tokens_first(tables[1])),
            stream=self.stream,
        )
        bias = None if biases[0] is None else torch.cat(biases)
        result = chunked_self_attention(call, x.transpose(0, 1), torch.cat(weights), bias, out.weight)
        return (result if out.bias is None else result + out.bias).transpose(0, 1)


def _tokens_first(table: Tensor) -> Tensor:
    """Rearrange [batch or 1, tokens, size] into [tokens, batch or 1, 1, size]."""
    return table.transpose(0, 1).unsqueeze(2)


def attention_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of each attention with the four projections."""
    for path, each in module.named_modules():
        names = {name for name, _ in each.named_children()}
        if names.issuperset((*_IN, _OUT)):
            yield path, each


def chunked(module: nn.Module, chunk: int, proven: set[Any]) -> ChunkedForward:
    """Return a replacement for ``module.forward``. ``proven``: kinds of modules that have already been compared.

    NotChunkable: it computes something else (see the module docstring), or cannot run on hidden states and rotary
    tables.
    """
    if "forward" in vars(module):
        raise NotChunkable("its forward has already been replaced")
    made = ChunkedForward(module, chunk)
    kind = _kind_of(module)
    if kind not in proven:
        _compare(module, made)
        proven.add(kind)
    return made


def _kind_of(module: nn.Module) -> Any:
    """Return a key that is equal for modules that compute the same with the same weights."""
    shapes = tuple((name, tuple(full_shape(each))) for name, each in module.named_parameters())
    plain = {
        name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str))
    }
    plain.pop("layer_idx", None)
    return type(module), shapes, tuple(sorted(plain.items()))


def _compare(module: nn.Module, chunked: ChunkedForward) -> None:
    """Raise NotChunkable if the module and its chunked attention differ. Scores are large (about 9), to expose
    capping."""
    draw = torch.Generator().manual_seed(0)
    shapes = {name: full_shape(each) for name, each in module.named_parameters()}
    tensors = {
        name: torch.randn(shape, generator=draw) * (3 / math.sqrt(shape[-1]))
        for name, shape in shapes.items()
    }
    x = torch.randn(_BATCH, _LENGTH, shapes[f"{_IN[0]}.weight"][1], generator=draw)
    angles = torch.rand(1, _LENGTH, chunked.size // 2, generator=draw).repeat(1, 1, 2) * 6
    tables = (angles.cos(), angles.sin())
    inputs = {"hidden_states": x, "position_embeddings": tables, "attention_mask": None}
    try:
        with torch.no_grad():
            expected = torch.func.functional_call(module, tensors, (), inputs)
            found = torch.func.functional_call(_SingleRankGroup(chunked), tensors, (x, tables))
    except Exception as error:
        raise NotChunkable(f"its forward on hidden states and rotary tables fails: {error}") from error
    expected = expected[0] if isinstance(expected, tuple) else expected
    if not isinstance(expected, Tensor) or expected.shape != found.shape:
        raise NotChunkable("it does not return hidden states")
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error <= _TOLERANCE:
        raise NotChunkable(
            f"it computes something else than causal attention with rotary positions ({error:.0e})"
        )


class _SingleRankGroup(nn.Module):
    """Module that runs ``chunked``, with the parameter names of its attention module, for ``functional_call``."""

    def __init__(self, chunked: ChunkedForward) -> None:
        super().__init__()
        for name, child in chunked.module.named_children():
            self.add_module(name, child)
        self.chunked = chunked

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        return self.chunked.attend(x, tables, 4)
