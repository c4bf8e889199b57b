"""Choose the learning-rate scheduler of an engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from deepspeed.base.logging import logger
from deepspeed.config.arguments import WHOLE_NUMBERS
from deepspeed.config.constants import VALID_LR_SCHEDULES
from deepspeed.config.deepspeed_config import DeepSpeedConfig, DeepSpeedConfigError


def resolve_scheduler(
    config: DeepSpeedConfig, client: Any, optimizer: torch.optim.Optimizer | None, own: Any = None
) -> Any:
    """Return the client's scheduler, or its callable's for the optimizer, else the config's, or None. ``own``: the
    client's optimizer argument."""
    if client is not None:
        if not callable(client) and not hasattr(client, "step"):
            raise TypeError(f"lr_scheduler must be a scheduler or a callable, not {type(client).__name__}")
        _warn_of_other_optimizer(client, optimizer, own)
        return client(optimizer) if callable(client) and not hasattr(client, "step") else client
    name = config.scheduler_name
    if name is None or optimizer is None:
        return None
    cls = _class_of(name)
    given = config.scheduler_params or {}
    params = {
        key: int(value) if key in WHOLE_NUMBERS and isinstance(value, float) else value
        for key, value in given.items()
        if value != "auto"
    }
    known = set(inspect.signature(cls).parameters) - {"optimizer"}
    unknown = sorted(set(given) - known)
    if unknown:
        raise DeepSpeedConfigError(
            f"scheduler.params.{unknown[0]} is not a parameter of {name}; it takes {', '.join(sorted(known))}."
        )
    try:
        return cls(optimizer, **params)
    except TypeError as error:  # a required argument is missing
        raise DeepSpeedConfigError(f"scheduler.params does not fit {name}: {error}") from error


def advance(schedule: Any, lr_kwargs: Mapping[str, Any], samples: int) -> None:
    """Step ``schedule`` with the caller's keywords. Without any, a ``step`` that requires an argument, as
    Megatron-LM's does, gets the number of samples of this step: a pipeline's ``train_batch`` takes no keywords for
    it."""
    method = getattr(type(schedule), "step", None)
    positional = (samples,) if not lr_kwargs and method is not None and _needs_argument(method) else ()
    schedule.step(*positional, **lr_kwargs)


@lru_cache(maxsize=16)
def _needs_argument(step: Callable[..., Any]) -> bool:
    """Return whether the method ``step`` has a required positional parameter besides ``self``."""
    own = list(inspect.signature(step).parameters.values())[1:]
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(param.kind in by_place and param.default is param.empty for param in own)


def _warn_of_other_optimizer(client: Any, optimizer: Any, own: Any) -> None:
    """Warn of a torch scheduler that drives another optimizer than the engine's. As in 0.19 it is stepped, and the
    learning rate stays constant."""
    made_here = own is None or not hasattr(own, "param_groups")
    if isinstance(client, LRScheduler) and made_here and client.optimizer is not optimizer:
        logger.warning(
            f"lr_scheduler is a {type(client).__name__} of a different optimizer than the one in use, so it "
            "does not control the learning rates of this engine. Pass its optimizer as optimizer=, or a "
            "function that creates the scheduler: lr_scheduler=lambda optimizer: ..."
        )


def _class_of(name: str) -> Any:
    if name in VALID_LR_SCHEDULES:
        from deepspeed.optim import lr_schedules  # only if the config names one of ours

        return getattr(lr_schedules, name)
    cls = getattr(torch.optim.lr_scheduler, name, None)
    if cls is None:
        raise DeepSpeedConfigError(
            f"scheduler.type={name!r} is unknown: use one of {', '.join(VALID_LR_SCHEDULES)} or the name "
            "of a class in torch.optim.lr_scheduler."
        )
    return cls
