"""Rules about data efficiency: curricula, batches of tokens, and layers that drop tokens."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.config.rules.findings import Finding
from deepspeed.config.schema import TrainingConfig
from deepspeed.config.sections.data import (
    CurriculumLegacyConfig,
    CurriculumMetricConfig,
    RandomLTDConfig,
    wrong_curriculum,
    wrong_lengths,
    wrong_warmup,
)

SAMPLING = "data_efficiency.data_sampling"
RANDOM_LTD = "data_efficiency.data_routing.random_ltd"


def curricula_fit(config: TrainingConfig) -> Iterator[Finding]:
    """Each curriculum has what its kind of schedule needs."""
    sampling = config.data_efficiency.data_sampling
    asked: dict[str, CurriculumLegacyConfig | CurriculumMetricConfig] = {}
    if config.curriculum_learning is not None and config.curriculum_learning.enabled:
        asked["curriculum_learning"] = config.curriculum_learning
    if config.data_efficiency.enabled and sampling.enabled and sampling.curriculum_learning.enabled:
        metrics = sampling.curriculum_learning.curriculum_metrics or {}
        asked |= {
            f"{SAMPLING}.curriculum_learning.curriculum_metrics.{name}": each
            for name, each in metrics.items()
        }
    for key, section in asked.items():
        given = section.model_dump()
        details = given["schedule_config"] or {}
        if null := [
            each for each in ("min_difficulty", "max_difficulty", "schedule_type") if given[each] is None
        ]:
            yield Finding((key,), f"a curriculum needs {null[0]!r}, which is null")
        elif wrong := wrong_curriculum(given["schedule_type"], details):
            yield Finding((key,), wrong)


def one_choice_of_samples(config: TrainingConfig) -> Iterator[Finding]:
    """Harmless for a loader that the client makes itself."""
    sampling = config.data_efficiency.data_sampling
    both = sampling.dynamic_batching.enabled and sampling.curriculum_learning.enabled
    if config.data_efficiency.enabled and sampling.enabled and both:
        yield Finding(
            (f"{SAMPLING}.dynamic_batching.enabled", f"{SAMPLING}.curriculum_learning.enabled"),
            "dynamic_batching and curriculum_learning both choose the samples of a batch: initialize(training_data=) "
            "refuses that",
            is_error=False,
        )


def dropped_tokens(config: TrainingConfig) -> Iterator[Finding]:
    """Random-LTD: its layers, lengths and learning rate agree, and ranks do not share sequences."""
    routing = config.data_efficiency.data_routing
    section = routing.random_ltd
    if not (config.data_efficiency.enabled and routing.enabled and section.enabled):
        return
    lengths = section.random_ltd_schedule
    if lengths is not None and (wrong := wrong_lengths(lengths.model_dump())):
        yield Finding((f"{RANDOM_LTD}.random_ltd_schedule",), wrong)
    if wrong := wrong_layers(section):
        yield Finding((RANDOM_LTD,), wrong)
    for name in ("model_type", "hidden_state_order"):
        if getattr(section, name) is None:
            yield Finding((RANDOM_LTD,), f"{name} is needed: it cannot be null")
    if (config.sequence_parallel_size or 1) > 1:
        yield Finding(
            (f"{RANDOM_LTD}.enabled", "sequence_parallel_size"),
            "cannot be combined with sequence_parallel_size: ranks that share a sequence would each drop tokens of "
            "their own part",
        )
    yield from _learning_rate(config)


def wrong_layers(section: RandomLTDConfig) -> str:
    """Say what is wrong with the numbers of the layers that drop tokens; empty: nothing."""
    numbers, count, total = section.random_ltd_layer_id, section.random_ltd_layer_num, section.total_layer_num
    if numbers is None or count is None or total is None:
        return "random_ltd_layer_id, random_ltd_layer_num and total_layer_num are needed: none can be null"
    if len(numbers) != count:
        return f"random_ltd_layer_id has {len(numbers)} entries, random_ltd_layer_num is {count}: they must agree"
    wrong = [number for number in numbers if not 0 <= number < total or numbers.count(number) > 1]
    if wrong:
        return (
            f"random_ltd_layer_id has {wrong[0]}: layers are numbered from 0 to {total - 1} (total_layer_num - 1), "
            "each once"
        )
    return ""


def _learning_rate(config: TrainingConfig) -> Iterator[Finding]:
    asked = config.data_efficiency.data_routing.random_ltd.layer_token_lr_schedule
    key = f"{RANDOM_LTD}.layer_token_lr_schedule"
    if not asked.enabled:
        return
    if config.scheduler is not None and config.scheduler.type is not None:
        yield Finding(
            (RANDOM_LTD, "scheduler"),
            f"layer_token_lr_schedule.enabled=true sets the learning rate, as {config.scheduler.type} does: "
            "remove one of the two",
        )
    if asked.total_layer_tokens is None:
        yield Finding((f"{key}.total_layer_tokens",), "is missing")
        return
    warmup = asked.warmup_layer_tokens or 0
    if wrong := wrong_warmup(asked.warmup_type or "linear", warmup, asked.total_layer_tokens):
        yield Finding((key,), wrong)
