"""The optimizer protocol: what an optimizer and whoever holds its tensors tell each other.

An optimizer that takes part declares ``update_traits`` and has ``step_fragments``; ``MultiTensorOptimizer`` does. Any
other ``torch.optim.Optimizer`` has the traits ``FOREIGN``: it is given its tensors in its own groups, and its ``step``
is called. ``traits_of`` is the only place that decides; training, the memory planner and the reports ask it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

Group: TypeAlias = dict[str, Any]
"""One of an optimizer's `param_groups`."""
Tensors: TypeAlias = list[Tensor]

Ranks = Any
"""A `comm.collectives.Communicator`; `ops` lies below `comm`."""

SegmentSum = Callable[[list[Tensor], Tensor], Tensor]
"""Given fragments and their sums [n, k] fp64, the sums of the whole tensors that they are parts of. Collective."""


HoldersOf = Callable[[Sequence[Tensor]], Sequence[tuple[Ranks, list[int]]]]
"""Given masters, those ranks that hold the same ones as this rank, with the positions of these masters: one entry per
kind of weights, always the same ones in one order, some maybe without positions."""


class WholeMatrixUpdate(Protocol):
    """Given fragments of the matrices of ``group`` and values for them, replace the values by those of
    ``function`` applied to the whole matrices: [rows, columns] -> the same shape, or for a stack of them
    [n, rows, columns]. Collective."""

    def __call__(
        self,
        group: Group,
        params: Sequence[Tensor],
        values: Sequence[Tensor],
        function: Callable[[Tensor], Tensor],
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTraits:
    """Traits of an optimizer's update: what it needs besides tensors and their gradients."""

    fused: bool = True
    """Whether it has ``step_fragments``: one pass over memory, without copies of gradients."""
    elementwise: bool | None = None
    """Whether tensors may be updated in pieces; None: to be found by trial."""
    segment_sums: bool = False
    """Sums over whole tensors in the middle of the update (LAMB)."""
    whole_matrices: bool = False
    """Functions of whole matrices in the middle of the update (Muon)."""

    grain: int = 1
    """Tensors may be cut at multiples of this many elements from the start of a parameter."""
    coded: tuple[str, ...] = ()
    """Entries of its state that are codes of numbers; it is a ``CodedStateOptimizer``."""
    positions: bool = False
    """Whether its update is told where in its parameter a fragment starts."""

    gradient_norm: bool = False
    """The norm of the whole gradient, of all groups and ranks (LAMB's own clipping)."""
    own_communication: bool = False
    """Whether it may ask for gradients that are not summed over ranks, and then exchanges what it needs itself (1-bit
    Adam); it is a ``CommunicatingOptimizer``. Where tensors are partitioned, groups of ranks share a copy each, and
    gradients are those of a group: were there one copy, no rank could say what another one's shard lacks."""
    rank_state: tuple[str, ...] = ()
    """Entries of its state that differ between ranks with the same weights (error feedback); per element."""
    script_keys: tuple[str, ...] = ()
    """Entries of its groups that are the script's alone: never saved, nor loaded."""

    @property
    def joins_ranks(self) -> bool:
        """Return whether the update is collective, so that ranks without a fragment participate as well."""
        return self.segment_sums or self.whole_matrices or self.own_communication

    @property
    def needs_context(self) -> bool:
        """Return whether an ``UpdateContext`` can make a difference to it."""
        return self.joins_ranks or self.gradient_norm


FOREIGN = UpdateTraits(fused=False)
"""An optimizer that knows nothing of this protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateContext:
    """Services of whoever holds the tensors to an update, as far as its traits ask for them. None: the tensors are
    whole, and nobody knows more."""

    gradient_norm: float | None = None
    """Norm of the whole gradient, ``grad_scale`` included."""
    segment_sum: SegmentSum | None = None
    segment_largest: SegmentSum | None = None
    """Beside ``segment_sum``: the same for the largest of numbers [n, k] fp64 that are not negative."""
    copy_sum: Callable[[Tensor], Tensor] | None = None
    """Beside ``segment_sum``: the sum of numbers [k] fp64 over the ranks that share one copy. Collective."""
    whole_matrices: WholeMatrixUpdate | None = None
    holders: HoldersOf | None = None
    """Set if the gradients are this rank's own: their mean over the holders is the gradient. The update then exchanges
    what keeps the masters equal on all holders. ``gradient_norm`` is the root mean square of the holders' norms."""
    parts: Ranks | None = None
    """The ranks that share one copy, if masters are shards of it; only for updates with ``own_communication``."""


ALONE = UpdateContext()


class Fragments(Protocol):
    """The tensors of one optimizer group that are updated here, in parallel lists."""

    @property
    def masters(self) -> Sequence[Tensor]: ...
    @property
    def grads(self) -> Sequence[Tensor]: ...
    @property
    def lows(self) -> Sequence[Tensor | None]:
        """Return the tensors that receive the updated master rounded to their dtype; None where there is none."""
        ...

    @property
    def starts(self) -> Sequence[int]:
        """Index of each one's first element in its parameter."""
        ...


class CodedStateOptimizer(Protocol):
    """One with ``coded`` entries in its state."""

    def decoded_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """``state`` with values (fp32 copies, of the parameter's shape) for codes, and without their scales."""
        ...

    def set_decoded_state(self, state: dict[str, Any], name: str, values: Tensor) -> None:
        """Write one entry; decoded values get their codes back."""
        ...


class FragmentOptimizer(Protocol):
    """An optimizer that updates fragments: 1-D parts of parameters, or whole ones in their own shape."""

    param_groups: list[dict[str, Any]]

    @property
    def update_traits(self) -> UpdateTraits: ...

    def step_fragments(
        self, fragments: Sequence[Fragments], *, grad_scale: float, context: UpdateContext
    ) -> None:
        """Update ``fragments[g]`` with the hyperparameters of group g, from the gradients times ``grad_scale``."""
        ...


class CommunicatingOptimizer(FragmentOptimizer, Protocol):
    """One with ``own_communication``. An engine calls these methods at the same time on every rank."""

    def keeps_own_gradients(self) -> bool:
        """Return whether, once the coming step is applied, the following gradients should be left as they are on each
        rank.

        They are as soon as every rank says so, and summed again as soon as one does not; the update is told which by
        ``UpdateContext.holders``. Asked before each step, maybe repeatedly."""
        ...

    def own_state(self) -> dict[str, Any]:
        """Return the rank's own state for a checkpoint, besides the groups and the state by parameter: plain values and
        tensors."""
        ...

    def load_own_state(self, saved: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> None:
        """``saved[r]``: what rank r had saved, of as many ranks as there were then, read when it is asked for; none if
        another optimizer was saved. This is ``rank`` of ``ranks`` now."""
        ...


@runtime_checkable
class ServerErrorOwner(Protocol):
    """A ``CommunicatingOptimizer`` that keeps server errors (1-bit Adam): what compressing an average has lost."""

    def server_errors(
        self, masters: Sequence[Sequence[Tensor]]
    ) -> Mapping[int, Sequence[tuple[int, Tensor]]]:
        """Return, by id of a master, errors of what this rank averages, and where in the master they begin.
        ``masters``: all of them, by group, copies of whole tensors first; asked before a checkpoint reads the state."""
        ...

    def forget_server_errors(self) -> None:
        """Drop them: they have become part of ``rank_state``."""
        ...


def traits_of(optimizer: Any) -> UpdateTraits:
    """Return the traits that ``optimizer`` declares, FOREIGN if it declares none."""
    declared = getattr(optimizer, "update_traits", None)
    return declared if isinstance(declared, UpdateTraits) else FOREIGN


def corrections(group: Group, step: int) -> tuple[float, float]:
    """Return Adam's bias corrections, in fp64, which the kernels round once: the step size lr / (1 - beta1^t), and the
    factor 1 / sqrt(1 - beta2^t) of the square root."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    if not group["bias_correction"]:
        return lr, 1.0
    return lr / (1.0 - math.pow(beta1, step)), 1.0 / math.sqrt(1.0 - math.pow(beta2, step))
