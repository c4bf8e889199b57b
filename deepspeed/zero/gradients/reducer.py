"""The only path of a gradient: autograd -> ``GradReducer.ready`` -> ``GradBucket.launch`` -> ``GradientSum.start``,
which reduces over ranks -> ``GradBucket.reduced``, the shard of the sum that the optimizer reads.

[Note: order of collectives] Buckets fill in an order that may differ from rank to rank because of control flow,
unused parameters or checkpointing. Launching them as they fill would pair different buckets. So all ranks share one
launch order: until the first backward that reduces, the reverse of registration; afterwards the order that rank 0
observed there, broadcast once. A bucket that fills early waits for its turn; ``flush`` launches the rest, with zeros
for missing gradients.

[Note: waiting in backward] The sum of a launched bucket is awaited in the same backward, to reuse its memory. This
deadlocks if other ranks launch that bucket only at the end of their backward, because one of its parameters is unused
there, and this rank's layers exchange data with theirs before that (experts, parts of a sequence). So where layers
exchange data, the ranks tell each other at the start of a backward that sums which parameters it will reach
(``agree_on_reached_params``). If these differ between ranks, all buckets of this backward are launched at its end.
Collective gathers at stage 3 need no such exchange: a gather that follows a sum in their common order launches it.

[Note: arrivals] A parameter used twice arrives once; reentrant checkpointing makes it arrive once per segment. The
number of arrivals of each is part of rank 0's record, and a bucket is full when all have arrived. A gradient that
arrives after its bucket was launched is kept as a late gradient. It is summed at the end of the backward, for which
the ranks ask each other there, if the record has a parameter that arrives several times: such a number may change.
Else they find it at the step (``StepVote``).

[Note: cadence] The cadence changes only at the end of a step, when nothing is in flight and the gradients are about
to be dropped, and on all ranks in the same step (``StepExecutor``). With ``Cadence.NEVER`` everything happens as at
the boundary, except that the buckets' wire format sends nothing.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from deepspeed.base.sharded import full_shape
from deepspeed.base.tracing import untraced
from deepspeed.comm.collectives import Communicator
from deepspeed.config.plan import Cadence
from deepspeed.zero.gradients.bucket import BucketOrder, ExposedGrads, GradBucket, GradLocation
from deepspeed.zero.layout import UNUSED


def _will_arrive(param: nn.Parameter) -> bool:
    """Return whether the backward in progress reaches ``param``; graphs built during backward (reentrant
    checkpointing) do not count."""
    if not param.requires_grad:
        return False
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(param).node)
    except RuntimeError:  # torch.autograd.grad asks for the gradient itself, which then arrives nowhere
        return False


def _set_grad(param: nn.Parameter, grad: Tensor | None) -> None:
    """Assign ``param.grad`` although ``param`` may be sharded by now: torch compares the shapes."""
    if grad is None or grad.shape == param.shape:
        param.grad = grad
        return
    data = param.data
    param.data = grad.new_empty(()).expand_as(grad)
    param.grad = grad
    param.data = data


class Progress(Enum):
    """State of the reducer with respect to the backward in progress."""

    IDLE = "no backward has begun since the last one ended"
    ANNOUNCED = (
        "`before_backward` was called and no gradient has arrived; the caller will call `flush` at its end"
    )
    ACCUMULATING = "gradients arrive and are added up on this rank only"
    SUMMING = "gradients arrive, and buckets that are full are summed over ranks"


class LaunchTurns(Protocol):
    """Decides when a sum may start if it is ordered with other collectives (the gathers of stage 3)."""

    start_sum: Callable[[int], None]
    """``GradReducer.launch``."""

    def sum_ready(self, b: int) -> None:
        """Note that bucket ``b`` is full on this rank; call ``GradReducer.launch(b)`` now or later."""

    def end_segment(self) -> None:
        """End a backward that sums: launch everything ordered before its end."""


@dataclass(eq=False, repr=False)
class GradReducer:
    """Packs ready gradients into buckets and sums the buckets over ranks at a cadence, initially the plan's.

    Args:
        params: the engine's trainable parameters; bucket slots index into it.
        buckets: their gradient buckets, in the order in which the module registers the parameters.
        communicator: over all ranks that must agree on launch order and unused parameters.
        cadence: how often gradients are summed over ranks.
        at_boundary: returns whether this micro-batch is the accumulation boundary.
        overlap: leave sums in flight while backward runs; otherwise each is awaited immediately.
        expose: stage 0: expose the (reduced) gradients in ``param.grad`` after each backward.
        turns: decides whose turn it is, if other collectives share one launch order with the sums.
        layers_exchange: whether layers exchange data among the ranks of ``communicator`` in backward.
        message_device: where messages to other ranks are built; default: where the gradients are.
    """

    params: list[nn.Parameter]
    buckets: list[GradBucket]
    communicator: Communicator
    _: KW_ONLY
    cadence: Cadence
    overlap: bool
    expose: bool
    at_boundary: Callable[[], bool]
    turns: LaunchTurns | None = None
    layers_exchange: bool = False
    message_device: torch.device | None = None

    def __post_init__(self) -> None:
        self._agrees_on_reached = self.layers_exchange and self.communicator.size > 1
        self.usual_cadence = self.cadence
        """The cadence that temporary ones return to: the plan's, or at stage 3 the one that fits the budget of live
        parameters (``factory.cadence``)."""
        self.sums_paused = False
        """True between ``pause_sums`` and ``resume_sums``."""
        self.used = [False] * len(self.params)  # since the last boundary, on this rank
        self.pending_params: list[nn.Parameter] = []
        """Not trained yet: autograd accumulates their gradients, if any, in ``param.grad`` (``PendingParams``)."""
        self._saved_pending_grads: list[tuple[nn.Parameter, Tensor | None]] = []
        """Their gradients from before a backward with a ``grad_factor``, added back at its end."""
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._exposed = ExposedGrads()
        self._late: dict[int, Tensor] = {}
        self._after_sum: Callable[[Tensor], None] | None = None
        self._retired_by = ""  # name of a parameter that a later engine trains
        self._order = BucketOrder((), ())
        self._index_params(len(self.params))

    def _index_params(self, added: int) -> None:
        """Index every parameter's place in the buckets; the last ``added`` of them are new."""
        places: dict[int, GradLocation] = {}
        members: list[list[int]] = []
        for b, bucket in enumerate(self.buckets):
            slots = [(i, slot.param) for i, slot in enumerate(bucket.layout.slots) if slot.param != UNUSED]
            places.update((index, GradLocation(b, bucket, position)) for position, index in slots)
            members.append([index for _, index in slots])
        self._places = places
        self._order = self._order.extended(members, added)
        self._begin()

    # One backward -------------------------------------------------------------------------------------------

    def install_hooks(self) -> None:
        for index in range(len(self._handles), len(self.params)):
            param, hook = self.params[index], self._make_hook(index)
            trainable = param.requires_grad
            param.requires_grad_(True)  # frozen here, but another rank may have unfrozen it
            self._handles.append(param.register_post_accumulate_grad_hook(hook))
            param.requires_grad_(trainable)

    def _make_hook(self, index: int) -> Callable[[Tensor], None]:
        # A closure, not a bound method: modules and parameters get deep-copied with their hooks. It holds the reducer
        # weakly: the garbage collector does not see hooks that torch holds, so an engine that its user drops would
        # never be freed, nor its process groups and their threads.
        itself = weakref.ref(self)

        def hook(param: Tensor) -> None:
            reducer = itself()
            if reducer is not None:
                reducer.ready(index, param)

        return untraced(hook)

    def _begin(self) -> None:
        """Forget the last backward."""
        self._order.begin()
        self._last: GradBucket | None = None  # launched last
        self._at_end = False  # all buckets of this backward are launched at its end
        self._progress = Progress.IDLE
        self._grad_factor = 1.0

    def before_backward(self, *, grad_factor: float = 1.0) -> None:
        """Announce a backward, after which the caller will ``flush``. ``grad_factor`` multiplies all its gradients,
        for a loss that was not divided. ``param.grad`` of exposed gradients is set to None first."""
        if self._retired_by:
            raise self._retired()
        self._grad_factor = grad_factor
        self._progress = Progress.ANNOUNCED
        if grad_factor != 1.0:
            self._saved_pending_grads = [(param, param.grad) for param in self.pending_params]
            for param in self.pending_params:
                param.grad = None
        if self.expose and self._exposed.withdraw():
            self.clear()

    def watch(self, root: Tensor) -> None:
        """Call ``agree_on_reached_params`` when the announced backward begins at ``root`` [any shape], where needed."""
        if self._agrees_on_reached:

            def begin(_: Tensor) -> None:
                handle.remove()
                self.agree_on_reached_params()

            handle = root.register_hook(begin)

    def launch_at_end(self) -> None:
        """Launch all buckets at the end where ``agree_on_reached_params`` would be needed: the root of the announced
        backward is unknown, as in pipeline stages without the loss."""
        self._at_end = self._agrees_on_reached

    def agree_on_reached_params(self) -> None:
        """Agree, inside autograd at the start of a backward, whether all ranks will have the same gradients (Note:
        waiting in backward). Collective over ``communicator`` where layers exchange data."""
        if not self._agrees_on_reached or not self._decide():
            return
        reached = zlib.crc32(bytes(map(_will_arrive, self.params)))
        extremes = torch.tensor([reached, -reached], dtype=torch.int64, device=self.device)
        self.communicator.all_reduce_max(extremes).wait()
        highest, lowest = extremes.tolist()
        self._at_end = highest != -lowest  # the largest crc is not the smallest one

    def _scale_pending_grads(self) -> None:
        """Apply this backward's factor to the gradients of pending parameters, which autograd accumulates."""
        aside, self._saved_pending_grads = self._saved_pending_grads, []
        for param, before in aside:
            grad = param.grad
            if grad is not None:
                grad = grad * self._grad_factor
                before = grad if before is None else before + grad
            _set_grad(param, before)

    def ready(self, index: int, param: Tensor) -> None:
        """Take the gradient that autograd has just left in ``param.grad``."""
        grad = param.grad
        if grad is None:
            return
        b, bucket, position = self._places[index]
        # A backward that bypassed the engine adds to the exposed view directly.
        in_place = bool(self._exposed.params) and self._added_in_place(bucket, position, grad)
        param.grad = None
        self.used[index] = True
        if self._grad_factor != 1.0:
            grad = grad * self._grad_factor  # not in place: several parameters may share one tensor
        if self._progress is Progress.IDLE:
            # Unannounced: the module was called directly. This is called at the end of the graph task.
            torch.autograd.Variable._execution_engine.queue_callback(self.flush)
        sums = self._progress is Progress.SUMMING or self._decide()
        filled = self._order.arrive(index, b)
        if self._order.launched[b]:
            late = self._late.get(index)
            self._late[index] = grad.detach().clone() if late is None else late.add_(grad.detach())
            return
        if not in_place:
            bucket.accept(position, grad, lasting=not sums)
        if filled and sums and not self._at_end and (self.overlap or not bucket.keep_local):
            self._order.launch(self.launch if self.turns is None else self.turns.sum_ready, rest=False)

    def _decide(self) -> bool:
        """Return whether this backward sums over ranks; decided at its first gradient, or at its end if there is
        none."""
        if self._progress is Progress.IDLE or self._progress is Progress.ANNOUNCED:
            self._progress = Progress.SUMMING if self.will_sync() else Progress.ACCUMULATING
        return self._progress is Progress.SUMMING

    def add(self, index: int, grad: Tensor) -> None:
        """Add a gradient computed outside of a backward, while sums are paused."""
        _, bucket, position = self._places[index]
        self.used[index] = True
        bucket.accept(position, grad, lasting=True)

    def _added_in_place(self, bucket: GradBucket, position: int, grad: Tensor) -> bool:
        """Return whether a backward that bypassed the engine has added to an exposed gradient that is still in
        ``param.grad``. RuntimeError: that gradient was already summed over ranks."""
        if bucket.accumulated_in_place(position, grad):
            return True
        if bucket.views and grad.data_ptr() == bucket.views[position].data_ptr():
            raise RuntimeError(
                "a second backward added to gradients that were already summed over ranks. Run the forward through "
                "the engine (engine(...)), or call engine.abandon_update() before this backward to drop them."
            )
        return False

    def pause_sums(self) -> None:
        """Accumulate gradients on this rank only until ``resume_sums``; the next backward after it sums everything."""
        self.sums_paused = True

    def resume_sums(self) -> None:
        self.sums_paused = False

    def will_sync(self) -> bool:
        """Return whether a backward that begins now sums over ranks."""
        if self.sums_paused:
            return False
        cadence = self.usual_cadence if self.cadence is Cadence.NEVER else self.cadence
        return cadence is Cadence.EVERY_MICRO_BATCH or self.at_boundary()

    def launch(self, b: int) -> None:
        """Start the sum of bucket ``b``, once per backward, with zeros for gradients missing on this rank."""
        if self._order.launched[b]:
            return
        bucket = self.buckets[b]
        if self._last is not None and self._last.borrows:
            self._last.collect()  # return borrowed buffers early: at most one is in flight besides those being filled
        bucket.launch()
        self._order.launched[b] = True
        self._last = bucket
        if not self.overlap:
            bucket.collect()

    def flush(self) -> None:
        """End a backward: launch the remaining buckets, wait for all, and at stage 0 expose the sums in
        ``param.grad``."""
        self._scale_pending_grads()
        if self._decide():
            self._launch_rest()
            for bucket in self.buckets:
                bucket.collect()
            if self._sums_late_now():
                self.reduce_late()
        self._begin()
        if self.expose:
            self._exposed.show(self.params, self.used, self._places)

    def _sums_late_now(self) -> bool:
        """Return whether all ranks sum late gradients at the end of this backward (Note: arrivals). Collective where a
        parameter arrives several times."""
        late, now = bool(self._late), bool(self._late) and self.communicator.size == 1
        if not self._order.agreed:
            now = self._order.agree(late, self.communicator, self.device)
        if self.communicator.size == 1 or not self._order.repeats:
            return now
        any_late = torch.tensor([late], dtype=torch.int64, device=self.device)
        self.communicator.all_reduce_max(any_late).wait()
        return bool(any_late.item())

    def _launch_rest(self) -> None:
        self._order.launch(self.launch if self.turns is None else self.turns.sum_ready, rest=True)
        if self.turns is not None:
            self.turns.end_segment()
            for b in self._order:
                self.launch(b)

    def check_cadence(self, cadence: Cadence) -> None:
        """Raise ValueError if this reducer cannot change to ``cadence``."""
        if cadence is Cadence.NEVER:
            for bucket in self.buckets:
                bucket.check_unsharded()
        if self.turns is not None and cadence is not self.cadence:
            raise ValueError("the cadence of sums is fixed while they alternate with the gathers of stage 3")

    def change_cadence(self, cadence: Cadence) -> None:
        """Sum at this cadence from the next backward on. Every rank calls this between the same two steps, or none
        does (Note: cadence). RuntimeError: this rank has unsummed gradients."""
        if cadence is self.cadence:
            return
        self.check_cadence(cadence)
        if self._progress is not Progress.IDLE or any(bucket.local is not None for bucket in self.buckets):
            raise RuntimeError("the cadence of sums can change between steps only, not between micro-batches")
        self.cadence = cadence
        self._set_formats()

    def _set_formats(self) -> None:
        for bucket in self.buckets:
            bucket.sum_over_ranks(self.cadence is not Cadence.NEVER)

    @property
    def device(self) -> torch.device:
        if self.message_device is not None:
            return self.message_device
        return self.buckets[0].device if self.buckets else torch.device("cpu")

    def local_sum(self, index: int) -> Tensor | None:
        """Return a view of this rank's local sum for a parameter [numel]; None: there is none, or it is in a
        collective."""
        _, bucket, position = self._places[index]
        if bucket.local is None or not bucket.written[position]:
            return None
        return bucket.views[position].view(-1)

    # The step -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Reduce, before the optimizer step, the gradients that no backward has reduced (``no_sync``, unmanaged
        accumulation)."""
        if self._retired_by:
            raise self._retired()
        if self.expose:
            self._exposed.take_assigned(self.params, self.used, self._places)
        for bucket in self.buckets:
            if bucket.local is not None or bucket.reduced is None:
                self.before_backward()
                self._progress = Progress.SUMMING
                self.flush()
                return

    @property
    def late(self) -> Mapping[int, Tensor]:
        """Return the gradients that arrived after their bucket was launched, by parameter."""
        return self._late

    def restore(self, index: int, value: Tensor, *, late: bool = False) -> None:
        """Restore a local sum from a checkpoint taken between micro-batches."""
        self.used[index] = True
        if late:
            self._late[index] = value.to(self.device, copy=True).view(full_shape(self.params[index]))
        else:
            _, bucket, position = self._places[index]
            bucket.accept(position, value.view(full_shape(self.params[index])), lasting=True)

    def reduce_late(self) -> None:
        """Sum the late gradients. Every rank calls this, or none does."""
        for index, grad in self._late.items():
            _, bucket, position = self._places[index]
            bucket.accept(position, grad)
        self._late.clear()
        for bucket in self.buckets:  # all of them: ranks differ in which ones got a late gradient
            bucket.launch()
            bucket.collect()
        self._order.agreed = False  # the graph has changed

    def admit(self, params: Sequence[nn.Parameter], buckets: Sequence[GradBucket]) -> None:
        """Also train ``params`` from now on; ``buckets`` hold their gradients (new buckets, or existing ones with
        room for them). Every rank calls this, or none does."""
        self.params += params
        self.used += [False] * len(params)
        self.buckets += [bucket for bucket in buckets if bucket not in self.buckets]
        self.call_after_sums(self._after_sum)
        if self.cadence is Cadence.NEVER:
            self._set_formats()
        self._index_params(len(params))
        self.install_hooks()

    def call_after_sums(self, hook: Callable[[Tensor], None] | None) -> None:
        """Register ``hook`` to change this rank's result of each sum over ranks in place. Sums finish in one order on
        all ranks, so it may communicate."""
        self._after_sum = hook
        for bucket in self.buckets:
            bucket.after_sum = hook

    def sum_admitted(self, first: int, buckets: Sequence[GradBucket]) -> None:
        """Sum over ranks what autograd has accumulated in ``param.grad`` for the parameters from index ``first`` on,
        which are in ``buckets``. Every rank calls this, or none does."""
        for index, param in enumerate(self.params[first:], first):
            if param.grad is not None:
                _, bucket, position = self._places[index]
                bucket.accept(position, param.grad)
                self.used[index] = True
                param.grad = None
        for bucket in buckets:
            bucket.launch()
            bucket.collect()
        self.finish_copies()

    def finish_copies(self) -> None:
        """Wait for gradient copies to host memory: copies to pinned memory run asynchronously."""
        for bucket in self.buckets:
            if bucket.host is not None:
                bucket.host.synchronize()

    def abandon(self) -> None:
        """Discard every gradient since the last step, and the leftovers of a failed backward.

        The sums of that backward are completed first and their results dropped. So all ranks have joined the same
        number of collectives, wherever each one failed, and no memory is reused while another rank still writes to
        it.
        """
        if self._progress is not Progress.IDLE and self._decide():
            self._launch_rest()
        for bucket in self.buckets:
            bucket.abandon()
        self.clear()
        self._begin()

    def clear(self) -> None:
        """Drop all gradients (after the step, or ``zero_grad`` outside of an update)."""
        for bucket in self.buckets:
            if bucket.in_flight is not None:
                self.abandon()  # a backward failed and was not noticed until now
                return
        for bucket in self.buckets:
            bucket.clear()
        self._saved_pending_grads = []
        for param in (*self.params, *self.pending_params):
            param.grad = None
        self._exposed.forget()
        self._late.clear()
        self.used = [False] * len(self.params)

    def destroy(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def retire(self, name: str) -> None:
        """Leave the gradients to a later engine that trains parameter ``name``: two engines taking ``param.grad``
        would each get some of the gradients."""
        if not self._retired_by:
            self.abandon()
            self.destroy()
            self._retired_by = name

    def _retired(self) -> RuntimeError:
        return RuntimeError(
            "this engine no longer trains its model: a later deepspeed.initialize took over parameter "
            f"{self._retired_by}. Use the newer engine, or give each engine its own model."
        )
