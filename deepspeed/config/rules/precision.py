"""Rules about dtypes: of computation, of storage, and of sums."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.base.dtypes import Dtype
from deepspeed.config.rules import AMP, BF16, FP16, OFFLOAD, STAGE, Finding, offload_device
from deepspeed.config.schema import TrainingConfig


def one_precision(config: TrainingConfig) -> Iterator[Finding]:
    if config.fp16.enabled and config.bf16.enabled:
        yield Finding(
            (BF16, FP16),
            "fp16 and bf16 are both enabled: bfloat16 and fp16 modes exclude each other, choose one",
        )
    wanted = config.data_types.param_dtype
    for key, on, dtype in ((FP16, config.fp16.enabled, Dtype.fp16), (BF16, config.bf16.enabled, Dtype.bf16)):
        if on and wanted not in (None, dtype):
            text = f"{wanted.long_name} contradicts {key}: choose one of the two"
            yield Finding(("data_types.param_dtype", key), text)
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
    """Check autocast against 16-bit weights, which already determine the dtype of products: both must agree."""
    if not config.torch_autocast.enabled:
        return
    chosen = config.torch_autocast.dtype or Dtype.bf16
    for key, on, dtype in ((FP16, config.fp16.enabled, Dtype.fp16), (BF16, config.bf16.enabled, Dtype.bf16)):
        if on and chosen is not dtype:
            text = f"{chosen.long_name} contradicts {key}: choose one of the two"
            yield Finding(("torch_autocast.dtype", key), text)


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


def quantizes_16_bits(config: TrainingConfig) -> Iterator[Finding]:
    """Warn about quantization after updates in fp32: it rounds 16-bit weights, next to exact fp32 masters. No error, as
    an engine whose model was not prepared, such as a teacher's, does not use the section."""
    if config.fp16.enabled or config.bf16.enabled or config.data_types.param_dtype not in (None, Dtype.fp32):
        return
    weights = config.compression_training.weight_quantization.shared_parameters
    if weights.enabled and not weights.quantize_weight_in_forward:
        key = "compression_training.weight_quantization.shared_parameters.quantize_weight_in_forward"
        yield Finding(
            (key, BF16, FP16),
            "false is refused for a model of init_compression in fp32, which has no 16-bit weights to "
            "quantize: set it to true, or enable fp16 or bf16",
            is_error=False,
        )
