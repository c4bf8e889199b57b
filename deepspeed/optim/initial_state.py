"""Find the state that an optimizer keeps for a parameter before its first update, without updating anything.

Not all of it is zero (NAdam's ``mu_product``, Rprop's ``step_size``, ASGD's ``eta`` and ``mu``), and torch's
optimizers have no method for it: most create it inside ``step``, some in their constructor. So a stand-in takes one
step with a zero gradient on a copy of the parameter, and a dict records the first value assigned to each entry: the
initial state.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deepspeed.ops.multi_tensor import MultiTensorOptimizer
from deepspeed.ops.update import Group


@torch.no_grad()
def initial_state(optimizer: Optimizer, group: Group, param: Tensor) -> dict[str, Any]:
    """Return the initial state of ``param`` under the hyperparameters of ``group``; empty if the optimizer keeps
    none.

    Neither the optimizer nor ``param`` is touched. RuntimeError: the optimizer cannot take a step with a zero
    gradient.
    """
    if isinstance(optimizer, MultiTensorOptimizer):  # ours has a method for it
        substitute: Any = clone_optimizer(optimizer, group, [])
        return substitute.state_for(param, group)
    copied = nn.Parameter(param.detach().clone())
    recorder = _StateRecorder()
    try:
        with torch.random.fork_rng(devices=()):
            _step_on_zeros(optimizer, group, copied, recorder)
    except Exception as error:
        # The step may rely on state created by the constructor.
        state = state_of_constructor(optimizer, group, copied)
        if not state:
            raise RuntimeError(
                f"cannot initialize the state of {type(optimizer).__name__} for a new parameter: its step "
                f"on a zero gradient failed ({type(error).__name__}: {error})"
            ) from error
        return state
    return recorder.initial


def _step_on_zeros(optimizer: Optimizer, group: Group, param: nn.Parameter, state: _StateRecorder) -> None:
    substitute = clone_optimizer(optimizer, group, [param])
    substitute.state[param] = state
    param.grad = torch.zeros_like(param)
    type(optimizer).step(substitute)
    left: Any = substitute.state[param]
    if left is not state:  # the step replaced the dict, so nothing was recorded: take its values
        state.initial.update(left)
        if "step" in left:
            state.initial["step"] = left["step"] * 0


class _StateRecorder(dict):
    """State dict that keeps a copy of the first value assigned to each entry in ``initial``."""

    def __init__(self) -> None:
        super().__init__()
        self.initial: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.initial:
            self.initial[key] = value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


def state_of_constructor(optimizer: Optimizer, group: Group, param: nn.Parameter) -> dict[str, Any]:
    """Return the state that the constructor of the optimizer's class creates for ``param``; empty if none or if it
    fails."""
    try:
        accepted = inspect.signature(type(optimizer)).parameters
        given = {key: value for key, value in optimizer.defaults.items() if key in accepted}
        made = type(optimizer)([{**options_of(group), "params": [param]}], **given)
    except Exception:  # a foreign constructor may require anything
        return {}
    return dict(made.state.get(param, {}))


def options_of(group: Group) -> dict[str, Any]:
    """Return a copy of the hyperparameters of a group."""
    return {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}


def clone_optimizer(optimizer: Optimizer, group: Group, params: list[nn.Parameter]) -> Optimizer:
    """Return an optimizer of the same class and attributes with other parameters, without hooks and state. The
    constructor is not called, because its arguments are unknown here."""
    substitute = object.__new__(type(optimizer))
    attributes: dict[str, Any] = dict(optimizer.__dict__)
    attributes.pop("step", None)  # schedulers replace it on the instance, bound to the original
    for name, value in attributes.items():
        if isinstance(value, OrderedDict) and name.endswith("_hooks"):
            attributes[name] = OrderedDict()
    attributes.update(param_groups=[{**options_of(group), "params": params}], state=defaultdict(dict))
    substitute.__dict__.update(attributes)
    if "_tables" in attributes:
        substitute.__dict__["_tables"] = {}
    train = getattr(substitute, "train", None)
    if params and callable(train):
        train()  # schedule-free optimizers step in this mode only
    return substitute
