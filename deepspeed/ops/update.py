"""The protocol between an optimizer and its caller, which holds the tensors.

An optimizer of the protocol declares ``update_traits`` and has ``step_fragments``; ``MultiTensorOptimizer`` does. Any
other ``torch.optim.Optimizer`` has the traits ``FOREIGN``: it gets its tensors in its own groups, and its ``step`` is
called. ``traits_of`` is the only place that decides; training, the memory planner and the reports ask it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

Group: TypeAlias = dict[str, Any]
"""One of an optimizer's `param_groups`."""
Tensors: TypeAlias = list[Tensor]

Ranks = Any
"""A `comm.collectives.Communicator`; `ops` lies below `comm`."""

SegmentSum = Callable[[list[Tensor], Tensor], Tensor]
"""Maps fragments and their sums [n, k] fp64 to the sums over the whole tensors. Collective."""


HoldersOf = Callable[[Sequence[Tensor]], Sequence[tuple[Ranks, list[int]]]]
"""Maps masters to the ranks that hold the same ones as this rank, and those masters' positions: one entry per kind of
weights, always in the same order, some possibly without positions."""


WholeMatrixUpdate = Callable[[Group, Sequence[Tensor], Sequence[Tensor], Callable[[Tensor], Tensor]], None]
"""Applies a function to whole matrices of which each rank has fragments. Given fragments of the matrices of a group and
their values, replaces the values by those of the function: [rows, columns] -> the same shape, or for a stack [n, rows,
columns]. Collective."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTraits:
    """Requirements of an optimizer's update besides tensors and gradients."""

    fused: bool = True
    """Has ``step_fragments``: one pass over memory, without copies of gradients."""
    elementwise: bool | None = None
    """Tensors may be updated in parts; None: determined by a trial."""
    segment_sums: bool = False
    """Needs sums over whole tensors in the middle of the update (LAMB)."""
    whole_matrices: bool = False
    """Needs functions of whole matrices in the middle of the update (Muon)."""

    grain: int = 1
    """Tensors may be cut at multiples of this many elements from the start of a parameter."""
    coded: tuple[str, ...] = ()
    """State entries that are codes of numbers; requires ``decoded_state`` and ``set_decoded_state``, as `CompactAdam`
    has."""
    positions: bool = False
    """Its update needs the start of each fragment in its parameter."""

    gradient_norm: bool = False
    """Needs the norm of the whole gradient, over all groups and ranks (LAMB's own clipping)."""
    own_communication: bool = False
    """It may ask for gradients that are not summed over ranks, and then communicates by itself (1-bit Adam); requires a
    ``CommunicatingOptimizer``. With partitioned tensors, each group of ranks shares one copy, and gradients are a
    group's: with a single copy, no rank could know what another one's shard lacks."""
    local_weights: bool = False
    """Between exchanges, masters differ between ranks with the same weights (DiLoCo)."""
    rank_state: tuple[str, ...] = ()
    """State entries that differ between ranks with the same weights (error feedback); per element."""
    script_keys: tuple[str, ...] = ()
    """Group entries that belong to the script: neither saved nor loaded."""

    @property
    def joins_ranks(self) -> bool:
        """Return whether the update is collective, so that ranks without a fragment must participate."""
        return self.segment_sums or self.whole_matrices or self.own_communication

    @property
    def needs_context(self) -> bool:
        """Return whether an ``UpdateContext`` can affect the update."""
        return self.joins_ranks or self.gradient_norm


FOREIGN = UpdateTraits(fused=False)
"""Traits of optimizers outside this protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateContext:
    """Services of the caller, which holds the tensors, to an update, as far as its traits require. None: the tensors
    are whole, and nothing else is known."""

    gradient_norm: float | None = None
    """Norm of the whole gradient, including ``grad_scale``."""
    segment_sum: SegmentSum | None = None
    segment_largest: SegmentSum | None = None
    """With ``segment_sum``: the maximum instead, for non-negative numbers [n, k] fp64."""
    copy_sum: Callable[[Tensor], Tensor] | None = None
    """With ``segment_sum``: the sum of numbers [k] fp64 over the ranks that share one copy. Collective."""
    whole_matrices: WholeMatrixUpdate | None = None
    holders: HoldersOf | None = None
    """Set if the gradients are this rank's own, to be averaged over the holders. The update then exchanges what keeps
    the masters equal on all holders. ``gradient_norm`` is the root mean square of the holders' norms."""
    parts: Ranks | None = None
    """The ranks that share one copy, if masters are shards of it; only for updates with ``own_communication``."""
    copies_of_one_batch: bool = False
    """Whether ranks that compute one batch, on any stage, hold copies of weights: these must be equal whenever they
    compute. Only for updates with ``own_communication``."""


ALONE = UpdateContext()


def refresh_weights(masters: Sequence[Tensor], lows: Sequence[Tensor | None]) -> None:
    """Round updated masters into the model's own weights; None: the master is the weight itself."""
    pairs = [(low, master) for master, low in zip(masters, lows, strict=True) if low is not None]
    if pairs:
        torch._foreach_copy_([low.view(-1) for low, _ in pairs], [master.reshape(-1) for _, master in pairs])


class Fragments(Protocol):
    """One optimizer group's tensors to update on this rank, as parallel lists."""

    @property
    def masters(self) -> Sequence[Tensor]: ...
    @property
    def grads(self) -> Sequence[Tensor]: ...
    @property
    def lows(self) -> Sequence[Tensor | None]:
        """Return the tensors that receive the updated masters, rounded to their dtype; None where there is none."""
        ...

    @property
    def starts(self) -> Sequence[int]:
        """Return the index of each fragment's first element in its parameter."""
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
    """An optimizer with ``own_communication``. Engines call these methods at the same time on all ranks."""

    def wants_local_gradients(self) -> bool:
        """Return whether, after the coming step, this rank wants gradients that are not summed over ranks.

        They stay local as soon as all ranks agree, and are summed again as soon as one does not; the update learns it
        from ``UpdateContext.holders``. Called before each step, possibly repeatedly."""
        ...

    def rank_state_dict(self) -> dict[str, Any]:
        """Return this rank's own state for a checkpoint, besides groups and per-parameter state: plain values and
        tensors."""
        ...

    def load_rank_state_dict(self, saved: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> None:
        """Load ``saved[r]``, the own state of rank r of the saving world size, read lazily; empty if another optimizer
        was saved. This is ``rank`` of ``ranks`` now."""
        ...


@runtime_checkable
class ServerErrorOwner(Protocol):
    """A ``CommunicatingOptimizer`` with server errors (1-bit Adam): the compression errors of averages."""

    def server_errors(
        self, masters: Sequence[Sequence[Tensor]]
    ) -> Mapping[int, Sequence[tuple[int, Tensor]]]:
        """Return, by id of a master, errors of the averages of this rank, each with its start in the master.
        ``masters``: all of them, by group, copies of whole tensors first. Called before a checkpoint reads the
        state."""
        ...

    def forget_server_errors(self) -> None:
        """Drop the server errors, which have become part of ``rank_state``."""
        ...


def traits_of(optimizer: Any) -> UpdateTraits:
    """Return the traits that ``optimizer`` declares, FOREIGN if it declares none."""
    declared = getattr(optimizer, "update_traits", None)
    return declared if isinstance(declared, UpdateTraits) else FOREIGN


def corrections(group: Group, step: int) -> tuple[float, float]:
    """Return Adam's bias corrections in fp64, which the kernels round once: the step size lr / (1 - beta1^t), and the
    factor 1 / sqrt(1 - beta2^t) of the square root."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    if not group["bias_correction"]:
        return lr, 1.0
    return lr / (1.0 - math.pow(beta1, step)), 1.0 / math.sqrt(1.0 - math.pow(beta2, step))
