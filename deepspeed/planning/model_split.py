"""One rank's part of a model under tensor and pipeline parallelism."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from deepspeed.ops.partitions import partition_balanced
from deepspeed.planning.activations import TransformerShape
from deepspeed.planning.planned_model import PlannedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSplit:
    """Model-parallel position of a rank. ``tensor``: tensor-parallel degree. ``stages``: pipeline stages; ``stage``:
    this rank's. ``held``: micro-batches in flight, whose activations the stage holds at the same time."""

    tensor: int = 1
    stages: int = 1
    stage: int = 0
    held: int = 1

    @property
    def ways(self) -> int:
        """Number of parts into which the model is divided."""
        return self.tensor * self.stages

    def local_model(self, model: PlannedModel, module: nn.Module) -> PlannedModel:
        """Return the model for a rank of this stage: every matrix is divided by ``tensor``, other parameters are
        whole."""
        if self.ways == 1:
            return model
        first, stop = self._calls(model)
        calls = model.calls[first:stop]
        chosen = sorted({i for call in calls for i in call})
        matrices = {name for name, param in module.named_parameters() if param.dim() >= 2}
        place = {old: new for new, old in enumerate(chosen)}
        specs = []
        for old, new in place.items():
            spec = model.specs[old]
            parts = self.tensor if spec.name in matrices else 1
            specs.append(replace(spec, index=new, numel=-(-spec.numel // parts)))
        trained = sum(old < model.trained for old in chosen)
        return replace(
            model,
            specs=specs,
            trained=trained,
            group_of=[model.group_of[old] for old in chosen[:trained]],
            calls=[[place[i] for i in call] for call in calls],
            built_itemsizes=[model.built_itemsizes[old] for old in chosen],
        )

    def _calls(self, model: PlannedModel) -> tuple[int, int]:
        """Return the range of calls of this stage, balanced by parameters."""
        if self.stages == 1:
            return 0, len(model.calls)
        sizes = [sum(model.specs[i].numel for i in dict.fromkeys(call)) for call in model.calls]
        bounds = partition_balanced(sizes, self.stages)
        return bounds[self.stage], bounds[self.stage + 1]

    def local_shape(self, shape: TransformerShape) -> TransformerShape:
        """Return the shape whose activations a rank of this stage holds. Norms and residuals are not divided; logits
        are on the last stage."""
        last = self.stage == self.stages - 1
        return replace(
            shape,
            layers=-(-shape.layers // self.stages) * self.held,
            heads=max(1, shape.heads // self.tensor),
            kv_heads=max(1, shape.kv_heads // self.tensor),
            intermediate=-(-shape.intermediate // self.tensor),
            vocabulary=-(-shape.vocabulary // self.tensor) if last else 0,
        )
