"""Read and write weights, gradients and optimizer state by parameter, at every stage.

Checkpoints use ``StateAccess``; so does the ``safe_get_*``/``safe_set_*`` family of ``deepspeed.utils``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.base.sharded import full_numel, full_shape
from deepspeed.checkpoint.placement import placement_of
from deepspeed.checkpoint.shards import ShardCut, ShardIndex
from deepspeed.ops.adam.multi_tensor_adam import as_in
from deepspeed.optim.loss_scaler import LossScaler
from deepspeed.zero.bucket import WeightPublisher
from deepspeed.zero.gradients.bucket import GradBucket
from deepspeed.zero.gradients.reducer import GradReducer
from deepspeed.zero.layout import UNUSED
from deepspeed.zero.replica_groups import ReplicaGroups
from deepspeed.zero.states.fragments import write_pieces
from deepspeed.zero.states.store import PARAMS, OwnedFragment, StateStore

MASTER = "fp32"
JOINED = "_ds_joined"
"""Tensor attribute: the fragments whose master weights this tensor concatenates."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One trainable parameter as checkpoints see it; ``shared_names`` are its other names in the module."""

    name: str
    param: nn.Parameter
    shape: tuple[int, ...]
    dtype: torch.dtype
    group_index: int
    shared_names: tuple[str, ...]


class StateAccess:
    """View of the live training state: nothing is copied, and writes take effect.

    ``names[i]`` and ``shared[i]`` belong to ``params[i]`` of the store. Methods marked *collective* must be called
    by all ranks that hold the parameter.
    """

    def __init__(
        self,
        store: StateStore,
        reducer: GradReducer,
        scaler: LossScaler,
        publisher: WeightPublisher,
        replica_groups: ReplicaGroups,
        names: Sequence[str],
        shared: Sequence[tuple[str, ...]],
    ) -> None:
        self.store = store
        self.reducer = reducer
        self.scaler = scaler
        self.publisher = publisher
        self.replica_groups = replica_groups
        self.names: list[str] = []
        self.shared: list[tuple[str, ...]] = []
        self._index: dict[int, int] = {}
        self._owned: dict[int, list[OwnedFragment]] = {}
        self.admit(names, shared)

    def admit(self, names: Sequence[str], shared: Sequence[tuple[str, ...]]) -> None:
        """Follow the store, which now holds the parameters with these names at its end."""
        first = len(self.names)
        self.names += names
        self.shared += shared
        for index, param in enumerate(self.store.params[first:], first):
            self._index[id(param)] = index
            former = vars(param).get("_ds_state_access")
            if isinstance(former, StateAccess) and former is not self:
                former.reducer.retire(former.names[former._index[id(param)]])
            param._ds_state_access = self  # type: ignore[attr-defined]
        for owned in self.store.fragments:
            if owned.param_index >= first:
                self._owned.setdefault(owned.param_index, []).append(owned)

    def __reduce__(self) -> Any:
        """Pickle as None, for parameters inside ``torch.save(module)``."""
        return type(None), ()

    # For checkpoints ----------------------------------------------------------------------------------------

    def trainable(self) -> list[StateEntry]:
        return [
            StateEntry(
                self.names[i], p, tuple(full_shape(p)), p.dtype, self.store.group_of[i], self.shared[i]
            )
            for i, p in enumerate(self.store.params)
        ]

    def shards(self) -> Iterator[tuple[ShardIndex, dict[str, Tensor]]]:
        """Yield this rank's fragments with their live master weights (key "fp32", 1-D) and optimizer state, except
        state that differs between ranks (``rank_state.py``)."""
        return self._each(self.store.fragments)

    def distinct_shards(self) -> Iterator[tuple[ShardIndex, dict[str, Tensor]]]:
        """Yield the ``shards`` of which this rank is the first holder: among MiCS replicas and, at stage 0, among all
        ranks with the same weights."""
        return self._each(owned for owned in self.store.fragments if owned.grad_bucket.counts_in_norm)

    def _each(self, fragments: Iterable[OwnedFragment]) -> Iterator[tuple[ShardIndex, dict[str, Tensor]]]:
        """Yield the fragments with quantized state decoded; values the caller writes are encoded again when it asks
        for the next fragment."""
        self.store.settle()
        own = self.store.traits.rank_state
        for owned in fragments:
            tensors = {key: tensor for key, tensor in self._tensors(owned).items() if key not in own}
            shown = {key: tensors[key]._version for key in self.store.traits.coded if key in tensors}
            yield self.index_of(owned), tensors
            for key, version in shown.items():
                if tensors[key]._version != version:
                    self.store.set_value(owned, key, tensors[key])

    def cuts(self) -> dict[str, ShardCut]:
        """Return how each parameter is divided among the ranks that share one copy, by name."""
        return {
            self.names[slot.param]: bucket.layout.cut_of(slot)
            for bucket in self.store.param_buckets
            for slot in bucket.layout.slots
            if slot.param != UNUSED
        }

    def _tensors(self, owned: OwnedFragment) -> dict[str, Tensor]:
        tensors = {MASTER: owned.master.detach().view(-1)}
        for key, value in self.store.values_of(owned).items():
            if isinstance(value, Tensor):
                tensors[key] = value.detach().view(-1) if value.shape == owned.master.shape else value
            elif isinstance(value, (int, float)):
                tensors[key] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        return tensors

    def local_states(self) -> Iterator[tuple[ShardIndex, dict[str, Tensor]]]:
        """Yield the ``shards`` by parameter, joined if stored in several pieces; live if in one piece."""
        self.store.settle()
        for pieces in self._owned.values():
            tensors = _joined(pieces, [self._tensors(owned) for owned in pieces])
            yield replace(self.index_of(pieces[0]), stop=self.index_of(pieces[-1]).stop), tensors

    def write_local_states(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Invert ``local_states``, by name: parameters without optimizer state in ``saved`` have none afterwards.
        Master weights not in ``saved`` are kept."""
        self.store.settle()
        self.allocate_state({name for name, tensors in saved.items() if tensors.keys() - {MASTER}})
        for index, pieces in self._owned.items():
            name, first = self.names[index], pieces[0].fragment.param_offset
            for owned in pieces if name in saved else ():
                part = slice(owned.fragment.param_offset - first, None)
                self._write_fragment(owned, name, saved[name], part)

    def _write_fragment(
        self, owned: OwnedFragment, name: str, saved: Mapping[str, Tensor], part: slice
    ) -> None:
        with torch.no_grad():
            for key, tensor in self._tensors(owned).items():
                if key not in saved:
                    if key != MASTER and len(saved.keys() - {MASTER}):
                        raise ValueError(
                            f"the state of {name} has no {key!r}: it belongs to a different optimizer"
                        )
                elif tensor.shape == (owned.fragment.numel,):
                    tensor.copy_(saved[key].reshape(-1)[part][: tensor.numel()])
                    if key in self.store.traits.coded:
                        self.store.set_value(owned, key, tensor)
                else:
                    _write(self.store.state_of(owned), key, saved[key])

    def states_by_param(self) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        """Yield this rank's optimizer state by parameter, in the optimizer's format; per-element state in one piece."""
        self.store.settle()
        for index, pieces in self._owned.items():
            state = _joined(pieces, [self.store.values_of(owned) for owned in pieces])
            if state:
                yield self.store.params[index], state

    def state_of(self, key: Tensor) -> dict[str, Any] | None:
        """Return this rank's optimizer state of a parameter, or of the fragments whose masters were joined in
        ``key``; per-element state in one piece, 1-D unless the master has the parameter's shape. None: there is none.
        """
        pieces = getattr(key, JOINED, None)
        if pieces is None:
            pieces = self._owned.get(self._index.get(id(key), -1), [])
        self.store.settle()
        return _joined(pieces, [self.store.values_of(owned) for owned in pieces]) or None

    def name_of(self, param: Tensor) -> str | None:
        """Return the name of a parameter that the engine trains, None for any other."""
        index = self._index.get(id(param))
        return None if index is None else self.names[index]

    def interval(self, param: nn.Parameter) -> tuple[int, int]:
        """Return the interval of the flat parameter that this rank holds; (0, 0) if it holds nothing."""
        pieces = [owned.fragment for owned in self._fragments(param)]
        return (pieces[0].param_offset, pieces[-1].param_offset + pieces[-1].numel) if pieces else (0, 0)

    def index_of(self, owned: OwnedFragment) -> ShardIndex:
        start = owned.fragment.param_offset
        placement = placement_of(self.store.params[owned.param_index])
        return placement.index(self.names[owned.param_index], start, start + owned.fragment.numel)

    def ensure_state(self) -> None:
        """Create initial state for all parameters that have none."""
        self.store.ensure_state()

    def kinds(self, names: Container[str]) -> set[str]:
        """Return the kinds of state that the optimizer keeps once it has stepped: for each group those of its smallest
        fragment of a parameter in ``names``. Local; no state is created."""
        self.store.settle()
        groups = [[o for o in group if self.names[o.param_index] in names] for group in self.store.by_group]
        smallest = [min(group, key=lambda owned: owned.fragment.numel) for group in groups if group]
        states = [self.store.values_or_initial(owned) for owned in smallest]
        kept = {k for state in states for k, v in state.items() if isinstance(v, (Tensor, int, float))}
        return kept.difference(self.store.traits.rank_state)

    def allocate_state(self, names: Container[str]) -> None:
        """Create optimizer state, to be overwritten, for the parameters in ``names``; drop that of the others."""
        self.store.allocate_state(lambda owned: self.names[owned.param_index] in names)

    def set_scalar_state(self, key: str, values: Mapping[str, Tensor]) -> None:
        """Write a scalar state such as ``step`` for each parameter in ``values``."""
        for owned in self.store.fragments:
            value = values.get(self.names[owned.param_index])
            if value is not None:
                _write(self.store.state_of(owned), key, value)

    def publish(self) -> None:
        """Refresh the model's weights on all ranks after master weights were written. Collective."""
        with torch.no_grad():
            self.store.refresh_low(self.store.fragments)
        self.publisher.publish()

    def weights_loaded(self) -> None:
        """Set the master weights after the model's own weights were written (whole, on every rank)."""
        with torch.no_grad():
            for bucket in self.store.param_buckets:
                bucket.relink(bucket.detached())
                self.store.rebind(bucket)

    def weights_written(self, param: nn.Parameter) -> None:
        """Set the master weights of one parameter after its own weights were written."""
        with torch.no_grad():
            for owned in self._fragments(param):
                if owned.low is not None:
                    owned.master.view(-1).copy_(owned.low)

    def elements_written(self, param: nn.Parameter, value: Tensor) -> None:
        """Copy elements of ``value`` [shape] that differ from the parameter's own weights to the master weights."""
        flat = value.reshape(-1)
        for owned in self._fragments(param):
            if owned.low is not None:
                start = owned.fragment.param_offset
                new = flat[start : start + owned.fragment.numel].to(owned.low.device)
                master = owned.master.view(-1)
                differs = new != owned.low.view(-1)
                master.copy_(torch.where(differs.to(master.device), new.to(master), master))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's groups without their parameters."""
        left_out = (PARAMS, *self.store.traits.script_keys)
        return [{k: v for k, v in g.items() if k not in left_out} for g in self.store.optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        own = self.store.optimizer.param_groups
        if len(groups) != len(own):
            raise ValueError(f"{len(groups)} parameter groups were saved, but the optimizer has {len(own)}")
        for group, saved in zip(own, groups, strict=True):
            options = as_in(group, saved)
            group.update({k: v for k, v in options.items() if k not in self.store.traits.script_keys})

    def scalars(self) -> dict[str, Any]:
        return {"loss_scaler": self.scaler.state_dict(), "dynamic": self.scaler.dynamic}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Restore a dynamic loss scale from its saved value; a static one stays the config's."""
        saved = scalars.get("loss_scaler")
        if saved and scalars.get("dynamic") and self.scaler.dynamic:
            self.scaler.load_state_dict({**self.scaler.state_dict(), **saved})

    def pending_gradients(self) -> dict[str, Any] | None:
        """Return this rank's gradients since the last boundary: local sums, late gradients, reduced shards with the
        layout of their bucket, and the names of parameters that had a gradient. None: there are none."""
        self.reducer.finish_copies()
        local: dict[str, Tensor] = {}
        reduced: dict[str, Tensor] = {}
        for bucket in self.reducer.buckets:
            for position, slot in enumerate(bucket.layout.slots):
                if bucket.local is not None and bucket.written[position]:
                    local[self.names[slot.param]] = bucket.views[position].view(-1)
            if bucket.reduced is not None:
                reduced[str(bucket.layout.index)] = bucket.reduced
        late = {self.names[i]: grad.reshape(-1) for i, grad in self.reducer.late.items()}
        if not local and not reduced and not late:
            return None
        layouts = {
            str(b.layout.index): self._layout(b) for b in self.reducer.buckets if b.reduced is not None
        }
        used = [name for name, was_used in zip(self.names, self.reducer.used, strict=True) if was_used]
        return {"local": local, "late": late, "reduced": reduced, "layouts": layouts, "used": used}

    def _layout(self, bucket: GradBucket) -> list[Any]:
        """Return the contents of a bucket's shard: its interval, and (name, offset, numel) of the bucket's slots."""
        trained = [slot for slot in bucket.layout.slots if slot.param != UNUSED]
        slots = [[self.names[slot.param], slot.offset, slot.numel] for slot in trained]
        return [bucket.start, bucket.stop, slots]

    def load_pending_gradients(self, pending: dict[str, Any] | None) -> None:
        """Restore ``pending_gradients``. KeyError or ValueError: they belong to other parameters, or their buckets
        were partitioned differently."""
        self.reducer.clear()
        if pending is None:
            return
        buckets = {str(bucket.layout.index): bucket for bucket in self.reducer.buckets}
        for key, layout in pending.get("layouts", {}).items():
            if self._layout(buckets[key]) != layout:
                raise ValueError("gradients are partitioned differently")
        index_of = {name: index for index, name in enumerate(self.names)}
        for name, value in pending["local"].items():
            self.reducer.restore(index_of[name], value)
        for name, value in pending.get("late", {}).items():
            self.reducer.restore(index_of[name], value, late=True)
        for key, value in pending["reduced"].items():
            buckets[key].restore(value)
        for name in pending.get("used", ()):
            self.reducer.used[index_of[name]] = True

    # By parameter (deepspeed.utils.safe_get_*, safe_set_*) --------------------------------------------------

    def full_master(self, param: nn.Parameter) -> Tensor | None:
        """Return the whole master weight [shape] in the master dtype. Collective."""
        return self._assemble(param, [(o, o.master) for o in self._fragments(param)])

    def set_full_master(self, param: nn.Parameter, value: Tensor) -> None:
        """Write ``value`` [shape] to the master weights, each rank its fragment, and refresh the model's weights.
        Collective."""
        self._scatter(value, [(o, o.master) for o in self._fragments(param)])
        self._publish_param(param)

    def full_state(self, param: nn.Parameter, key: str) -> Tensor | None:
        """Return a per-element optimizer state [shape] such as ``exp_avg``. KeyError, on every rank: there is none.
        Collective."""
        parts = [(o, self.store.values_or_initial(o).get(key)) for o in self._fragments(param)]
        found = [(o, v) for o, v in parts if isinstance(v, Tensor) and v.numel() == o.master.numel()]
        missing = torch.tensor([float(len(found) < len(parts))], device=param.device)
        if self._is_sharded(param):  # only ranks that hold a fragment know
            self.replica_groups.of(param).shard.all_reduce_max(missing).wait()
        if missing.item():
            raise KeyError(
                f"{type(self.store.optimizer).__name__} has no per-element state {key!r} for {self.name_of(param)}"
            )
        return self._assemble(param, found)

    def set_full_state(self, param: nn.Parameter, key: str, value: Tensor) -> None:
        with self._writable_state(param, key) as parts:
            self._scatter(value, parts)

    def full_gradient(self, param: nn.Parameter) -> Tensor | None:
        """Return the reduced gradient in fp32, or None before the backward of a boundary. Collective.

        Inside ``no_sync`` nothing is reduced: this rank's local sum is returned, if any.
        """
        owned = self._fragments(param)
        if self.reducer.sums_paused:
            local = self.reducer.local_sum(self._index[id(param)])
            return (
                None if local is None else local.detach().view(full_shape(param)).to(torch.float32, copy=True)
            )
        if not self._reduced():
            return None
        full = self._assemble(param, [(o, o.gradient()) for o in owned])
        return None if full is None else full.float()

    def set_full_gradient(self, param: nn.Parameter, value: Tensor) -> None:
        self.reducer.finish_copies()
        self._scatter(value, [(o, o.gradient()) for o in self._fragments(param)])

    def local_master(self, param: nn.Parameter) -> Tensor:
        """Return this rank's fragment of the master weight, 1-D; empty if it owns none. Live, unless stored in
        several pieces (NVMe)."""
        return self._local(param, [o.master for o in self._fragments(param)])

    def set_local_master(self, param: nn.Parameter, value: Tensor) -> None:
        write_pieces([o.master for o in self._fragments(param)], value, "part of the master weight")

    def local_weight(self, param: nn.Parameter) -> Tensor:
        """Return this rank's fragment of the model's own weights, as other ranks gather them; 1-D."""
        return self._local(param, [o.master if o.low is None else o.low for o in self._fragments(param)])

    def local_state(self, param: nn.Parameter, key: str) -> Tensor:
        return self._local(param, [self.store.values_or_initial(o)[key] for o in self._fragments(param)])

    def set_local_state(self, param: nn.Parameter, key: str, value: Tensor) -> None:
        with self._writable_state(param, key) as parts:
            write_pieces([tensor for _, tensor in parts], value, f"part of {key!r}")

    def local_gradient(self, param: nn.Parameter) -> Tensor | None:
        owned = self._fragments(param)
        return self._local(param, [o.gradient() for o in owned]) if self._reduced() else None

    def set_local_gradient(self, param: nn.Parameter, value: Tensor) -> None:
        pieces = [o.gradient() for o in self._fragments(param)] if self._reduced() else None
        write_pieces(pieces, value, "part of the gradient")

    def _reduced(self) -> bool:
        """Return whether every bucket's gradients are reduced, and so can be read and written."""
        self.reducer.finish_copies()
        return all(bucket.reduced is not None for bucket in self.reducer.buckets)

    @contextmanager
    def _writable_state(self, param: nn.Parameter, key: str) -> Iterator[list[tuple[OwnedFragment, Tensor]]]:
        """Yield the state ``key`` of this rank's fragments, which the block may write."""
        parts = [(owned, self._own_state(owned, key)) for owned in self._fragments(param)]
        yield parts
        if key in self.store.traits.coded:
            for owned, tensor in parts:
                self.store.set_value(owned, key, tensor)

    def _own_state(self, owned: OwnedFragment, key: str) -> Tensor:
        self.store.ensure_state(lambda other: other is owned)
        return self.store.values_of(owned)[key]

    def _publish_param(self, param: nn.Parameter) -> None:
        with torch.no_grad():
            self.store.refresh_low(self._fragments(param))
        self.publisher.publish([b for b in self.store.param_buckets if any(p is param for p in b.params)])

    def _fragments(self, param: nn.Parameter) -> list[OwnedFragment]:
        if id(param) not in self._index:
            raise KeyError("this parameter is not trained by the engine")
        self.store.settle()
        return self._owned.get(self._index[id(param)], [])

    @staticmethod
    def _local(param: nn.Parameter, parts: list[Tensor]) -> Tensor:
        if len(parts) == 1:
            return parts[0].view(-1)
        return torch.cat([part.view(-1) for part in parts]) if parts else torch.empty(0, device=param.device)

    def _assemble(self, param: nn.Parameter, parts: list[tuple[OwnedFragment, Tensor]]) -> Tensor | None:
        """Assemble the whole tensor from all ranks' fragments: each element has one owner, so the sum is exact."""
        numel, shape = full_numel(param), full_shape(param)
        if len(parts) == 1 and parts[0][0].fragment.numel == numel and not self._is_sharded(param):
            return parts[0][1].detach().reshape(shape).clone()
        dtype = parts[0][1].dtype if parts else torch.float32
        full = torch.zeros(numel, dtype=dtype, device=param.device)
        for owned, tensor in parts:
            start = owned.fragment.param_offset
            full[start : start + owned.fragment.numel] = tensor.reshape(-1)
        if self._is_sharded(param):
            full = full.float()
            self.replica_groups.of(param).shard.all_reduce(full).wait()
        return full.view(shape)

    def _is_sharded(self, param: nn.Parameter) -> bool:
        return any(
            p is param and bucket.layout.num_shards > 1
            for bucket in self.store.param_buckets
            for p in bucket.params
        )

    def _scatter(self, value: Tensor, parts: list[tuple[OwnedFragment, Tensor]]) -> None:
        flat = value.detach().reshape(-1)
        with torch.no_grad():
            for owned, tensor in parts:
                start = owned.fragment.param_offset
                tensor.view(-1).copy_(flat[start : start + owned.fragment.numel])


def _joined(pieces: Sequence[OwnedFragment], states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the states of a parameter's pieces as one, live if there is one piece; empty if any has none."""
    if not states or not all(states):
        return {}
    if len(pieces) == 1:
        return states[0]
    shape = pieces[0].master.shape
    return {
        key: torch.cat([state[key].view(-1) for state in states])
        if isinstance(value, Tensor) and value.dim() and value.shape == shape
        else value
        for key, value in states[0].items()
    }


def _write(state: dict[str, Any], key: str, value: Tensor) -> None:
    """Set an entry of one fragment's state, in the dtype that the optimizer keeps."""
    if isinstance(state.get(key), Tensor):
        state[key].copy_(value)
    elif key in state:
        state[key] = type(state[key])(value.item())
