"""Keys and values of attention in memory that never moves, written where the caller says: for graphs that are replayed.

A cache that counts its tokens itself would repeat, at every replay, the position at which the graph was recorded. Here
the position is a tensor of the caller, who changes it in place: one for all rows, or one for each row of the batch (-1:
the row is free). It has the methods that models of Transformers call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class DeepSpeedStaticLayer:
    """One layer: ``keys`` and ``values`` [rows, heads, max_cache_len, head size], made at the first update."""

    is_compileable = True
    is_sliding = False

    def __init__(self, max_cache_len: int) -> None:
        self.max_cache_len = max_cache_len
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.is_initialized = False
        self._position: Tensor | None = None

    def set_write_position(self, pos: Tensor) -> None:
        """ValueError: neither an integer nor one for each row."""
        if not isinstance(pos, Tensor) or pos.dim() > 1:
            raise ValueError(
                "a write position is a tensor of one number, or of one for each row of the cache"
            )
        if pos.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"a write position is int32 or int64, not {pos.dtype}")
        self._position = pos

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Memory for as many rows and heads as these have."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.max_batch_size, self.num_heads = key_states.shape[:2]
        self.k_head_dim, self.v_head_dim = key_states.shape[-1], value_states.shape[-1]
        shape = (self.max_batch_size, self.num_heads, self.max_cache_len)
        self.keys = torch.zeros((*shape, self.k_head_dim), dtype=self.dtype, device=self.device)
        self.values = torch.zeros((*shape, self.v_head_dim), dtype=self.dtype, device=self.device)
        for memory in (self.keys, self.values):
            torch._dynamo.mark_static_address(memory)
        self.is_initialized = True

    def _memory(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new tokens [rows, heads, tokens, head size] and return all there is of these rows. ValueError: rows
        with a position each get one token, within the cache, and every row needs a position."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, tokens = key_states.shape[0], key_states.shape[-2]
        if self._position is not None and self._position.dim() == 1:
            at = self._row_positions(rows, tokens)
            places = (torch.arange(rows, device=self.device), slice(None), at)
            for memory, new in zip(self._memory(), (key_states, value_states), strict=True):
                memory[places] = new[:, :, 0]
        else:
            at = torch.arange(tokens, device=self.device)
            if self._position is not None:
                at = at + self._position.to(self.device)
            for memory, new in zip(self._memory(), (key_states, value_states), strict=True):
                memory[:rows].index_copy_(2, at, new)
        keys, values = self._memory()
        return keys[:rows], values[:rows]

    def _row_positions(self, rows: int, tokens: int) -> Tensor:
        assert self._position is not None
        if self._position.numel() < rows:
            raise ValueError(
                f"{self._position.numel()} write positions do not cover the active batch size, {rows} rows"
            )
        if tokens != 1:
            raise ValueError(f"rows with a position each get one token at a time, not {tokens}")
        at = self._position[:rows].to(self.device)
        is_recording = at.is_cuda and torch.cuda.is_current_stream_capturing()
        if not is_recording and bool(((at < 0) | (at >= self.max_cache_len)).any()):
            raise ValueError(f"a write position is outside the cache of {self.max_cache_len} tokens")
        return at

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.max_cache_len, 0

    def get_seq_length(self) -> int | Tensor:
        """Tokens up to the write position and with it; 0 before there is one."""
        return 0 if not self.is_initialized or self._position is None else self._position + 1

    def get_max_cache_shape(self) -> int:
        return self.max_cache_len

    def reset(self) -> None:
        if self.is_initialized:
            for memory in self._memory():
                memory.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row ``i`` becomes what row ``beam_idx[i]`` was."""
        if self.is_initialized:
            for memory in self._memory():
                memory.copy_(memory.index_select(0, beam_idx.to(memory.device)))

    def _compact(self, rows: Tensor) -> None:
        if self.is_initialized:
            for memory in self._memory():
                kept = memory.index_select(0, rows.to(memory.device))
                memory[: len(rows)] = kept
                memory[len(rows) :].zero_()

    def _trim_left(self, count: int) -> None:
        if self.is_initialized and count:
            for memory in self._memory():
                memory[:, :, : self.max_cache_len - count] = memory[:, :, count:].clone()
                memory[:, :, self.max_cache_len - count :].zero_()


class DeepSpeedStaticCache:
    """The layers of a model of Transformers, with one write position for all of them."""

    is_compileable = True

    def __init__(
        self,
        config: Any,
        batch_size: int = 1,
        max_cache_len: int = 4096,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        text = getattr(config, "text_config", None) or config
        heads = text.num_attention_heads
        size = getattr(text, "head_dim", None) or text.hidden_size // heads
        self._position: Tensor | None = None
        self.max_batch_size, self.max_cache_len = batch_size, max_cache_len
        self._layers = [DeepSpeedStaticLayer(max_cache_len) for _ in range(text.num_hidden_layers)]
        if device is not None:
            kv_heads = getattr(text, "num_key_value_heads", None) or heads
            self.early_initialization(batch_size, kv_heads, size, dtype or torch.float32, device)

    @property
    def layers(self) -> list[DeepSpeedStaticLayer]:
        return self._layers

    def early_initialization(
        self, batch_size: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Make the memory of all layers."""
        example = torch.zeros((batch_size, num_heads, 0, head_dim), dtype=dtype, device=device)
        for layer in self._layers:
            layer.lazy_initialization(example, example)

    def set_write_position(self, pos: Tensor) -> None:
        """Before each step, or once: the tensor may be changed in place."""
        for layer in self._layers:
            layer.set_write_position(pos)
        self._position = pos

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not 0 <= layer_idx < len(self._layers):
            raise IndexError(f"layer_idx {layer_idx}: the cache has {len(self._layers)} layers")
        return self._layers[layer_idx].update(key_states, value_states)

    def compact(self, active_indices: Tensor) -> None:
        """Move the rows ``active_indices`` to the front, in this order, with their positions; the others are free.
        ValueError: they are not different rows of the cache."""
        rows = active_indices.tolist() if active_indices.dim() == 1 else None
        if rows is None or len(set(rows)) != len(rows):
            raise ValueError("active_indices names rows of the cache, each once, in one dimension")
        if any(not 0 <= row < self.max_batch_size for row in rows):
            raise ValueError(f"active_indices has a row that is not one of the {self.max_batch_size} rows")
        position = self._position
        if position is not None and position.dim() == 1:
            if position.numel() != self.max_batch_size:
                raise ValueError(
                    f"{position.numel()} write positions for {self.max_batch_size} rows: give one for each"
                )
            kept = position.index_select(0, active_indices.to(position.device))
            position.fill_(-1)[: len(rows)] = kept
        for layer in self._layers:
            layer._compact(active_indices)

    def trim_left(self, count: int) -> None:
        """Drop the first ``count`` tokens of all rows; write positions move with the rest. ValueError: negative."""
        if count < 0:
            raise ValueError(f"count={count}: must not be negative")
        count = min(count, self.max_cache_len)
        for layer in self._layers:
            layer._trim_left(count)
        if self._position is not None:
            self._position.sub_(count).clamp_(min=-1)

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        return self._layers[layer_idx].get_seq_length()

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.max_cache_len

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._layers[layer_idx].get_mask_sizes(query_length)

    def reset(self) -> None:
        for layer in self._layers:
            layer.reset()

    def __len__(self) -> int:
        return len(self._layers)
