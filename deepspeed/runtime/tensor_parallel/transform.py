"""Tensor parallelism as a transform of the module: plan, apply, report."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from deepspeed.comm.mesh import ProcessMesh
from deepspeed.runtime.pipe.staged import Staged
from deepspeed.runtime.tensor_parallel.applying import apply_plan
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.tensor_parallel.planning.planner import plan_module
from deepspeed.runtime.tensor_parallel.planning.rules import rules_of


class Context(Protocol):
    """The part of a ``TransformContext`` used here."""

    mesh: ProcessMesh

    def became(self, old: nn.Parameter, *new: nn.Parameter) -> None: ...
    def say(self, text: str) -> None: ...


class TensorParallelism:
    """Splits the layers of a module over the tensor-parallel ranks, as its graph and the config say."""

    name = "tensor_parallel"
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    def __init__(self, config: TPTrainingConfig) -> None:
        self.config = config

    def apply(self, module: nn.Module, context: Context) -> None:
        mesh = context.mesh
        if mesh.size("tp") == 1:
            context.say("one rank: nothing to split")
            return
        # Of a stage: what all stages have in common (a vocabulary, a tied weight) is seen in the whole model only.
        staged = isinstance(module, Staged)
        whole, inputs = (module.whole_on_paper(), module.inputs_on_paper()) if staged else (module, None)
        rules = rules_of(whole, self.config)
        grain = self.config.tensor_parallel.tp_grain_size
        plan = plan_module(whole, mesh.size("tp"), inputs=inputs, rules=rules, grain=grain)
        if whole is not module:
            plan = plan.within(module)
        apply_plan(module, plan, mesh.communicator("tp"), context.became)
        idle = f"; no parameter for {', '.join(map(repr, rules.idle))}" if rules.idle else ""
        context.say(plan.describe() + idle)
