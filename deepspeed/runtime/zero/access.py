"""Reading and writing weights, gradients and optimizer state by parameter, whatever the stage.

Checkpoints go through ``StateAccess``; so does the ``safe_get_*``/``safe_set_*`` family of ``deepspeed.utils``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed.checkpoint.shards import ShardIndex
from deepspeed.comm.collectives import Communicator
from deepspeed.runtime.loss_scaler import LossScaler
from deepspeed.runtime.zero.bucket import WeightPublisher
from deepspeed.runtime.zero.params import full_numel, full_shape
from deepspeed.runtime.zero.reducer import GradReducer
from deepspeed.runtime.zero.state_store import PARAMS, OwnedFragment, StateStore

MASTER = "fp32"


@dataclass(frozen=True, slots=True)
class ParamEntry:
    """One trainable parameter as checkpoints know it; ``shared_names`` are its other names in the module."""

    name: str
    param: nn.Parameter
    shape: tuple[int, ...]
    dtype: torch.dtype
    group_index: int
    shared_names: tuple[str, ...]


class StateAccess:
    """A view on the live training state: nothing is copied, and writes go through.

    ``names[i]`` and ``shared[i]`` belong to ``params[i]`` of the store. Methods marked *collective* must be called
    by all ranks of the data-parallel group.
    """

    def __init__(
        self,
        store: StateStore,
        reducer: GradReducer,
        scaler: LossScaler,
        publisher: WeightPublisher,
        communicator: Communicator,
        names: Sequence[str],
        shared: Sequence[tuple[str, ...]],
    ) -> None:
        self.store = store
        self.reducer = reducer
        self.scaler = scaler
        self.publisher = publisher
        self.communicator = communicator
        self.names = list(names)
        self.shared = list(shared)
        self._index = {id(param): i for i, param in enumerate(store.params)}
        self._owned: dict[int, list[OwnedFragment]] = {}
        for owned in store.fragments:
            self._owned.setdefault(owned.param_index, []).append(owned)

    # For checkpoints ----------------------------------------------------------------------------------------

    def trainable(self) -> list[ParamEntry]:
        return [
            ParamEntry(
                self.names[i], p, tuple(full_shape(p)), p.dtype, self.store.group_of[i], self.shared[i]
            )
            for i, p in enumerate(self.store.params)
        ]

    def shards(self) -> Iterator[tuple[ShardIndex, dict[str, Tensor]]]:
        """This rank's fragments with their master weights (key "fp32", 1-D) and optimizer state, live."""
        for owned in self.store.fragments:
            tensors = {MASTER: owned.master.detach().view(-1)}
            for key, value in self.store.state_of(owned).items():
                if isinstance(value, Tensor):
                    tensors[key] = value.detach().view(-1) if value.shape == owned.master.shape else value
                elif isinstance(value, (int, float)):
                    tensors[key] = torch.tensor(value)
            yield self.index_of(owned), tensors

    def index_of(self, owned: OwnedFragment) -> ShardIndex:
        start = owned.fragment.param_offset
        return ShardIndex(
            name=self.names[owned.param_index],
            global_shape=tuple(full_shape(self.store.params[owned.param_index])),
            boxes=(),
            start=start,
            stop=start + owned.fragment.numel,
        )

    def ensure_state(self) -> None:
        self.store.ensure_state()

    def clear_state(self) -> None:
        """Forget all optimizer state (what is loaded next was saved before the first step)."""
        self.store.clear_state()

    def set_scalar_state(self, key: str, value: Tensor, name: str | None = None) -> None:
        """Write a per-parameter scalar such as ``step``, for one parameter or for all."""
        for owned in self.store.fragments:
            if name is None or self.names[owned.param_index] == name:
                state = self.store.state_of(owned)
                if isinstance(state.get(key), Tensor):
                    state[key].copy_(value)
                elif key in state:
                    state[key] = type(state[key])(value.item())

    def publish(self) -> None:
        """After masters were written: refresh the model's weights on all ranks. Collective."""
        with torch.no_grad():
            self.store.refresh_low(self.store.fragments)
        self.publisher.publish()

    def weights_loaded(self) -> None:
        """After the model's own weights were written (whole, on every rank): take the masters from them."""
        with torch.no_grad():
            for bucket in self.store.param_buckets:
                bucket.relink(bucket.detached())
                self.store.rebind(bucket)

    def weights_written(self, param: nn.Parameter) -> None:
        """One parameter's own weights were written: take its masters from them."""
        with torch.no_grad():
            for owned in self._fragments(param):
                if owned.low is not None:
                    owned.master.view(-1).copy_(owned.low)

    def elements_written(self, param: nn.Parameter, value: Tensor) -> None:
        """One parameter's own weights will be ``value`` [shape]: the masters take what differs from now."""
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
        """The client's groups without their parameters."""
        return [{k: v for k, v in g.items() if k != PARAMS} for g in self.store.optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        own = self.store.optimizer.param_groups
        if len(groups) != len(own):
            raise ValueError(f"{len(groups)} parameter groups were saved, but the optimizer has {len(own)}")
        for group, saved in zip(own, groups, strict=True):
            group.update(saved)

    def scalars(self) -> dict[str, Any]:
        return {"loss_scaler": self.scaler.state_dict()}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        if "loss_scaler" in scalars:
            self.scaler.load_state_dict(scalars["loss_scaler"])

    def pending_gradients(self) -> dict[str, dict[str, Tensor]] | None:
        """This rank's gradients since the last boundary: local sums and reduced slices, by bucket and parameter."""
        local: dict[str, Tensor] = {}
        reduced: dict[str, Tensor] = {}
        for bucket in self.reducer.buckets:
            for position, slot in enumerate(bucket.layout.slots):
                if bucket.local is not None and bucket.written[position]:
                    local[self.names[slot.param]] = bucket.views[position]
            if bucket.reduced is not None:
                reduced[str(bucket.layout.index)] = bucket.reduced
        return {"local": local, "reduced": reduced} if local or reduced else None

    def load_pending_gradients(self, pending: dict[str, dict[str, Tensor]] | None) -> None:
        self.reducer.clear()
        if pending is None:
            return
        places = {self.names[slot.param]: (b, i, slot.param)
                  for b in self.reducer.buckets for i, slot in enumerate(b.layout.slots)}  # fmt: skip
        for name, value in pending["local"].items():
            bucket, position, index = places[name]
            bucket.accept(position, value)
            self.reducer.used[index] = True
        for index, value in pending["reduced"].items():
            self.reducer.buckets[int(index)].restore(value)

    # By parameter (deepspeed.utils.safe_get_*, safe_set_*) --------------------------------------------------

    def full_master(self, param: nn.Parameter) -> Tensor | None:
        """[shape] in the master dtype. Collective."""
        return self._assemble(param, [(o, o.master) for o in self._fragments(param)])

    def set_full_master(self, param: nn.Parameter, value: Tensor) -> None:
        """Every rank writes its part; the model's weights are refreshed. Collective."""
        self._scatter(value, [(o, o.master) for o in self._fragments(param)])
        self._publish_one(param)

    def full_state(self, param: nn.Parameter, key: str) -> Tensor | None:
        """A per-element optimizer state such as ``exp_avg``. Collective."""
        self.store.ensure_state()
        return self._assemble(param, [(o, self.store.state_of(o)[key]) for o in self._fragments(param)])

    def set_full_state(self, param: nn.Parameter, key: str, value: Tensor) -> None:
        self.store.ensure_state()
        self._scatter(value, [(o, self.store.state_of(o)[key]) for o in self._fragments(param)])

    def full_gradient(self, param: nn.Parameter) -> Tensor | None:
        """The reduced gradient in fp32, or None before the backward of a boundary. Collective."""
        owned = self._fragments(param)
        if any(bucket.reduced is None for bucket in self.reducer.buckets):
            return None
        full = self._assemble(param, [(o, o.gradient()) for o in owned])
        return None if full is None else full.float()

    def set_full_gradient(self, param: nn.Parameter, value: Tensor) -> None:
        self._scatter(value, [(o, o.gradient()) for o in self._fragments(param)])

    def local_master(self, param: nn.Parameter) -> Tensor | None:
        """This rank's part, 1-D and live; empty where it owns none."""
        return self._local(param, lambda o: o.master)

    def local_state(self, param: nn.Parameter, key: str) -> Tensor | None:
        self.store.ensure_state()
        return self._local(param, lambda o: self.store.state_of(o)[key])

    def local_gradient(self, param: nn.Parameter) -> Tensor | None:
        if any(bucket.reduced is None for bucket in self.reducer.buckets):
            return None
        return self._local(param, lambda o: o.gradient())

    def _publish_one(self, param: nn.Parameter) -> None:
        with torch.no_grad():
            self.store.refresh_low(self._fragments(param))
        self.publisher.publish([b for b in self.store.param_buckets if any(p is param for p in b.params)])

    def _fragments(self, param: nn.Parameter) -> list[OwnedFragment]:
        if id(param) not in self._index:
            raise KeyError("this parameter is not trained by the engine")
        return self._owned.get(self._index[id(param)], [])

    def _local(self, param: nn.Parameter, tensor_of: Any) -> Tensor:
        owned = self._fragments(param)
        return tensor_of(owned[0]).view(-1) if owned else torch.empty(0, device=param.device)

    def _assemble(self, param: nn.Parameter, parts: list[tuple[OwnedFragment, Tensor]]) -> Tensor | None:
        """Whole tensor from its parts on all ranks: each element has one owner, so the sum is exact."""
        numel, shape = full_numel(param), full_shape(param)
        if len(parts) == 1 and parts[0][0].fragment.numel == numel and not self._cut(param):
            return parts[0][1].detach().reshape(shape).clone()
        dtype = parts[0][1].dtype if parts else torch.float32
        full = torch.zeros(numel, dtype=dtype, device=param.device)
        for owned, tensor in parts:
            start = owned.fragment.param_offset
            full[start : start + owned.fragment.numel] = tensor.reshape(-1)
        if self._cut(param):
            full = full.float()
            self.communicator.all_reduce(full).wait()
        return full.view(shape)

    def _cut(self, param: nn.Parameter) -> bool:
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
