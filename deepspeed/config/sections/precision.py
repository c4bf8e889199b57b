"""The sections that choose number formats: `fp16`, `bf16`, `torch_autocast`, `amp`, `data_types`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    ValidationInfo,
    field_validator,
)

from deepspeed.base.dtypes import Dtype
from deepspeed.config.section import (
    AllowedValues,
    DeepSpeedConfigModel,
    DtypeOrNull,
    Float,
    Int,
    LenientConfigModel,
    LenientSwitched,
    SumDtypeOrNull,
    finite,
    is_auto,
    key,
    note,
    parse_dtype,
)

# DeepSpeed-Chat and old scripts use the long name.
BFLOAT16_SPELLINGS = ("bf16", "bfloat16")


def _finite_number(value: Any) -> Any:
    """Refuse non-finite numbers before bounds are checked, which NaN and minus infinity violate as well."""
    return finite(value) if isinstance(value, float) else value


class DeepSpeedFP16Config(DeepSpeedConfigModel):
    """16-bit floats with loss scaling (Micikevicius et al. 2018)."""

    enabled: bool = key(False, "Train in fp16.")
    auto_cast: bool = key(False, "Cast floating-point inputs of forward to fp16.")
    loss_scale: Annotated[Float, BeforeValidator(_finite_number), AfterValidator(finite)] = key(
        0.0, "0: dynamic loss scale; else the static scale.", ge=0
    )
    initial_scale_power: Int = key(16, "Initial dynamic scale, as a power of 2.")
    loss_scale_window: Int = key(
        1000, "Steps without overflow before the dynamic scale doubles; above 0 when dynamic."
    )
    hysteresis: Int = key(2, "Overflows tolerated before the scale is halved (hysteresis).")
    consecutive_hysteresis: bool = key(
        False, "Reset the tolerated overflows after every step without overflow."
    )
    min_loss_scale: Int = key(1, "Minimum of the dynamic scale; above 0 when dynamic.")
    fp16_master_weights_and_grads: bool = key(
        False, "Master weights and gradients in fp16 too (ZeRO with optimizer offload)."
    )

    @field_validator("initial_scale_power", mode="before")
    @classmethod
    def true_is_one(cls, value: Any) -> Any:
        """Read true as 1: fastNLP's driver writes `true` into every config that it makes."""
        if value is True:
            note(
                "config key 'fp16.initial_scale_power': true is read as 1, as in release 0.19, so the loss scale "
                "starts at 2; the default is 16"
            )
            return 1
        return value

    @field_validator("loss_scale_window", "min_loss_scale")
    @classmethod
    def positive_when_dynamic(cls, value: int, info: ValidationInfo) -> int:
        if value <= 0 and info.data.get("enabled") and info.data.get("loss_scale") == 0:
            raise ValueError("must be above 0 when the loss scale is dynamic (loss_scale 0)")
        return value

    def initial_dynamic_scale(self) -> float:
        return 2.0**self.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the arguments of the dynamic loss scaler, under its own names."""
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": self.loss_scale_window,
            "delayed_shift": self.hysteresis,
            "consecutive_hysteresis": self.consecutive_hysteresis,
            "min_scale": self.min_loss_scale,
        }


class DeepSpeedBF16Config(DeepSpeedConfigModel):
    """bfloat16, with fp32 master weights unless said otherwise; needs no loss scale."""

    enabled: bool = key(False, "Train in bf16.")
    immediate_grad_update: bool = key(
        False, "No effect: each gradient is added to the sum as soon as it is ready."
    )
    check_grad_overflow: bool = key(True, "Skip steps whose gradients are not finite.")
    bf16_master_weights_and_grads: bool = key(
        False, "Master weights and gradients in bf16 too (ZeRO 1 to 3)."
    )
    bf16_optimizer_states: bool = key(
        False, "Optimizer moments in bf16 too; needs `bf16_master_weights_and_grads` and ZeRO 1 to 3."
    )


class Float8Config(DeepSpeedConfigModel):
    """Products of linear layers with 8-bit floating-point numbers, in forward and backward (own key; see float8.md).
    Weights, gradients and states are those of `bf16`, `fp16` or fp32."""

    enabled: bool = key(False, "Use them.")
    exclude: list[str] = key(
        ["lm_head", "head", "embed_out", "score", "classifier"],
        "Layers to leave unchanged: those with one of these names as a component of their path.",
    )
    emulate: bool = key(
        False,
        "On devices without 8-bit products, emulate them in the dtype of the layer's input: the same "
        "numbers, but not faster. False: raise an error there.",
    )


class NativeProductsConfig(DeepSpeedConfigModel):
    """Products of linear layers in fp32 on the host by the native library, in forward and backward, on processors where
    torch's use half of the vectors (own key; see transformer_kernels.md). Elsewhere it changes nothing."""

    enabled: bool = key(False, "Use them.")


class TorchAutocastConfig(LenientSwitched):
    """`torch.autocast` around forward, run by the engine."""

    dtype: Annotated[
        Dtype | None,
        PlainValidator(partial(parse_dtype, allowed=("bf16", "fp16", "fp32"))),
        AllowedValues("'bfloat16', 'float16', 'float32', their short names or 'torch.<name>', or null"),
    ] = key(None, "Autocast dtype; null: bfloat16.")
    lower_precision_safe_modules: list[str] | None = key(
        None,
        "Full class names of modules whose gradients may be sent in that dtype; null: `torch.nn.Linear`, `Conv1d`, "
        "`Conv2d`, `Conv3d`. MoE routers are excluded: they compute and communicate in full precision.",
    )


class AmpConfig(LenientSwitched):
    """The legacy `amp` section; here it turns on torch's own mixed precision."""

    model_config = ConfigDict(extra="allow")

    @property
    def params(self) -> dict[str, Any]:
        """All other keys of the section, such as `opt_level`."""
        return dict(self.model_extra or {})


class DataTypesConfig(LenientConfigModel):
    """Dtypes that differ from what the precision section implies."""

    grad_accum_dtype: SumDtypeOrNull = key(None, "Dtype for accumulating the gradients of micro-batches.")
    param_dtype: DtypeOrNull = key(None, "Dtype to which the module's parameters are cast.")
    buffer_dtype: DtypeOrNull = key(None, "Dtype to which floating-point buffers are cast; null: unchanged.")


def bf16_section(param_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the `bf16` section, or the one under the old spelling `bfloat16` if `bf16` is missing."""
    for spelling in BFLOAT16_SPELLINGS:
        if spelling in param_dict and not is_auto(param_dict[spelling]):
            return param_dict[spelling]
    return {}


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> DeepSpeedBF16Config:
    return DeepSpeedBF16Config(**bf16_section(param_dict))
