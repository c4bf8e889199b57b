"""Scratch buffers that are lent again and again, and the views of them that are kept meanwhile."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor

from deepspeed.zero.bucket import BufferPool
from deepspeed.zero.offload.state_moves import by_storage, move_storage

HERE = torch.device("cpu")
NUMEL = 96


def take(pool: BufferPool, numel: int = NUMEL) -> Tensor:
    return pool.take(numel, torch.float32, HERE)


def halves(buffer: Tensor) -> list[Tensor]:
    return [buffer[: NUMEL // 2].view(6, -1), buffer[NUMEL // 2 :]]


def thirds(buffer: Tensor) -> list[Tensor]:
    return list(buffer.split(NUMEL // 3))


def test_a_user_that_gets_the_same_buffer_gets_the_same_views() -> None:
    pool = BufferPool()
    buffer = take(pool)
    views = pool.parts(buffer, 0, halves)
    pool.give(buffer)
    again = take(pool)
    assert again is buffer
    assert pool.parts(again, 0, halves) is views
    others = pool.parts(again, 1, thirds)
    others[0].fill_(1.0)
    views[1].fill_(2.0)
    assert again[:32].eq(1.0).all() and again[48:].eq(2.0).all()


def test_a_buffer_of_another_size_has_views_of_its_own() -> None:
    pool = BufferPool()
    large = take(pool, 2 * NUMEL)
    pool.give(large)
    part = take(pool)
    assert part.numel() == NUMEL and part.data_ptr() == large.data_ptr()
    assert pool.parts(part, 0, halves)[0].data_ptr() == large.data_ptr()


def test_kept_views_do_not_keep_a_buffer_alive() -> None:
    pool = BufferPool()
    buffer = take(pool)
    view = weakref.ref(pool.parts(buffer, 0, halves)[0])
    gone = weakref.ref(buffer)
    pool.give(buffer)
    del buffer
    gc.disable()  # counting references suffices: memory is free at once
    try:
        pool.clear()
        assert gone() is None and view() is None
    finally:
        gc.enable()


def test_views_of_all_users_move_with_a_buffer() -> None:
    """``offload_states`` moves the memory of a buffer in use: later users must not write to where it was."""
    pool = BufferPool()
    buffer = take(pool)
    views = [pool.parts(buffer, 0, halves), pool.parts(buffer, 1, thirds)]
    buffer.copy_(torch.arange(NUMEL))
    (group,) = by_storage([buffer, *pool.parts_of(buffer)])
    move_storage(group, torch.empty(NUMEL * 4, dtype=torch.uint8), non_blocking=False)
    for parts in views:
        assert torch.cat([part.reshape(-1) for part in parts]).equal(buffer)
        assert parts[0].data_ptr() == buffer.data_ptr()
