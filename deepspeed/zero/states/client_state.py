"""Make ``state_dict`` and ``load_state_dict`` of the client's optimizer work while the engine holds its state.

``optimizer.state`` is keyed by the engine's masters, which torch's methods do not know. Hooks present this rank's
state under the client's parameters instead, in torch's format: whole tensors have the parameter's shape, parts are
1-D. Loading accepts both, so state saved without the engine can be loaded too.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.base.sharded import full_numel, full_shape
from deepspeed.zero.states.access import StateAccess


class StateByParam(defaultdict[Any, dict[str, Any]]):
    """An optimizer's state by master, which can also be looked up by the client's parameters and by joined masters
    (``StateAccess.state_of``): ``optimizer.state[param]`` is this rank's part."""

    def __init__(self, access: StateAccess, state: dict[Any, dict[str, Any]]) -> None:
        super().__init__(dict, state)
        self.access = access

    def __missing__(self, key: Any) -> dict[str, Any]:
        found = self.access.state_of(key) if isinstance(key, Tensor) else None
        return super().__missing__(key) if found is None else found

    def __contains__(self, key: Any) -> bool:
        held = super().__contains__(key)
        return held or (isinstance(key, Tensor) and self.access.state_of(key) is not None)

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))


class ClientState:
    """Hooks on ``optimizer`` that translate between its parameters and the state behind ``access``."""

    def __init__(self, optimizer: Optimizer, access: StateAccess) -> None:
        self.access = access
        optimizer.state = StateByParam(access, optimizer.state)
        self._real_state: Any = None  # the real state while torch's method runs
        self._loaded: dict[str, dict[str, Tensor]] = {}
        self._handles = [
            optimizer.register_state_dict_pre_hook(self._before_save),
            optimizer.register_state_dict_post_hook(self._after_save),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def release(self, optimizer: Optimizer) -> None:
        """Return the state of parameters that this rank holds completely to the optimizer, at the engine's end."""
        for handle in self._handles:
            handle.remove()
        optimizer.state = self._by_param(optimizer, parts=False)

    # Saving -------------------------------------------------------------------------------------------------

    def _before_save(self, optimizer: Optimizer) -> None:
        shown = self._by_param(optimizer)
        self._real_state, optimizer.state = optimizer.state, shown

    def _after_save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        optimizer.state, self._real_state = self._real_state, None

    def _by_param(self, optimizer: Optimizer, *, parts: bool = True) -> defaultdict[Any, dict[str, Any]]:
        shown: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        masters = {id(owned.master) for owned in self.access.store.fragments}
        for key, state in optimizer.state.items():
            if id(key) not in masters:  # belongs to a parameter that the engine does not train
                shown[key] = state
        for param, state in self.access.states_by_param():
            start, stop = self.access.interval(param)
            if parts or stop - start == full_numel(param):
                shown[param] = {key: _whole(value, full_shape(param)) for key, value in state.items()}
        return shown

    # Loading ------------------------------------------------------------------------------------------------

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Set aside the state of the engine's parameters; torch checks and loads the rest."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        rest = dict(state_dict["state"])
        self._loaded = {}
        for number, param in zip(numbers, params, strict=False):  # torch reports other lengths
            name = self.access.name_of(param)
            if name is not None and number in rest:
                self._loaded[name] = self._own_part(name, param, rest.pop(number))
        self._real_state = optimizer.state
        return {**state_dict, "state": rest}

    def _own_part(self, name: str, param: nn.Parameter, state: dict[str, Any]) -> dict[str, Tensor]:
        """Return this rank's part of the state of one parameter."""
        start, stop = self.access.interval(param)
        found: dict[str, Tensor] = {}
        for key, value in state.items():
            if isinstance(value, (int, float)):
                value = torch.tensor(value, dtype=torch.float64)
            if not isinstance(value, Tensor):
                continue
            if value.dim() and value.numel() == full_numel(param):
                value = value.reshape(-1)[start:stop]
            elif value.dim() == 1 and value.numel() != stop - start:
                raise ValueError(
                    f"the state {key!r} of {name} has {value.numel()} elements; this rank holds {stop - start} of "
                    f"{full_numel(param)}. For state of a different number of ranks, use engine.load_checkpoint"
                )
            found[key] = value
        return found

    def _after_load(self, optimizer: Optimizer) -> None:
        rest = optimizer.state
        optimizer.state, self._real_state = self._real_state, None
        for key, state in rest.items():
            if isinstance(key, Tensor) and self.access.name_of(key) is None:
                optimizer.state[key] = state
        loaded, self._loaded = self._loaded, {}
        self.access.write_local_states(loaded)


def _whole(value: Any, shape: torch.Size) -> Any:
    """Return flat state of all elements in the parameter's shape, anything else unchanged."""
    flat = isinstance(value, Tensor) and value.dim() == 1 and value.numel() == shape.numel()
    return value.view(shape) if flat else value


def has_hooks(optimizer: Any) -> bool:
    """Return whether ``optimizer`` is torch-style, not merely an object with parameter groups."""
    return hasattr(optimizer, "register_load_state_dict_post_hook")
