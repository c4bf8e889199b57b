"""The list of rules between several sections of a config, and the rules on data, optimizers and schedules (`zero.py`
and `precision.py` have the others).

Every rule yields its findings as `Finding(keys, message)`: the first key is the reported one, the others are those that
the rule read (a finding is dropped if one of its keys is itself invalid). Rules within a single section are in its
model.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.config import arguments
from deepspeed.config.arguments import REQUIRED, unquote_hint, unquoted_remedy, wrong_arguments
from deepspeed.config.constants import VALID_LR_SCHEDULES
from deepspeed.config.optimizers import BUILT_IN, OPTIMIZERS, SCHEDULES, classes_of
from deepspeed.config.problems import nearest, shown
from deepspeed.config.rules import STAGE, Finding, Rule
from deepspeed.config.rules import precision as precision_rules
from deepspeed.config.rules import zero as zero_rules
from deepspeed.config.schema import TrainingConfig
from deepspeed.config.sections.data import (
    CurriculumLegacyConfig,
    CurriculumMetricConfig,
    RandomLTDConfig,
    wrong_curriculum,
    wrong_lengths,
    wrong_warmup,
)
from deepspeed.config.sections.elasticity import ElasticityConfigError
from deepspeed.config.sections.parallel import ATTRIBUTES


def check_rules(config: TrainingConfig) -> list[Finding]:
    return [finding for rule in RULES for finding in rule(config)]


def contiguous_checkpoints(config: TrainingConfig) -> Iterator[Finding]:
    section, prefix = config.activation_checkpointing, "activation_checkpointing."
    if not section.contiguous_memory_optimization:
        return
    for name, given in (
        ("partition_activations", section.partition_activations),
        ("number_checkpoints", section.number_checkpoints),
    ):
        if not given:
            yield Finding(
                (prefix + "contiguous_memory_optimization", prefix + name),
                f"needs {prefix}{name}; without it, inputs are kept one by one",
                is_error=False,
            )


def elastic_batch(config: TrainingConfig) -> Iterator[Finding]:
    section = config.elasticity
    if section is None or not section.enabled:
        return
    for name, message in section.problems():
        yield Finding((f"elasticity.{name}",), message)
    if not section.ignore_non_elastic_batch_info:
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            if getattr(config, name) is not None:
                yield Finding(
                    (name, "elasticity.enabled"),
                    "is decided by elasticity: remove it, or set elasticity.ignore_non_elastic_batch_info",
                    raised_as=ElasticityConfigError,
                )


def saves_by_itself(config: TrainingConfig) -> Iterator[Finding]:
    section = config.checkpoint
    for name in ("resume", "save_at_sigterm", "save_before"):
        if getattr(section, name) and section.folder is None:
            keys = (f"checkpoint.{name}", "checkpoint.folder")
            yield Finding(keys, "needs checkpoint.folder, the folder of this run's checkpoints")


def expert_and_tensor_parallel(config: TrainingConfig) -> Iterator[Finding]:
    if config.expert_parallel.enabled and config.tensor_parallel.autotp_size > 1:
        keys = ("expert_parallel.enabled", "tensor_parallel.autotp_size")
        yield Finding(
            keys, f"cannot be combined with tensor_parallel.autotp_size {config.tensor_parallel.autotp_size}"
        )


def sparse_and_parallel(config: TrainingConfig) -> Iterator[Finding]:
    """Warn about parallel sparse attention; no error, as a model that reads the section may split it itself."""
    section, key = config.sparse_attention, "sparse_attention"
    if section is None:
        return
    if (config.sequence_parallel_size or 1) > 1:
        yield Finding(
            (key, "sequence_parallel_size"),
            f"with sequence_parallel_size {config.sequence_parallel_size} is refused for models of Transformers: use "
            "one of them",
            is_error=False,
        )
    if section.different_layout_per_head and config.tensor_parallel.autotp_size > 1:
        yield Finding(
            (f"{key}.different_layout_per_head", "tensor_parallel.autotp_size"),
            "true is refused for models of Transformers whose heads are shared by ranks: set it to false",
            is_error=False,
        )


def names_of_experts(config: TrainingConfig) -> Iterator[Finding]:
    section = config.expert_parallel
    for name in ATTRIBUTES if section.enabled else ():
        if getattr(section, name) == "":
            yield Finding(
                (f"expert_parallel.{name}",), "is empty: set it to the attribute's name, or leave it out"
            )


def shared_generation(config: TrainingConfig) -> Iterator[Finding]:
    """Warn about a group that generation cannot use; no error, as models that only score do not generate."""
    size, layers = config.hybrid_engine.inference_tp_size, config.tensor_parallel.autotp_size
    if config.hybrid_engine.enabled and layers > 1 and size not in (1, layers):
        yield Finding(
            ("hybrid_engine.inference_tp_size", "tensor_parallel.autotp_size"),
            f"{size} is refused in training, where {layers} ranks share each layer: leave it out, or use {layers}",
            is_error=False,
        )


def even_vocabulary(config: TrainingConfig) -> Iterator[Finding]:
    if config.vocabulary_size and config.vocabulary_size % 8:
        yield Finding(
            ("vocabulary_size",),
            f"{config.vocabulary_size} is not a multiple of 8: matrix products on GPUs are slower",
            False,
        )


SAMPLING = "data_efficiency.data_sampling"
RANDOM_LTD = "data_efficiency.data_routing.random_ltd"


def curricula_fit(config: TrainingConfig) -> Iterator[Finding]:
    """Check that each curriculum has what its schedule type needs."""
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
    """Warn about two samplers; no error, as a client's own data loader uses neither."""
    sampling = config.data_efficiency.data_sampling
    both = sampling.dynamic_batching.enabled and sampling.curriculum_learning.enabled
    if config.data_efficiency.enabled and sampling.enabled and both:
        yield Finding(
            (f"{SAMPLING}.dynamic_batching.enabled", f"{SAMPLING}.curriculum_learning.enabled"),
            "dynamic_batching and curriculum_learning both choose the samples of a batch, which "
            "initialize(training_data=) rejects",
            is_error=False,
        )


def dropped_tokens(config: TrainingConfig) -> Iterator[Finding]:
    """Check random-LTD: its layers, lengths and learning rate agree, and ranks do not share sequences."""
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
            "cannot be combined with sequence_parallel_size: each rank would drop tokens of its own part of "
            "the sequence",
        )
    yield from _learning_rate(config)


def wrong_layers(section: RandomLTDConfig) -> str:
    """Return what is wrong with the numbers of the layers that drop tokens; empty: nothing."""
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


def optimizer_is_known(config: TrainingConfig) -> Iterator[Finding]:
    section = config.optimizer
    if section is None:
        return
    if "max_grad_norm" in (section.params or {}):
        yield Finding(
            ("optimizer.params.max_grad_norm",),
            "is not an argument of the optimizer: set gradient_clipping at top level instead",
        )
    name = section.type
    if name is None:
        if section.params:
            yield Finding(
                ("optimizer.type",), "is missing although optimizer.params is given: name the optimizer"
            )
        return
    if name.lower() not in BUILT_IN and name not in classes_of(OPTIMIZERS):
        yield Finding(("optimizer.type",), _unknown_class(name, tuple(BUILT_IN), OPTIMIZERS))


def one_bit_needs_copies(config: TrainingConfig) -> Iterator[Finding]:
    zero, section = config.zero_optimization, config.optimizer
    built_in = None if section is None else BUILT_IN.get((section.type or "").lower())
    if section is None or zero.stage == 0 or built_in is None or not built_in.exchanges:
        return
    if zero.stage == 3:
        yield Finding(
            ("optimizer.type", STAGE),
            f"{section.type!r} exchanges momenta instead of gradients, which stage {zero.stage} holds only "
            "in part; use stage 0 to 2, or another optimizer with zero_quantized_gradients",
        )
    elif zero.mics_shard_size <= 0:
        yield Finding(
            ("optimizer.type", STAGE),
            f"{section.type!r} exchanges signs between copies of the weights, and stage {zero.stage} keeps one copy; "
            "set zero_optimization.mics_shard_size to the number of ranks per host, or use stage 0",
        )


def local_steps_need_whole_sequences(config: TrainingConfig) -> Iterator[Finding]:
    sequence, zero, section = config.sequence_parallel_size or 1, config.zero_optimization, config.optimizer
    copies_are_groups = zero.stage > 0 and zero.mics_shard_size > 0 and zero.mics_shard_size % sequence == 0
    if (
        section is not None
        and (section.type or "").lower() == "diloco"
        and sequence > 1
        and not copies_are_groups
    ):
        yield Finding(
            ("optimizer.type", "sequence_parallel_size"),
            f"{section.type!r} trains every copy of the weights alone, and ranks that share a sequence need the same "
            f"weights; use stage 1 or 2 with a zero_optimization.mics_shard_size that is a multiple of {sequence}",
        )


def scheduler_is_known(config: TrainingConfig) -> Iterator[Finding]:
    section = config.scheduler
    if section is None:
        return
    name, params = section.type, section.params or {}
    if name is None:
        if params:
            yield Finding(
                ("scheduler.type",), "is missing although scheduler.params is given: name the schedule"
            )
        return
    if name not in VALID_LR_SCHEDULES and name not in classes_of(SCHEDULES):
        yield Finding(("scheduler.type",), _unknown_class(name, VALID_LR_SCHEDULES, SCHEDULES))
    for key in REQUIRED.get(name, ()):
        if key not in params:
            yield Finding((f"scheduler.params.{key}",), f"is missing: {name} needs it")


def arguments_make_sense(config: TrainingConfig) -> Iterator[Finding]:
    optimizer, scheduler = config.optimizer, config.scheduler
    tables = []
    if optimizer is not None:
        tables.append(("optimizer", optimizer.params, arguments.OPTIMIZER))
    if scheduler is not None and scheduler.type is not None:
        tables.append(("scheduler", scheduler.params, arguments.SCHEDULES.get(scheduler.type, {})))
    for section, params, table in tables:
        for key, value, text, fits in wrong_arguments(params, table):
            message = f"{shown(value)} is not allowed; expected {text}{unquote_hint(value)}"
            yield Finding((f"{section}.params.{key}",), message, remedy=unquoted_remedy(value, fits))


def _unknown_class(name: str, own: tuple[str, ...], module: str) -> str:
    hint = nearest(name, [*own, *sorted(classes_of(module))])
    meant = f"; did you mean '{hint}'?" if hint else "."
    known = f"Built in: {', '.join(own)}; or the name of a class in {module}"
    return f"{shown(name)} is not known{meant} {known}"


RULES: tuple[Rule, ...] = (
    precision_rules.one_precision, precision_rules.autocast_beside_16_bit, precision_rules.low_precision_masters,
    precision_rules.unmanaged_accumulation, precision_rules.quantizes_16_bits, zero_rules.compiled_passes,
    precision_rules.summed_gradients, zero_rules.offload_makes_sense, zero_rules.zenflow_makes_sense,
    zero_rules.payloads_make_sense, zero_rules.even_gathers, zero_rules.old_stage_one, optimizer_is_known,
    one_bit_needs_copies, local_steps_need_whole_sequences, scheduler_is_known, arguments_make_sense,
    precision_rules.no_norm_wanted, contiguous_checkpoints, elastic_batch, saves_by_itself,
    expert_and_tensor_parallel, names_of_experts, sparse_and_parallel,
    shared_generation, curricula_fit, one_choice_of_samples, dropped_tokens,
    even_vocabulary,
)  # fmt: skip
