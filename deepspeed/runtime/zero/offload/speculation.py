"""SuperOffload: the host updates a bucket's states as soon as its gradients are summed, before the step is validated.

Lian et al., "SuperOffload: Unleashing the Power of Large-Scale LLM Training on Superchips" (2025), speculation then
validation. The step of a bucket needs the norm of the whole gradient only to clip, and the agreement of all ranks only
to skip; mostly neither happens. So a worker thread updates each bucket while backward computes the others, as if the
gradient were finite and not clipped. The step then either takes these results or does the update itself.

[Note: twins] The worker never touches what training reads. It updates *twins*, copies of masters and state in host
memory, and the step swaps the memory of the two. Rolling back therefore is to forget: no bit of the state of before has
changed, checkpoints and ``safe_get_*`` between backward and step see it, and an exception leaves it whole. The price
is a second copy of masters and state in host memory.

[Note: validation] A result is taken only if everything that it was computed from is as the step finds it: the factor of
the gradient (loss scale and clipping), the options of the group, and the versions of gradient, master and state, which
every write through torch raises.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepspeed.accelerator import get_accelerator
from deepspeed.ops.multi_tensor import MultiTensorOptimizer
from deepspeed.ops.update import UpdateContext
from deepspeed.runtime.loss_scaler import LossScaler
from deepspeed.runtime.optim.first_state import stand_in
from deepspeed.runtime.zero.grad_bucket import GradBucket
from deepspeed.runtime.zero.offload.host_copies import host_empty
from deepspeed.runtime.zero.state_store import PARAMS, OwnedFragment, StateStore
from deepspeed.runtime.zero.step import StepExecutor
from deepspeed.utils.logging import log_dist

LONGEST_PAUSE = 8
"""Steps without speculation after many in a row that clipped."""


@dataclass(slots=True)
class Twin:
    """Copies of one fragment's tensors (Note: twins)."""

    owned: OwnedFragment
    live: list[Tensor]  # the master, then the state by name
    copies: list[Tensor]
    low: Tensor | None  # [numel] in host memory: receives the rounded weights

    def take(self) -> None:
        """The copies become the live values."""
        master, copied = self.live[0], self.copies[0]
        if self.owned.low is None:  # the master is the model's own weight, whose place is fixed
            master.copy_(copied)
        else:
            master.data, copied.data = copied.data, master.data
        for tensor, copy in zip(self.live[1:], self.copies[1:], strict=True):
            tensor.data, copy.data = copy.data, tensor.data
        if self.owned.low is not None and self.low is not None:
            self.owned.low.copy_(self.low, non_blocking=True)


@dataclass(slots=True)
class Job:
    """One bucket's speculative update, and what it was computed from."""

    twins: list[Twin]
    grads: list[Tensor]
    grad_scale: float
    options: list[dict[str, Any]]
    versions: list[int]
    arrived: Any  # event after which the gradient is in host memory, or None
    done: Future[None] = field(default_factory=Future)

    def current_versions(self) -> list[int]:
        live = [tensor._version for twin in self.twins for tensor in twin.live]
        return [*live, *(grad._version for grad in self.grads)]


class Speculation:
    """Runs the updates of buckets on a worker thread, and keeps their results until the step asks for them.

    Args:
        optimizer: elementwise, and ours: its update can be run on other tensors.
        at_boundary: whether the gradients being summed are the last ones before the step.
        threads: that the worker may use.
    """

    def __init__(
        self, optimizer: MultiTensorOptimizer, at_boundary: Callable[[], bool], threads: int
    ) -> None:
        self.optimizer = optimizer
        self.at_boundary = at_boundary
        self.threads = threads
        self.taken = self.rolled_back = 0  # buckets since the start
        self._store: StateStore | None = None
        self._scaler: LossScaler | None = None
        # Twins alternate between two sets of memory, and an optimizer keeps a table of addresses for each list: one
        # optimizer per set leaves both tables valid.
        first = stand_in(optimizer, {}, [])
        second = stand_in(optimizer, {}, [])
        second.state = first.state
        self._optimizers: tuple[Any, Any] = (first, second)
        self._turn: dict[int, int] = {}
        self._owned: dict[int, list[OwnedFragment]] = {}  # by id of their bucket
        self._fragments = 0  # of the store, when it was last looked at
        self._twins: dict[int, Twin] = {}  # by id of the fragment
        self._jobs: dict[int, Job] = {}
        self._pause = self._paused = 0
        self._copied: Any = None  # event after the last rounded weights have reached the device
        self._worker = ThreadPoolExecutor(1, "super_offload", torch.set_num_threads, (threads,))
        self._worker.submit(int).result()
        torch.set_num_threads(torch.get_num_threads())  # what the worker set is also for threads not yet made

    def attach(self, store: StateStore, scaler: LossScaler) -> None:
        """Whose masters are updated. Called before the first backward."""
        self._store, self._scaler = store, scaler

    # While backward runs ------------------------------------------------------------------------------------

    def offer(self, bucket: GradBucket) -> None:
        """The gradients of ``bucket`` are summed: start its update, unless more of them will come."""
        if self._paused or not self.at_boundary():
            return
        twins = self._twins_of(bucket)
        if not twins:
            return
        assert self._scaler is not None
        grads = [twin.owned.gradient() for twin in twins]
        arrived = bucket.host.last if bucket.host is not None else None
        job = Job(twins, grads, 1.0 / self._scaler.scale, self._options(), [], arrived)
        job.versions = job.current_versions()
        self._jobs[id(bucket)] = job
        job.done = self._worker.submit(self._run, job, self._turn.get(id(bucket), 0))

    def withdraw(self, bucket: GradBucket) -> None:
        """The gradients of ``bucket`` are about to change, or are dropped: forget its update."""
        job = self._jobs.pop(id(bucket), None)
        if job is not None and not job.done.cancel():
            job.done.exception()  # it must not read any more; what it failed at does not matter
            self.rolled_back += 1

    def _options(self) -> list[dict[str, Any]]:
        return [
            {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != PARAMS}
            for group in self.optimizer.param_groups
        ]

    def _twins_of(self, bucket: GradBucket) -> list[Twin]:
        """Of the fragments on the host that have state; one without it is left to the step, which creates it."""
        assert self._store is not None
        if self._fragments != len(self._store.fragments):
            self._fragments = len(self._store.fragments)
            self._owned = {}
            for owned in self._store.fragments:
                self._owned.setdefault(id(owned.grad_bucket), []).append(owned)
        twins = (self._twin(owned, self._store.state_of(owned)) for owned in self._owned.get(id(bucket), []))
        return [twin for twin in twins if twin is not None]

    def _twin(self, owned: OwnedFragment, state: dict[str, Any]) -> Twin | None:
        if not state or owned.master.device.type != "cpu":
            return None
        names = sorted(state)
        live = [owned.master, *(state[name] for name in names)]
        twin = self._twins.get(id(owned))
        if twin is not None and all(map(operator.is_, twin.live, live)):
            return twin
        if twin is not None:  # the state was replaced: a checkpoint was loaded
            del self._optimizers[0].state[twin.copies[0]]
        copies = [torch.empty_like(tensor, requires_grad=False) for tensor in live]
        self._optimizers[0].state[copies[0]] = dict(zip(names, copies[1:], strict=True))
        low = None if owned.low is None else host_empty(owned.low.numel(), owned.low.dtype, pin=True)
        twin = self._twins[id(owned)] = Twin(owned, live, copies, low)
        return twin

    # On the worker's thread ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _run(self, job: Job, turn: int) -> None:
        for event in (job.arrived, self._copied):
            if event is not None:
                event.synchronize()
        torch._foreach_copy_(
            [copy for twin in job.twins for copy in twin.copies],
            [tensor.detach() for twin in job.twins for tensor in twin.live],
        )
        for g, options in enumerate(job.options):
            chosen = [i for i, twin in enumerate(job.twins) if twin.owned.group_index == g]
            if chosen:
                self._optimizers[turn].multi_tensor_step(
                    options,
                    [job.twins[i].copies[0] for i in chosen],
                    [job.grads[i] for i in chosen],
                    grad_scale=job.grad_scale,
                    low_precision=[job.twins[i].low for i in chosen],
                )

    # At the step --------------------------------------------------------------------------------------------

    def commit(self, used: Sequence[bool], grad_scale: float) -> set[int]:
        """Take the results that are valid; returns the ids of the fragments whose update is thereby done. A parameter
        that is not in ``used`` keeps its value and state."""
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.done.result()
        valid = {key: job for key, job in jobs.items() if self._holds(job, grad_scale)}
        done: set[int] = set()
        for key, job in valid.items():
            for twin in job.twins:
                if used[twin.owned.param_index]:
                    twin.take()
                    done.add(id(twin.owned))
            self._turn[key] = 1 - self._turn.get(key, 0)
        if done and get_accelerator().device_name() != "cpu":
            self._copied = get_accelerator().Event()
            self._copied.record()
        self.taken += len(valid)
        self.rolled_back += len(jobs) - len(valid)
        self._adapt(failed=any(job.grad_scale != grad_scale for job in jobs.values()))
        return done

    def _holds(self, job: Job, grad_scale: float) -> bool:
        return (
            job.grad_scale == grad_scale
            and job.options == self._options()
            and job.versions == job.current_versions()
        )

    def _adapt(self, *, failed: bool) -> None:
        """Where steps clip one after another, speculating only costs: pause for 1, 2, 4, ... of them."""
        if failed:
            self._pause = min(LONGEST_PAUSE, max(1, 2 * self._pause))
            self._paused = self._pause
        elif self._paused:
            self._paused -= 1
        else:
            self._pause = 0

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)


class SpeculativeBucket(GradBucket):
    """A gradient bucket that offers its sum to a ``Speculation``, and withdraws it before anything changes it."""

    def __init__(self, *arguments: Any, speculation: Speculation, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.speculation = speculation

    @property
    def borrows(self) -> bool:
        """Always collected when the next bucket starts, so that the update starts early."""
        return self.in_flight is not None

    def collect(self) -> None:
        if self.in_flight is not None:
            self.speculation.withdraw(self)
            super().collect()
            self.speculation.offer(self)

    def _open(self, lasting: bool = False) -> None:
        self.speculation.withdraw(self)
        super()._open(lasting)

    def restore(self, value: Tensor) -> None:
        self.speculation.withdraw(self)
        super().restore(value)

    def clear(self) -> None:
        self.speculation.withdraw(self)
        super().clear()


class SpeculativeStepExecutor(StepExecutor):
    """A step that takes what was speculated, and updates the rest as ever."""

    def __init__(self, *arguments: Any, speculation: Speculation) -> None:
        super().__init__(*arguments)
        self.speculation = speculation
        speculation.attach(self.store, self.scaler)

    def _update(self, used: Sequence[bool], grad_scale: float, context: UpdateContext) -> None:
        done = self.speculation.commit(used, grad_scale)
        if not done:
            super()._update(used, grad_scale, context)
            return
        left = [
            entry.pick(i for i, o in enumerate(entry.fragments) if used[o.param_index] and id(o) not in done)
            for entry in self._gradient_lists()
        ]
        if any(entry.fragments for entry in left):
            self._update_lists(left, grad_scale, context)

    def close(self) -> None:
        super().close()
        self.speculation.close()


def make_speculation(
    optimizer: torch.optim.Optimizer, at_boundary: Callable[[], bool], cores: float
) -> Speculation | None:
    """``cores``: share of this rank's threads for the worker. None, with one line in the log: the update of this
    optimizer cannot run ahead, so that the step does it."""
    if isinstance(optimizer, MultiTensorOptimizer):
        traits = optimizer.update_traits
        if traits.elementwise and traits.fused and not traits.needs_context:
            return Speculation(optimizer, at_boundary, max(1, int(cores * torch.get_num_threads())))
    log_dist(
        f"super_offload has no effect with {type(optimizer).__name__}: only elementwise optimizers of this package "
        "(Adam, AdamW, Adagrad, Lion, SGD) can be updated ahead of the step",
        ranks=[0],
    )
    return None
