"""The optimizer of an engine: the client's or the config's, and checks that it fits the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.base.exceptions import NoOptimizerError
from deepspeed.base.staged import Staged, is_idle
from deepspeed.config.plan import Plan
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.ops.update import traits_of
from deepspeed.optim.elementwise import check_partitioning, require_elementwise
from deepspeed.zero.optimizer_registry import (
    build_optimizer,
    kind_of_group,
    kind_of_param,
    set_optimizer_flags,
)
from deepspeed.zero.params import ZeRORuntimeException
from deepspeed.zero.partitioning import TrainedParams
from deepspeed.zero.placements import is_partial, is_split_matrix
from deepspeed.zero.states.store import PARAMS

if TYPE_CHECKING:
    from deepspeed.config.deepspeed_config import DeepSpeedConfig


def list_parameters(given: Any) -> list[Any] | None:
    """Return the ``model_parameters`` of ``initialize`` as a list, since they are read twice; None if not given.

    Like torch's optimizers it accepts (name, parameter) pairs, and also a single group. TypeError: another type.
    """
    if given is None:
        return None
    if isinstance(given, dict) and PARAMS in given:
        given = [given]
    entries = [given] if isinstance(given, (dict, torch.Tensor)) else list(given)
    entries = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
    for entry in entries:
        is_group = isinstance(entry, dict) and PARAMS in entry
        if entry is given or not (is_group or isinstance(entry, torch.Tensor)):
            raise TypeError(
                f"model_parameters {'is' if entry is given else 'holds'} a {type(entry).__name__}: pass an iterable of "
                "parameters, such as model.parameters(), or of groups, such as [{'params': [...], 'lr': 1e-4}]"
            )
    return entries


def resolve_optimizer(
    config: DeepSpeedConfig,
    plan: Plan,
    client: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None,
    model_parameters: list[Any] | None,
    module: nn.Module,
) -> torch.optim.Optimizer | None:
    """Return the client's optimizer, the result of its callable, the config's optimizer, or None.

    ``model_parameters``: a list, or None for those of ``module``. ValueError: it is empty, but ``module`` has
    trainable parameters.
    """
    if isinstance(client, torch.optim.Optimizer) or (client is not None and hasattr(client, "param_groups")):
        return _unwrapped(client)
    given = list(module.parameters()) if model_parameters is None else model_parameters
    # Frozen parameters outside groups are left out, as nothing updates them.
    groups = [entry for entry in given if isinstance(entry, dict) or entry.requires_grad]
    if not groups and is_idle(module):
        groups = [{PARAMS: []}]
    if client is not None or config.optimizer_name is not None:
        _check_given(model_parameters, module)
    if callable(client):
        return client(groups)
    if client is not None:
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer or a callable, not {type(client).__name__}"
        )
    if config.optimizer_name is None or not groups:
        return None
    set_optimizer_flags(config, module)
    on_host = plan.state_offload is not None
    return build_optimizer(config.optimizer_name, config.optimizer_params, groups, on_host=on_host)


def check_made_for_host(client: Any, plan: Plan) -> None:
    """Raise ZeRORuntimeException if a client's optimizer is not made for the host although the config requires it.
    Not called for the config's own, such as `torch_adam`, which is a deliberate choice."""
    if plan.state_offload is None or not plan.zero.host_optimizer_only:
        return
    if not type(client).__module__.startswith("deepspeed."):
        raise ZeRORuntimeException(
            f"offload_optimizer updates on the host, which {type(client).__name__} does not support, and "
            "the config has zero_force_ds_cpu_optimizer: true. Use DeepSpeedCPUAdam or an 'optimizer' "
            "section, or leave the key out."
        )


def _unwrapped(client: Any) -> torch.optim.Optimizer:
    """Return the inner optimizer if ``client`` is only a wrapper, without the state of torch's class (Accelerate's,
    for models that are already split), else ``client``."""
    inner = vars(client).get("optimizer")
    wraps = isinstance(inner, torch.optim.Optimizer) and "_optimizer_state_dict_pre_hooks" not in vars(client)
    return inner if wraps else client


def find_unfreezable(
    model_parameters: Iterable[Any] | None, module: nn.Module, optimizer: torch.optim.Optimizer
) -> list[nn.Parameter]:
    """Return frozen parameters that would be in a group of the optimizer if trainable: in its only group, or in that of
    their kind (``kind_of_group``). Parts of matrices that Muon cannot assemble stay frozen; so do all if a callable
    left some of the trainable parameters out."""
    given = list(module.parameters() if model_parameters is None else model_parameters)
    kinds = [kind_of_group(group) for group in optimizer.param_groups]
    if len(set(kinds)) < len(kinds) or any(isinstance(entry, dict) for entry in given):
        return []
    held = {id(param) for group in optimizer.param_groups for param in group[PARAMS]}
    if any(param.requires_grad and id(param) not in held for param in given):
        return []
    frozen = [param for param in given if not param.requires_grad]
    if kinds == [None]:
        return frozen
    fitting = [param for param in frozen if kind_of_param(param) in kinds]
    return [p for p in fitting if not (kind_of_param(p)[0] and _is_unassembled(p))]


def _is_unassembled(param: torch.Tensor) -> bool:
    """Return whether ``param`` is a part of a matrix whose other parts its ranks cannot assemble."""
    return is_partial(param, matrices=True) and not is_split_matrix(param)


def _check_given(model_parameters: list[Any] | None, module: nn.Module) -> None:
    if model_parameters == [] and any(param.requires_grad for param in module.parameters()):
        raise ValueError(
            "model_parameters is empty, although the model has trainable parameters. A generator such as "
            "model.parameters() can only be consumed once: pass a new one or a list, or leave the argument "
            "out to use all parameters of the model."
        )


def check_membership(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Raise ValueError unless ``optimizer`` trains ``module``: gradients never reach another model's parameters.

    It holds parameters that are not in the module (a pipeline's optimizer may also hold those of other stages), or no
    trainable parameter of a module that has some.
    """
    own = {id(param) for param in module.parameters()}
    held = [param for group in optimizer.param_groups for param in group[PARAMS]]
    foreign = sum(id(param) not in own for param in held)
    if foreign and (not isinstance(module, Staged) or foreign == len(held)):
        raise ValueError(
            f"{foreign} of the {len(held)} parameters in the optimizer are not in the model, so it would "
            "never train them. They belong to another model, such as a copy of this one, or the model "
            "changed after the optimizer was created: create it from model.parameters() of the model passed "
            "to deepspeed.initialize, and add the parameters of a loss to that model."
        )
    trainable = sum(param.requires_grad for param in module.parameters())
    if trainable and not any(param.requires_grad for param in held) and not is_idle(module):
        raise ValueError(
            f"the {len(held)} parameters in the optimizer are all frozen (requires_grad=False), and the {trainable} "
            "trainable parameters of the model are not in it: create it from the parameters to train."
        )


def require_optimizer(plan: Plan, given: bool) -> None:
    """Raise DeepSpeedConfigError at stages 1 and 2 without an optimizer, whose state they would partition."""
    if plan.zero.needs_optimizer and not given:
        raise DeepSpeedConfigError(
            f"zero_optimization.stage={plan.zero.stage} requires an optimizer: pass optimizer= or model_parameters= to "
            "deepspeed.initialize with an 'optimizer' section in the config, or use stage 0."
        )


def require_trainable(plan: Plan, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise DeepSpeedConfigError if stages 1 and 2 have no optimizer because all parameters are frozen."""
    if plan.zero.needs_optimizer and optimizer is None:
        raise DeepSpeedConfigError(
            f"zero_optimization.stage={plan.zero.stage} partitions optimizer state, but there is none: all "
            "parameters of the model are frozen (requires_grad=False). Unfreeze some, or use stage 0."
        )


def check_optimizer(
    plan: Plan, optimizer: torch.optim.Optimizer, trained: TrainedParams, module: nn.Module
) -> None:
    _check_parts(optimizer, plan, trained)
    if not plan.zero.shard_state:
        return
    if not trained.params and not is_idle(module):
        raise DeepSpeedConfigError(
            f"zero_optimization.stage={plan.zero.stage} shards the state of trainable parameters, but the optimizer "
            "holds none with requires_grad=True; unfreeze some, or use stage 0."
        )
    check_partitioning(optimizer, plan)


def _check_parts(optimizer: torch.optim.Optimizer, plan: Plan, trained: TrainedParams) -> None:
    """Check the optimizer against split tensors (tensor and expert parallelism, DTensors), at every stage: parts are
    allowed if it is elementwise or requests segment sums, and for Muon if the matrices can be assembled (of
    ``per_head_muon``: no head is cut). DeepSpeedConfigError names a tensor; ZeRO's shards are checked by
    ``check_partitioning``."""
    traits, named = traits_of(optimizer), dict(zip(map(id, trained.params), trained.names, strict=True))
    if traits.whole_matrices:
        of_matrices = (g for g in optimizer.param_groups if g.get("use_muon") and not g.get("num_heads"))
        held = [p for group in of_matrices for p in group[PARAMS]]
        cut = [named[id(p)] for p in held if id(p) in named and _is_unassembled(p)]
        if cut:
            raise DeepSpeedConfigError(
                f"{type(optimizer).__name__} needs whole matrices, but {len(cut)} of them are split in a way in which "
                f"they cannot be assembled (experts, or an unknown dim), such as {cut[0]}; set use_muon = False on "
                "these parameters, or use another optimizer"
            )
        return
    cut = [name for param, name in zip(trained.params, trained.names, strict=True) if is_partial(param)]
    if cut and not traits.segment_sums:
        split = f"{len(cut)} tensors are split over tensor- or expert-parallel ranks, such as {cut[0]}"
        require_elementwise(optimizer, plan, split, "use another optimizer")


def no_training(what: str, *, destroyed: bool, configured: bool) -> RuntimeError:
    """Return the error of ``engine.what()`` in an engine that does not train: it was ``destroyed``, all parameters
    were frozen although the config has an optimizer (``configured``), or it has no optimizer."""
    if destroyed:
        return RuntimeError(
            f"engine.{what}() after engine.destroy(): this engine can no longer train. Create another one "
            "with deepspeed.initialize, or call destroy() later."
        )
    if configured:
        return NoOptimizerError(
            f"engine.{what}() needs trainable parameters: all were frozen (requires_grad=False) when "
            "deepspeed.initialize was called, so the engine only runs forward. Unfreeze some before that call."
        )
    return NoOptimizerError(
        f"engine.{what}() needs an optimizer and trainable parameters: pass optimizer=, or model_parameters= with an "
        "'optimizer' section in the config, to deepspeed.initialize. Without them the engine only runs forward."
    )
