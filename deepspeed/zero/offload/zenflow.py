"""ZenFlow: update the important columns on the device in every step, the others on the host, in rounds.

Lan et al., "ZenFlow: Enabling Stall-Free Offloading Training via Asynchronous Updates" (2025). Masters and state are
kept in host memory. Those of the chosen columns (``columns.py``) are also packed in device memory and updated in
every step. The gradients of the others are accumulated on the device for a *round* of steps; their mean then goes to
the host, which updates its copy of everything, with ``overlap_step`` during the next round. The updated weights come
back at the end of that round: no gradient waits for more than two rounds.

[Note: packed and host values] The packed value of a chosen element is current and the host's is stale; for any other
element the host's is current. ``settle`` writes the packed values to the host's tensors. Readers of masters or state
call it first (``StateStore.settle``), and columns are chosen again only after it. External writes are detected by the
versions of the tensors.

[Note: results] The host updates shadow copies, which are taken at the end of a round. Until then a checkpoint saves
the state before that update, and ``saved`` adds the gradient in progress: the resumed run repeats the update with it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from deepspeed.base.logging import warning_once
from deepspeed.checkpoint.placement import placement_of
from deepspeed.config.plan import ZenFlowPlan
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.ops.multi_tensor import MultiTensorOptimizer
from deepspeed.ops.update import UpdateContext
from deepspeed.optim.initial_state import clone_optimizer
from deepspeed.zero.offload.columns import ColumnChoice
from deepspeed.zero.offload.host_copies import host_empty
from deepspeed.zero.offload.shadow_copies import (
    ShadowCopies,
    ShadowCopy,
    class_name,
    host_worker,
    live_tensors,
    options_of_groups,
    runs_ahead,
)
from deepspeed.zero.offload.warm_up import WarmUp
from deepspeed.zero.replica_groups import ReplicaGroups
from deepspeed.zero.states.store import GroupTensors, OwnedFragment, StateStore
from deepspeed.zero.step import StepExecutor, StepResult

MIN_INTERVAL, MAX_INTERVAL = 4, 16
"""Steps per round with ``update_interval: auto``: in the first round, and at most."""
ROUNDS_PER_CHOICE = 4
"""Rounds between choices of columns, with ``select_interval: auto``."""


@dataclass(slots=True)
class ZenFlowPiece:
    """One fragment under ZenFlow."""

    owned: OwnedFragment
    live: list[Tensor]  # the master, then the state by name: on the host
    names: list[str]
    chosen: Tensor  # [k] int64: positions of the chosen elements, on the device of the gradient
    whole: bool  # all elements are chosen
    packed: list[Tensor] = field(default_factory=list)  # like ``live``, of the chosen elements
    sum: Tensor | None = None  # [numel] fp32: gradients of this round
    pending: Tensor | None = None  # [numel] mean gradient of the host's update
    # Kept between rounds: allocating memory takes longer than filling it, above all page-locked memory.
    sum_memory: Tensor | None = None
    pending_memory: Tensor | None = None
    versions: list[int] = field(default_factory=list)

    @property
    def weights(self) -> Tensor:
        """Return the weights that the model computes with."""
        return self.owned.master if self.owned.low is None else self.owned.low

    @property
    def step(self) -> Tensor:
        """Return the step count of the packed elements."""
        return self.packed[1 + self.names.index("step")]

    def load(self, device: torch.device) -> None:
        """Pack the chosen elements of the live tensors. The step count continues, or starts from the host's, which
        has updated all elements so far."""
        begun = self.packed and self.packed[0].numel()
        count = self.step.clone() if begun else None
        positions = self.chosen.cpu()
        self.packed = [
            tensor.detach().clone() if not tensor.dim() else tensor.detach()[positions].to(device)
            for tensor in self.live
        ]
        if count is not None:
            self.step.copy_(count)

    def store(self) -> None:
        """Write the packed elements to the live tensors."""
        positions = self.chosen.cpu()
        for tensor, value in zip(self.live, self.packed, strict=True):
            if tensor.dim():
                tensor.detach().index_copy_(0, positions, value.to(tensor.device))
            elif self.whole:
                tensor.copy_(value)

    def write_weights(self) -> None:
        """Round the packed masters into the weights."""
        weights = self.weights
        weights.index_copy_(0, self.chosen.to(weights.device), self.packed[0].to(weights))

    def record_versions(self) -> None:
        self.versions = [tensor._version for tensor in self.live]

    def reload(self) -> None:
        """Pack again the live tensors that were written from outside; the other packed values stay."""
        positions = self.chosen.cpu()
        for i, (tensor, version) in enumerate(zip(self.live, self.versions, strict=True)):
            if tensor._version != version:
                value = tensor.detach() if not tensor.dim() else tensor.detach()[positions]
                self.packed[i].copy_(value)


@dataclass(eq=False)
class ZenFlow:
    """Runs the ZenFlow update: chosen elements now, the others at the end of a round. Every rank calls ``step``
    equally."""

    plan: ZenFlowPlan
    optimizer: MultiTensorOptimizer
    store: StateStore
    replica_groups: ReplicaGroups
    takes_part = True  # as a ``RankState``: each rank saves its chosen columns and deferred gradients

    def __post_init__(self) -> None:
        self.choice = ColumnChoice(self.store, self.replica_groups, self.plan.ratio)
        self.device = self.store.params[0].device
        self.steps = 0  # applied so far
        self.in_round = 0
        self.interval = self.plan.update_interval or MIN_INTERVAL
        self.chosen_at: int | None = None  # value of ``steps`` when columns were chosen; None: choose
        self.warm_up = WarmUp(self.plan.warm_up_rounds, self.interval, self.choice)
        self.steps_per_epoch: int | None = None
        self.bytes_to_host = self.bytes_to_device = 0
        self._pieces: dict[int, ZenFlowPiece] = {}
        self._shadow_copies = ShadowCopies(self.optimizer)
        self._packed_optimizer: Any = clone_optimizer(self.optimizer, {}, [])
        self._job: Future[None] | None = None
        self._updating: list[tuple[ZenFlowPiece, ShadowCopy]] = []
        self._dirty = False
        self._parity = 0
        self._worker = host_worker("zenflow", self.plan.cores)
        self.store.settle = self.settle

    # The step -----------------------------------------------------------------------------------------------

    def step(self, used: Sequence[bool], grad_scale: float, update_all: Callable[[], None]) -> None:
        """Update with the fragments' current gradients, times ``grad_scale``."""
        if self.warm_up.includes(self.steps):
            self.warm_up.run(self.steps, update_all)
            self.steps += 1
            return
        self._adopt_written()
        pieces = self._pieces_of(used)
        if self.chosen_at is None:
            self._choose(pieces)
        self._update_chosen(pieces, grad_scale)
        for piece in pieces:
            if not piece.whole:
                self._defer(piece, grad_scale)
        self._dirty = True
        self.steps += 1
        self.in_round += 1
        if self.in_round >= self.interval:
            self._end_round()

    def _pieces_of(self, used: Sequence[bool]) -> list[ZenFlowPiece]:
        """Return the pieces of the updated fragments; new ones start with all or none of their elements chosen."""
        present = [owned for owned in self.store.fragments if used[owned.param_index]]
        wanted = {id(owned) for owned in present}
        self.store.ensure_state(lambda owned: id(owned) in wanted)
        for owned in present:
            if id(owned) not in self._pieces:
                self._pieces[id(owned)] = self._new_piece(owned)
        return [self._pieces[id(owned)] for owned in present]

    def _new_piece(self, owned: OwnedFragment) -> ZenFlowPiece:
        state = self.store.state_of(owned)
        whole = self.choice.always_chosen(owned)
        chosen = torch.arange(owned.fragment.numel if whole else 0, device=self.device)
        piece = ZenFlowPiece(owned, live_tensors(owned, state), sorted(state), chosen, whole)
        self._load(piece)
        return piece

    def _load(self, piece: ZenFlowPiece) -> None:
        if piece.packed:
            self._packed_optimizer.state.pop(piece.packed[0], None)
        piece.load(self._packed_device)
        self._packed_optimizer.state[piece.packed[0]] = dict(zip(piece.names, piece.packed[1:], strict=True))
        self.bytes_to_device += _nbytes(piece.packed)

    @property
    def _packed_device(self) -> torch.device:
        """Return the device of packed values between steps."""
        return torch.device("cpu") if self.plan.offload else self.device

    def _update_chosen(self, pieces: Sequence[ZenFlowPiece], grad_scale: float) -> None:
        for g, group in enumerate(self.optimizer.param_groups):
            members = [p for p in pieces if p.owned.group_index == g and p.chosen.numel()]
            grads = [p.owned.gradient() for p in members]
            grads = [
                (grad if p.whole else grad[p.chosen]).to(self._packed_device)
                for p, grad in zip(members, grads, strict=True)
            ]
            if members:
                self._packed_optimizer.multi_tensor_step(
                    group, [p.packed[0] for p in members], grads, grad_scale=grad_scale
                )
        for piece in pieces:
            piece.write_weights()

    @staticmethod
    def _defer(piece: ZenFlowPiece, grad_scale: float) -> None:
        grad = piece.owned.gradient()
        if piece.sum is not None:
            piece.sum.add_(grad, alpha=grad_scale)
            return
        if piece.sum_memory is None:
            piece.sum_memory = torch.empty(grad.shape, dtype=torch.float32, device=grad.device)
        piece.sum = piece.sum_memory.copy_(grad).mul_(grad_scale)

    # Rounds -------------------------------------------------------------------------------------------------

    def _end_round(self) -> None:
        self.finish()
        for piece in self._pieces.values():
            if piece.sum is not None:
                self._copy_to_host(piece, self._mean(piece, piece.sum))
        choose = self.chosen_at is not None and self.steps - self.chosen_at >= self._choice_steps()
        self._start_update()
        if choose or not self.plan.overlap:
            self.finish()
        if choose:
            self.settle()
            self.chosen_at = None
        self.in_round = 0

    def _mean(self, piece: ZenFlowPiece, total: Tensor) -> Tensor:
        """Return the round's mean gradient [numel], zero for chosen elements, which used theirs already, in
        ``_wire_dtype``."""
        piece.sum = None
        return total.div_(self.in_round).index_fill_(0, piece.chosen, 0.0).to(_wire_dtype(piece.owned))

    def _copy_to_host(self, piece: ZenFlowPiece, mean: Tensor) -> None:
        """Copy the mean gradient to the host, whose previous update has been taken."""
        if piece.pending_memory is None:
            piece.pending_memory = host_empty(mean.numel(), mean.dtype, pin=True)
        piece.pending = piece.pending_memory.copy_(mean)
        self.bytes_to_host += mean.numel() * mean.element_size()

    def _start_update(self) -> None:
        """Start the host's update with the pending gradients."""
        self._updating = []
        for piece in self._pieces.values():
            shadow = self._shadow_copies.of(piece.owned, self.store.state_of(piece.owned))
            if piece.pending is not None and shadow is not None:
                self._updating.append((piece, shadow))
        if self._updating:
            self._job = self._worker.submit(
                self._shadow_copies.update,
                [shadow for _, shadow in self._updating],
                [piece.pending for piece, _ in self._updating if piece.pending is not None],
                options_of_groups(self.optimizer),
                1.0,
                parity=self._parity,
            )

    def finish(self) -> None:
        """Wait for the host's update and take its results."""
        if self._job is None:
            return
        job, self._job = self._job, None
        job.result()
        for piece, shadow in self._updating:
            shadow.take()
            piece.pending = None
            if piece.owned.low is not None:
                self.bytes_to_device += piece.owned.low.numel() * piece.owned.low.element_size()
            piece.write_weights()
        self._parity = 1 - self._parity
        self._shadow_copies.taken()
        self._updating, self._dirty = [], True

    def _choice_steps(self) -> int:
        """Return the number of steps after which columns are chosen again."""
        every = self.plan.select_interval
        if not self.plan.by_epoch:
            return every or ROUNDS_PER_CHOICE * self.interval
        if self.steps_per_epoch is None:
            warning_once(
                "zero_optimization.zenflow.select_strategy 'epoch' has no effect without training_data or "
                "zenflow.steps_per_epoch, the length of an epoch; selecting columns as with 'auto'"
            )
            return ROUNDS_PER_CHOICE * self.interval
        return (every or 1) * self.steps_per_epoch

    def _choose(self, pieces: Sequence[ZenFlowPiece]) -> None:
        """Collective."""
        chosen, share = self.choice.choose([piece.owned for piece in pieces])
        for piece in pieces:
            if not piece.whole:
                piece.chosen = chosen[id(piece.owned)]
                self._load(piece)
        self.chosen_at = self.steps
        if self.plan.update_interval is None:
            longer = share >= self.plan.auto_ratio
            self.interval = min(MAX_INTERVAL, 2 * self.interval) if longer else MIN_INTERVAL

    # Who else reads and writes ------------------------------------------------------------------------------

    @torch.no_grad()
    def settle(self) -> None:
        """Bring masters and state in the store up to date (Note: packed and host values)."""
        if self._dirty:
            self._dirty = False
            for piece in self._pieces.values():
                piece.store()
                self.bytes_to_host += _nbytes(piece.packed)
            self.record_versions()

    def record_versions(self) -> None:
        """Record the versions of the store's tensors; called after publishing the weights, which writes to them."""
        for piece in self._pieces.values():
            piece.record_versions()

    def _adopt_written(self) -> None:
        """Adopt masters and state that were written or replaced from outside."""
        replaced, written = [], []
        for key, piece in self._pieces.items():
            live = live_tensors(piece.owned, self.store.state_of(piece.owned))
            if len(live) != len(piece.live) or not all(map(operator.is_, live, piece.live)):
                replaced.append(key)
            elif [tensor._version for tensor in live] != piece.versions:
                written.append(piece)
        if not replaced and not written:
            return
        was_running = self._cancel_update()
        for piece in written:
            piece.reload()
        for key in replaced:
            self._replace_state(key)
        if was_running:
            self._start_update()
        self.record_versions()

    def _cancel_update(self) -> bool:
        """Drop the host's update; the gradients stay pending. Return whether there was one."""
        job, self._job = self._job, None
        if job is not None and not job.cancel():
            job.exception()
        return job is not None

    def _replace_state(self, key: int) -> None:
        """Adopt this piece's new state tensors, or none, as before its first update."""
        piece = self._pieces.pop(key)
        self._packed_optimizer.state.pop(piece.packed[0], None)
        state = self.store.state_of(piece.owned)
        if state:
            piece.live, piece.names, piece.packed = live_tensors(piece.owned, state), sorted(state), []
            self._pieces[key] = piece
            self._load(piece)

    # Checkpoints --------------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """Return this rank's state for a checkpoint, besides masters and optimizer state."""
        self.settle()
        pieces = [
            {
                "param": piece.owned.param_index,
                "start": piece.owned.fragment.param_offset,
                "numel": piece.owned.fragment.numel,
                "chosen": piece.chosen.cpu(),
                "step": piece.step.clone(),
                "sum": None if piece.sum is None else piece.sum.cpu(),
                "pending": None if piece.pending is None else piece.pending.clone(),
            }
            for piece in self._pieces.values()
        ]
        clock = {
            "steps": self.steps,
            "in_round": self.in_round,
            "interval": self.interval,
            "chosen_at": self.chosen_at,
            "warm_up": (self.warm_up.settled, self.warm_up.rates),
        }
        return {"clock": clock, "pieces": pieces, "places": self._places()}

    def _places(self) -> list[Any]:
        found = [placement_of(param) for param in self.store.params]
        return [(each.global_shape, each.boxes) for each in found]

    def load(self, saved: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> list[str]:
        """Load saved state, also of other stages and numbers of ranks; return notes for the log.

        If ranks hold different parts of a model, each takes its own saved state; with another number of ranks or other
        parts, or without saved state, all start from scratch."""
        parts = bool(self.replica_groups.across) or any(
            self.replica_groups.of(p) is not self.replica_groups.dense for p in self.store.params
        )
        known = bool(len(saved)) and (not parts or len(saved) == ranks)
        places = self._places()
        known = known and saved[rank % len(saved)].get("places", places) == places
        sources = ([rank] if parts else range(len(saved))) if known else []
        self._cancel_update()
        self._pieces, self._dirty = {}, False
        self._packed_optimizer.state.clear()
        clock = saved[rank if parts else 0]["clock"] if known else {}
        self.steps = clock.get("steps", 0)
        self.in_round = clock.get("in_round", 0)
        self.interval = clock.get("interval", self.plan.update_interval or MIN_INTERVAL)
        self.chosen_at = clock.get("chosen_at")
        self.warm_up.settled, self.warm_up.rates = clock.get("warm_up", (known, []))
        by_param: dict[int, list[Mapping[str, Any]]] = {}
        for source in sources:
            for entry in saved[source]["pieces"]:
                by_param.setdefault(entry["param"], []).append(entry)
        for owned in self.store.fragments:
            entries = [e for e in by_param.get(owned.param_index, []) if _overlap(owned, e)]
            if entries and self.store.state_of(owned):
                self._pieces[id(owned)] = self._restored(owned, entries)
        self._start_update()
        self.record_versions()
        lost = "ZenFlow restarts: no deferred updates and column selection were saved for these ranks"
        return [] if known else [lost]

    def _restored(self, owned: OwnedFragment, entries: Sequence[Mapping[str, Any]]) -> ZenFlowPiece:
        piece = self._new_piece(owned)
        if not piece.whole:
            start = owned.fragment.param_offset
            found = torch.cat([e["chosen"] + (e["start"] - start) for e in entries])
            inside = (found >= 0) & (found < owned.fragment.numel)
            piece.chosen = found[inside].sort().values.to(self.device)
            self._load(piece)
        piece.step.copy_(entries[0]["step"])
        piece.sum = _joined(owned, entries, "sum", torch.float32, self.device)
        piece.pending = _joined(owned, entries, "pending", _wire_dtype(owned), torch.device("cpu"))
        return piece

    def close(self) -> None:
        self._cancel_update()
        self._worker.shutdown(wait=True, cancel_futures=True)


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _wire_dtype(owned: OwnedFragment) -> torch.dtype:
    """Return the dtype of gradients, but fp32 for fp16, which cannot hold unscaled gradients."""
    dtype = owned.grad_bucket.dtype
    return torch.float32 if dtype is torch.float16 else dtype


def _overlap(owned: OwnedFragment, entry: Mapping[str, Any]) -> bool:
    start, stop = entry["start"], entry["start"] + entry["numel"]
    return start < owned.fragment.param_offset + owned.fragment.numel and owned.fragment.param_offset < stop


def _joined(
    owned: OwnedFragment,
    entries: Sequence[Mapping[str, Any]],
    key: str,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """Return the part of the entries' tensors that covers ``owned``; None if they have none."""
    if all(entry[key] is None for entry in entries):
        return None
    result = torch.zeros(owned.fragment.numel, dtype=dtype, device=device)
    first, last = owned.fragment.param_offset, owned.fragment.param_offset + owned.fragment.numel
    for entry in entries:
        low, high = max(first, entry["start"]), min(last, entry["start"] + entry["numel"])
        if entry[key] is not None:
            part = entry[key].view(-1)[low - entry["start"] : high - entry["start"]]
            result[low - first : high - first].copy_(part)
    return result


class ZenFlowStepExecutor(StepExecutor):
    """Step executor that updates the chosen columns, and leaves the others to rounds."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        assert self.plan.zenflow is not None
        if not runs_ahead(self.store.optimizer) or self.store.traits.grain > 1:
            raise DeepSpeedConfigError(
                f"zero_optimization.zenflow cannot be combined with {class_name(self.store.optimizer)}: it "
                "updates columns, which needs an elementwise optimizer of this package. Leave optimizer= "
                "out and let the config's 'optimizer' section name one (Adam, AdamW, Adagrad, Lion, SGD; "
                "without state_bits and stochastic_rounding)"
            )
        optimizer = cast(MultiTensorOptimizer, self.store.optimizer)
        self.zenflow = ZenFlow(self.plan.zenflow, optimizer, self.store, self.replica_groups)

    def step(self) -> StepResult:
        result = super().step()
        if result.applied:
            self.zenflow.record_versions()
        return result

    def _update(self, used: Sequence[bool], grad_scale: float, context: UpdateContext) -> None:
        update_all = partial(super()._update, used, grad_scale, context)
        self.zenflow.step(used, grad_scale, update_all)
        self.store.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it

    def _update_lists(self, lists: list[GroupTensors], grad_scale: float, context: UpdateContext) -> None:
        """Update everything on the host, in the warm-up rounds; the gradients are on the device."""
        on_host = [
            entry._replace(grads=[g.to(m.device) for g, m in zip(entry.grads, entry.masters, strict=True)])
            for entry in lists
        ]
        super()._update_lists(on_host, grad_scale, context)

    def close(self) -> None:
        super().close()
        self.zenflow.close()
