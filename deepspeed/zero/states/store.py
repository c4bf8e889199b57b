"""Master weights and optimizer state of this rank, by fragment, and the tier where they rest.

``ResidentTier`` keeps them where the update runs; ``offload/tiers.py`` in host memory or on storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.sharded import full_shape
from deepspeed.ops.update import refresh_weights, traits_of
from deepspeed.optim.initial_state import initial_state, state_of_constructor
from deepspeed.zero.bucket import ParamBucket
from deepspeed.zero.gradients.bucket import GradBucket
from deepspeed.zero.layout import BucketLayout, Fragment
from deepspeed.zero.states.fragments import GroupTensors as GroupTensors
from deepspeed.zero.states.fragments import OwnedFragment as OwnedFragment

PARAMS = "params"


class StateStore:
    """Owner of the master weights, with the optimizer's state by fragment.

    The client's optimizer keeps its group dicts, with the client's parameters in them; ``swap_groups`` replaces these
    by the fragments while the optimizer runs.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Sequence[nn.Parameter],
        param_buckets: Sequence[ParamBucket],
        grad_buckets: Sequence[GradBucket],
        *,
        master_dtype: torch.dtype | None,
        tier: ResidentTier | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.traits = traits_of(optimizer)
        self.tier = tier or ResidentTier()
        self.master_dtype = master_dtype
        self.params: list[nn.Parameter] = []
        self.param_buckets: list[ParamBucket] = []
        self.group_of: list[int] = []
        self.by_group: list[list[OwnedFragment]] = []
        self.fragments: list[OwnedFragment] = []
        self._needs_constructor = False  # whether the optimizer's step relies on state of its constructor
        self.settle: Callable[[], None] = self.tier.check
        """Called before masters or state are read outside the step, to complete values that are kept elsewhere."""
        self.admit(params, param_buckets, grad_buckets)

    def admit(
        self,
        params: Sequence[nn.Parameter],
        param_buckets: Sequence[ParamBucket],
        grad_buckets: Sequence[GradBucket],
    ) -> None:
        """Own the fragments of ``params``, which are in ``param_buckets``."""
        first = len(self.params)
        self.params += params
        self.group_of += _group_index(self.optimizer, params)
        self.follow_groups()
        known = len(self.fragments)
        for weights, grads in zip(param_buckets, grad_buckets, strict=True):
            if weights not in self.param_buckets:
                self.param_buckets.append(weights)
            self._own(weights, grads, [f for f in weights.fragments if f.param >= first])
        new = self.fragments[known:]
        self._adopt_existing_state(params, new)
        by_group = [[owned for owned in new if owned.group_index == g] for g in range(len(self.by_group))]
        self.tier.adopt(by_group, self.state_of)

    def follow_groups(self) -> None:
        """Follow groups added to the optimizer."""
        self.by_group += [[] for _ in self.optimizer.param_groups[len(self.by_group) :]]

    def _own(self, weights: ParamBucket, grads: GradBucket, fragments: Sequence[Fragment]) -> None:
        """Create the masters of one bucket, in one flat buffer if the bucket is flat and trained as a whole."""
        dtype = self.master_dtype or weights.layout.dtype
        tier = self.tier.of(weights.layout)
        example = weights.shard if weights.shard is not None else weights.params[0].data
        separate = dtype != weights.layout.dtype or tier.needs_master(example)
        flat = None
        if separate and weights.shard is not None and len(fragments) == len(weights.fragments):
            flat = tier.new_masters(weights.shard, dtype)
        for fragment in fragments:
            if self.group_of[fragment.param] < 0:
                continue
            whole = None  # master of the whole parameter, if buckets are not flat
            if weights.shard is None and separate:
                param = self.params[fragment.param]
                whole = tier.new_masters(param.detach().reshape(-1), dtype)
            for piece in tier.pieces(fragment):
                low = weights.local_weights(piece)
                if flat is not None:
                    master = flat[piece.shard_offset : piece.shard_offset + piece.numel]
                elif weights.shard is not None and separate:
                    master = tier.new_masters(low, dtype)
                elif weights.shard is not None or tier.cuts:
                    start = piece.param_offset
                    master = low if whole is None else whole[start : start + piece.numel]
                else:
                    param = self.params[piece.param]
                    master = param if whole is None else whole.view(param.shape)
                group = self.group_of[piece.param]
                owned = OwnedFragment(piece.param, group, piece, grads, master, low if separate else None)
                self.fragments.append(owned)
                self.by_group[group].append(owned)

    def _adopt_existing_state(
        self, params: Sequence[nn.Parameter], fragments: Iterable[OwnedFragment]
    ) -> None:
        """Partition the state that the client's optimizer already has for ``params`` like the weights."""
        old = {id(p): self.optimizer.state.pop(p, None) for p in params}
        example = next((p for p in params if old.get(id(p))), None)
        if example is not None:
            group = self.optimizer.param_groups[_group_index(self.optimizer, [example])[0]]
            probe = nn.Parameter(torch.zeros(1))
            self._needs_constructor |= bool(state_of_constructor(self.optimizer, group, probe))
        for owned in fragments:
            state = old.get(id(self.params[owned.param_index]))
            if state:
                self.optimizer.state[owned.master] = self._cut_state(state, owned)

    def _cut_state(self, state: dict[str, Any], owned: OwnedFragment) -> dict[str, Any]:
        """Return the part of a whole parameter's ``state`` that belongs to ``owned``, on the device and in the dtype
        of its master."""
        param, master = self.params[owned.param_index], owned.master
        shape = full_shape(param)
        values = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        if shape.numel() and any(value.dim() and not value.numel() for value in values.values()):
            # Created by the optimizer's constructor for a parameter that was already sharded.
            return self._initial_state(owned)
        per_element = {key for key, value in values.items() if value.shape == shape}
        # For a scalar parameter, "step" and the like have its shape too: the state of a vector tells them from
        # per-element state.
        if not shape and master.dim():
            first = self._initial_state(owned)
            per_element = {
                k for k in values if isinstance(first.get(k), Tensor) and first[k].shape == master.shape
            }
        low, numel = owned.fragment.param_offset, owned.fragment.numel
        cut = dict(state)
        for key, value in values.items():
            cut[key] = value.clone()
            if key in per_element:
                part = value.reshape(-1)[low : low + numel].view(master.shape)
                dtype = master.dtype if value.dtype == param.dtype else value.dtype
                cut[key] = part.to(master.device, dtype, copy=True)
        return cut

    def swap_groups(self, fragments_by_group: Sequence[Sequence[OwnedFragment]]) -> _GroupSwap:
        """Return a context in which the optimizer's groups hold the masters of the given fragments."""
        return _GroupSwap(self.optimizer, [[owned.master for owned in group] for group in fragments_by_group])

    def state_of(self, owned: OwnedFragment) -> dict[str, Any]:
        return self.optimizer.state.get(owned.master, {})

    def values_of(self, owned: OwnedFragment) -> dict[str, Any]:
        """Return the state of a fragment: live, but entries that the optimizer keeps quantized are decoded."""
        return self._decoded(self.state_of(owned))

    def set_value(self, owned: OwnedFragment, key: str, values: Tensor) -> None:
        """Encode and write one quantized entry; see ``values_of``."""
        optimizer: Any = self.optimizer
        with torch.no_grad():
            optimizer.set_decoded_state(self.state_of(owned), key, values)

    def _decoded(self, state: dict[str, Any]) -> dict[str, Any]:
        optimizer: Any = self.optimizer
        return optimizer.decoded_state(state) if self.traits.coded else state

    def rebind(self, bucket: ParamBucket) -> None:
        """Find the fragments of a ``bucket`` whose weights have moved, and set the masters from them."""
        for owned in self.fragments:
            if owned.grad_bucket.layout is bucket.layout and owned.low is not None:
                owned.low = bucket.local_weights(owned.fragment)
                owned.master.view(-1).copy_(owned.low)
            elif owned.grad_bucket.layout is bucket.layout and owned.master.dim() == 1:
                owned.master.data = bucket.local_weights(owned.fragment)

    def refresh_low(self, fragments: Sequence[OwnedFragment]) -> None:
        """Round the masters into the model's own weights."""
        refresh_weights([owned.master for owned in fragments], [owned.low for owned in fragments])

    def refresh_masters(self) -> None:
        """Set the masters from the model's own weights, after these were loaded or edited."""
        pairs = [(owned.master.reshape(-1), owned.low) for owned in self.fragments if owned.low is not None]
        if pairs:
            torch._foreach_copy_([master for master, _ in pairs], [low for _, low in pairs])

    def ensure_state(self, wanted: Callable[[OwnedFragment], bool] = lambda owned: True) -> None:
        """Create initial state for fragments that have none. Local."""
        missing = [[o for o in group if wanted(o) and not self.state_of(o)] for group in self.by_group]
        for batch in self.tier.batches(missing):
            for owned in (owned for group in batch for owned in group):
                self.optimizer.state[owned.master] = self._initial_state(owned)

    def allocate_state(self, wanted: Callable[[OwnedFragment], bool]) -> None:
        """Create state, to be overwritten, for the ``wanted`` fragments; if others have state, drop all of it first."""
        if any(self.state_of(owned) and not wanted(owned) for owned in self.fragments):
            self.clear_state()
        self.ensure_state(wanted)

    def clear_state(self) -> None:
        """Discard all optimizer state, as before the first step."""
        for owned in self.fragments:
            self.optimizer.state.pop(owned.master, None)
        self.tier.forget_state()
        if self._needs_constructor:
            self.ensure_state()

    def values_or_initial(self, owned: OwnedFragment) -> dict[str, Any]:
        """Return ``values_of`` a fragment, or those of its initial state, which is not stored."""
        return self._decoded(self.state_of(owned) or self._initial_state(owned))

    def _initial_state(self, owned: OwnedFragment) -> dict[str, Any]:
        return initial_state(self.optimizer, self.optimizer.param_groups[owned.group_index], owned.master)


class _GroupSwap:
    """Context that swaps ``group["params"]`` of every group, and restores the client's lists on exit."""

    def __init__(self, optimizer: torch.optim.Optimizer, lists: list[list[Tensor]]) -> None:
        self.groups = optimizer.param_groups
        self.lists = lists

    def __enter__(self) -> None:
        self.kept = [group[PARAMS] for group in self.groups]
        for group, masters in zip(self.groups, self.lists, strict=True):
            group[PARAMS] = masters

    def __exit__(self, *exc: object) -> None:
        for group, kept in zip(self.groups, self.kept, strict=True):
            group[PARAMS] = kept


def _group_index(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> list[int]:
    """Return the optimizer group of each parameter, -1 for one not in the optimizer."""
    groups = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group[PARAMS]}
    return [groups.get(id(param), -1) for param in params]


Groups = list[GroupTensors]
StateOf = Callable[[OwnedFragment], dict[str, Any]]


class ResidentTier:
    """Tier that keeps state and masters where they are updated: nothing moves."""

    cuts = False
    """Whether fragments may be split into ``pieces``."""

    on_file = False
    """Whether any of its tensors, gradients included, are mapped from a file."""

    def offloads(self, layout: BucketLayout) -> bool:
        """Return whether this tier offloads the state of this bucket."""
        return False

    def of(self, layout: BucketLayout) -> ResidentTier:
        """Return the tier that places the masters of this bucket."""
        return self if self.offloads(layout) else ResidentTier()

    def needs_master(self, weights: Tensor) -> bool:
        """Return whether these weights need a separate master even if they have the master dtype."""
        return False

    def pieces(self, fragment: Fragment) -> Sequence[Fragment]:
        """Return the pieces in which the fragment is owned; an offloading tier splits large ones."""
        return [fragment]

    def new_masters(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy of ``weights`` [n] in the master dtype, where the tier keeps masters."""
        return weights.to(dtype, copy=True)

    def new_gradients(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialized memory [numel] for the summed gradients of a bucket on ``device``."""
        return torch.empty(numel, dtype=dtype, device=device)

    def adopt(self, groups: Sequence[Sequence[OwnedFragment]], state_of: StateOf) -> None:
        """Take over these fragments, by optimizer group. Called when their masters exist."""

    def update(self, groups: Groups, apply: Callable[[Groups], None]) -> None:
        """Update ``groups`` with ``apply``, in parts that fit in memory."""
        apply(groups)

    def batches(self, groups: list[list[OwnedFragment]]) -> Iterator[list[list[OwnedFragment]]]:
        """Yield ``groups`` in parts whose state fits in memory together."""
        yield groups

    def store_new_state(self) -> None:
        """Move state that was created or replaced outside ``update`` to where it rests."""

    def forget_state(self) -> None:
        """Forget all optimizer state, which has been dropped."""

    def describe(self) -> str:
        """Return one line for the log at start-up; empty if there is nothing to say."""
        return ""

    def check(self) -> None:
        """Check the storage before state is accessed outside ``update``. OSError: the file that holds it is damaged."""

    def close(self) -> None:
        """Free what the tier holds, at the engine's end."""
