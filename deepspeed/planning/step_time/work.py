"""Compute time of a rank: forward and backward of each call of the model, and the update per element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from deepspeed.planning.activations import TransformerShape
from deepspeed.planning.planned_model import PlannedModel
from deepspeed.planning.step_time.hardware import Device

BACKWARD = 2.0
"""GEMMs of a backward per GEMM of its forward: one for the input gradient, one for the weight gradient."""

BYTES_PER_UPDATE = 28.0
"""Memory traffic per element of Adam in mixed precision: master and two moments (read and written), gradient, 16-bit
weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Durations in seconds: ``forward`` and ``backward`` by call, ``per_element`` of the update. ``contention``: factor
    on all of them if ranks share cores."""

    forward: Sequence[float]
    backward: Sequence[float]
    per_element: float
    contention: float = 1.0
    extra: Sequence[Sequence[PlannedExchange]] = field(default_factory=tuple)
    """By call: blocking collectives of its layers, in forward and again in backward."""

    def stretched(self, factor: float) -> StepWork:
        """Return a copy with all compute times multiplied by ``factor``."""
        return replace(
            self,
            forward=[factor * each for each in self.forward],
            backward=[factor * each for each in self.backward],
            per_element=factor * self.per_element,
        )


@dataclass(frozen=True, slots=True)
class PlannedExchange:
    """A collective inside a layer among ``ranks`` neighbours, ``times`` in forward and again in backward."""

    operation: str
    nbytes: float
    ranks: int
    times: int = 1


def flops_by_call(
    module: nn.Module,
    model: PlannedModel,
    tokens: int,
    sequence: int = 0,
    shape: TransformerShape | None = None,
) -> list[float]:
    """Return the FLOPs of each call's forward: two per matrix weight and token, plus attention.

    Embedding lookups count as zero; an embedding whose vocabulary no other matrix maps to is also the output head, in
    the last call. A token visits as many experts as the model's config says.
    """
    weights, head = _matrix_weights(module, model, shape)
    calls = [2.0 * tokens * sum(weights[i] for i in dict.fromkeys(call)) for call in model.calls]
    if not calls:
        return [0.0]
    calls[-1] += 2.0 * tokens * head
    blocks = layer_calls(model)
    if shape is not None and sequence and blocks:
        # Two GEMMs, half of each is masked.
        per_layer = 2.0 * tokens * sequence * shape.heads * shape.head_dim
        for call in blocks:
            calls[call] += per_layer * shape.layers / len(blocks)
    return calls


def layer_calls(model: PlannedModel) -> list[int]:
    """Return the calls of the repeated blocks: those of the repeated size that holds the most parameters; without one,
    the largest call."""
    sizes = [sum(model.specs[i].numel for i in dict.fromkeys(call)) for call in model.calls]
    counts = {size: sizes.count(size) for size in sizes}
    alike = [size for size, count in counts.items() if count > 1]
    if not alike:
        return [max(range(len(sizes)), key=sizes.__getitem__)] if sizes else []
    usual = max(alike, key=lambda size: size * counts[size])
    return [i for i, size in enumerate(sizes) if size == usual]


def _matrix_weights(
    module: nn.Module, model: PlannedModel, shape: TransformerShape | None
) -> tuple[list[float], float]:
    """Return, by parameter, the number of weights that multiply a token, and the weights of a tied output head."""
    tables = {id(part.weight): part for part in module.modules() if isinstance(part, nn.Embedding)}
    params = dict(module.named_parameters(remove_duplicate=False))
    largest = max((part.num_embeddings for part in tables.values()), default=0)
    linear = {part.weight.shape[0] for part in module.modules() if isinstance(part, nn.Linear)}
    shared = {id(part.weight) for part in module.modules() if isinstance(part, nn.Linear)} & tables.keys()
    found, head = [], 0.0
    for spec in model.specs:
        param = params.get(spec.name)
        if param is None or (param.dim() < 2 and not hasattr(param, "ds_shape")):
            found.append(0.0)
        elif id(param) in tables:
            found.append(0.0)
            vocabulary = tables[id(param)].num_embeddings
            if id(param) in shared or (vocabulary not in linear and vocabulary == largest):
                head = max(head, float(spec.numel))
        else:
            found.append(spec.numel * _visited(spec.replica_group, module))
    return found, head


def _visited(replica_group: str, module: nn.Module) -> float:
    """Return the factor on the weights of a rank's experts: the experts that a token visits over the experts per rank;
    1 for dense parameters and for models that do not say."""
    if not replica_group.startswith("ep_size_"):
        return 1.0
    config = getattr(module, "config", None)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    visits = getattr(config, "num_experts_per_tok", None) or 1
    size = int(replica_group.split("_")[2].partition(",")[0])
    return visits * size / experts if experts else 1.0


def work_of_device(device: Device, flops: Sequence[float], *, recompute: bool = False) -> StepWork:
    """Return the work at the device's rates. ``recompute``: activations are checkpointed, so backward repeats
    forward."""
    rate = device.flops * device.share
    forward = [each / rate + device.launch for each in flops]
    factor = BACKWARD + (1.0 if recompute else 0.0)
    return StepWork(
        forward=forward,
        backward=[each / rate * factor + device.launch for each in flops],
        per_element=BYTES_PER_UPDATE / device.memory_rate,
    )
