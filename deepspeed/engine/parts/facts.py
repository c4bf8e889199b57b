"""Queries about an engine: ``engine.facts``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.config.plan import GradientPlan
from deepspeed.config.section import note

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine
    from deepspeed.transforms.progressive_layer_drop import ProgressiveLayerDrop


class EngineFacts:
    """Answers queries about the last step, the optimizer's groups, dtypes, and groups of ranks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.norm: float | None = None
        """Gradient norm of the last step."""
        self.applied = False
        """True if the last step updated the weights."""
        self._averages: bool | None = None
        self._sent_as: torch.dtype | None = None

    # The last step and the optimizer --------------------------------------------------------------------------

    def get_global_grad_norm(self) -> float | None:
        """Return the gradient norm before clipping at the last step (inf if it was skipped); None before the first."""
        return self.norm

    def was_step_applied(self) -> bool:
        """Return whether the last ``step()`` updated the weights."""
        return self.applied

    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._engine.basic_optimizer
        return optimizer.param_groups if optimizer is not None else []

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group."""
        return [group["lr"] for group in self._groups()]

    def get_type(self) -> list[Any]:
        """Return the ``type`` of each group, None where it has none."""
        return [group.get("type") for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """Return the betas of each group, or its momentum if it has no betas."""
        return [group.get("betas", group.get("momentum")) for group in self._groups()]

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Return the mean milliseconds of each timer (needs ``wall_clock_breakdown``)."""
        return {name: timer.mean() for name, timer in self._engine.timers.get_timers().items()}

    def position_in_batch(self) -> str:
        """Describe the action in progress, for hang reports; empty except in pipelines."""
        return ""

    # The module -----------------------------------------------------------------------------------------------

    @property
    def progressive_layer_drop(self) -> ProgressiveLayerDrop | None:
        """Schedule of progressive layer dropping, None if not configured."""
        found = [
            each for each in self._engine.module_transforms.inputs if each.name == "progressive_layer_drop"
        ]
        return found[0].schedule if found else None  # type: ignore[attr-defined]

    def get_pld_theta(self) -> float | None:
        """Return the current fraction of layers kept by progressive layer dropping; None without it."""
        schedule = self.progressive_layer_drop
        return schedule.get_theta() if schedule is not None else None

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return (model dtype, dtype in which gradients accumulate)."""
        precision = self._engine.plan.precision
        model = precision.param or torch.float32
        return model, precision.accumulate or model

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Names, such as ``emb.weight``, of embeddings whose gradients are sent as used rows only
        (``sparse_gradients``)."""
        engine = self._engine
        if not engine._config.sparse_gradients_enabled:
            return set()
        from deepspeed.zero.partitioning import sparse_parameters

        weights = sparse_parameters(engine.module)
        return {name for name, param in engine.module.named_parameters() if param in weights}

    # Sums of gradients ----------------------------------------------------------------------------------------

    @property
    def communication_data_type(self) -> torch.dtype:
        """Dtype of gradients on the wire: as set, else that of the config, else the training dtype. Trainers set it
        after ``initialize``; at stages 2 and 3, and with compressed gradients, the buffers keep theirs, with a
        warning."""
        precision = self._engine.plan.precision
        return self._sent_as or precision.reduce or precision.param or torch.float32

    @communication_data_type.setter
    def communication_data_type(self, value: torch.dtype) -> None:
        core, groups = self._engine.core, self._engine.replica_groups
        buckets = core.reducer.buckets if core is not None else ()
        sent = [bucket for bucket in buckets if groups[bucket.layout.replica_group].all_ranks.size > 1]
        changed = [bucket.send_as(value) for bucket in sent]
        if all(changed):
            self._sent_as = value
        else:
            known = ", ".join(sorted({str(bucket.wire_dtype) for bucket in sent}))
            note(
                f"communication_data_type={value} has no effect on this engine, whose buffers are made for {known}: "
                "set the config key before initialize"
            )

    @property
    def gradient_average(self) -> bool:
        """True: gradients are averaged over the ranks; False: summed. Initialized from ``gradient_allreduce_op``; it
        can be set wherever that key can be "sum"."""
        return self._engine.plan.gradients.mean if self._averages is None else self._averages

    @gradient_average.setter
    def gradient_average(self, value: bool) -> None:
        if bool(value) == self.gradient_average:
            return
        engine = self._engine
        if engine._config.zero_optimization_stage == 3 or engine._config.zero_config.zenflow is not None:
            raise ValueError(
                f"gradient_average={value!r}: with ZeRO stage 3 or ZenFlow gradients are always averaged. Scale the "
                "loss instead, or use a lower stage."
            )
        buckets = engine._require_core("gradient_average").reducer.buckets
        self._averages = bool(value)
        for bucket in buckets:
            bucket.factors = self.gradient_rule().factors(
                engine.replica_groups[bucket.layout.replica_group].divisor
            )

    def gradient_rule(self) -> GradientPlan:
        """Return the plan of gradient sums, with the current ``gradient_average``."""
        return replace(self._engine.plan.gradients, mean=self.gradient_average)

    # Groups of ranks ------------------------------------------------------------------------------------------

    @property
    def expert_parallel_group(self) -> dict[str, Any]:
        """Name of a group of experts -> the ranks that share one set of experts; empty without experts."""
        return self._expert_groups(same=False)

    @property
    def expert_data_parallel_group(self) -> dict[str, Any]:
        """Name of a group of experts -> the ranks that hold the same experts; empty without experts."""
        return self._expert_groups(same=True)

    def _expert_groups(self, *, same: bool) -> dict[str, Any]:
        module, mesh = self._engine.module, self._engine.mesh
        experts = [p for p in module.parameters() if not getattr(p, "allreduce", True)]
        sizes = {name: int(name.rpartition("_")[2]) for name in sorted({str(p.group_name) for p in experts})}  # type: ignore[attr-defined]
        return {
            name: mesh.among(mesh.sharing_experts(size, same=same), same=same).group
            for name, size in sizes.items()
        }
