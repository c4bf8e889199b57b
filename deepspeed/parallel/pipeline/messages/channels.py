"""Ordered, one-way message channels between two stages.

Ranks of one host communicate through shared memory (``LocalSender``), others over the process group.

Over a group, a message is a *frame*, int64 [FRAME], followed by the bytes of its tensors. On CPUs the receives of the
next frame and bytes are posted ahead, so that the message arrives while the stage computes; a receive posted only when
needed costs gloo milliseconds. On a GPU, a receive pending for a future message would block anything that synchronizes
with the device. The frame has the number of bytes, and the description of the message (``describe``) only if that
changed; a description too long for the frame follows separately.

Messages carry the number of their batch: those of a batch that failed, and which nobody received then, are dropped.

gloo aborts the process if a receive buffer is too small. So the buffer posted ahead has the size of the previous
message, and a message of another size is preceded by that many padding bytes.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.comm.transports.host_messages import NeighbourReceiver, NeighbourSender
from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.parallel.pipeline.messages.encoding import (
    TensorSpec,
    describe,
    pack,
    pack_into,
    rebuild,
    specs,
    total_bytes,
    unpack,
)

FRAME = 64
_NUMBER, _BATCH, _BYTES, _WORDS, _INLINE = range(5)  # offsets of the frame's header fields
_SAME = -1
"""Word count that means: same description as the previous message."""


class SendChannel(Protocol):
    """The sending end of a channel between stages. ``begin``: a batch begins, on all stages. ``flush`` waits for what
    was sent since."""

    def begin(self) -> None: ...

    def send(self, value: Any) -> None: ...

    def flush(self) -> None: ...


class ReceiveChannel(Protocol):
    """The receiving end of a channel between stages. ``begin``: a batch begins, and messages of earlier ones are
    dropped."""

    def begin(self) -> None: ...

    def post_receives(self, messages: int) -> None: ...

    def receive(self, left: int = 0) -> Any: ...


class SameStageChannel:
    """Both ends of a channel between two chunks on the same stage. Received tensors are detached, like those of a
    message."""

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()

    def send(self, value: Any) -> None:
        words, tensors = describe(value)
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        self._waiting.append(rebuild(words, leaves))

    def receive(self, left: int = 0) -> Any:
        return self._waiting.popleft()

    def begin(self) -> None:
        self._waiting.clear()

    def post_receives(self, messages: int) -> None:
        """Do nothing: messages are available once sent."""

    def flush(self) -> None:
        """Do nothing: nothing is in flight."""


class LocalSender:
    """Sends to a rank of this host. Sent tensors may be modified immediately."""

    def __init__(self, link: NeighbourSender) -> None:
        self.link, self.peer = link, link.peer
        self.sent = self.batch = self._sent_before = 0
        self.described = 0
        self._words: list[int] | None = None
        self._specs: list[TensorSpec] = []

    def begin(self) -> None:
        self.batch, self._sent_before = self.batch + 1, self.sent

    def send(self, value: Any) -> None:
        """Send ``value``, a nest that ``describe`` supports."""
        words, tensors = describe(value)
        note = array("q", (self.sent, self.batch))
        if words != self._words:
            self._words, self._specs = words, specs(words)
            self.described += 1
            note.extend(words)
        found = self._specs
        self.link.send(note.tobytes(), total_bytes(found), lambda memory: pack_into(memory, tensors, found))
        self.sent += 1

    def flush(self) -> None:
        """Wait until the peer can receive everything of this batch without this rank."""
        if self.sent > self._sent_before:
            self.link.flush()


class LocalReceiver:
    """Receives from the ``LocalSender`` of a rank of this host, without copying: tensors are views of shared memory."""

    def __init__(self, link: NeighbourReceiver) -> None:
        self.link, self.peer = link, link.peer
        self.received = self.batch = 0
        self._words: Sequence[int] | None = None
        self._specs: list[TensorSpec] = []

    def begin(self) -> None:
        self.batch += 1

    def post_receives(self, messages: int) -> None:
        """Do nothing: shared memory needs no posted receives."""

    def receive(self, left: int = 0) -> Any:
        """Return the next message, as ``Receiver`` does."""
        batch, data = self._next()
        while batch != self.batch:
            batch, data = self._next()
        if self._words is None or data.numel() != total_bytes(self._specs):
            raise PipelineError(
                f"rank {self.peer} sent {data.numel()} bytes, but described {total_bytes(self._specs)}"
            )
        return rebuild(self._words, unpack(data, self._specs))

    def _next(self) -> tuple[int, Tensor]:
        """Return the batch and the bytes of the next message."""
        note, data = self.link.receive()
        number, batch, *words = memoryview(note).cast("q")
        _check_order(number, batch, self)
        self.received += 1
        if words:
            self._words, self._specs = words, specs(words)
        return batch, data


def _check_order(number: int, batch: int, end: LocalReceiver | Receiver) -> None:
    """Raise PipelineError unless a message is the next one, and of the batch that runs or of an earlier one."""
    if number != end.received or batch > end.batch:
        raise PipelineError(
            f"rank {end.peer} sent message {number} in batch {batch}, but {end.received} was expected in batch "
            f"{end.batch}: the stages do not run the same order of micro-batches"
        )


class Sender:
    """Sends to the rank ``peer`` asynchronously. ``tag``: one per direction of a pair of ranks."""

    def __init__(self, peer: int, group: Any, device: torch.device, tag: int) -> None:
        self.peer, self.group, self.device, self.tag = peer, group, device, tag
        self.sent = self.batch = self._sent_before = 0
        self.described = 0
        self._words: list[int] | None = None
        self._specs: list[TensorSpec] = []
        self._last_bytes = 0
        self._pending: deque[tuple[Any, Tensor]] = deque()

    def begin(self) -> None:
        self.batch, self._sent_before = self.batch + 1, self.sent

    def send(self, value: Any) -> None:
        """Send ``value``, a nest that ``describe`` supports. Its tensors must not change before ``flush``."""
        words, tensors = describe(value)
        frame = [self.sent, self.batch, 0, _SAME]
        rest: list[int] = []
        if words != self._words:
            self._words, self._specs = words, specs(words)
            self.described += 1
            frame[_WORDS] = len(words)
            if len(words) <= FRAME - _INLINE:
                frame += words
            else:
                rest = words
        frame[_BYTES] = total_bytes(self._specs)
        self._post(torch.tensor(frame + [0] * (FRAME - len(frame)), dtype=torch.int64))
        as_expected = frame[_BYTES] == self._last_bytes
        if self._last_bytes and not as_expected:
            self._post(torch.zeros(self._last_bytes, dtype=torch.uint8))
        if frame[_BYTES] and as_expected:
            self._post(pack(tensors, self._specs))
        if rest:
            self._post(torch.tensor(rest, dtype=torch.int64))
        if frame[_BYTES] and not as_expected:
            self._post(pack(tensors, self._specs))
        self._last_bytes = frame[_BYTES]
        self.sent += 1
        self._forget_done()

    def _post(self, data: Tensor) -> None:
        data = data.to(self.device)
        self._pending.append((dist.isend(data, self.peer, group=self.group, tag=self.tag), data))

    def _forget_done(self) -> None:
        while self._pending and self._pending[0][0].is_completed():
            self._pending.popleft()[0].wait()

    def flush(self) -> None:
        """Wait until everything of this batch has been received."""
        while self._pending and self.sent > self._sent_before:
            self._pending.popleft()[0].wait()


class Receiver:
    """Receives from the ``Sender`` at rank ``peer`` with the same ``tag``."""

    def __init__(self, peer: int, group: Any, device: torch.device, tag: int) -> None:
        self.peer, self.group, self.device, self.tag = peer, group, device, tag
        self.received = self.batch = 0
        self._words: Sequence[int] | None = None
        self._specs: list[TensorSpec] = []
        self._ahead: list[tuple[Any, Tensor]] = []
        """Posted receives of the next frame, and of as many bytes as the last message had, if any."""
        self._last_bytes = 0
        self._posts_ahead = device.type == "cpu"

    def begin(self) -> None:
        self.batch += 1

    def post_receives(self, messages: int) -> None:
        """Post the receives of the next message ahead, if ``messages`` are still to come."""
        if messages > 0 and self._posts_ahead:
            self._post_next()

    def _post_next(self) -> None:
        if not self._ahead:
            self._ahead.append(self._post(FRAME, torch.int64))
            if self._last_bytes:
                self._ahead.append(self._post(self._last_bytes, torch.uint8))

    def _post(self, numel: int, dtype: torch.dtype) -> tuple[Any, Tensor]:
        data = torch.empty(numel, dtype=dtype, device=self.device)
        return dist.irecv(data, self.peer, group=self.group, tag=self.tag), data

    def receive(self, left: int = 0) -> Any:
        """Return the next message; its tensors require gradients if they did at the sender. ``left``: messages still to
        come after this one. PipelineError: a message was lost."""
        batch, data = self._next()
        while batch != self.batch:
            batch, data = self._next()
        self.post_receives(left)
        assert self._words is not None
        return rebuild(self._words, unpack(data, self._specs))

    def _next(self) -> tuple[int, Tensor]:
        """Return the batch and the bytes of the next message."""
        self._post_next()
        (work, frame), *ahead = self._ahead
        self._ahead = []
        work.wait()
        head = frame.tolist()
        _check_order(head[_NUMBER], head[_BATCH], self)
        self.received += 1
        for work, _ in ahead:  # before posting the receives of what follows
            work.wait()
        count = head[_WORDS]
        if count != _SAME:
            fits = count <= FRAME - _INLINE
            self._words = head[_INLINE : _INLINE + count] if fits else self._take(count, torch.int64).tolist()
            self._specs = specs(self._words)
        if self._words is None or head[_BYTES] != total_bytes(self._specs):
            raise PipelineError(
                f"rank {self.peer} announced {head[_BYTES]} bytes, but described {total_bytes(self._specs)}"
            )
        as_expected = bool(ahead) and head[_BYTES] == self._last_bytes
        data = ahead[0][1] if as_expected else self._take(head[_BYTES], torch.uint8)
        self._last_bytes = head[_BYTES]
        return head[_BATCH], data

    def _take(self, numel: int, dtype: torch.dtype) -> Tensor:
        if not numel:
            return torch.empty(0, dtype=dtype, device=self.device)
        work, data = self._post(numel, dtype)
        work.wait()
        return data
