"""A cache whose write position is the caller's: rows, positions and what is kept of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from deepspeed.inference.static_cache import DeepSpeedStaticCache, DeepSpeedStaticLayer

CONFIG = SimpleNamespace(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=12)
CPU = torch.device("cpu")


def tokens(rows: int, count: int) -> torch.Tensor:
    return torch.randn(rows, 2, count, 3)


def test_one_position_for_all_rows() -> None:
    cache = DeepSpeedStaticCache(CONFIG, batch_size=2, max_cache_len=6, device=CPU)
    assert len(cache) == 2 and cache.layers[1].keys is not None and cache.layers[1].keys.shape == (2, 2, 6, 3)
    assert cache.get_seq_length() == 0 and cache.get_mask_sizes(1) == (6, 0)
    position = torch.tensor(0)
    cache.set_write_position(position)
    prompt, later = tokens(2, 3), tokens(2, 1)
    cache.update(prompt, -prompt, 1)
    position.fill_(3)  # what a graph would read at its next replay
    keys, values = cache.update(later, -later, 1)
    assert torch.equal(keys[:, :, :4], torch.cat((prompt, later), 2)) and torch.equal(values, -keys)
    assert not keys[:, :, 4:].any() and cache.get_seq_length(1) == 4
    cache.trim_left(2)
    assert torch.equal(keys[:, :, :2], torch.cat((prompt[:, :, 2:], later), 2)) and position == 1
    cache.layers[1].reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(keys[0, :, 1], later[1, :, 0])
    cache.reset()
    assert not keys.any()
    with pytest.raises(IndexError, match="layer_idx 2"):
        cache.update(later, later, 2)


def test_a_position_for_each_row() -> None:
    layer = DeepSpeedStaticLayer(4)
    new = tokens(2, 1)
    layer.set_write_position(torch.tensor([1, 3, -1]))
    layer.lazy_initialization(tokens(3, 1), tokens(3, 1))
    keys, values = layer.update(new, 10 * new)  # of the third row nothing is written
    assert torch.equal(keys[0, :, 1], new[0, :, 0]) and torch.equal(values[1, :, 3], 10 * new[1, :, 0])
    assert keys.count_nonzero() == new.numel() and keys.shape[0] == 2
    assert torch.equal(torch.as_tensor(layer.get_seq_length()), torch.tensor([2, 4, 0]))
    with pytest.raises(ValueError, match="outside the cache of 4"):
        layer.update(tokens(3, 1), tokens(3, 1))
    with pytest.raises(ValueError, match="one token at a time, not 2"):
        layer.update(tokens(2, 2), tokens(2, 2))
    layer.set_write_position(torch.tensor([1]))
    with pytest.raises(ValueError, match="cover the active batch size"):
        layer.update(new, new)
    for wrong in (torch.tensor([1.0]), torch.zeros(1, 1, dtype=torch.long)):
        with pytest.raises(ValueError, match="a write position is"):
            layer.set_write_position(wrong)


def test_free_rows_go_to_the_end() -> None:
    cache = DeepSpeedStaticCache(CONFIG, batch_size=3, max_cache_len=4, device=CPU)
    position = torch.tensor([1, 2, 3])
    cache.set_write_position(position)
    written = tokens(3, 1)
    keys, _ = cache.update(written, written, 0)
    cache.compact(torch.tensor([2, 0]))
    assert torch.equal(keys[0, :, 3], written[2, :, 0]) and torch.equal(keys[1, :, 1], written[0, :, 0])
    assert not keys[2].any() and position.tolist() == [3, 1, -1]
    for wrong in ([0, 0], [3], [[0]]):
        with pytest.raises(ValueError, match="active_indices"):
            cache.compact(torch.tensor(wrong))
