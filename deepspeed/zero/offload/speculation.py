"""SuperOffload: update a bucket's states on the host as soon as its gradients are summed, before the step is
validated.

Lian et al., "SuperOffload: Unleashing the Power of Large-Scale LLM Training on Superchips" (2025), speculation then
validation. The update of a bucket needs the norm of the whole gradient only to clip, and the agreement of all ranks
only to skip; mostly neither happens. So a worker thread updates each bucket while backward computes the others, as if
the gradient were finite and not clipped. The step then either takes these results or runs the update itself.

The worker updates shadow copies (``shadow_copies.py``), so a rollback just drops them: checkpoints and ``safe_get_*``
between backward and step see the state before the update, and an exception leaves it intact.

[Note: validation] A result is taken only if all its inputs are unchanged at the step: the gradient factor (loss scale
and clipping), the options of the group, and the versions of gradient, master and state, which every write through
torch increments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from deepspeed.base.logging import log_dist
from deepspeed.ops.multi_tensor import MultiTensorOptimizer
from deepspeed.ops.update import UpdateContext
from deepspeed.optim.loss_scaler import LossScaler
from deepspeed.zero.gradients.bucket import GradBucket
from deepspeed.zero.offload.shadow_copies import (
    ShadowCopies,
    ShadowCopy,
    class_name,
    host_worker,
    options_of_groups,
    runs_ahead,
)
from deepspeed.zero.states.store import OwnedFragment, StateStore
from deepspeed.zero.step import StepExecutor

MAX_PAUSE = 8
"""Largest number of steps without speculation after repeated clipping."""


@dataclass(slots=True)
class UpdateJob:
    """One bucket's speculative update, with its inputs."""

    shadows: list[ShadowCopy]
    grads: list[Tensor]
    grad_scale: float
    options: list[dict[str, Any]]
    versions: list[int]
    done: Future[None] = field(default_factory=Future)

    def current_versions(self) -> list[int]:
        live = [version for shadow in self.shadows for version in shadow.versions()]
        return [*live, *(grad._version for grad in self.grads)]


class Speculation:
    """Runs the updates of buckets on a worker thread, and keeps their results until the step.

    Args:
        optimizer: elementwise, of this package: its update can run on other tensors.
        at_boundary: returns whether the gradients being summed are the last ones before the step.
        cores: share of this rank's threads for the worker.
    """

    def __init__(
        self, optimizer: MultiTensorOptimizer, at_boundary: Callable[[], bool], cores: float
    ) -> None:
        self.optimizer = optimizer
        self.at_boundary = at_boundary
        self.taken = self.rolled_back = 0  # buckets since the start, jobs that had not begun included
        self._store: StateStore | None = None
        self._scaler: LossScaler | None = None
        self._shadow_copies = ShadowCopies(optimizer)
        self._parity: dict[int, int] = {}
        self._owned: dict[int, list[OwnedFragment]] = {}  # by id of their bucket
        self._fragments = 0  # number in the store when ``_owned`` was built
        self._jobs: dict[int, UpdateJob] = {}
        self._pause = self._paused = 0
        self._worker = host_worker("super_offload", cores)

    def attach(self, store: StateStore, scaler: LossScaler) -> None:
        """Attach the store whose masters are updated. Called before the first backward."""
        self._store, self._scaler = store, scaler

    # While backward runs ------------------------------------------------------------------------------------

    def offer(self, bucket: GradBucket) -> None:
        """Start the update of ``bucket``, whose gradients are summed, unless more will be added."""
        if self._paused or not self.at_boundary():
            return
        shadows = self._shadows_of(bucket)
        if not shadows:
            return
        assert self._scaler is not None
        grads = [shadow.owned.gradient() for shadow in shadows]
        arrived = bucket.host.last if bucket.host is not None else None
        options = options_of_groups(self.optimizer)
        job = UpdateJob(shadows, grads, 1.0 / self._scaler.scale, options, [])
        job.versions = job.current_versions()
        self._jobs[id(bucket)] = job
        parity = self._parity.get(id(bucket), 0)
        job.done = self._worker.submit(
            self._shadow_copies.update, shadows, grads, options, job.grad_scale, after=arrived, parity=parity
        )

    def withdraw(self, bucket: GradBucket) -> None:
        """Drop the update of ``bucket``, whose gradients are about to change or be dropped."""
        job = self._jobs.pop(id(bucket), None)
        if job is None:
            return
        if not job.done.cancel():
            job.done.exception()  # waits until it reads no more; its error does not matter
        self.rolled_back += 1

    def _shadows_of(self, bucket: GradBucket) -> list[ShadowCopy]:
        """Return the shadow copies of the bucket's fragments that have state on the host; the step creates missing
        state and updates the others."""
        assert self._store is not None
        if self._fragments != len(self._store.fragments):
            self._fragments = len(self._store.fragments)
            self._owned = {}
            for owned in self._store.fragments:
                self._owned.setdefault(id(owned.grad_bucket), []).append(owned)
        shadows = (
            self._shadow_copies.of(owned, self._store.state_of(owned))
            for owned in self._owned.get(id(bucket), [])
        )
        return [shadow for shadow in shadows if shadow is not None]

    # At the step --------------------------------------------------------------------------------------------

    def commit(self, used: Sequence[bool], grad_scale: float) -> set[int]:
        """Take the valid results; return the ids of the fragments that this updated. A parameter that is not ``used``
        keeps its value and state."""
        jobs, self._jobs = self._jobs, {}
        for job in jobs.values():
            job.done.result()
        valid = {key: job for key, job in jobs.items() if self._is_valid(job, grad_scale)}
        done: set[int] = set()
        for key, job in valid.items():
            for shadow in job.shadows:
                if used[shadow.owned.param_index]:
                    shadow.take()
                    done.add(id(shadow.owned))
            self._parity[key] = 1 - self._parity.get(key, 0)
        self._shadow_copies.taken()
        self.taken += len(valid)
        self.rolled_back += len(jobs) - len(valid)
        self._adapt(failed=any(job.grad_scale != grad_scale for job in jobs.values()))
        return done

    def _is_valid(self, job: UpdateJob, grad_scale: float) -> bool:
        return (
            job.grad_scale == grad_scale
            and job.options == options_of_groups(self.optimizer)
            and job.versions == job.current_versions()
        )

    def _adapt(self, *, failed: bool) -> None:
        """Pause speculation for 1, 2, 4, ... steps while consecutive steps clip, which makes it useless."""
        if failed:
            self._pause = min(MAX_PAUSE, max(1, 2 * self._pause))
            self._paused = self._pause
        elif self._paused:
            self._paused -= 1
        else:
            self._pause = 0

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)


class SpeculativeBucket(GradBucket):
    """Gradient bucket that offers its sum to a ``Speculation``, and withdraws it before the sum changes."""

    def __init__(self, *arguments: Any, speculation: Speculation, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.speculation = speculation

    @property
    def borrows(self) -> bool:
        """Return True for any sum in flight, so that it is collected when the next bucket starts and its update
        starts early."""
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
    """Step executor that takes speculated results, and updates the rest as usual."""

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
    """Return the speculation, or None, with a line in the log, if this optimizer's update cannot run ahead of the
    step. ``cores``: share of this rank's threads for the worker."""
    if runs_ahead(optimizer):
        return Speculation(cast(MultiTensorOptimizer, optimizer), at_boundary, cores)
    log_dist(
        f"super_offload has no effect with {class_name(optimizer)}: only elementwise optimizers of this "
        "package, created from the config's 'optimizer' section (Adam, AdamW, Adagrad, Lion, SGD), can be "
        "updated ahead of the step",
        ranks=[0],
    )
    return None
