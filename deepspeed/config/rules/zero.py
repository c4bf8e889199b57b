"""Rules about ZeRO: offload, ZenFlow, MiCS, ZeRO++ and compiled graphs, by stage."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.config.optimizers import BUILT_IN
from deepspeed.config.problems import shown
from deepspeed.config.rules import OFFLOAD, STAGE, Finding, offload_device
from deepspeed.config.schema import TrainingConfig

GATHER_ALIGNMENT = 2
"""Elements; documented as ``nccl_start_alignment_factor``."""


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
            (moving, OFFLOAD), f"cannot be combined with {OFFLOAD}: both offload the optimizer state"
        )
    if section.offload_opt_states and zero.stage == 0:
        yield Finding((moving, STAGE), "needs ZeRO stage 1, 2 or 3 (stage is 0)")
    if section.offload_parameters and offload_device(zero.offload_param) == "none":
        param = "zero_optimization.offload_param"
        yield Finding(
            ("compile.offload_parameters", param),
            f"is done by {param}: set {param}.device to 'cpu' and stage 3",
        )


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
                "is needed for device 'nvme': set it to a folder for the swap files",
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
            f"needs device 'cpu' (it is '{optimizer.device}'): only state in host memory can be updated ahead",
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
    yield from _updates_columns(config)
    for name in ("select_interval", "update_interval"):
        value = getattr(section, name)
        if value != "auto" and int(value) < 1:
            yield Finding(
                (f"{key}.{name}",), f"{value} is not allowed: expected a number of at least 1, or 'auto'"
            )


def _updates_columns(config: TrainingConfig) -> Iterator[Finding]:
    """Check the optimizer: ZenFlow updates selected columns, which only this package's elementwise optimizers can."""
    section, key = config.optimizer, "zero_optimization.zenflow"
    if section is None or section.type is None:
        return
    name, params = section.type, section.params or {}
    built_in = BUILT_IN.get(name.lower())
    known = built_in is not None and built_in.updates_columns
    asked = [each for each in ("torch_adam", "state_bits", "stochastic_rounding") if params.get(each)]
    if not known or asked:
        what = f"optimizer.params.{asked[0]}" if known else f"optimizer.type {shown(name)}"
        yield Finding(
            (key, "optimizer.type"),
            f"cannot be combined with {what}: it updates single columns; use Adam, AdamW, Adagrad, Lion or "
            "SGD of this package, without torch_adam, state_bits and stochastic_rounding",
        )


def payloads_make_sense(config: TrainingConfig) -> Iterator[Finding]:
    """Check the requirements of MiCS and of ZeRO++ options."""
    zero = config.zero_optimization
    group = zero.zero_hpz_partition_size
    for name, on, needed in (
        ("mics_shard_size", zero.mics_shard_size > 0, 1),
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
            "has no effect without zero_quantized_gradients: it corrects their quantization error",
            False,
        )
    quantizes = zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights
    if zero.zero_quantized_rounding == "stochastic" and not (quantizes or zero.zero_quantized_gradients):
        yield Finding(
            ("zero_optimization.zero_quantized_rounding", "zero_optimization.zero_quantized_gradients"),
            "has no effect: neither gradients nor weights are quantized",
            False,
        )
    yield from _rounding_of_codec(config)
    if config.gradient_compression is not None and zero.zero_quantized_gradients:
        yield Finding(
            ("gradient_compression", "zero_optimization.zero_quantized_gradients"),
            "cannot be combined with zero_quantized_gradients: both choose the encoding of gradients; keep one",
        )
    if group > 1 and zero.mics_shard_size > 0 and zero.stage == 3:
        yield Finding(
            ("zero_optimization.zero_hpz_partition_size", "zero_optimization.mics_shard_size"),
            "cannot be combined: with MiCS, gathers already stay within a group; set zero_hpz_partition_size to 1",
        )


def _rounding_of_codec(config: TrainingConfig) -> Iterator[Finding]:
    section = config.gradient_compression
    if section is None or section.rounding != "stochastic":
        return
    from deepspeed.ops.formats.codecs import CODECS, codec_named

    if codec_named(section.codec).seeded(0) is None:
        seeded = " or ".join(f'"{name}"' for name in CODECS if codec_named(name).seeded(0) is not None)
        yield Finding(
            ("gradient_compression.rounding", "gradient_compression.codec"),
            f'"{section.codec}" has no stochastic rounding: use {seeded}, or leave rounding out',
        )


def even_gathers(config: TrainingConfig) -> Iterator[Finding]:
    """Refuse odd bucket sizes: harmless here, but release 0.19 fails on them, and configs should stay portable."""
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
