"""Random-LTD in an engine: which layers drop tokens, how many they keep at each step, and the reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deepspeed.base.logging import is_rank_zero, log_dist, logger
from deepspeed.config.problems import DeepSpeedConfigError
from deepspeed.data.data_routing.basic_layer import RandomLayerTokenDrop
from deepspeed.data.data_routing.layer_token_lr import LayerTokenLR
from deepspeed.data.data_routing.sampling import TokenPositions, TokenSampler
from deepspeed.data.data_routing.scheduler import RandomLTDScheduler

if TYPE_CHECKING:
    from deepspeed.engine.interface import Engine

SECTION = "data_efficiency.data_routing.random_ltd"


class RandomLTD:
    """Updates the schedule to the engine's step before each training forward.

    Args:
        section: config section with defaults; the batch sizes are added, as documented.
        seed: seed of the choice of tokens.

    DeepSpeedConfigError: the section is inconsistent, or does not fit the module or the parallelism.
    """

    def __init__(self, engine: Engine, section: dict[str, Any], seed: int) -> None:
        _check_axes(engine)
        section["global_batch_size"] = engine._config.train_batch_size
        section["micro_batch_size"] = engine._config.train_micro_batch_size_per_gpu
        self.engine = engine
        self.section = section
        self.scheduler = engine.random_ltd_scheduler = RandomLTDScheduler(section)
        self.scheduler.sampler = TokenSampler(section["random_ltd_layer_num"], seed, self.place)
        engine.random_ltd = self
        self._learning_rate()
        self.initialized = self.warned = False
        if _is_converted(engine.module):
            self.initialize()
        engine.events.on("before_forward", self.follow)
        engine.events.on("after_update", self.write)

    def place(self) -> TokenPositions:
        """Return the position of a forward, or of its recomputation, in the run."""
        mesh, position = self.engine.mesh, self.engine.clock.position
        return TokenPositions(self.engine.global_steps, position * mesh.size("dp") + mesh.rank("dp"))

    def initialize(self) -> None:
        """Make the configured layers drop tokens.

        DeepSpeedConfigError: a configured layer does not exist.
        """
        layers = _numbered(self.engine.module, self.section["total_layer_num"])
        for count, number in enumerate(sorted(self.section["random_ltd_layer_id"])):
            if number not in layers:
                raise DeepSpeedConfigError(
                    f"{SECTION}.random_ltd_layer_id has {number}, but the converted layers are "
                    f"{', '.join(map(str, sorted(layers))) or 'none'}: call convert_to_random_ltd with the "
                    "class of the model's layers; ids start at 0"
                )
            layers[number].init_config(self.section, self.scheduler, count)
        for layer in layers.values():
            layer.claimed = True
        self.initialized = True
        schedule = self.section["random_ltd_schedule"]
        log_dist(
            f"random-LTD: {self.section['random_ltd_layer_num']} of {self.section['total_layer_num']} layers keep "
            f"{schedule['min_value']} to {schedule['max_value']} tokens",
            ranks=[0],
        )

    def follow(self, **_: Any) -> None:
        if not self.engine.module.training:
            return
        step = self.engine.global_steps
        curriculum = getattr(self.engine, "curriculum_scheduler_legacy", None)  # it truncates sequences
        self.scheduler.update_seq(step, curriculum and curriculum.update_difficulty(step + 1))
        if not self.initialized and _is_converted(self.engine.module):  # converted after initialize
            self.initialize()
        if not (self.initialized or self.warned):
            self.warned = True
            logger.warning(
                f"{SECTION}.enabled is true, but no layer drops tokens: call convert_to_random_ltd(engine, LayerClass)"
            )

    def write(self, **_: Any) -> None:
        """Write the curves of each step."""
        engine = self.engine
        if not (engine.monitor.enabled and is_rank_zero()):
            return
        state = self.scheduler.state_dict()
        values = {
            "random_ltd_reserved_length": state["current_value"],
            "consumed_layer_tokens": state["consumed_layer_tokens"],
        }
        engine.monitor.write_events(engine.curve_axis.events(values))

    def _learning_rate(self) -> None:
        asked = self.section["layer_token_lr_schedule"]
        if not asked["enabled"]:
            return
        key = f"{SECTION}.layer_token_lr_schedule"
        if self.engine.lr_scheduler is not None:
            raise DeepSpeedConfigError(
                f"{key}.enabled=true sets the learning rate, as {type(self.engine.lr_scheduler).__name__} does: remove "
                "one of the two"
            )
        if self.engine.basic_optimizer is None:
            raise DeepSpeedConfigError(f"{key}.enabled=true needs an optimizer")
        self.engine.lr_scheduler = LayerTokenLR(
            self.engine.basic_optimizer,
            self.scheduler,
            total_layer_tokens=asked["total_layer_tokens"],
            warmup_layer_tokens=asked["warmup_layer_tokens"] or 0,
            warmup_type=asked["warmup_type"] or "linear",
        )


def _check_axes(engine: Engine) -> None:
    for axis, key, why in (
        ("sp", "sequence_parallel_size", "each rank would drop tokens of its part of the sequence"),
        ("pp", "stages of a pipeline", "micro-batches are recomputed in a different order"),
    ):
        if engine.mesh.size(axis) > 1:
            raise DeepSpeedConfigError(f"{SECTION}.enabled=true cannot be combined with {key}: {why}")
    if hasattr(engine, "train_batch"):
        raise DeepSpeedConfigError(f"{SECTION}.enabled=true cannot be combined with a PipelineModule")


def _is_converted(module: torch.nn.Module) -> bool:
    return any(isinstance(each, RandomLayerTokenDrop) for each in module.modules())


def _numbered(module: torch.nn.Module, total: int) -> dict[int, RandomLayerTokenDrop]:
    """Return the converted layers by number: their position, if all layers of the model are converted, else the last
    number in their names."""
    found = [(name, each) for name, each in module.named_modules() if isinstance(each, RandomLayerTokenDrop)]
    if len(found) == total:
        return {number: each for number, (_, each) in enumerate(found)}
    numbered = {}
    for name, each in found:
        numbers = [part for part in name.split(".") if part.isdigit()]
        if numbers:
            numbered[int(numbers[-1])] = each
    return numbered
