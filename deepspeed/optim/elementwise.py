"""Test whether an optimizer updates every element independently, so that ZeRO may partition its tensors anywhere.

Decided by trial, not by a list: a small matrix is updated once whole and once as two flat pieces. Optimizers that use
norms, rows or matrices (LAMB, LARS, Adafactor, Muon, Shampoo), or need a closure or sparse gradients, give different
results or raise.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from deepspeed.base.logging import logger, warning_once
from deepspeed.config.plan import Plan
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.ops.update import traits_of
from deepspeed.optim.initial_state import clone_optimizer, state_of_constructor

_SHAPE, _CUT, _STEPS = (8, 8), 23, 4
_verdicts: WeakKeyDictionary[type, bool] = WeakKeyDictionary()  # per class, determined once


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether splitting a tensor into flat pieces leaves its update unchanged (to 1e-5).

    The optimizer itself, its hooks and the global random states are not touched. There is one verdict per class. A
    class's own declaration (`UpdateTraits.elementwise`) is trusted; the tests verify ours. One inherited from our
    classes is not, as the subclass may have changed the update.
    """
    cls = type(optimizer)
    declared = traits_of(optimizer).elementwise
    if declared is not None and (cls.__module__.startswith("deepspeed.") or "update_traits" in vars(cls)):
        return declared
    if cls not in _verdicts:
        _verdicts[cls] = _probe(optimizer)
    return _verdicts[cls]


def check_partitioning(optimizer: Optimizer, plan: Plan) -> None:
    """Raise DeepSpeedConfigError if the plan partitions tensors that ``optimizer`` cannot update in parts."""
    if not plan.zero.shard_state:
        return
    name, traits = type(optimizer).__name__, traits_of(optimizer)
    if traits.own_communication:
        _check_groups(name, traits.elementwise is True or traits.segment_sums, plan)
    if plan.zero.refuses_untested and not type(optimizer).__module__.startswith(
        ("torch.optim", "deepspeed.")
    ):
        raise DeepSpeedConfigError(
            f"{name} comes neither from torch nor from this package, and the config has "
            "zero_allow_untested_optimizer: false. Remove that key to have its update tested on a small "
            "tensor, or set it to true to accept the optimizer untested."
        )
    if not traits.joins_ranks:
        cut = f"zero_optimization.stage={plan.zero.stage} partitions its tensors across ranks"
        require_elementwise(optimizer, plan, cut, "use stage 0")


def require_elementwise(optimizer: Optimizer, plan: Plan, cut: str, remedy: str) -> None:
    """Raise DeepSpeedConfigError unless ``optimizer`` updates elements independently; only warn if the config has
    ``zero_allow_untested_optimizer``. ``cut``: a clause that says which tensors it gets in parts."""
    if is_elementwise(optimizer):
        return
    said = f"{type(optimizer).__name__} does not update elements independently, but {cut}"
    if not plan.zero.allow_untested_optimizer:
        raise DeepSpeedConfigError(f"{said}; {remedy}, or set zero_allow_untested_optimizer: true to try.")
    warning_once(
        f"{said}: its updates differ from those of whole tensors (allowed by zero_allow_untested_optimizer: true)."
    )


def _check_groups(name: str, in_shards: bool, plan: Plan) -> None:
    """Raise if the plan does not suit an optimizer that communicates itself: it needs several copies of the states,
    and no stage 3, which has no whole copies. ``in_shards``: it can update shards of tensors."""
    if plan.zero.shard_params or not in_shards:
        raise DeepSpeedConfigError(
            f"{name} does its own gradient communication, so zero_optimization.stage={plan.zero.stage} "
            f"cannot partition its tensors across ranks; use stage 0{' to 2' if in_shards else ''}."
        )
    if not plan.zero.in_groups:
        raise DeepSpeedConfigError(
            f"{name} exchanges signs between copies of the weights, but zero_optimization.stage={plan.zero.stage} "
            "keeps only one: set zero_optimization.mics_shard_size to the number of ranks per host, or use stage 0."
        )


@torch.no_grad()
def _probe(optimizer: Optimizer) -> bool:
    device = next(
        (p.device for g in optimizer.param_groups for p in g["params"] if not p.is_meta), torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_SHAPE, generator=generator).to(device)
    # Gradients of different magnitude in the two pieces, so that their norms differ from the whole's.
    scale = torch.linspace(0.1, 3.0, start.numel()).view(_SHAPE)
    grads = [(torch.randn(_SHAPE, generator=generator) * scale).to(device) for _ in range(_STEPS)]
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            whole = _updated(optimizer, [start], [[grad] for grad in grads])
            pieces = _updated(optimizer, _split(start), [_split(grad) for grad in grads])
    except Exception as error:  # any error of a foreign optimizer means that it cannot update pieces
        logger.debug(f"{type(optimizer).__name__} does not update flat pieces of tensors: {error}")
        return False
    updated = whole[0].flatten()
    return bool(torch.allclose(torch.cat(pieces), updated, rtol=1e-5, atol=1e-6)) and not torch.equal(
        updated, start.flatten()
    )


def _split(tensor: Tensor) -> list[Tensor]:
    flat = tensor.flatten()
    return [flat[:_CUT].clone(), flat[_CUT:].clone()]


def _updated(optimizer: Optimizer, values: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
    """Return `values` after updates by a stand-in for `optimizer` with its settings, one per list of `grads`."""
    params = [torch.nn.Parameter(value.clone()) for value in values]
    group = {**optimizer.param_groups[0]}
    if "lr" in group:
        group["lr"] = 0.05  # a warm-up may be at 0, where nothing changes
    substitute = clone_optimizer(optimizer, group, params)
    if any(optimizer.state.values()):  # its step may rely on state created by its constructor
        for param in params:
            substitute.state[param].update(state_of_constructor(optimizer, group, param))
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        type(optimizer).step(substitute)
    return [param.detach() for param in params]
