"""Rules that tie several sections of a config together.

Every rule yields what it finds as `Finding(keys, message)`: the first key is the one to report, the others
are those the rule looked at (a finding is dropped if one of its keys is itself invalid). Rules within a
single section live in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.config.arguments import (
    REQUIRED,
    WrongArgument,
    meant,
    remedy,
    wrong_optimizer_arguments,
    wrong_schedule_arguments,
)
from deepspeed.config.problems import DeepSpeedConfigError, Remedy, nearest, shown
from deepspeed.config.schema import TrainingConfig
from deepspeed.elasticity.config import ElasticityConfigError
from deepspeed.runtime.constants import (
    BUILT_IN_OPTIMIZERS,
    VALID_LR_SCHEDULES,
)


@dataclass(frozen=True, slots=True)
class Finding:
    keys: tuple[str, ...]
    message: str
    is_error: bool = True
    remedy: Remedy | None = None
    raised_as: type[DeepSpeedConfigError] | None = None


Rule = Callable[[TrainingConfig], Iterator[Finding]]
FP16, BF16, AMP = "fp16.enabled", "bf16.enabled", "amp.enabled"
STAGE = "zero_optimization.stage"
ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam", "diloco")
"""Their state may lie in slices of copies."""
OFFLOAD = "zero_optimization.offload_optimizer"
GATHER_ALIGNMENT = 2
"""Elements; documented as ``nccl_start_alignment_factor``."""


def check_rules(config: TrainingConfig) -> list[Finding]:
    return [finding for rule in RULES for finding in rule(config)]


def offload_device(section: Any) -> str:
    """Device of an offload section, "none" if the section is missing."""
    return section.device if section is not None else "none"


def one_precision(config: TrainingConfig) -> Iterator[Finding]:
    if config.fp16.enabled and config.bf16.enabled:
        yield Finding(
            (BF16, FP16),
            "fp16 and bf16 are both enabled: bfloat16 and fp16 modes exclude each other, choose one",
        )
    wanted = config.data_types.param_dtype
    for key, on, dtype in (
        (FP16, config.fp16.enabled, torch.float16),
        (BF16, config.bf16.enabled, torch.bfloat16),
    ):
        if on and wanted not in (None, dtype):
            name = str(wanted).removeprefix("torch.")
            yield Finding(("data_types.param_dtype", key), f"{name} contradicts {key}: choose one of the two")
    if not config.amp.enabled:
        return
    for key, on in (
        (FP16, config.fp16.enabled),
        (BF16, config.bf16.enabled),
        (STAGE, config.zero_optimization.stage > 0),
    ):
        if on:
            yield Finding(
                (AMP, key),
                f"amp cannot be combined with {key}: remove one of the two (torch_autocast works with ZeRO)",
            )


def autocast_beside_16_bit(config: TrainingConfig) -> Iterator[Finding]:
    """16-bit weights already determine the dtype of products; autocast is allowed on top only if it says the same."""
    if not config.torch_autocast.enabled:
        return
    chosen = config.torch_autocast.dtype or torch.bfloat16
    for key, on, dtype in (
        (FP16, config.fp16.enabled, torch.float16),
        (BF16, config.bf16.enabled, torch.bfloat16),
    ):
        if on and chosen is not dtype:
            name = str(chosen).removeprefix("torch.")
            yield Finding(("torch_autocast.dtype", key), f"{name} contradicts {key}: choose one of the two")
        elif on:
            yield Finding(
                ("torch_autocast.enabled", key), f"has no effect when {key} is true", is_error=False
            )


def low_precision_masters(config: TrainingConfig) -> Iterator[Finding]:
    zero, stage = config.zero_optimization, config.zero_optimization.stage
    if config.fp16.fp16_master_weights_and_grads:
        key = "fp16.fp16_master_weights_and_grads"
        if stage == 0 or offload_device(zero.offload_optimizer) == "none":
            yield Finding(
                (key, STAGE, OFFLOAD, f"{OFFLOAD}.device"),
                "needs ZeRO stage 1, 2 or 3 with zero_optimization.offload_optimizer",
            )
    masters, states = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
    params = config.optimizer.params if config.optimizer is not None else {}
    rounds = bool((params or {}).get("stochastic_rounding"))
    if rounds and not (config.bf16.enabled and config.bf16.bf16_master_weights_and_grads):
        yield Finding(
            ("optimizer.params.stochastic_rounding", masters),
            f"true has no effect on masters in fp32: set {masters}: true, with bf16.enabled",
        )
    if config.bf16.bf16_master_weights_and_grads and stage == 0 and not rounds:
        yield Finding((masters, STAGE), "needs ZeRO stage 1, 2 or 3 (zero_optimization.stage is 0)")
    if config.bf16.bf16_optimizer_states:
        for key in ("state_bits", "stochastic_rounding"):
            if (params or {}).get(key):
                yield Finding(
                    (states, f"optimizer.params.{key}"), f"cannot be combined with optimizer.params.{key}"
                )
        if not config.bf16.bf16_master_weights_and_grads:
            yield Finding((states, masters), f"needs {masters}: true")
        if stage == 0:
            yield Finding((states, STAGE), "needs ZeRO stage 1, 2 or 3 (zero_optimization.stage is 0)")


def unmanaged_accumulation(config: TrainingConfig) -> Iterator[Finding]:
    if config.managed_gradient_accumulation:
        return
    key, zero = "managed_gradient_accumulation", config.zero_optimization
    if config.compile.deepcompile:
        yield Finding((key, "compile.deepcompile"), "false cannot be combined with compile.deepcompile")
    if config.amp.enabled:
        yield Finding((key, AMP), "false cannot be combined with amp")
    if "overlap_comm" in zero.model_fields_set and zero.overlap_comm and zero.stage != 2:
        overlap = "zero_optimization.overlap_comm"
        yield Finding(
            (key, overlap, STAGE),
            f"false can be combined with {overlap}: true at stage 2 only (stage is {zero.stage})",
        )


def compiled_passes(config: TrainingConfig) -> Iterator[Finding]:
    section, zero = config.compile, config.zero_optimization
    if not section.deepcompile:
        return
    for name, stages in (("z1", (1, 2)), ("z3", (3,))):
        if name in (section.passes or ()) and zero.stage not in stages:
            wanted = " or ".join(map(str, stages))
            yield Finding(
                ("compile.passes", STAGE), f"{name!r} needs ZeRO stage {wanted} (stage is {zero.stage})"
            )
    moving = "compile.offload_opt_states"
    if section.offload_opt_states and offload_device(zero.offload_optimizer) != "none":
        yield Finding(
            (moving, OFFLOAD), f"cannot be combined with {OFFLOAD}: both move the optimizer's states"
        )
    if section.offload_opt_states and zero.stage == 0:
        yield Finding((moving, STAGE), "needs ZeRO stage 1, 2 or 3 (stage is 0)")
    if section.offload_parameters and offload_device(zero.offload_param) == "none":
        param = "zero_optimization.offload_param"
        yield Finding(
            ("compile.offload_parameters", param),
            f"is done by {param}: set {param}.device to 'cpu' and stage 3",
        )


def summed_gradients(config: TrainingConfig) -> Iterator[Finding]:
    if config.gradient_allreduce_op != "sum":
        return
    zero = config.zero_optimization
    for key, on in (
        (STAGE, zero.stage == 3),
        ("zero_optimization.zenflow", zero.zenflow is not None),
        ("compile.deepcompile", config.compile.deepcompile),
    ):
        if on:
            what = "ZeRO stage 3" if key == STAGE else key
            yield Finding(("gradient_allreduce_op", key), f"'sum' cannot be combined with {what}; use 'mean'")


def offload_makes_sense(config: TrainingConfig) -> Iterator[Finding]:
    zero = config.zero_optimization
    for name, section, needed in (
        ("offload_param", zero.offload_param, 3),
        ("offload_optimizer", zero.offload_optimizer, 1),
    ):
        key = f"zero_optimization.{name}"
        if section is None or section.device == "none":
            continue
        if section.device == "nvme" and section.nvme_path is None:
            yield Finding(
                (f"{key}.nvme_path", f"{key}.device"),
                "is needed for device 'nvme': give a folder for the swap files",
            )
        if zero.stage < needed:
            yield Finding(
                (key, STAGE), f"has no effect at stage {zero.stage}; it needs stage {needed} or higher", False
            )
    optimizer = zero.offload_optimizer
    if optimizer is not None and optimizer.ratio < 1.0 and zero.stage != 3:
        yield Finding(
            (f"{OFFLOAD}.ratio", STAGE),
            f"{optimizer.ratio} is below 1, which needs stage 3 (stage is {zero.stage})",
        )
    if optimizer is not None and optimizer.super_offload and zero.stage == 0:
        yield Finding((f"{OFFLOAD}.super_offload", STAGE), "needs stage 1, 2 or 3 (stage is 0)")
    if optimizer is not None and optimizer.super_offload and optimizer.device != "cpu":
        yield Finding(
            (f"{OFFLOAD}.super_offload", f"{OFFLOAD}.device"),
            f"needs device 'cpu' (it is '{optimizer.device}'): what is updated ahead is in host memory",
        )


def zenflow_makes_sense(config: TrainingConfig) -> Iterator[Finding]:
    zero = config.zero_optimization
    key, section, offload = "zero_optimization.zenflow", zero.zenflow, zero.offload_optimizer
    if section is None:
        return
    if zero.stage == 0:
        yield Finding((key, STAGE), "needs stage 1, 2 or 3 (stage is 0)")
    if offload is None or offload.device != "cpu":
        yield Finding(
            (key, f"{OFFLOAD}.device"), f"needs the optimizer on the host: set {OFFLOAD}.device to 'cpu'"
        )
    elif offload.super_offload:
        yield Finding((key, f"{OFFLOAD}.super_offload"), "cannot be combined with super_offload: choose one")
    elif offload.ratio < 1.0:
        yield Finding((key, f"{OFFLOAD}.ratio"), "cannot be combined with a ratio below 1: set it to 1")
    for name in ("select_interval", "update_interval"):
        value = getattr(section, name)
        if value != "auto" and int(value) < 1:
            yield Finding((f"{key}.{name}",), f"{value} is not allowed: a number of at least 1, or 'auto'")


def mics_needs_slices(config: TrainingConfig) -> Iterator[Finding]:
    zero = config.zero_optimization
    if zero.mics_shard_size > 0 and zero.stage == 0:
        what = "has no effect at stage 0; it needs stage 1 or higher"
        yield Finding(("zero_optimization.mics_shard_size", STAGE), what, False)


def packets_make_sense(config: TrainingConfig) -> Iterator[Finding]:
    """ZeRO++: what its options need."""
    zero = config.zero_optimization
    group = zero.zero_hpz_partition_size
    for name, on, needed in (
        ("zero_hpz_partition_size", group > 1, 3),
        ("zero_quantized_weights", zero.zero_quantized_weights, 3),
        ("zero_quantized_nontrainable_weights", zero.zero_quantized_nontrainable_weights, 3),
        ("zero_quantized_gradients", zero.zero_quantized_gradients, 1),
    ):
        if on and zero.stage < needed:
            what = (
                f"has no effect at stage {zero.stage}; it needs stage {needed}{' or higher' * (needed < 3)}"
            )
            yield Finding((f"zero_optimization.{name}", STAGE), what, False)
    if zero.zeropp_loco_param is not None and not zero.zero_quantized_gradients:
        yield Finding(
            ("zero_optimization.zeropp_loco_param", "zero_optimization.zero_quantized_gradients"),
            "has no effect without zero_quantized_gradients: it corrects errors of their quantization",
            False,
        )
    quantizes = zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights
    if zero.zero_quantized_rounding == "stochastic" and not (quantizes or zero.zero_quantized_gradients):
        yield Finding(
            ("zero_optimization.zero_quantized_rounding", "zero_optimization.zero_quantized_gradients"),
            "has no effect: neither gradients nor weights are quantized",
            False,
        )
    section = config.gradient_compression
    if section is not None and section.rounding == "stochastic" and section.codec not in ("int8", "int4"):
        yield Finding(
            ("gradient_compression.rounding", "gradient_compression.codec"),
            f'"{section.codec}" is not rounded at random: use "int8" or "int4", or leave rounding out',
        )
    if config.gradient_compression is not None and zero.zero_quantized_gradients:
        yield Finding(
            ("gradient_compression", "zero_optimization.zero_quantized_gradients"),
            "cannot be combined with zero_quantized_gradients: both say how gradients travel; choose one",
        )
    if group > 1 and zero.mics_shard_size > 0 and zero.stage == 3:
        yield Finding(
            ("zero_optimization.zero_hpz_partition_size", "zero_optimization.mics_shard_size"),
            "cannot be combined: with MiCS, gathers stay within a group already; set zero_hpz_partition_size to 1",
        )


def even_gathers(config: TrainingConfig) -> Iterator[Finding]:
    """Harmless here, but release 0.19 stops at it: what passes here is to run there."""
    zero, key = config.zero_optimization, "zero_optimization.allgather_bucket_size"
    if zero.stage in (1, 2) and zero.allgather_bucket_size % GATHER_ALIGNMENT:
        yield Finding(
            (key, STAGE),
            f"{zero.allgather_bucket_size} is odd: allgather_bucket_size must be a multiple of "
            f"nccl_start_alignment_factor, {GATHER_ALIGNMENT}",
        )


def old_stage_one(config: TrainingConfig) -> Iterator[Finding]:
    if config.zero_optimization.legacy_stage1:
        yield Finding(
            ("zero_optimization.legacy_stage1",),
            "true is no longer supported: remove it, stage 1 is the current one",
        )


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
    found = getattr(torch.optim, name, None)
    if name.lower() not in BUILT_IN_OPTIMIZERS and not (
        isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
    ):
        yield Finding(
            ("optimizer.type",), _unknown_class(name, BUILT_IN_OPTIMIZERS, torch.optim, "torch.optim")
        )


def one_bit_needs_copies(config: TrainingConfig) -> Iterator[Finding]:
    zero, section = config.zero_optimization, config.optimizer
    kind = "" if section is None else (section.type or "").lower()
    if section is None or zero.stage == 0 or kind not in ONE_BIT:
        return
    if zero.stage == 3:
        yield Finding(
            ("optimizer.type", STAGE),
            f"{section.type!r} exchanges momenta instead of gradients, of which stage {zero.stage} has only parts; use "
            "stage 0 to 2, or another optimizer with zero_quantized_gradients",
        )
    elif zero.mics_shard_size <= 0:
        yield Finding(
            ("optimizer.type", STAGE),
            f"{section.type!r} exchanges signs between copies of the weights, and stage {zero.stage} keeps one copy; "
            "set zero_optimization.mics_shard_size to the number of ranks per host, or use stage 0",
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
    module = torch.optim.lr_scheduler
    if name not in VALID_LR_SCHEDULES and not isinstance(getattr(module, name, None), type):
        yield Finding(
            ("scheduler.type",), _unknown_class(name, VALID_LR_SCHEDULES, module, "torch.optim.lr_scheduler")
        )
    for key in REQUIRED.get(name, ()):
        if key not in params:
            yield Finding((f"scheduler.params.{key}",), f"is missing: {name} needs it")


def arguments_make_sense(config: TrainingConfig) -> Iterator[Finding]:
    optimizer, scheduler = config.optimizer, config.scheduler
    wrong: list[tuple[str, Iterator[WrongArgument]]] = []
    if optimizer is not None:
        wrong.append(("optimizer", wrong_optimizer_arguments(optimizer.params)))
    if scheduler is not None and scheduler.type is not None:
        wrong.append(("scheduler", wrong_schedule_arguments(scheduler.type, scheduler.params)))
    for section, problems in wrong:
        for key, value, text, fits in problems:
            message = f"{shown(value)} is not allowed; expected {text}{remedy(value)}"
            yield Finding((f"{section}.params.{key}",), message, remedy=meant(value, fits))


def _unknown_class(name: str, own: tuple[str, ...], module: Any, module_name: str) -> str:
    of_torch = [
        member
        for member, value in vars(module).items()
        if isinstance(value, type) and not member.startswith("_")
    ]
    hint = nearest(name, [*own, *of_torch])
    meant = f"; did you mean '{hint}'?" if hint else "."
    known = f"Built in: {', '.join(own)}; or the name of a class in {module_name}"
    return f"{shown(name)} is not known{meant} {known}"


def no_norm_wanted(config: TrainingConfig) -> Iterator[Finding]:
    zero, key = config.zero_optimization, "zero_optimization.compute_grad_norm"
    if zero.compute_grad_norm:
        return
    if zero.stage not in (1, 2):
        yield Finding((key, STAGE), f"{key}=false is for ZeRO stage 1 or 2")
    if config.gradient_clipping:
        yield Finding(
            (key, "gradient_clipping"), f"clipping needs the norm: {key}=false requires gradient_clipping=0"
        )


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


def even_vocabulary(config: TrainingConfig) -> Iterator[Finding]:
    if config.vocabulary_size and config.vocabulary_size % 8:
        yield Finding(
            ("vocabulary_size",),
            f"{config.vocabulary_size} is not a multiple of 8: matrix products on GPUs are slower",
            False,
        )


RULES: tuple[Rule, ...] = (
    one_precision,
    autocast_beside_16_bit,
    low_precision_masters,
    unmanaged_accumulation,
    compiled_passes,
    summed_gradients,
    offload_makes_sense,
    zenflow_makes_sense,
    mics_needs_slices,
    packets_make_sense,
    even_gathers,
    old_stage_one,
    optimizer_is_known,
    one_bit_needs_copies,
    scheduler_is_known,
    arguments_make_sense,
    no_norm_wanted,
    contiguous_checkpoints,
    elastic_batch,
    saves_by_itself,
    expert_and_tensor_parallel,
    even_vocabulary,
)
