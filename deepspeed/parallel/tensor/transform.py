"""Tensor parallelism as a transform of the module: plan, apply, report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from deepspeed.base.staged import Staged
from deepspeed.config.sections.parallel import TPTrainingConfig
from deepspeed.parallel.tensor.apply import apply_plan
from deepspeed.parallel.tensor.low_rank import QUANTIZED
from deepspeed.parallel.tensor.planning.plan import PlanError
from deepspeed.parallel.tensor.planning.planner import plan_module
from deepspeed.parallel.tensor.planning.rules import rules_of
from deepspeed.parallel.tensor.trial import try_split
from deepspeed.transforms.lora.quantization import QuantizedParameter

if TYPE_CHECKING:
    from deepspeed.transforms.module_transforms import TransformContext


_NO_HEAD = (
    "tensor_parallel.vocab_parallel_lm_head: true requires a supported nn.Linear as the output head, with a row for "
    "every word of the embedding; this model has none. Leave the key out: heads that can be split are split anyway"
)


class TensorParallelism:
    """Splits the layers of a module over the tensor-parallel ranks, according to its graph and the config."""

    name = "tensor_parallel"
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()

    def __init__(self, config: TPTrainingConfig) -> None:
        self.config = config

    def apply(self, module: nn.Module, context: TransformContext) -> None:
        mesh = context.mesh
        if mesh.size("tp") == 1:
            context.report("one rank: nothing to split")
            return
        # For a pipeline stage, plan the whole model: stages share things (a vocabulary, a tied weight).
        staged = isinstance(module, Staged)
        whole, inputs = (module.whole_meta(), module.meta_inputs()) if staged else (module, None)
        rules = rules_of(whole, self.config)
        grain = self.config.tensor_parallel.tp_grain_size
        try:
            plan = plan_module(whole, mesh.size("tp"), inputs=inputs, rules=rules, grain=grain)
        except PlanError as error:
            raise PlanError(f"{error}{_hint(whole)}") from error
        if self.config.vocab_parallel_lm_head and not any(each.heads for each in plan.vocabulary):
            raise PlanError(_NO_HEAD)
        tried = try_split(plan, mesh.communicator("tp"))
        if whole is not module:
            plan = plan.within(module)
        apply_plan(module, plan, mesh.communicator("tp"), context.replace_param)
        unmatched = f"; no parameter for {', '.join(map(repr, rules.unmatched))}" if rules.unmatched else ""
        context.report(f"{plan.describe()}; {tried}{unmatched}")


def _hint(module: nn.Module) -> str:
    """Return advice to append to the error of a model that cannot be traced."""
    from deepspeed.ops.sparse_attention import SparseSelfAttention

    if any(isinstance(each, QuantizedParameter) for each in module.parameters()):
        return f". {QUANTIZED}"
    if not any(isinstance(each, SparseSelfAttention) for each in module.modules()):
        return ""
    return (
        ". It has SparseSelfAttention in its layers, which cannot be split: keep the attention of a "
        "Transformers model, and set sparse_attention in the config, which replaces it after the split"
    )
