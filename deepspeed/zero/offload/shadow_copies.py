"""Update shadow copies on a worker thread; training takes or drops the results.

[Note: shadow copies] The worker never touches tensors that training reads. It updates *shadow copies* of masters and
state in host memory, and taking the result swaps the memory of the two. So dropping a result needs no undo: no bit of
the live state has changed, and concurrent readers see it consistent. The price is a second copy of masters and state
in host memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed.base.accelerator import get_accelerator
from deepspeed.ops.multi_tensor import MultiTensorOptimizer
from deepspeed.optim.initial_state import clone_optimizer
from deepspeed.zero.offload.host_copies import host_empty
from deepspeed.zero.states.store import PARAMS, OwnedFragment


@dataclass(slots=True)
class ShadowCopy:
    """Copies of one fragment's tensors (Note: shadow copies)."""

    owned: OwnedFragment
    live: list[Tensor]  # the master, then the state by name
    copies: list[Tensor]
    low: Tensor | None  # [numel] in host memory: receives the rounded weights

    def take(self) -> None:
        """Make the copies the live values."""
        master, copied = self.live[0], self.copies[0]
        if self.owned.low is None:  # the master is the model's own weight, whose address is fixed
            master.copy_(copied)
        else:
            master.data, copied.data = copied.data, master.data
        for tensor, copy in zip(self.live[1:], self.copies[1:], strict=True):
            tensor.data, copy.data = copy.data, tensor.data
        if self.owned.low is not None and self.low is not None:
            self.owned.low.copy_(self.low, non_blocking=True)

    def versions(self) -> list[int]:
        """Return the versions of the live tensors, which every write through torch increments."""
        return [tensor._version for tensor in self.live]


def live_tensors(owned: OwnedFragment, state: dict[str, Any]) -> list[Tensor]:
    """Return the master of a fragment, then its state, sorted by name."""
    return [owned.master, *(state[name] for name in sorted(state))]


class ShadowCopies:
    """Shadow copies of an optimizer's fragments, and their update. ``optimizer``: elementwise, of this package."""

    def __init__(self, optimizer: MultiTensorOptimizer) -> None:
        # Shadow copies alternate between two sets of memory, and an optimizer caches a table of addresses per list:
        # one optimizer per set keeps both tables valid.
        first, second = clone_optimizer(optimizer, {}, []), clone_optimizer(optimizer, {}, [])
        second.state = first.state
        self.state = first.state
        self._optimizers: tuple[Any, Any] = (first, second)
        self._known: dict[int, ShadowCopy] = {}  # by id of the fragment
        self._copied: Any = None  # event after the last rounded weights have reached the device

    def of(self, owned: OwnedFragment, state: dict[str, Any]) -> ShadowCopy | None:
        """Return the shadow copy of a fragment; None: it has no state yet, or none in host memory."""
        if not state or owned.master.device.type != "cpu":
            return None
        live = live_tensors(owned, state)
        shadow = self._known.get(id(owned))
        if shadow is not None and all(map(operator.is_, shadow.live, live)):
            return shadow
        if shadow is not None:  # the state was replaced: a checkpoint was loaded
            del self.state[shadow.copies[0]]
        copies = [torch.empty_like(tensor, requires_grad=False) for tensor in live]
        self.state[copies[0]] = dict(zip(sorted(state), copies[1:], strict=True))
        low = None if owned.low is None else host_empty(owned.low.numel(), owned.low.dtype, pin=True)
        shadow = self._known[id(owned)] = ShadowCopy(owned, live, copies, low)
        return shadow

    @torch.no_grad()
    def update(
        self,
        shadows: Sequence[ShadowCopy],
        grads: Sequence[Tensor],
        options: Sequence[dict[str, Any]],
        grad_scale: float,
        *,
        after: Any = None,
        parity: int = 0,
    ) -> None:
        """Copy the live values of ``shadows`` and update the copies; ``grads`` are in host memory when the event
        ``after`` has happened. ``options[g]`` belongs to group g. ``parity`` alternates between 0 and 1 with each taken
        result."""
        for event in (after, self._copied):
            if event is not None:
                event.synchronize()
        torch._foreach_copy_(
            [copy for shadow in shadows for copy in shadow.copies],
            [tensor.detach() for shadow in shadows for tensor in shadow.live],
        )
        for g, group in enumerate(options):
            chosen = [i for i, shadow in enumerate(shadows) if shadow.owned.group_index == g]
            if chosen:
                self._optimizers[parity].multi_tensor_step(
                    group,
                    [shadows[i].copies[0] for i in chosen],
                    [grads[i] for i in chosen],
                    grad_scale=grad_scale,
                    low_precision=[shadows[i].low for i in chosen],
                    **self._positions([shadows[i].owned for i in chosen]),
                )

    def _positions(self, fragments: Sequence[OwnedFragment]) -> dict[str, list[int]]:
        """Return the starts of fragments in their parameters, for an update that needs them."""
        if not self._optimizers[0].update_traits.positions:
            return {}
        return {"starts": [owned.fragment.param_offset for owned in fragments]}

    def taken(self) -> None:
        """Record an event after the copies of rounded weights to the device, until which their memory is in use."""
        if get_accelerator().device_name() != "cpu":
            self._copied = get_accelerator().Event()
            self._copied.record()


def options_of_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the current options of the groups, without parameters, as plain values."""
    return [
        {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != PARAMS}
        for group in optimizer.param_groups
    ]


def runs_ahead(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's update can be run on shadow copies."""
    if not isinstance(optimizer, MultiTensorOptimizer):
        return False
    traits = optimizer.update_traits
    return bool(traits.elementwise) and traits.fused and not traits.needs_context


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the optimizer's class, qualified for torch's to distinguish it from ours."""
    kind = type(optimizer)
    return f"torch.optim.{kind.__name__}" if kind.__module__.startswith("torch.optim.") else kind.__name__


def _use_threads(threads: int) -> None:
    torch.get_num_threads()  # the first call in a thread sets it to the process's number
    torch.set_num_threads(threads)


def host_worker(name: str, share: float) -> ThreadPoolExecutor:
    """Start a one-thread executor whose torch ops use ``share`` of this rank's threads, at least one."""
    threads = max(1, int(share * torch.get_num_threads()))
    worker = ThreadPoolExecutor(1, name, _use_threads, (threads,))
    worker.submit(int).result()
    torch.set_num_threads(torch.get_num_threads())  # undoes the worker's setting for later threads
    return worker
