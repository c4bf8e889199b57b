"""CRC-32 of every block of a file's tensors, so that a reader verifies exactly the blocks it touches.

A hash per block, unlike a sum over the tensor, detects swapped bytes, can be verified without other ranks' shards,
and costs the reader of an interval at most two extra blocks.
"""

from __future__ import annotations

import ctypes
import zlib
from array import array
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from torch import Tensor

from deepspeed.ops import native

BLOCK = 1 << 14
"""Bytes that one CRC covers. Each tensor starts a new block, so no block holds bytes of two tensors."""

CHUNK_BYTES = 1 << 20
"""Bytes hashed, written or verified at a time."""

_WORTH_A_THREAD = 1 << 18


def count_blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK)


def hash_blocks(data: np.ndarray) -> np.ndarray:
    """Return the CRC-32 of each block of contiguous bytes, [blocks] uint32; the last block may be short."""
    return native.crc32_blocks(data.ctypes.data, data.nbytes, BLOCK)


class BlockHasher:
    """Hashes bytes that arrive in chunks of any size, in a separate thread while the caller writes them.

    A chunk passed to ``add`` must stay unchanged until the next call.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._done = array("I")
        self._crc = 0
        self._filled = 0

    def add(self, chunk: np.ndarray) -> None:
        self.wait()
        if chunk.nbytes < _WORTH_A_THREAD:
            self._add(chunk)
            return
        if self._pool is None:  # one per file: threads do not survive a fork
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-hash")
        self._pending = self._pool.submit(self._add, chunk)

    def wait(self) -> None:
        """Return when the last chunk is hashed and its memory may be reused."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def end_of_tensor(self) -> None:
        self.wait()
        if self._filled:
            self._close_block()

    def result(self) -> np.ndarray:
        """Return the hashes of all tensors so far, in order, [blocks] uint32."""
        self.wait()
        return np.array(self._done, dtype=np.uint32)

    def _add(self, chunk: np.ndarray) -> None:
        position = 0
        if self._filled:
            position = min(BLOCK - self._filled, chunk.nbytes)
            self._extend(chunk[:position])
        whole = position + (chunk.nbytes - position) // BLOCK * BLOCK
        self._done.frombytes(hash_blocks(chunk[position:whole]).tobytes())
        if whole < chunk.nbytes:
            self._extend(chunk[whole:])

    def _extend(self, part: np.ndarray) -> None:
        self._crc = zlib.crc32(memoryview(part), self._crc)  # type: ignore[arg-type]
        self._filled += part.nbytes
        if self._filled == BLOCK:
            self._close_block()

    def _close_block(self) -> None:
        self._done.append(self._crc)
        self._crc = self._filled = 0

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown()


def byte_chunks(tensor: Tensor) -> Iterator[np.ndarray]:
    """Yield the bytes of ``tensor`` in row-major order, in chunks on the host; each is valid until the next."""
    if not tensor.numel():
        return
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    for part in flat.split(max(1, CHUNK_BYTES // tensor.dtype.itemsize)):
        host = part.cpu().contiguous()
        yield memory_at(host.data_ptr(), host.numel() * host.element_size())


def hash_tensor(tensor: Tensor) -> int:
    """Return the hash of a tensor's dtype, shape and bytes: equal on ranks that hold the same tensor."""
    crc = zlib.crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    for chunk in byte_chunks(tensor):
        crc = zlib.crc32(memoryview(chunk), crc)  # type: ignore[arg-type]  # numpy arrays are buffers
    return crc


def memory_at(address: int, nbytes: int) -> np.ndarray:
    """Return a uint8 view of memory. ``Tensor.numpy`` would keep torch from resizing the storage, by which gathered
    weights are released."""
    memory: Any = (ctypes.c_ubyte * nbytes).from_address(address)
    return np.frombuffer(memory, dtype=np.uint8)
