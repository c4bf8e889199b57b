"""Run the optimizer step: agree on reduced gradients, compute the norm, clip, update fragments, publish weights."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepspeed.base.exceptions import UnusedParametersError
from deepspeed.base.logging import logger
from deepspeed.comm.collectives import Communicator
from deepspeed.config.plan import Cadence, Plan
from deepspeed.ops.native import DEVICE_PIECE, SumOfSquares
from deepspeed.ops.update import ALONE, UpdateContext
from deepspeed.optim.loss_scaler import LossScaleError, LossScaler
from deepspeed.zero.bucket import WeightPublisher
from deepspeed.zero.gradients.reducer import GradReducer
from deepspeed.zero.placements import own_views
from deepspeed.zero.replica_groups import ReplicaGroup, ReplicaGroups
from deepspeed.zero.states.store import GroupTensors, StateStore
from deepspeed.zero.update_context import (
    SwappedGroupsStep,
    UpdateContextBuilder,
    local_squares,
    params_by_group,
)

if TYPE_CHECKING:
    from deepspeed.zero.pending_params import PendingParams

# [Note: the gradient norm] One function for every stage, group and precision. Squares are summed in fp64 and the root
# is rounded once to fp32, so the result does not depend on how gradients are partitioned into buckets and across ranks;
# the clipping coefficient is then computed as torch does.
# [Note: fp32 without tensors] A tensor of one element costs microseconds in every step. Python's floats are fp64: a
# sum, product or quotient of two fp32 numbers computed in fp64 and rounded to fp32 is the one that fp32 arithmetic
# gives (S. Figueroa: When is double rounding innocuous?, SIGNUM 1995: it is if 53 >= 2 x 24 + 2).
_fp32 = ctypes.c_float  # its value is rounded to fp32; what is too large becomes inf
_EPS = _fp32(1e-6).value


def norm_from_squares(total: float) -> float:
    """Return the root of a sum of squares, rounded once to fp32."""
    if not math.isfinite(total):
        return math.nan if math.isnan(total) else math.inf
    return _fp32(math.sqrt(total)).value


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return ``min(1, max_norm / (norm + 1e-6))`` in fp32, as ``torch.nn.utils.clip_grad_norm_``; 1 if ``max_norm``
    is 0."""
    if max_norm <= 0:
        return 1.0
    # torch divides by a tensor in two roundings
    inverse = _fp32(1.0 / _fp32(_fp32(norm).value + _EPS).value).value
    coefficient = _fp32(inverse * _fp32(max_norm).value).value
    return coefficient if coefficient < 1.0 or math.isnan(coefficient) else 1.0


def first_non_finite(tensors: Sequence[Tensor]) -> int | None:
    """Return the position of the first tensor with a NaN or Inf; None: all are finite."""
    for i, tensor in enumerate(tensors):
        pieces = tensor.detach().reshape(-1).split(DEVICE_PIECE)
        if not all(bool(torch.isfinite(piece).all()) for piece in pieces):
            return i
    return None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of a step.

    ``norm`` is the global gradient norm before clipping, in the scale of the true gradient; inf if the step was
    skipped, even if the norm was NaN. Where gradients are not summed over ranks it comes from ``local_squares``.
    """

    applied: bool
    norm: float
    clip: float


@dataclass(frozen=True, slots=True)
class StepVote:
    """Result of the all-reduce before an update: every rank has the same one."""

    squares: float
    """Sum of the squares of all gradients, in the scale of the loss; NaN or Inf if one of them is."""
    used: list[bool]
    """By parameter of the store: whether any rank that holds it has its gradient."""
    has_late_gradients: bool
    """Whether any rank has a gradient that arrived after the sum of its bucket was launched."""
    activated: list[bool]
    """By pending parameter: whether any rank that holds it has its gradient."""
    needs_second_vote: bool
    """Any rank of the whole model has a late or newly activated gradient: all vote again once it is summed."""
    wants_local: bool
    """Whether every rank's optimizer wants the next gradients unsummed."""
    copies: bool
    """Whether ranks that compute one batch hold copies of weights, on any stage (``UpdateContext``)."""


@dataclass(eq=False, repr=False)
class StepExecutor:
    """Runs one synchronous optimizer step over the fragments that this rank owns.

    ``before_step`` is called once all gradients are summed, before the norm is computed. ``by_rows``: see
    ``SwappedGroupsStep``.
    """

    plan: Plan
    reducer: GradReducer
    store: StateStore
    scaler: LossScaler
    publisher: WeightPublisher
    replica_groups: ReplicaGroups
    names: list[str]
    pending_params: PendingParams
    before_step: list[Callable[[], None]] = field(default_factory=list)
    by_rows: Collection[nn.Parameter] = ()

    def __post_init__(self) -> None:
        store = self.store
        self.communicator = self.replica_groups.all_ranks
        self.names = list(self.names)
        self.members = params_by_group(store.params, self.replica_groups)
        self._non_dense = self._find_non_dense(store.params)
        self.sharded = self.plan.zero.shard_state
        self.bad_steps = 0
        self.pending_params.on_admitted = self._admitted
        self.on_relink: Callable[[str], None] = lambda name: logger.warning(
            f"parameter {name} was moved out of its ZeRO buffer (module.to, a LoRA merge, assign=True); its current "
            "value was copied back into the buffer"
        )
        self._grad_key: list[int] = []
        self._lists: list[GroupTensors] = []
        self._squares = SumOfSquares(())  # of the gradients whose norm counts on this rank
        self.optimizer_context = UpdateContextBuilder(store, self.replica_groups, sharded=self.sharded)
        optimizer: Any = store.optimizer
        traits = store.traits
        self._needs_context = traits.needs_context
        self._announced: Cadence | None = None
        self._wants_local = optimizer.wants_local_gradients if traits.own_communication else None
        self._step_fragments = (
            optimizer.step_fragments if traits.fused else SwappedGroupsStep(store, self.by_rows)
        )

    def step(self) -> StepResult:
        self.reducer.finish()
        for notify in self.before_step:
            notify()
        vote = self._agree()
        norm = norm_from_squares(vote.squares) / self.scaler.scale
        if self.plan.precision.check_overflow and not math.isfinite(norm):
            self._skip(norm)
            return StepResult(False, math.inf, 0.0)
        self.bad_steps = 0
        self._check_unused(vote.used)
        clip = clip_coefficient(norm, self.plan.gradients.clip)
        self._relink_detached()
        with torch.set_grad_enabled(False):  # in every step: half the calls of no_grad()
            context = self._context(norm * clip, vote) if self._needs_context else ALONE
            self._update(vote.used, clip / self.scaler.scale, context)
        self.publisher.publish()
        self.scaler.update(overflow=False)
        if self._wants_local or self._announced is not None:
            self._change_cadence(vote)
        return StepResult(True, norm, clip)

    # Cadence ------------------------------------------------------------------------------------------------

    def announce(self, cadence: Cadence) -> None:
        """Change the cadence of gradient sums once the next step has been applied. Every rank announces the same
        cadence before the same step. ValueError: the gradients are partitioned, or their sums are scheduled (stage
        3)."""
        self.reducer.check_cadence(cadence)
        self._announced = cadence

    def _change_cadence(self, vote: StepVote) -> None:
        if self._wants_local:
            self.reducer.change_cadence(Cadence.NEVER if vote.wants_local else self.reducer.usual_cadence)
        if self._announced is not None:
            self.reducer.change_cadence(self._announced)
            self._announced = None

    # Agreement ----------------------------------------------------------------------------------------------

    def _agree(self) -> StepVote:
        """Vote, and vote again if late or newly activated gradients had to be summed after the first vote."""
        self.pending_params.find_pending()
        vote = self._vote()
        if any(vote.activated):
            self.pending_params.admit(vote.activated)
        if vote.has_late_gradients:
            self.reducer.reduce_late()
        return self._vote() if vote.needs_second_vote else vote

    def _admitted(self, names: Sequence[str]) -> None:
        """Follow the store, which now holds the parameters with these names at its end."""
        self.names += names
        self.members = params_by_group(self.store.params, self.replica_groups)
        self._non_dense = self._find_non_dense(self.store.params)
        self.optimizer_context.rebuild()
        self._lists = []

    def _vote(self) -> StepVote:
        """Cast this rank's vote and return the result: one small all-reduce in fp64."""
        self._gradient_lists()
        alone = self.reducer.cadence is Cadence.NEVER
        squares = local_squares(self.store, self.members, sharded=self.sharded) if alone else self._squares()
        late, pending = bool(self.reducer.late), self.reducer.pending_params
        activated = [param.grad is not None for param in pending] if pending else []
        mine = flags = [*self.reducer.used, *activated]
        wants = [bool(self._wants_local())] if self._wants_local else []
        local = any(wants)
        if self.communicator.size > 1:
            values = self._sum([squares, late, *flags, *wants], self.communicator)
            flags = [count > 0 for count in values[2 : 2 + len(flags)]]
            squares, late = values[0], values[1] > 0
            local = bool(wants) and values[-1] == self.communicator.size
        groups = self._find_non_dense([*self.store.params, *pending]) if pending else self._non_dense
        if groups:
            self._vote_by_group(groups, mine, flags)
        used, activated = flags[: len(self.store.params)], flags[len(self.store.params) :]
        revote, copies = late or any(activated), bool(self.optimizer_context.copies)
        for others in self.replica_groups.across.values():
            squares, voters, refused, holding = self._sum([squares, revote, not local, copies], others)
            revote, local, copies = voters > 0, not refused, holding > 0
        return StepVote(squares, used, late, activated, revote, local, copies)

    def _sum(self, message: Sequence[float], communicator: Communicator) -> list[float]:
        packed = torch.tensor(message, dtype=torch.float64).to(self.reducer.device)
        communicator.all_reduce(packed).wait()
        return packed.tolist()

    def _vote_by_group(
        self, groups: Sequence[tuple[ReplicaGroup, Sequence[int]]], mine: Sequence[bool], flags: list[bool]
    ) -> None:
        """Correct ``flags`` where the ranks of ``dense`` are not the ranks that hold a weight: only some of them hold
        an expert, and other stages hold a shared weight too. ``flags`` has the store's parameters, then the pending
        ones; ``mine`` is this rank's."""
        for replica_group, indices in groups:
            counts = [float(mine[i]) for i in indices]
            if replica_group.all_ranks.size > 1:
                counts = self._sum(counts, replica_group.all_ranks)
            for i, count in zip(indices, counts, strict=True):
                flags[i] = count > 0

    def _find_non_dense(self, params: Sequence[nn.Parameter]) -> list[tuple[ReplicaGroup, list[int]]]:
        """Return the positions in ``params`` of those that are not dense, by replica group, sorted by its name so
        that all stages have one order."""
        found = params_by_group(params, self.replica_groups)
        found.pop(self.replica_groups.dense, None)
        return sorted(found.items(), key=lambda entry: entry[0].name)

    def _gradient_lists(self) -> list[GroupTensors]:
        """Return one entry per group, rebuilt only when buffers have moved: kernels cache their pointers by list."""
        key = [b.reduced.data_ptr() if b.reduced is not None else 0 for b in self.reducer.buckets]
        if key != self._grad_key or len(self._lists) != len(self.store.by_group):
            self._lists = [GroupTensors.of(group) for group in self.store.by_group]
            self._squares = SumOfSquares(
                [
                    part
                    for fragments, _, grads, _ in self._lists
                    for owned, grad in zip(fragments, grads, strict=True)
                    if owned.grad_bucket.counts_in_norm
                    for part in own_views(
                        self.store.params[owned.param_index], grad, owned.fragment.param_offset
                    )
                ]
            )
            self._grad_key = key
        return self._lists

    def _check_unused(self, used: Sequence[bool]) -> None:
        """Raise for a parameter without a gradient on any rank, if ``ignore_unused_parameters`` is false."""
        if self.plan.zero.ignore_unused or not self.sharded or all(used):
            return
        trainable = [param.requires_grad for param in self.store.params]  # some may be frozen by now
        names = [name for name, u, t in zip(self.names, used, trainable, strict=True) if t and not u]
        if not names:
            return
        raise UnusedParametersError(
            f"{len(names)} parameters did not contribute to the loss on any rank: {', '.join(names[:5])}"
            f"{', ...' if len(names) > 5 else ''}. Freeze them (requires_grad=False), or set "
            "zero_optimization.ignore_unused_parameters: true."
        )

    # Failure ------------------------------------------------------------------------------------------------

    def _skip(self, norm: float) -> None:
        name = self._first_bad_parameter()
        self.bad_steps += 1
        logger.warning(f"step skipped: the gradient norm is {norm}, first in parameter {name}")
        try:
            self.scaler.update(overflow=True)
        except LossScaleError as error:
            raise LossScaleError(f"{error} First non-finite gradient: {name}.") from None
        if self.scaler.exhausted and self.bad_steps >= self.plan.max_bad_steps:
            raise LossScaleError(
                f"{self.bad_steps} steps in a row had a non-finite gradient, first in parameter {name}; training "
                "cannot recover. Check the data and the learning rate, or resume from an earlier checkpoint."
            )

    def _first_bad_parameter(self) -> str:
        """Return the name of the first parameter with a non-finite gradient on any rank. Collective."""
        fragments = sorted(self.store.fragments, key=lambda owned: owned.param_index)
        bad = first_non_finite([owned.gradient() for owned in fragments])
        index = len(self.names) if bad is None else fragments[bad].param_index
        worst = torch.tensor([-index], dtype=torch.int64, device=self.reducer.device)
        self.communicator.all_reduce_max(worst).wait()
        index = -int(worst.item())
        if index < len(self.names):
            return self.names[index]
        elsewhere = self.replica_groups.across
        return "(of another part of the model)" if elsewhere else "(none: the squares overflow fp64)"

    # Update -------------------------------------------------------------------------------------------------

    def _relink_detached(self) -> None:
        for bucket in self.store.param_buckets:
            positions = bucket.detached()
            if not positions:
                continue
            if bucket.full is not None:
                for i in positions:
                    self.on_relink(self.names[bucket.layout.slots[i].param])
            bucket.relink(positions)
            self.store.rebind(bucket)
            self._lists = []

    def _context(self, norm: float, vote: StepVote) -> UpdateContext:
        """Return the context of an update whose gradient has this ``norm`` after clipping."""
        alone = self.reducer.cadence is Cadence.NEVER
        return self.optimizer_context.context(norm, local_gradients=alone, copies=vote.copies)

    def _update(self, used: Sequence[bool], grad_scale: float, context: UpdateContext) -> None:
        """Update used parameters; one that no rank used keeps its value and state, as with ``grad is None``."""
        lists = self._lists or self._gradient_lists()  # empty if weights have moved
        if not all(used):
            lists = [_select(entry, used) for entry in lists]
        self._update_lists(lists, grad_scale, context)

    def _update_lists(self, lists: list[GroupTensors], grad_scale: float, context: UpdateContext) -> None:
        self.store.tier.update(lists, partial(self._step_fragments, grad_scale=grad_scale, context=context))
        if self.store.traits.fused:
            self.store.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it

    def close(self) -> None:
        """Remove the reducer's hooks; the engine takes no more steps."""
        self.reducer.destroy()


def _select(tensors: GroupTensors, used: Sequence[bool]) -> GroupTensors:
    return tensors.pick(i for i, owned in enumerate(tensors.fragments) if used[owned.param_index])
