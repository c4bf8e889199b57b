"""Compression schedule of an engine: which techniques are active at which step, and when weights are pruned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.base.logging import log_dist
from deepspeed.base.staged import Staged
from deepspeed.comm.collectives import Communicator
from deepspeed.compression.scheduler import compression_scheduler
from deepspeed.compression.snip import SnipMomentum
from deepspeed.compression.techniques import SNIP, Compressible
from deepspeed.config import compression_constants as keys
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.config.sections.compression import get_compression_config

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine


def attach_compression(engine: Engine) -> None:
    """Set the engine's ``compression_scheduler``, if its config enables techniques and its module is prepared."""
    section = get_compression_config(engine._config._param_dict)
    asked = [
        each for each in keys.TECHNIQUES if section[each][keys.SHARED_PARAMETERS][keys.TECHNIQUE_ENABLED]
    ]
    prepared = any(isinstance(module, Compressible) for module in engine.module.modules())
    stages = engine.replica_groups.across.get("pp")
    if asked and stages is not None:  # a stage without compressed layers still takes part
        votes = torch.tensor([float(prepared)], device=engine.device)
        stages.all_reduce_max(votes).wait()
        prepared = bool(votes)
    if not asked and not prepared:
        return
    if not prepared:
        log_dist(
            f"compression_training asks for {', '.join(asked)}, but this module was not prepared by "
            "init_compression: training it uncompressed",
            ranks=[0],
        )
        return
    if not asked:
        raise DeepSpeedConfigError(
            "the module was prepared by init_compression, but the config of deepspeed.initialize enables no "
            "technique of compression_training: pass the same config to both"
        )
    pruners = _find_pruners(engine, section[keys.SPARSE_PRUNING][keys.SHARED_PARAMETERS], stages)
    CompressionSchedule(engine, compression_scheduler(engine.module, section), pruners)


def _find_pruners(
    engine: Engine, shared: Mapping[str, Any], stages: Communicator | None
) -> list[SnipMomentum]:
    """Return the pruners made by `init_compression`; new ones if the prepared modules were moved into another model,
    such as a pipeline. All stages have them, as they choose weights collectively."""
    module: Any = engine.module
    pruners: list[SnipMomentum] = vars(module).get("pruners", [])
    if not shared[keys.TECHNIQUE_ENABLED] or shared["method"] != SNIP:
        return pruners
    # imports all compressed layers, needed for pruning only
    from deepspeed.compression.helper import make_pruner
    from deepspeed.compression.pipeline import GlobalTopK

    pruners = pruners or [make_pruner(shared, module)]
    if stages is None:
        return [pruner for pruner in pruners if pruner.modules]
    whole = module.whole_meta() if isinstance(module, Staged) else module
    order = [name for name, _ in whole.named_modules()]
    for pruner in pruners:
        pruner.choose = GlobalTopK(stages, order, engine.device)
    return pruners


class CompressionSchedule:
    """Keeps ``scheduler`` and the module's pruners at the engine's step, and quantizes weights after an update where
    this is not done in forward (``quantize_weight_in_forward: false``)."""

    def __init__(self, engine: Engine, scheduler: compression_scheduler, pruners: list[SnipMomentum]) -> None:
        self.engine = engine
        self.scheduler = engine.compression_scheduler = scheduler
        self.pruners = pruners
        for pruner in self.pruners:  # tensor parallelism may have replaced layers
            pruner.modules = {name: engine.module.get_submodule(name) for name in pruner.modules}  # type: ignore[misc]
        self.written = self._find_written()
        self.follow()
        engine.events.on("after_update", self.after_update)
        engine.events.on("on_load", self.follow)
        if self.pruners:
            engine.events.on("at_boundary", self.score)

    def _find_written(self) -> list[Compressible]:
        """Return the modules whose 16-bit weights are quantized after each update. At stage 3 no rank has whole
        weights then, so it is done in forward, with the same result."""
        found = {
            id(module.weight): module
            for module in self.scheduler.modules
            if module.weight_bits is not None and not module.weight_quantization_enabled_in_forward
        }
        if found and self.engine.plan.precision.master is None:
            raise DeepSpeedConfigError(
                "compression_training.weight_quantization.shared_parameters.quantize_weight_in_forward=false "
                "quantizes 16-bit weights next to fp32 masters, but training in fp32 has no 16-bit weights: "
                "set it to true, or enable fp16 or bf16"
            )
        if self.engine.plan.zero.shard_params:
            for module in found.values():
                module.weight_quantization_enabled_in_forward = True
            return []
        return list(found.values())

    def follow(self, *, written: bool = True, **_: Any) -> None:
        """Advance to the engine's step. ``written``: the weights have changed."""
        self.scheduler.training_steps = self.engine.global_steps
        self.scheduler.check_all_modules()
        for pruner in self.pruners:
            pruner.step = self.engine.global_steps
        if written and self.scheduler.weight_quantization_enabled:
            self._write()

    @torch.no_grad()
    def _write(self) -> None:
        for module in self.written:
            weight = module.weight.data
            now = module.quantized_now(module.whole(weight), module.weight_rounding)
            weight.copy_(module.part(now))

    def score(self) -> None:
        access = self.engine.state_access
        for pruner in self.pruners:
            pruner.on_before_optimizer_step(weight=access.full_master, gradient=access.full_gradient)

    def after_update(self) -> None:
        for pruner in self.pruners:
            pruner.on_after_optimizer_step()
        self.follow(written=self.engine.was_step_applied())
