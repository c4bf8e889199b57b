"""Commands that all ranks of one server apply before each forward.

Tensor-parallel ranks run identical schedulers, so they must see the same requests at the same time. Rank 0 serves the
clients, and broadcasts their commands before each forward.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from deepspeed.comm.collectives import Communicator
from deepspeed.inference.scheduling.requests import Constraint, SamplingParams


@dataclass(slots=True)
class Commands:
    """``submitted``: (number, prompt, params) of new requests; ``cancelled``: numbers; ``ends``: stop after these, with
    no further forward."""

    submitted: list[tuple[int, Sequence[int], SamplingParams]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    ends: bool = False

    def to_bytes(self) -> bytes:
        plain = {
            "submitted": [
                (number, list(prompt), asdict(params)) for number, prompt, params in self.submitted
            ],
            "cancelled": self.cancelled,
            "ends": self.ends,
        }
        return json.dumps(plain).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Commands:
        plain = json.loads(data)
        submitted = [(number, prompt, _params(params)) for number, prompt, params in plain["submitted"]]
        return cls(submitted, plain["cancelled"], plain["ends"])


def _params(plain: dict[str, Any]) -> SamplingParams:
    given = {name: _tuples(value) for name, value in plain.items()}
    if given["constraint"] is not None:
        constraint = given["constraint"]
        given["constraint"] = Constraint(**{name: _tuples(value) for name, value in constraint.items()})
    return SamplingParams(**given)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def broadcast(group: Communicator, device: torch.device, commands: Commands) -> Commands:
    """Return rank 0's commands on all ranks of ``group``; ranks without clients pass empty ones. Collective: two small
    broadcasts, the second only if there are commands.

    CommunicationError: a rank does not answer within the group's timeout.
    """
    leads = group.rank == 0
    empty = not (commands.submitted or commands.cancelled or commands.ends)
    data = commands.to_bytes() if leads and not empty else b""
    length = torch.tensor([len(data)], device=device)
    group.broadcast(length, src=0).wait()
    if not int(length):
        return Commands()
    content = torch.empty(int(length), dtype=torch.uint8)
    if leads:
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    content = content.to(device)
    group.broadcast(content, src=0).wait()
    return commands if leads else Commands.from_bytes(bytes(content.tolist()))
