"""Channels of a stage: one in each direction for every pair of adjacent pieces (chunks) of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from deepspeed.comm.groups import new_group
from deepspeed.comm.transports.host_messages import Edge, NeighbourReceiver, NeighbourSender, connect
from deepspeed.parallel.pipeline.messages.channel import (
    Handover,
    LocalReceiver,
    LocalSender,
    ReceiveLink,
    Receiver,
    Sender,
    SendLink,
)
from deepspeed.parallel.pipeline.schedules.choice import ScheduleLayout
from deepspeed.parallel.pipeline.schedules.orders import chunk_position, stage_of_position
from deepspeed.parallel.pipeline.stage_run import ChunkLinks

_ACTIVATIONS, _GRADIENTS = 1, 2  # tags between pieces 0 and 1; each later pair adds 2


class Connections:
    """Creates the ``links`` of each chunk of stage ``stage``. ``ranks``: the global rank of each stage of this
    pipeline. Collective over ``group``, these ranks."""

    def __init__(
        self,
        layout: ScheduleLayout,
        stage: int,
        ranks: list[int],
        group: ProcessGroup,
        device: torch.device,
        *,
        may_share_memory: bool,
    ) -> None:
        self.layout, self.stage, self.ranks = layout, stage, ranks
        self.group, self.device = group, device
        self._handovers: dict[Hashable, Handover] = {}
        self._local: Mapping[Hashable, NeighbourSender | NeighbourReceiver] = {}
        if layout.stages > 1 and device.type == "cpu":
            self._local = connect(group, self._edges(), may_share_memory=may_share_memory)
        self._groups = {} if device.type == "cpu" else self._groups_of_edges()
        self.links = [self._of_chunk(chunk) for chunk in range(layout.chunks)]

    def _edges(self) -> list[Edge]:
        """Return the edges between different stages, keyed by tag."""
        found = []
        for number in range(self.layout.stages * self.layout.chunks - 1):
            before, after = self._rank_of(number), self._rank_of(number + 1)
            if before != after:
                found.append(Edge(2 * number + _ACTIVATIONS, before, after))
                found.append(Edge(2 * number + _GRADIENTS, after, before))
        return found

    def _groups_of_edges(self) -> dict[Hashable, ProcessGroup]:
        """Create a group for each direction of this stage's links, by tag: NCCL has no tags and queues all transfers
        between two ranks of a group in order, so two ranks that both send first would deadlock."""
        own = self.ranks[self.stage]
        return {
            edge.key: new_group(sorted((edge.source, edge.target)), separate=True)
            for edge in self._edges()
            if own in (edge.source, edge.target)
        }

    def _rank_of(self, number: int) -> int:
        """Return the rank that holds a piece of the model."""
        return self.ranks[stage_of_position(number, self.layout.stages, self.layout.zigzag)]

    def _of_chunk(self, chunk: int) -> ChunkLinks:
        layout = self.layout
        number = chunk_position(chunk, self.stage, layout.stages, layout.zigzag)
        links = ChunkLinks()
        if number > 0:
            links.inputs = self._receive_link(number - 1, 2 * (number - 1) + _ACTIVATIONS)
            links.input_gradients = self._send_link(number - 1, 2 * (number - 1) + _GRADIENTS)
        if number < layout.stages * layout.chunks - 1:
            links.outputs = self._send_link(number + 1, 2 * number + _ACTIVATIONS)
            links.output_gradients = self._receive_link(number + 1, 2 * number + _GRADIENTS)
        return links

    def _receive_link(self, source: int, tag: int) -> ReceiveLink:
        """Return the receiving end of a link from the piece ``source``."""
        peer, local = self._rank_of(source), self._local.get(tag)
        if peer == self.ranks[self.stage]:
            return self._handovers.setdefault(tag, Handover())
        return (
            LocalReceiver(local)
            if isinstance(local, NeighbourReceiver)
            else Receiver(peer, self._groups.get(tag, self.group), self.device, tag)
        )

    def _send_link(self, target: int, tag: int) -> SendLink:
        peer, local = self._rank_of(target), self._local.get(tag)
        if peer == self.ranks[self.stage]:
            return self._handovers.setdefault(tag, Handover())
        return (
            LocalSender(local)
            if isinstance(local, NeighbourSender)
            else Sender(peer, self._groups.get(tag, self.group), self.device, tag)
        )

    def named(self) -> Iterator[tuple[str, ReceiveLink | SendLink]]:
        """Yield each channel to or from a neighbour, with the name of its payload."""
        for links in self.links:
            for name, channel in (
                ("activations", links.inputs),
                ("gradients of activations", links.output_gradients),
                ("activations", links.outputs),
                ("gradients of activations", links.input_gradients),
            ):
                if channel is not None:
                    yield name, channel

    def begin(self) -> None:
        """Begin a batch, which all stages do: what is left of a failed one is dropped."""
        for _, channel in self.named():
            channel.begin()

    def close(self) -> None:
        """Release shared memory and groups. The other ranks notice at their next message."""
        for end in self._local.values():
            end.close()
        for group in self._groups.values():
            with contextlib.suppress(ValueError):  # the job's groups are already destroyed
                dist.destroy_process_group(group)
