"""Counted activations: one forward of the model on fake tensors, in which ``activation_checkpointing.memory_budget``
chooses what each block keeps, as in the first forward of a run."""

from __future__ import annotations

import functools
import inspect

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed.config.plan import PrecisionPlan
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.transforms.recompute.budget import budget_blocks
from deepspeed.transforms.recompute.knapsack import RecomputeChoice
from deepspeed.zero.meta import meta_copy
from deepspeed.zero.precision import autocast_context, cast_module


class CannotCount(RuntimeError):
    """The model's forward does not run on fake tensors; the message says why."""


@functools.lru_cache(maxsize=4)
def choose_recomputation(
    module: nn.Module, limit: float, micro_batch: int, sequence: int, precision: PrecisionPlan
) -> RecomputeChoice:
    """Choose what the blocks of ``module`` keep within the budget ``limit`` for ``micro_batch`` x ``sequence`` tokens.

    The CPU's attention is traced, which keeps the same tensors as flash attention on GPUs. DeepSpeedConfigError: the
    budget cannot be met. CannotCount: the model takes no ``input_ids``, or its code depends on tensor values.
    """
    if "input_ids" not in inspect.signature(module.forward).parameters:
        raise CannotCount("it takes no input_ids")
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            skeleton = meta_copy(module, device="cpu").train()
            cast_module(skeleton, precision)
            budget = budget_blocks(skeleton, limit, None)
            with autocast_context(precision, "cpu"):
                skeleton(**_inputs(skeleton, micro_batch, sequence))
    except DeepSpeedConfigError:
        raise
    except Exception as error:  # a forward that cannot be traced may raise anything
        text = str(error).splitlines()
        raise CannotCount(f"{type(error).__name__}: {text[0] if text else ''}") from error
    if budget.choice is None:
        raise CannotCount("its forward returned nothing")
    return budget.choice


def _inputs(module: nn.Module, micro_batch: int, sequence: int) -> dict[str, object]:
    accepted = inspect.signature(module.forward).parameters
    ids = torch.zeros(micro_batch, sequence, dtype=torch.int64)
    inputs: dict[str, object] = {"input_ids": ids}
    if "labels" in accepted:
        inputs["labels"] = ids
    if "use_cache" in accepted or any(each.kind is each.VAR_KEYWORD for each in accepted.values()):
        # Without a cache, Transformers looks for packed documents in the positions; they have no values here, so it
        # would build a mask. Blocks under a budget get no cache in any case.
        inputs["use_cache"] = True
    return inputs
