"""Tensor-parallel rules: of the user, of a preset, or of the model's author.

The model's graph takes precedence. A user's rule chooses among what the graph allows; a rule that contradicts the graph
is refused by name. Only if the graph of a model cannot be traced, the rules are the whole plan (``plan_by_rules``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from deepspeed.base.logging import logger
from deepspeed.base.sharded import full_shape
from deepspeed.config.sections.parallel import TPTrainingConfig, _get_hf_tp_plan
from deepspeed.parallel.tensor.cuts import Cut, even_sizes
from deepspeed.parallel.tensor.planning.autotp_config import (
    AutoTPConfig,
    AutoTPPresets,
    PartitionType,
    TPLayerSpec,
    merge_autotp_configs,
)
from deepspeed.parallel.tensor.planning.plan import ParameterPlan, PlanError, SplitKind, TensorParallelPlan
from deepspeed.parallel.tensor.probing import transposed_by_trial

USER = "excluded by your rules"
_UNNAMED = "no rule matches it"
_SPLIT: dict[PartitionType, SplitKind] = {PartitionType.COLUMN: "column", PartitionType.ROW: "row"}


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule that applies to one parameter. ``source``: the config key or plan it is from. ``of_user``: written by the
    user."""

    spec: TPLayerSpec
    source: str
    of_user: bool


@dataclass(frozen=True, slots=True)
class Rules:
    """``rules``: by parameter name. ``whole``: parameters that stay whole -> why. ``splits_siblings``: without a graph,
    the other linear layers of a block with a row-parallel layer are column-parallel. ``unmatched``: patterns of the
    user that match no parameter."""

    rules: Mapping[str, Rule] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    splits_siblings: bool = False
    unmatched: tuple[str, ...] = ()

    @property
    def gathered(self) -> Iterator[tuple[str, Rule]]:
        """Yield the user's rules for column-parallel layers whose output is gathered."""
        return ((name, each) for name, each in self.rules.items() if each.of_user and _is_gathered(each.spec))


def rules_of(module: nn.Module, section: TPTrainingConfig) -> Rules:
    """Return the rules of the section ``tensor_parallel``, by parameter.

    PlanError: rules contradict each other, or a preset is for other models. ValueError: in ``strict_mode``, a linear
    layer has no rule.
    """
    every = {name: len(full_shape(param)) for name, param in module.named_parameters()}
    names = [name for name, dims in every.items() if dims > 1]
    model_type = getattr(getattr(module, "config", None), "model_type", None)
    preset = _preset(section, names, module)
    own = None
    if section.partition_config is not None:
        own = AutoTPConfig.from_dict(section.partition_config.model_dump())
    mine = own.layer_specs if own is not None else []
    everything = merge_autotp_configs(preset or AutoTPConfig(), own) if own is not None else preset
    found: dict[str, Rule] = {}
    if everything is not None:
        for name in _linear_weights(module) if everything.strict_mode else every:
            spec = everything.find_matching_spec(name, model_type)
            if spec is not None and (every[name] > 1 or spec.grad_allreduce):
                source = "partition_config" if spec in mine else f"preset_model {section.preset_model!r}"
                found[name] = Rule(spec, f"tensor_parallel.{source}", spec in mine)
    for name, rule in _injected(section.injection_policy_tuple, names).items():
        other = found.get(name)
        if other is not None and other.of_user and other.spec.partition_type is not PartitionType.ROW:
            raise PlanError(
                f"{name} is 'row' by {rule.source} and {other.spec.partition_type.value!r} by {other.source}"
            )
        found[name] = rule if other is None or not other.of_user else other
    whole = {n: USER for n, r in found.items() if r.of_user and r.spec.partition_type is PartitionType.SKIP}
    if own is not None and not own.use_default_specs:
        whole |= {name: _UNNAMED for name in names if name not in found}
    patterns = [pattern for spec in mine for pattern in spec.patterns]
    unmatched = tuple(pattern for pattern in patterns if not any(re.match(pattern, name) for name in every))
    return Rules(found, whole, bool(section.injection_policy_tuple), unmatched)


def _preset(section: TPTrainingConfig, names: Sequence[str], module: nn.Module) -> AutoTPConfig | None:
    """Return the config of ``preset_model``, if set. PlanError: its rules match no parameter of the model."""
    if section.preset_model is None:
        return None
    preset = AutoTPPresets.get_preset(section.preset_model)
    if preset is None or not any(preset.find_matching_spec(name) for name in names):
        raise PlanError(
            f"tensor_parallel.preset_model={section.preset_model!r} names no parameter of "
            f"{type(module).__name__}; leave it out: the model's graph decides what to split"
        )
    return preset


def _injected(policy: tuple[Any, ...] | None, names: Sequence[str]) -> dict[str, Rule]:
    """Return row-parallel rules for the layers of an injection policy, whose outputs are summed. PlanError: an entry is
    not the name of a layer."""
    source = "tensor_parallel.injection_policy_tuple"
    found: dict[str, Rule] = {}
    for entry in policy or ():
        if not isinstance(entry, str):
            raise PlanError(f"{source}: {entry!r} is not a layer name such as 'self_attn.o_proj'")
        mine = [name for name in names if f".{name}".endswith(f".{entry}.weight")]
        if not mine:
            raise PlanError(f"{source}: the model has no layer named {entry!r}")
        spec = TPLayerSpec([re.escape(entry)], PartitionType.ROW)
        found |= dict.fromkeys(mine, Rule(spec, source, True))
    return found


def author_rules(module: nn.Module, ranks: int) -> Rules | None:
    """Return the rules of the ``base_model_tp_plan`` of a Transformers model; None if it has none, or ``ranks`` does
    not divide its heads."""
    config = getattr(module, "config", None)
    heads = [getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    if any(isinstance(count, int) and count % ranks for count in heads):
        return None
    plan = getattr(module, "tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        return _carried_rules(module)
    found: dict[str, Rule] = {}
    for name, _ in module.named_parameters():
        for pattern, kind in plan.items():
            same = re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+") + r"\.weight", name)
            style = _STYLES.get(kind)
            if same and style is not None and style["partition_type"] in _SPLIT:
                found[name] = Rule(TPLayerSpec([name], **style), "base_model_tp_plan", False)
    return Rules(found) if found else None


def _carried_rules(module: nn.Module) -> Rules | None:
    """Return the rules of a module that is not a Transformers class but carries such a plan."""
    specs = TPPlanConverter.convert(_get_hf_tp_plan(module) or {}) or []
    found: dict[str, Rule] = {}
    for name, _ in module.named_parameters():
        spec = next((each for each in specs if each.matches(name)), None)
        if spec is not None:
            found[name] = Rule(spec, "base_model_tp_plan", False)
    return Rules(found) if found else None


# ------------------------------------------------------------------------------------ with a graph


def apply_rules(plan: TensorParallelPlan, rules: Rules, module: nn.Module) -> TensorParallelPlan:
    """Check ``plan``, made without the parameters in ``rules.whole`` and ``rules.gathered``, against the user's rules.
    Returns it with the layers that gather their outputs added.

    PlanError: a rule contradicts the plan.
    """
    vocabulary = {each.weight for each in plan.vocabulary}
    params = dict(module.named_parameters())
    gathered = dict(rules.gathered)
    for name, rule in rules.rules.items():
        if not rule.of_user or name in gathered:
            continue
        kind = _SPLIT.get(rule.spec.partition_type)
        if kind is None:
            _check_summed(name, rule, plan)
        elif kind == "column" and name in vocabulary:
            continue
        else:
            _check_kind(name, kind, rule, plan, name in vocabulary)
            _check_shape(name, rule, plan.parameters[name].cut)
    more = {}
    for name, rule in gathered.items():
        more |= _gathering(name, rule, module, params, plan.ranks)
    whole = {name: why for name, why in plan.whole.items() if name not in more}
    inputs = {name.rpartition(".")[0]: name for name in gathered}
    return replace(
        plan, parameters={**plan.parameters, **more}, whole=whole, inputs={**plan.inputs, **inputs}
    )


def _check_kind(name: str, kind: str, rule: Rule, plan: TensorParallelPlan, in_vocabulary: bool) -> None:
    found = plan.parameters.get(name)
    if found is not None and found.kind in (kind, "sliced"):
        return
    if found is not None:
        why = f"it is {found.kind!r}"
    else:
        why = "its vocabulary is split" if in_vocabulary else plan.whole.get(name, "it is not a linear layer")
        why = f"it stays whole, because {why}" if name in plan.whole else why
    raise PlanError(
        f"{rule.source} wants {name} to be {kind!r}, but by the model's graph {why}; change the rule, or leave it out"
    )


def _check_shape(name: str, rule: Rule, cut: Cut) -> None:
    blocks = _blocks(name, rule, cut.size)
    position = 0
    for size in blocks:
        low, high = position, position + size
        position = high
        own = [sum(max(0, min(b, high) - max(a, low)) for a, b in part) for part in cut.parts]
        if any(part and not mine for part, mine in zip(cut.parts, own, strict=True)):
            raise PlanError(
                f"{rule.source} splits {name} into parts of {list(blocks)}; by the model's graph, ranks "
                f"hold {list(cut.parts)}"
            )


def _check_summed(name: str, rule: Rule, plan: TensorParallelPlan) -> None:
    if not rule.spec.grad_allreduce or name in plan.summed:
        return
    if name.rpartition(".")[0] in plan.outputs_summed:
        return
    raise PlanError(
        f"{rule.source} wants the gradient of {name} to be summed, but by the model's graph every rank "
        "already has the full gradient"
    )


def _gathering(
    name: str, rule: Rule, module: nn.Module, params: Mapping[str, nn.Parameter], ranks: int
) -> dict[str, ParameterPlan]:
    dims = linear_dims(module.get_submodule(name.rpartition(".")[0]))
    if dims is None:
        raise PlanError(f"{rule.source} wants {name} to be 'column', but it is not a linear layer")
    return _split(name, rule, dims, params, ranks)


# --------------------------------------------------------------------------------- without a graph


def plan_by_rules(module: nn.Module, ranks: int, rules: Rules, why: str) -> TensorParallelPlan:
    """Make the plan of a model whose graph cannot be traced: layers named by rules are split evenly, all others stay
    whole.

    Nothing here checks that the forward works on parts: views into heads must use ``-1`` as the number of heads, as in
    Transformers.

    PlanError: a rule names something other than a linear layer, or the parts would not be equal.
    """
    params = dict(module.named_parameters())
    named = dict(rules.rules)
    if rules.splits_siblings:
        named = {**_siblings(module, named), **named}
    found: dict[str, ParameterPlan] = {}
    summed: list[str] = []
    inputs: dict[str, str | None] = {}
    for name, rule in named.items():
        kind = _SPLIT.get(rule.spec.partition_type)
        path = name.rpartition(".")[0]
        if kind is None:
            summed += [name] * rule.spec.grad_allreduce
            continue
        dims = linear_dims(module.get_submodule(path), try_it=rule.of_user)
        if dims is None:
            if rule.of_user:
                raise PlanError(f"{rule.source} wants {name} to be {kind!r}, but it is not a linear layer")
            continue
        found |= _split(name, rule, dims, params, ranks)
        if kind == "column":
            inputs[path] = path
    skipped = next((rule.source for rule in named.values() if rule.of_user), None)
    if not found and skipped is None:
        raise PlanError(f"{why}; and no rule selects anything to split")
    source = f"{next(iter(found.values())).reason} ({why})" if found else f"{skipped} keeps all layers whole"
    return TensorParallelPlan(
        ranks=ranks, source=source, parameters=found, inputs=inputs, summed=tuple(summed), whole=rules.whole
    )


def _siblings(module: nn.Module, named: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return column-parallel rules for the other linear layers of the blocks that have row-parallel ones."""
    found: dict[str, Rule] = {}
    weights = _linear_weights(module)
    for name, rule in named.items():
        block = re.match(r"(.*\.)?\d+\.", name)
        if rule.spec.partition_type is PartitionType.ROW and block:
            for other in weights:
                if other.startswith(block.group()) and other not in named:
                    found[other] = Rule(TPLayerSpec([re.escape(other)]), rule.source, True)
    return found


def linear_dims(layer: nn.Module, *, try_it: bool = False) -> tuple[int, int] | None:
    """Return (dim of outputs, dim of inputs) of the weight of a linear layer; None if the layer cannot be split.

    ``try_it``: decide by a trial call whether a layer of an unknown class, which a rule names, is linear.
    """
    if isinstance(layer, nn.Linear):
        return 0, 1
    if any(base.__name__ == "Conv1D" for base in type(layer).__mro__) and isinstance(
        getattr(layer, "nf", None), int
    ):
        return 1, 0
    transposed = transposed_by_trial(layer) if try_it else None
    return None if transposed is None else (1, 0) if transposed else (0, 1)


def _linear_weights(module: nn.Module) -> list[str]:
    params = dict(module.named_parameters())
    found = [f"{path}.weight" for path, each in module.named_modules() if linear_dims(each) is not None]
    return [name for name in found if name in params]


def _is_gathered(spec: TPLayerSpec) -> bool:
    return spec.gather_output and spec.partition_type is PartitionType.COLUMN


def _blocks(name: str, rule: Rule, size: int) -> tuple[int, ...]:
    """Return the extents of the matrices side by side. PlanError: they do not sum to ``size``."""
    sizes, count = rule.spec.get_sub_param_sizes(), rule.spec.get_num_sub_params()
    if sizes is None:
        count = count or 1
        sizes = (size // count,) * count
    if sum(sizes) != size:
        raise PlanError(
            f"{rule.source}: the shape {rule.spec.shape} does not match {name}, which is {size} wide"
        )
    return sizes


def _split(
    name: str, rule: Rule, dims: tuple[int, int], params: Mapping[str, nn.Parameter], ranks: int
) -> dict[str, ParameterPlan]:
    """Cut the weight ``name`` evenly along the dim of its outputs or inputs (``dims``), as ``rule`` says, and the bias
    with the outputs. PlanError: ``ranks`` does not divide a matrix whose outputs are not gathered."""
    kind, gather = _SPLIT[rule.spec.partition_type], _is_gathered(rule.spec)
    dim = dims[kind == "row"]
    size = full_shape(params[name])[dim]
    blocks = _blocks(name, rule, size)
    if not gather and any(each % ranks for each in blocks):
        raise PlanError(f"{rule.source}: {name} is {size} wide, not a multiple of {ranks} ranks")
    cut = Cut.fused(dim, [even_sizes(each, ranks) for each in blocks])
    found = {name: ParameterPlan(kind, cut, rule.source, gather=gather)}
    bias = f"{name.rpartition('.')[0]}.bias"
    if kind == "column" and bias in params:
        found[bias] = ParameterPlan("column", cut.along(0), rule.source, gather=gather)
    return found


# Conversion of the plan of a Transformers model (``base_model_tp_plan``) to rules of ``partition_config``.

_STYLES: dict[str, dict[str, Any]] = {
    "colwise": {"partition_type": PartitionType.COLUMN},
    "colwise_rep": {"partition_type": PartitionType.COLUMN, "gather_output": True},
    "colwise_gather_output": {"partition_type": PartitionType.COLUMN, "gather_output": True},
    "rowwise": {"partition_type": PartitionType.ROW},
    "replicated_with_grad_allreduce": {"partition_type": PartitionType.SKIP, "grad_allreduce": True},
}


class TPPlanConverter:
    """Converts a Transformers plan (names with wildcards -> styles) to ``TPLayerSpec``."""

    @staticmethod
    def convert(hf_tp_plan: Mapping[str, str]) -> list[TPLayerSpec] | None:
        """Return one rule per entry, in the plan's order.

        A layer with an unsupported style gets a rule that keeps it whole, so that no other rule splits it. None: no
        style of the plan is supported.
        """
        known = {name for name, style in hf_tp_plan.items() if style.lower() in _STYLES}
        if hf_tp_plan and not known:
            return None
        foreign = sorted({style for name, style in hf_tp_plan.items() if name not in known})
        if foreign:
            logger.warning("layers of these styles of the model's tp_plan stay whole: %s", ", ".join(foreign))
        return [_spec(name, style.lower()) for name, style in hf_tp_plan.items()]

    @staticmethod
    def _wildcard_to_regex(pattern: str) -> str:
        """Return a regex in which ``*`` matches anything, and that may match from any position of a parameter name."""
        return ".*" + pattern.replace(".", r"\.").replace("*", ".*")


def _spec(name: str, style: str) -> TPLayerSpec:
    regex = TPPlanConverter._wildcard_to_regex(name.removesuffix(".weight"))
    return TPLayerSpec([rf"{regex}\.weight$"], **_STYLES.get(style, {"partition_type": PartitionType.SKIP}))
