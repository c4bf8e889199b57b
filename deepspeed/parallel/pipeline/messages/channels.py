"""Ordered, one-way message channels between two stages.

Ranks of one host communicate through shared memory (``LocalSender``), others over the process group.

Over a group, a message is a *frame*, int64 [FRAME], followed by the bytes of its tensors. On CPUs the receives of the
next frame and bytes are posted ahead, so that the message arrives while the stage computes; a receive posted only when
needed costs gloo milliseconds. On a GPU, a receive pending for a future message would block anything that synchronizes
with the device. The frame has the number of bytes, and the description of the message (its ``Outline``) only if that
changed; a description too long for the frame follows separately.

Messages carry the number of their batch: those of a batch that failed, and which nobody received then, are dropped.

gloo aborts the process if a receive buffer is too small. So the buffer posted ahead has the size of the previous
message, and a message of another size is preceded by that many padding bytes.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed.comm.transports.host_messages import NeighbourReceiver, NeighbourSender
from deepspeed.parallel.pipeline.errors import PipelineError
from deepspeed.parallel.pipeline.messages.encoding import Outline, describe
from deepspeed.parallel.pipeline.messages.values import map_tensors

FRAME = 64
_NUMBER, _BATCH, _BYTES, _WORDS, _INLINE = range(5)  # offsets of the frame's header fields
_SAME = -1
"""Word count that means: same description as the previous message."""


class SameStageChannel:
    """Both ends of a channel between two chunks on the same stage. Received tensors are detached, like those of a
    message."""

    def __init__(self) -> None:
        self._waiting: deque[Any] = deque()

    def send(self, value: Any) -> None:
        describe(value)  # refuses what could not be sent
        self._waiting.append(map_tensors(value, lambda t: t.detach().requires_grad_(t.requires_grad)))

    def receive(self, left: int = 0) -> Any:
        return self._waiting.popleft()

    def begin(self) -> None:
        self._waiting.clear()

    def post_receives(self, messages: int) -> None:
        """Do nothing: messages are available once sent."""

    def flush(self) -> None:
        """Do nothing: nothing is in flight."""


class _SendingEnd:
    """Numbers the messages to ``peer``, and describes those that differ from the one before."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.sent = self.batch = self._sent_before = 0
        self.described = 0
        self._marks: list[Any] = []
        self._outline = Outline(None, [])

    def begin(self) -> None:
        """Begin a batch, on all stages."""
        self.batch, self._sent_before = self.batch + 1, self.sent

    def _describe(self, value: Any) -> tuple[list[int], list[Tensor]]:
        """Return the words and tensors of a message; no words if they are those of the message before."""
        marks, tensors = describe(value)
        if marks == self._marks:
            return [], tensors
        self._marks, self._outline = marks, Outline.of(value, tensors)
        self.described += 1
        return self._outline.words(), tensors


class LocalSender(_SendingEnd):
    """Sends to a rank of this host. Sent tensors may be modified immediately."""

    def __init__(self, link: NeighbourSender) -> None:
        super().__init__(link.peer)
        self.link = link

    def send(self, value: Any) -> None:
        """Send ``value``, a nest that ``describe`` supports."""
        words, tensors = self._describe(value)
        note, outline = array("q", (self.sent, self.batch, *words)), self._outline
        self.link.send(note.tobytes(), outline.nbytes, lambda memory: outline.pack_into(memory, tensors))
        self.sent += 1

    def flush(self) -> None:
        """Wait until the peer can receive everything of this batch without this rank."""
        if self.sent > self._sent_before:
            self.link.flush()


class Sender(_SendingEnd):
    """Sends to the rank ``peer`` asynchronously. ``tag``: one per direction of a pair of ranks."""

    def __init__(self, peer: int, group: Any, device: torch.device, tag: int) -> None:
        super().__init__(peer)
        self.group, self.device, self.tag = group, device, tag
        self._last_bytes = 0
        self._pending: deque[tuple[Any, Tensor]] = deque()

    def send(self, value: Any) -> None:
        """Send ``value``, a nest that ``describe`` supports. Its tensors must not change before ``flush``."""
        words, tensors = self._describe(value)
        nbytes = self._outline.nbytes
        frame = [self.sent, self.batch, nbytes, len(words) or _SAME]
        if len(words) <= FRAME - _INLINE:
            frame, words = frame + words, []
        self._post(torch.tensor(frame + [0] * (FRAME - len(frame)), dtype=torch.int64))
        as_expected = nbytes == self._last_bytes
        if self._last_bytes and not as_expected:
            self._post(torch.zeros(self._last_bytes, dtype=torch.uint8))
        if nbytes and as_expected:
            self._post(self._outline.pack(tensors))
        if words:
            self._post(torch.tensor(words, dtype=torch.int64))
        if nbytes and not as_expected:
            self._post(self._outline.pack(tensors))
        self._last_bytes = nbytes
        self.sent += 1
        while self._pending and self._pending[0][0].is_completed():
            self._pending.popleft()[0].wait()

    def _post(self, data: Tensor) -> None:
        data = data.to(self.device)
        self._pending.append((dist.isend(data, self.peer, group=self.group, tag=self.tag), data))

    def flush(self) -> None:
        """Wait until everything of this batch has been received."""
        while self._pending and self.sent > self._sent_before:
            self._pending.popleft()[0].wait()


class _ReceivingEnd:
    """Receives messages of ``peer`` in order, dropping those of earlier batches."""

    def __init__(self, peer: int) -> None:
        self.peer = peer
        self.received = self.batch = 0
        self._outline: Outline | None = None

    def begin(self) -> None:
        """Begin a batch, on all stages."""
        self.batch += 1

    def post_receives(self, messages: int) -> None:
        """Post the receives of the next message ahead, if ``messages`` are still to come, where this helps."""

    def receive(self, left: int = 0) -> Any:
        """Return the next message; its tensors require gradients if they did at the sender. ``left``: messages still to
        come after this one. PipelineError: a message was lost."""
        batch, outline, data = self._next()
        while batch != self.batch:
            batch, outline, data = self._next()
        self.post_receives(left)
        return outline.unpack(data)

    def _next(self) -> tuple[int, Outline, Tensor]:
        """Return the batch, the outline and the bytes of the next message."""
        raise NotImplementedError

    def _check_order(self, number: int, batch: int) -> None:
        """Raise PipelineError unless a message is the next one, and of the batch that runs or of an earlier one."""
        if number != self.received or batch > self.batch:
            raise PipelineError(
                f"rank {self.peer} sent message {number} in batch {batch}, but {self.received} was expected in batch "
                f"{self.batch}: the stages do not run the same order of micro-batches"
            )
        self.received += 1

    def _described(self, words: list[int], nbytes: int) -> Outline:
        """Return the outline of a message of ``nbytes`` bytes; without ``words`` that of the message before."""
        if words:
            self._outline = Outline.of_words(words)
        described = 0 if self._outline is None else self._outline.nbytes
        if self._outline is None or nbytes != described:
            raise PipelineError(f"rank {self.peer} announced {nbytes} bytes, but described {described}")
        return self._outline


class LocalReceiver(_ReceivingEnd):
    """Receives from the ``LocalSender`` of a rank of this host, without copying: tensors are views of shared memory."""

    def __init__(self, link: NeighbourReceiver) -> None:
        super().__init__(link.peer)
        self.link = link

    def _next(self) -> tuple[int, Outline, Tensor]:
        note, data = self.link.receive()
        number, batch, *words = memoryview(note).cast("q")
        self._check_order(number, batch)
        return batch, self._described(words, data.numel()), data


class Receiver(_ReceivingEnd):
    """Receives from the ``Sender`` at rank ``peer`` with the same ``tag``."""

    def __init__(self, peer: int, group: Any, device: torch.device, tag: int) -> None:
        super().__init__(peer)
        self.group, self.device, self.tag = group, device, tag
        self._ahead: list[tuple[Any, Tensor]] = []
        """Posted receives of the next frame, and of as many bytes as the last message had, if any."""
        self._last_bytes = 0
        self._posts_ahead = device.type == "cpu"

    def post_receives(self, messages: int) -> None:
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

    def _next(self) -> tuple[int, Outline, Tensor]:
        self._post_next()
        (work, frame), *ahead = self._ahead
        self._ahead = []
        work.wait()
        head = frame.tolist()
        self._check_order(head[_NUMBER], head[_BATCH])
        for work, _ in ahead:  # before posting the receives of what follows
            work.wait()
        count, nbytes = head[_WORDS], head[_BYTES]
        words = head[_INLINE : _INLINE + max(count, 0)]
        if count > FRAME - _INLINE:
            words = self._take(count, torch.int64).tolist()
        outline = self._described(words, nbytes)
        as_expected = bool(ahead) and nbytes == self._last_bytes
        data = ahead[0][1] if as_expected else self._take(nbytes, torch.uint8)
        self._last_bytes = nbytes
        return head[_BATCH], outline, data

    def _take(self, numel: int, dtype: torch.dtype) -> Tensor:
        if not numel:
            return torch.empty(0, dtype=dtype, device=self.device)
        work, data = self._post(numel, dtype)
        work.wait()
        return data


SendChannel = LocalSender | Sender | SameStageChannel
ReceiveChannel = LocalReceiver | Receiver | SameStageChannel
