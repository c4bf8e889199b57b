"""Resolve the schema to decisions: the only reader of ``stage`` and of the dtype flags.

``make_plan(config)`` resolves a user's config into frozen dataclasses of decisions. The rest of the code uses these
objects, and never asks for the stage or precision mode.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.config.axes import Axes

if TYPE_CHECKING:
    from deepspeed.config.deepspeed_config import DeepSpeedConfig
    from deepspeed.ops.aio.engine import AioOptions
    from deepspeed.ops.formats.codecs import Codec


class Cadence(enum.Enum):
    """Points at which local gradients are summed over the data-parallel ranks. May change between two steps
    (``StepExecutor.announce``)."""

    AT_BOUNDARY = "once per optimizer step, after the last micro-batch"
    EVERY_MICRO_BATCH = "after the backward of every micro-batch"
    NEVER = "not at all: each rank, or group of ranks that share a copy, updates with its own"


AUTOCAST_MODULES = tuple(f"torch.nn.{name}" for name in ("Linear", "Conv1d", "Conv2d", "Conv3d"))
"""Modules that compute in autocast's dtype, so that summing their gradients in it loses nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScalePlan:
    """``static`` is the fixed scale, or None for dynamic scaling with the fields below (Micikevicius 2018)."""

    static: float | None = 1.0
    initial: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0
    stops_at_minimum: bool = True
    """True: an overflow at the minimum is an error at once; else steps are skipped until ``Plan.max_bad_steps``."""

    @property
    def active(self) -> bool:
        """True: scales other than 1 can occur."""
        return self.static is None or self.static != 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPlan:
    """The dtype of each kind of tensor. ``None`` for ``param`` leaves each parameter as the module created it."""

    name: str
    param: torch.dtype | None
    keeps_mixed: bool
    """True: parameters keep their dtypes if some already have ``param`` (adapters in fp32 on a 16-bit base)."""
    buffer: torch.dtype | None
    master: torch.dtype | None
    """Dtype of the weights that the optimizer updates; ``None``: the parameter itself."""
    accumulate: torch.dtype | None
    """Dtype in which micro-batch gradients are accumulated; ``None``: the parameter's."""
    reduce: torch.dtype | None
    """Dtype on the wire; ``None``: the parameter's."""
    state: torch.dtype | None
    """Dtype of optimizer moments; ``None``: the master weights'."""
    cast_inputs: bool
    cast_kwargs: bool
    autocast: torch.dtype | None
    autocast_modules: tuple[str, ...]
    """Class names (dotted) whose gradients are communicated in the autocast dtype."""
    loss_scale: LossScalePlan
    check_overflow: bool
    """True: a non-finite gradient norm skips the step."""

    @property
    def products(self) -> torch.dtype | None:
        """Dtype of matrix products; None: the dtype in which each parameter was created."""
        return self.autocast or self.param


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroPlan:
    """The stage (Rajbhandari et al. 2020), as decisions about each kind of state."""

    stage: int
    shard_params: bool
    shard_grads: bool
    shard_state: bool
    in_groups: bool
    """True: groups of ranks share one copy each (MiCS), so copies can differ for a while."""
    cadence: Cadence
    overlap: bool
    reduce_scatter: bool
    """False: sum with all-reduce and keep the shard (the documented ``reduce_scatter: false``)."""
    reduce_bucket_numel: int
    round_robin: bool
    ignore_unused: bool
    load_from_fp32_weights: bool
    allow_untested_optimizer: bool
    refuses_untested: bool
    """The config has ``zero_allow_untested_optimizer: false``, rather than leaving it out."""
    host_optimizer_only: bool
    """Likewise for ``zero_force_ds_cpu_optimizer: true``."""

    @property
    def needs_optimizer(self) -> bool:
        """True: an optimizer is required (stages 1 and 2), as only its state and gradients are sharded."""
        return self.shard_state and not self.shard_params


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOffload:
    """Master weights and optimizer state outside the device (``offload_optimizer``)."""

    folder: Path | None
    """Folder of the swap files; None: host memory."""
    pin: bool
    ratio: float
    """Fraction of the elements that the host updates (Twin-Flow); the rest stays on the device."""
    slots: int
    """Buffers for sub-groups in flight."""
    sub_group_numel: int
    read_ahead: bool
    write_behind: bool
    storage: AioOptions
    """Options of file I/O (the ``aio`` section)."""
    speculate: bool = False
    """Update during backward, before the step is validated (``super_offload``)."""
    cores: float = 0.8
    """Fraction of a rank's threads used for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZenFlowPlan:
    """Updates of some columns in every step, and of the others less often (``zenflow``)."""

    ratio: float
    """Fraction of the columns that are updated in every step."""
    select_interval: int | None
    """Steps or epochs between selections of columns; None: chosen automatically."""
    by_epoch: bool
    update_interval: int | None
    """Steps per round; None: from the fraction of the gradient in the selected columns."""
    auto_ratio: float
    """The fraction above which rounds grow."""
    warm_up_rounds: int | None
    """Initial rounds that update everything; None: until a round changes the weights little."""
    overlap: bool
    offload: bool
    """Keep the state of the selected columns on the host."""
    cores: float
    """Fraction of a rank's threads that update the other columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamOffload:
    """Stage-3 parameter shards outside the device (``offload_param``)."""

    folder: Path | None
    pin: bool
    host_numel: int
    """Elements kept in host memory even if there is a folder."""
    buffers: int
    """Number of shards to read ahead."""
    buffer_numel: int
    """Largest shard to read ahead, in elements."""
    storage: AioOptions

    def files(self, numel: int, host_numel: int) -> bool:
        """Return whether a shard of ``numel`` elements goes to the file, given ``host_numel`` in host memory."""
        return self.folder is not None and host_numel + numel > self.host_numel


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientPlan:
    """Arithmetic on gradients around the sum over ranks: multiply by ``pre``, sum, multiply by ``post``."""

    clip: float
    prescale: bool
    predivide: float
    mean: bool
    sparse: bool
    formats: tuple[Callable[[Any], Any], ...] = ()
    """Wire formats around the dense sum, innermost first (``zero/gradients/sums.py``)."""

    def factors(self, ranks: int) -> tuple[float, float]:
        """Return ``(pre, post)``; with the defaults (1, 1/ranks)."""
        total = 1.0 / ranks if self.mean else 1.0
        if self.prescale:
            return total, 1.0
        return 1.0 / self.predivide, total * self.predivide


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Quantized communication, and the ranks that use it (ZeRO++, G. Wang et al. 2023)."""

    weights: int = 0
    """Bits of gathered weights at stage 3 (qwZ); 0: not quantized."""
    frozen_weights: int = 0
    """Likewise for frozen weights."""
    gradients: int = 0
    """Bits of gradients where each rank keeps a shard of their sum (qgZ)."""
    feedback: tuple[float, int] | None = None
    """Weight of the old error, and number of sums after which it is reset (LoCo)."""
    random: bool = False
    """True: integers are rounded stochastically."""
    codec: Codec | None = None
    """Wire format of gradients at every stage (``gradient_compression``); None: by ``gradients``."""
    keeps_errors: bool = False
    """True: with error feedback."""
    group: int = 1
    """Consecutive ranks that together hold a copy of all weights (hpZ); gathers stay among them."""

    @property
    def loses(self) -> bool:
        """True: sums of gradients are inexact."""
        return self.gradients > 0 or self.codec is not None

    @property
    def rounds(self) -> bool:
        """True: gradients or weights are quantized on the wire."""
        return self.loses or self.weights > 0 or self.frozen_weights > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    precision: PrecisionPlan
    zero: ZeroPlan
    gradients: GradientPlan
    managed_accumulation: bool
    axes: Axes = Axes(1, "")
    state_offload: StateOffload | None = None
    zenflow: ZenFlowPlan | None = None
    param_offload: ParamOffload | None = None
    packing: Packing = Packing()
    max_bad_steps: int = 50
    """fp32 and bf16 raise after this many consecutive skipped steps; with fp16 only those at the minimum scale count,
    at which stages 1 to 3 raise at once."""

    @property
    def wraps_optimizer(self) -> bool:
        """True: the engine's optimizer is a ``ZeroOptimizer`` around the client's."""
        return self.zero.shard_state or self.precision.master is not None or self.precision.loss_scale.active

    @property
    def speculates(self) -> bool:
        """True: the host updates during backward, before the step is known to be valid."""
        return self.state_offload is not None and self.state_offload.speculate

    @property
    def swap_folders(self) -> list[Path]:
        """Return the folders of the swap files."""
        offloads = (self.state_offload, self.param_offload)
        return [o.folder for o in offloads if o is not None and o.folder is not None]


def make_plan(config: DeepSpeedConfig) -> Plan:
    precision = _precision(config)
    return Plan(
        precision=precision,
        zero=_zero(config),
        gradients=GradientPlan(
            clip=float(config.gradient_clipping or 0.0),
            prescale=bool(config.prescale_gradients),
            predivide=float(config.gradient_predivide_factor),
            mean=config.gradient_allreduce_op == "mean",
            sparse=bool(config.sparse_gradients_enabled),
        ),
        managed_accumulation=bool(config.managed_gradient_accumulation),
        axes=config.axes,
        state_offload=_state_offload(config),
        zenflow=_zenflow(config),
        param_offload=_param_offload(config),
        packing=_packing(config),
    )


def _packing(config: DeepSpeedConfig) -> Packing:
    packing = _zero_packing(config)
    section = config.schema.gradient_compression
    if section is None:
        return packing
    from deepspeed.ops.formats.codecs import codec_named

    codec = codec_named(section.codec, float(section.share))
    random = section.rounding == "stochastic"
    return replace(packing, codec=codec, keeps_errors=section.error_feedback, random=random)


def _zero_packing(config: DeepSpeedConfig) -> Packing:
    zero = config.zero_config
    if zero.stage < 1:
        return Packing()
    loco = zero.zeropp_loco_param
    gradients = 4 if zero.zero_quantized_gradients else 0
    feedback = (float(loco.err_beta), int(loco.reset_T)) if loco is not None and gradients else None
    random = zero.zero_quantized_rounding == "stochastic"
    if zero.stage < 3:
        return Packing(gradients=gradients, feedback=feedback, random=random)
    bits = int(zero.zero_quantized_weights_bits)
    weights = bits if zero.zero_quantized_weights else 0
    return Packing(
        weights=weights,
        frozen_weights=bits if zero.zero_quantized_nontrainable_weights else weights,
        gradients=gradients,
        feedback=feedback,
        random=random,
        group=max(1, int(zero.zero_hpz_partition_size)),
    )


SUB_GROUP_NUMEL = 4 * 1024 * 1024
"""Upper bound for the elements of a sub-group: enough for storage to reach full bandwidth, and small compared to the
state of a model that needs swapping."""


def _state_offload(config: DeepSpeedConfig) -> StateOffload | None:
    zero = config.zero_config
    section = zero.offload_optimizer
    if zero.stage < 1 or section is None or section.device == "none":
        return None
    # Documented as off by default; neither can change a result, so both are on unless disabled.
    read = section.pipeline_read or "pipeline_read" not in section.model_fields_set
    write = section.pipeline_write or "pipeline_write" not in section.model_fields_set
    return StateOffload(
        folder=_swap_folder(section, "optimizer"),
        pin=bool(section.pin_memory),
        ratio=float(section.ratio),
        slots=max(1, min(1 + read + write, int(section.buffer_count))),
        sub_group_numel=max(1, min(int(zero.sub_group_size), SUB_GROUP_NUMEL)),
        read_ahead=read,
        write_behind=write,
        storage=storage_options(config.aio_config),
        speculate=bool(section.super_offload),
        cores=float(section.cpuadam_cores_perc),
    )


def _zenflow(config: DeepSpeedConfig) -> ZenFlowPlan | None:
    section = config.zero_config.zenflow
    if section is None or config.zero_config.stage < 1:
        return None
    given = "full_warm_up_rounds" in section.model_fields_set  # "auto" counts as absent
    return ZenFlowPlan(
        ratio=float(section.topk_ratio),
        select_interval=None if section.select_interval == "auto" else int(section.select_interval),
        by_epoch=section.select_strategy == "epoch",
        update_interval=None if section.update_interval == "auto" else int(section.update_interval),
        auto_ratio=float(section.auto_ratio),
        warm_up_rounds=section.full_warm_up_rounds if given else None,
        overlap=bool(section.overlap_step),
        offload=bool(section.offload),
        cores=1.0 - float(section.pt_reserved_cores_perc),
    )


def _param_offload(config: DeepSpeedConfig) -> ParamOffload | None:
    zero = config.zero_config
    section = zero.offload_param
    if zero.stage != 3 or section is None or section.device == "none":
        return None
    return ParamOffload(
        folder=_swap_folder(section, "param"),
        pin=bool(section.pin_memory),
        host_numel=int(section.max_in_cpu),
        buffers=int(section.buffer_count),
        buffer_numel=int(section.buffer_size),
        storage=storage_options(config.aio_config),
    )


def storage_options(settings: Mapping[str, Any]) -> AioOptions:
    """Return the options of a file I/O engine, from the values of the section ``aio``."""
    from deepspeed.ops.aio.engine import AioOptions  # only for plans with files

    return AioOptions(**{name: settings[name] for name in AioOptions.__dataclass_fields__})


def _swap_folder(section: Any, what: str) -> Path | None:
    return Path(section.nvme_path) / "deepspeed" / what if section.device == "nvme" else None


def _zero(config: DeepSpeedConfig) -> ZeroPlan:
    zero = config.zero_config
    stage = int(zero.stage)
    cadence = Cadence.EVERY_MICRO_BATCH if stage >= 2 else Cadence.AT_BOUNDARY
    # Documented as off by default below stage 3; here overlap cannot change a result, so it is on unless disabled.
    overlap = zero.overlap_comm if "overlap_comm" in zero.model_fields_set else True
    return ZeroPlan(
        stage=stage,
        shard_params=stage >= 3,
        shard_grads=stage >= 2,
        shard_state=stage >= 1,
        in_groups=stage >= 1 and zero.mics_shard_size > 0,
        cadence=cadence,
        # Without managed accumulation, only per-micro-batch sums can start before step() is called.
        overlap=bool(overlap) and (config.managed_gradient_accumulation or stage >= 2),
        reduce_scatter=bool(zero.reduce_scatter),
        reduce_bucket_numel=max(1, int(zero.reduce_bucket_size)),
        round_robin=bool(zero.round_robin_gradients),
        ignore_unused=bool(zero.ignore_unused_parameters),
        load_from_fp32_weights=bool(zero.load_from_fp32_weights),
        allow_untested_optimizer=bool(config.zero_allow_untested_optimizer),
        refuses_untested=not config.zero_allow_untested_optimizer
        and "zero_allow_untested_optimizer" in config.given_keys,
        host_optimizer_only=bool(config.zero_force_ds_cpu_optimizer)
        and "zero_force_ds_cpu_optimizer" in config.given_keys,
    )


def _precision(config: DeepSpeedConfig) -> PrecisionPlan:
    autocast, modules = _autocast(config)
    fp16, bf16 = config.float16_config, config.bfloat16_config
    param, state, check_overflow = config.param_dtype, None, True
    cast_inputs = cast_kwargs = has_master = param is not None and param != torch.float32
    # Loss scaling is needed wherever products are fp16, however that was chosen.
    scaled = torch.float16 in (autocast, param)
    if fp16.enabled:
        param, scaled = torch.float16, True
        cast_kwargs = bool(fp16.auto_cast)
        has_master = not fp16.fp16_master_weights_and_grads
    elif bf16.enabled:
        param, scaled = torch.bfloat16, False
        cast_kwargs = True
        has_master = not bf16.bf16_master_weights_and_grads
        state = torch.bfloat16 if bf16.bf16_optimizer_states else torch.float32
        check_overflow = bool(bf16.check_grad_overflow)
    if fp16.enabled or bf16.enabled:
        cast_inputs = autocast is None  # autocast casts for the operations that want it
    return PrecisionPlan(
        name=_name(param or torch.float32, autocast),
        param=param,
        keeps_mixed=autocast is not None and config.param_dtype is None,
        buffer=config.buffer_dtype,
        master=torch.float32 if has_master else None,
        accumulate=config.grad_accum_dtype,
        reduce=config.communication_data_type,
        state=state,
        cast_inputs=cast_inputs,
        cast_kwargs=cast_kwargs,
        autocast=autocast,
        autocast_modules=modules,
        loss_scale=_loss_scale(config) if scaled else LossScalePlan(),
        check_overflow=check_overflow,
    )


def _autocast(config: DeepSpeedConfig) -> tuple[torch.dtype | None, tuple[str, ...]]:
    section = config.torch_autocast
    if section.enabled:
        modules = section.lower_precision_safe_modules
        if modules is None:
            modules = AUTOCAST_MODULES
        return config.torch_autocast_dtype or torch.bfloat16, tuple(modules)
    if config.amp.enabled:
        # apex's opt levels O1 to O3 all mean fp16 products over fp32 weights in torch's terms; O0 is plain fp32.
        level = (config.amp.params or {}).get("opt_level", "O1")
        return (None if level == "O0" else torch.float16), ()
    return None, ()


def _loss_scale(config: DeepSpeedConfig) -> LossScalePlan:
    section = config.float16_config
    if section.loss_scale:
        return LossScalePlan(static=float(section.loss_scale))
    return LossScalePlan(
        static=None,
        initial=2.0**section.initial_scale_power,
        window=int(section.loss_scale_window),
        hysteresis=int(section.hysteresis),
        consecutive_hysteresis=bool(section.consecutive_hysteresis),
        minimum=float(section.min_loss_scale),
        stops_at_minimum=config.zero_config.stage > 0,
    )


def _name(param: torch.dtype, autocast: torch.dtype | None) -> str:
    short = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
    name = short.get(param, str(param).removeprefix("torch."))
    return f"{name} under autocast to {short.get(autocast, autocast)}" if autocast else name
