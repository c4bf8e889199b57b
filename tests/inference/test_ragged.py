"""The documented classes of ragged batching: sequences, their blocks, and batches of them."""

from __future__ import annotations

import pytest
import torch

from deepspeed.inference.v2.allocator import empty_from
from deepspeed.inference.v2.inference_parameter import InferenceParameter
from deepspeed.inference.v2.ragged import (
    AllocationMode,
    BlockedKVCache,
    DSStateManager,
    DSStateManagerConfig,
    KVCacheConfig,
    MemoryConfig,
    PlaceholderSequenceDescriptor,
    RaggedBatchWrapper,
    split_kv,
)
from deepspeed.inference.v2.ragged.ragged_wrapper import to_padded
from deepspeed.inference.v2.scheduling_utils import SchedulingError, SchedulingResult


def cache_config(**changes: object) -> KVCacheConfig:
    return KVCacheConfig(**({"block_size": 4, "cache_shape": (2, 3, 8), "cache_dtype": "fp16"} | changes))


def counted(blocks: int) -> MemoryConfig:
    return MemoryConfig(mode=AllocationMode.ALLOCATE, size=blocks)


def test_a_batch_of_sequences() -> None:
    config = DSStateManagerConfig(
        max_tracked_sequences=8, max_ragged_sequence_count=3, max_ragged_batch_size=20
    )
    batch = RaggedBatchWrapper(config)
    given = [torch.arange(5), torch.tensor([7]), torch.arange(10, 16)]
    for number, tokens in enumerate(given):
        sequence = PlaceholderSequenceDescriptor(
            seen_tokens=number, cur_allocated_blocks=2, kv_blocks_ptr=100 + number
        )
        batch.insert_sequence(sequence, tokens)
        assert batch.current_sequences == number + 1
    with pytest.raises(ValueError, match="finalize"):
        batch.input_ids()
    batch.finalize()
    assert batch.input_ids().tolist() == torch.cat(given).tolist()
    assert batch.tokens_to_seq().tolist() == [0] * 5 + [1] + [2] * 6
    assert batch.inflight_seq_descriptors()[:, :3].tolist() == [[0, 5, 0], [5, 1, 1], [6, 6, 2]]
    assert batch.kv_ptrs(on_device=False).tolist() == [100, 101, 102]
    assert batch.batch_metadata_buffer().tolist() == [12, 3] and batch.masks() is None
    batch.finalize(padding=True)
    assert len(batch.input_ids()) == to_padded(12) == 64 and batch.tokens_to_seq()[12:].unique().tolist() == [
        -1
    ]
    with pytest.raises(SchedulingError) as refused:
        batch.insert_sequence(PlaceholderSequenceDescriptor(), torch.zeros(1))
    assert refused.value.result is SchedulingResult.BatchSequenceLimitExceeded
    batch.clear()
    assert (batch.current_tokens, batch.current_sequences) == (0, 0)
    with pytest.raises(SchedulingError) as refused:
        batch.insert_sequence(PlaceholderSequenceDescriptor(), torch.zeros(21))
    assert refused.value.result is SchedulingResult.BatchTokenLimitExceeded
    batch.insert_sequence(PlaceholderSequenceDescriptor(), torch.zeros(21), do_checks=False)


def test_sequences_have_blocks_and_give_them_back() -> None:
    limits = DSStateManagerConfig(
        max_tracked_sequences=2,
        max_ragged_sequence_count=2,
        max_ragged_batch_size=8,
        memory_config=counted(6),
    )
    manager = DSStateManager(limits, cache_config())
    assert (manager.free_blocks == 6).all() and manager.kv_block_size == 4 and manager.n_kv_cache_groups == 1
    first = manager.get_or_create_sequence(17)
    assert manager.get_or_create_sequence(17) is first is manager.get_sequence(17)
    first.pre_forward(7)
    assert (first.seen_tokens, first.in_flight_tokens) == (0, 7)
    first.post_forward()
    assert (first.seen_tokens, first.in_flight_tokens) == (7, 0)
    blocks = manager.allocate_blocks(3)
    first.extend_kv_cache(blocks[:2])
    first.extend_kv_cache([blocks[2:]])
    assert first.cur_allocated_blocks == 3 and first.all_block_ids().tolist() == blocks.tolist()
    assert first.kv_cache_ids(on_device=True)[0, :3].tolist() == blocks.tolist()
    assert first.kv_blocks_ptr == first.kv_cache_ids(on_device=True).data_ptr()
    first.free_kv_cache(blocks[1:2])
    assert first.all_block_ids().tolist() == [int(blocks[0]), int(blocks[2])]
    with pytest.raises(ValueError, match="does not have block"):
        first.free_kv_cache(blocks[1:2])
    manager._kv_cache.free(blocks[1:2])
    manager.get_or_create_sequence(18)
    with pytest.raises(SchedulingError) as refused:
        manager.get_or_create_sequence(19)
    assert refused.value.result is SchedulingResult.EngineSequenceLimitExceeded
    manager.flush_sequence(17)
    manager.flush_sequence(20)
    assert (manager.free_blocks == 6).all() and list(manager.tracked_sequences) == [18]
    manager.get_or_create_sequence(19)
    assert manager.n_tracked_sequences == 2 and manager.get_sequence(17) is None


def test_blocks_move_to_the_host_and_come_back() -> None:
    cache = BlockedKVCache((cache_config(), cache_config(block_size=2)), counted(4), offload=True)
    assert cache.num_caches == 2 and cache.free_blocks.tolist() == [4, 4]
    keys, values = split_kv(cache.get_cache(1))
    assert keys.shape == values.shape == (4, 4, 3, 8) and cache.get_cache(0).dtype is torch.float16
    blocks = cache.reserve(2)
    for block in blocks.tolist():
        keys[block], values[block] = block + 1, -block - 1
    wanted = keys[blocks.long()].clone(), values[blocks.long()].clone()
    stored = cache.offload(blocks)
    assert cache.free_blocks.tolist() == [4, 4]
    taken = cache.reserve(3)
    with pytest.raises(ValueError, match="are free"):
        cache.restore(stored)
    cache.get_cache(1).zero_()
    cache.free(taken)
    found = cache.restore(stored).long()
    assert torch.equal(keys[found], wanted[0]) and torch.equal(values[found], wanted[1])
    with pytest.raises(ValueError, match="under the number"):
        cache.restore(stored)
    with pytest.raises(ValueError, match="without offload"):
        BlockedKVCache(cache_config(), counted(1)).offload([0])
    with pytest.raises(ValueError, match="no block of"):
        BlockedKVCache(cache_config(), MemoryConfig(size=10**18))


def test_memory_is_used_again() -> None:
    whole = torch.zeros(10)
    part = empty_from(whole, (2, 3))
    part.fill_(1)
    assert whole.tolist() == [1.0] * 6 + [0.0] * 4
    with pytest.raises(ValueError, match="does not fit"):
        empty_from(whole, (11,))


def test_a_parameter_takes_what_belongs_to_it_along() -> None:
    param = InferenceParameter.initialize(
        torch.ones(2, 3), scales=torch.zeros(2), words=torch.zeros(2, dtype=torch.uint8)
    )
    assert isinstance(param, torch.Tensor) and (param + 1).tolist() == [[2.0] * 3] * 2
    moved = param.to(torch.bfloat16)
    assert isinstance(moved, InferenceParameter) and list(moved.aux_attrs) == ["scales", "words"]
    assert (moved.dtype, moved.scales.dtype, moved.words.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.uint8,
    )
    assert InferenceParameter.initialize_raw(only=torch.ones(1)).only.tolist() == [1.0]
