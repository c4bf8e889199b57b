"""Parameters that start training later: unfrozen during training, or passed to ``optimizer.add_param_group``.

Until then they cost nothing: no gradient buckets, no master weights, no optimizer state. The first gradient of one
stays in ``param.grad``, where autograd accumulates it over micro-batches like a local sum. At the next step all ranks
agree on which pending parameters have a gradient (``StepVote.activated``). These get buckets, master weights and a
place in the reducer; their local sums are reduced over the ranks, and that step updates them. From then on they are
ordinary trained parameters.

The opposite case needs no handling: a parameter that is frozen later has no gradient, and a parameter that no rank used
keeps its value and its state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from deepspeed.base.logging import log_dist, logger
from deepspeed.base.tables import first_of
from deepspeed.zero.optimizer_registry import kind_of_group, kind_of_param
from deepspeed.zero.partitioning import TrainedParams, named_params
from deepspeed.zero.states.store import PARAMS

if TYPE_CHECKING:
    from deepspeed.config.plan import Plan
    from deepspeed.zero.bucket import ParamBucket, WeightPublisher
    from deepspeed.zero.gradients.bucket import GradBucket
    from deepspeed.zero.gradients.reducer import GradReducer
    from deepspeed.zero.states.access import StateAccess
    from deepspeed.zero.states.store import StateStore

Buckets = tuple[Sequence["ParamBucket"], Sequence["GradBucket"]]


@dataclass(eq=False, repr=False)
class PendingParams:
    """Tracks the optimizer's parameters that are not trained yet, and admits each one when it gets a gradient.

    Args:
        module: the whole model, for names.
        make_buckets: makes buckets for the given parameters, numbered after those of ``store``, and their gradient
            buckets. Local.
        spare: parameters meant for the optimizer's group of their kind but left out because they were frozen.
        on_admitted: called with the names of admitted parameters, once the store holds them.
    """

    module: nn.Module
    plan: Plan
    reducer: GradReducer
    store: StateStore
    publisher: WeightPublisher
    access: StateAccess
    make_buckets: Callable[[TrainedParams], Buckets]
    spare: Sequence[nn.Parameter]
    on_admitted: Callable[[Sequence[str]], None] = lambda names: None

    def __post_init__(self) -> None:
        self._groups: list[int] = []
        self._trained = -1
        self._known = {id(p) for p in self.module.parameters()}
        if not self.plan.zero.shard_params:  # frozen parameters outside the model have not been sharded
            self._known |= {id(p) for group in self.store.optimizer.param_groups for p in group[PARAMS]}
        self._orphans: list[tuple[str, nn.Parameter]] = []
        self._frozen = [(name, p) for name, p in self.module.named_parameters() if not p.requires_grad]
        self.find_pending()

    def find_pending(self) -> None:
        """Find the pending parameters. Every rank finds the same ones, because all have the same optimizer groups."""
        groups = self.store.optimizer.param_groups
        sizes = [len(group[PARAMS]) for group in groups]
        if sizes != self._groups or len(self.store.params) != self._trained:
            self._groups, self._trained = sizes, len(self.store.params)
            self.store.follow_groups()
            trained = {id(p) for p in self.store.params}
            held = {id(p): p for group in groups for p in group[PARAMS]}
            held.update((id(p), p) for p in self.spare)
            self.reducer.pending_params = [p for key, p in held.items() if key not in trained]
            self._orphans = [(name, p) for name, p in self._frozen if id(p) not in held]
        if self._orphans:
            self._warn_of_orphans()

    def _warn_of_orphans(self) -> None:
        """Warn about unfrozen parameters with a gradient that no optimizer holds: as in torch, they do not train."""
        names = [name for name, p in self._orphans if p.requires_grad and p.grad is not None]
        if names:
            known = set(names)
            self._frozen = [(name, p) for name, p in self._frozen if name not in known]
            self._orphans = [(name, p) for name, p in self._orphans if name not in known]
            logger.warning(
                f"{_listed(names)} {_verb(names)} unfrozen and received a gradient, but the optimizer was "
                "created without frozen parameters, so they are not trained. Add them to the optimizer: "
                "engine.optimizer.add_param_group({'params': [...]})."
            )

    def admit(self, chosen: Sequence[bool]) -> None:
        """Start training the ``chosen`` pending parameters, with the gradients they already have. Collective."""
        first = len(self.store.params)
        buckets = self._admit([p for p, yes in zip(self.reducer.pending_params, chosen, strict=True) if yes])
        self.reducer.sum_admitted(first, buckets)

    def admit_saved(self, names: Collection[str]) -> None:
        """Start training the pending parameters in ``names``, whose state a checkpoint holds. Local, on every rank."""
        self.find_pending()
        own = {id(p): name for name, p in self.module.named_parameters()}
        params = [p for p in self.reducer.pending_params if own.get(id(p)) in names]
        if params:
            self._admit(params)

    def _admit(self, params: Sequence[nn.Parameter]) -> Sequence[GradBucket]:
        added = named_params(self.module, params)
        self._check(added)
        self._add_to_group(added.params)
        weights, grads = self.make_buckets(added)
        self.store.admit(added.params, weights, grads)
        self.reducer.admit(added.params, grads)
        self.access.admit(added.names, added.shared)
        self.on_admitted(added.names)
        publisher = self.publisher
        publisher.buckets += [bucket for bucket in weights if bucket not in publisher.buckets]
        self.find_pending()
        log_dist(
            f"{_listed(added.names)} {_verb(added.names)} unfrozen: training starts with this step", ranks=[0]
        )
        return grads

    def _check(self, added: TrainedParams) -> None:
        new = [n for n, p in zip(added.names, added.params, strict=True) if id(p) not in self._known]
        if new:
            raise RuntimeError(
                f"{_listed(new)}: in the optimizer and with a gradient, but not part of the model when "
                "deepspeed.initialize was called. Add it to the model before initialize, frozen if necessary."
            )

    def _add_to_group(self, params: Sequence[nn.Parameter]) -> None:
        groups = self.store.optimizer.param_groups
        held = {id(p) for group in groups for p in group[PARAMS]}
        for param in params:
            if id(param) not in held:
                fitting = [g for g in groups if kind_of_group(g) in (None, kind_of_param(param))]
                fitting[0][PARAMS].append(param)


def _listed(names: Sequence[str]) -> str:
    return f"{'parameter' if len(names) == 1 else 'parameters'} {first_of(names, 5)}"


def _verb(names: Sequence[str]) -> str:
    return "was" if len(names) == 1 else "were"
