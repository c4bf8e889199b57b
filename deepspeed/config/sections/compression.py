"""The sections `compression_training`, `quantize_training` and `weight_quantization`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from deepspeed.config.section import AllowedValues, Float, Int, LenientConfigModel, required, section


class LayerReductionConfig(LenientConfigModel):
    """A student with fewer layers, started from some of the teacher's."""

    enabled: bool = Field(default=False, description="Turn it on.")
    keep_number_layer: Int | None = required("Layers of the student.")
    module_name_prefix: str | None = required("Name in front of the layer number.")
    teacher_layer: list[Int] | None = required("Layers of the teacher that are copied.")
    other_module_name: list[str] | None = required("Further modules that are copied.")


class FP16MixedQuantizeConfig(LenientConfigModel):
    """Passing gradually from fp16 to quantized weights."""

    enabled: bool = Field(default=False, description="Turn it on.")
    quantize_change_ratio: Float = Field(
        default=0.001, ge=0.0, description="Change of the mixing ratio per step."
    )


class _Group(LenientConfigModel):
    modules: Annotated[list[str] | Literal["*"], AllowedValues("a list of regular expressions, or '*'")] = (
        Field(default="*", description="Regular expressions on module names.")
    )
    related_modules: list[list[str]] | None = Field(
        default=None, description="Modules pruned together with them."
    )


class WeightQuantizationGroupParams(LenientConfigModel):
    start_bits: Int = Field(ge=1, description="Bits at the start.")
    target_bits: Int = Field(ge=1, description="Bits at the end.")
    quantization_period: Int = Field(default=1, ge=0, description="Steps per reduction of the bits.")

    @model_validator(mode="after")
    def _not_more_bits(self) -> WeightQuantizationGroupParams:
        if self.target_bits > self.start_bits:
            raise ValueError(
                f"target_bits={self.target_bits} must be at most start_bits={self.start_bits}, from which they fall"
            )
        return self


class WeightQuantizationGroup(_Group):
    params: WeightQuantizationGroupParams = Field(description="How strongly.")


class WeightQuantizationShared(LenientConfigModel):
    enabled: bool = Field(default=False, description="Turn it on.")
    quantizer_kernel: bool = Field(default=False, description="Accepted; the arithmetic is the same.")
    schedule_offset: Int = Field(default=0, ge=0, description="First step that quantizes.")
    quantize_groups: Int = Field(default=1, ge=1, description="Groups of values with a scale of their own.")
    quantize_verbose: bool = Field(default=False, description="Log what is quantized.")
    quantization_type: Literal["symmetric", "asymmetric"] = Field(
        default="symmetric", description="With or without a zero point."
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        default="nearest", description="How values are rounded."
    )
    quantize_weight_in_forward: bool = Field(
        default=False, description="Quantize in forward; else in the optimizer (MoQ)."
    )
    fp16_mixed_quantize: FP16MixedQuantizeConfig | None = Field(default=None, description="Gradual change.")


class WeightQuantizationTraining(LenientConfigModel):
    """Quantization-aware training of weights."""

    shared_parameters: WeightQuantizationShared = section(WeightQuantizationShared, "For all groups.")
    different_groups: dict[str, WeightQuantizationGroup] = Field(
        default={}, description="Groups by a name of your choice."
    )


class ActivationQuantizationGroupParams(LenientConfigModel):
    bits: Int = Field(ge=4, description="Bits.")


class ActivationQuantizationGroup(_Group):
    params: ActivationQuantizationGroupParams = Field(description="How strongly.")


class ActivationQuantizationShared(LenientConfigModel):
    enabled: bool = Field(default=False, description="Turn it on.")
    quantization_type: Literal["symmetric", "asymmetric"] = Field(
        default="symmetric", description="With or without a zero point."
    )
    range_calibration: Literal["dynamic", "static"] = Field(
        default="dynamic", description="Range per batch, or a running one."
    )
    schedule_offset: Int = Field(default=0, ge=0, description="First step that quantizes.")


class ActivationQuantizationTraining(LenientConfigModel):
    """Quantization-aware training of activations."""

    shared_parameters: ActivationQuantizationShared = section(ActivationQuantizationShared, "For all groups.")
    different_groups: dict[str, ActivationQuantizationGroup] = Field(
        default={}, description="Groups by a name of your choice."
    )


class PruningGroupParams(LenientConfigModel):
    dense_ratio: Float = Field(ge=0.0, le=1.0, description="Share that is kept.")


class PruningGroup(_Group):
    params: PruningGroupParams = Field(description="How strongly.")


class _PruningShared(LenientConfigModel):
    enabled: bool = Field(default=False, description="Turn it on.")
    schedule_offset: Int = Field(default=0, ge=0, description="First step that prunes.")


class SparsePruningShared(_PruningShared):
    method: Literal["l1", "topk", "snip_momentum"] = Field(default="l1", description="How values are chosen.")
    schedule_offset_end: Int = Field(default=1000, ge=0, description="Last step that prunes (snip_momentum).")
    schedule_offset_stride: Int = Field(
        default=1, ge=1, description="Steps between two prunings (snip_momentum)."
    )
    block_pattern: str = Field(default="4x1", description="Shape of the blocks (snip_momentum).")
    dense_ratio: Float = Field(default=0.1, ge=0.0, le=1.0, description="Share that is kept (snip_momentum).")
    excluded_modules: list[str] = Field(default=[], description="Modules left alone.")


class RowPruningShared(_PruningShared):
    method: Literal["l1", "topk"] = Field(default="l1", description="How rows are chosen.")


class ChannelPruningShared(_PruningShared):
    method: Literal["l1", "topk"] = Field(default="l1", description="How channels are chosen.")


class HeadPruningShared(_PruningShared):
    method: Literal["l1", "topk"] = Field(default="topk", description="How heads are chosen.")
    num_heads: Int | None = required("Attention heads per layer.")


class SparsePruningTraining(LenientConfigModel):
    """Single weights set to zero."""

    shared_parameters: SparsePruningShared = section(SparsePruningShared, "For all groups.")
    different_groups: dict[str, PruningGroup] = Field(
        default={}, description="Groups by a name of your choice."
    )


class RowPruningTraining(LenientConfigModel):
    """Rows removed."""

    shared_parameters: RowPruningShared = section(RowPruningShared, "For all groups.")
    different_groups: dict[str, PruningGroup] = Field(
        default={}, description="Groups by a name of your choice."
    )


class HeadPruningTraining(LenientConfigModel):
    """Attention heads removed."""

    shared_parameters: HeadPruningShared = section(HeadPruningShared, "For all groups.")
    different_groups: dict[str, PruningGroup] = Field(
        default={}, description="Groups by a name of your choice."
    )


class ChannelPruningTraining(LenientConfigModel):
    """Channels of convolutions removed."""

    shared_parameters: ChannelPruningShared = section(ChannelPruningShared, "For all groups.")
    different_groups: dict[str, PruningGroup] = Field(
        default={}, description="Groups by a name of your choice."
    )


class CompressionConfig(LenientConfigModel):
    """Quantization, pruning and layer reduction while training."""

    layer_reduction: LayerReductionConfig = section(LayerReductionConfig, "Fewer layers.")
    weight_quantization: WeightQuantizationTraining = section(
        WeightQuantizationTraining, "Weights in few bits."
    )
    activation_quantization: ActivationQuantizationTraining = section(
        ActivationQuantizationTraining, "Activations in few bits."
    )
    sparse_pruning: SparsePruningTraining = section(SparsePruningTraining, "Fewer weights.")
    row_pruning: RowPruningTraining = section(RowPruningTraining, "Fewer rows.")
    head_pruning: HeadPruningTraining = section(HeadPruningTraining, "Fewer heads.")
    channel_pruning: ChannelPruningTraining = section(ChannelPruningTraining, "Fewer channels.")


class EigenvalueConfig(LenientConfigModel):
    """Curvature of each block, by power iteration."""

    enabled: bool = Field(default=False, description="Turn it on.")
    verbose: bool = Field(default=False, description="Log the values.")
    max_iter: Int = Field(default=100, ge=1, description="Most iterations.")
    tol: Float = Field(default=1e-2, ge=0.0, description="Relative change at which it stops.")
    stability: Float = Field(default=1e-6, ge=0.0, description="Added to denominators.")
    gas_boundary_resolution: Int = Field(
        default=1, ge=1, description="Optimizer steps between two measurements."
    )
    layer_name: str = Field(default="bert.encoder.layer", description="Name of the list of blocks.")
    layer_num: Int = Field(default=0, ge=0, description="Number of blocks.")


class QuantizeBitsConfig(LenientConfigModel):
    """From many bits to few."""

    start_bits: Int = Field(default=16, ge=1, description="Bits at the start.")
    target_bits: Int = Field(default=8, ge=1, description="Bits at the end.")


class QuantizeScheduleConfig(LenientConfigModel):
    """Steps at which the number of bits is reduced."""

    quantize_period: Int = Field(
        default=100, ge=1, description="Steps until the first bit is lost; it doubles with each."
    )
    schedule_offset: Int = Field(default=100, ge=0, description="Steps before the first that quantizes.")


class QuantizeAlgorithmConfig(LenientConfigModel):
    """Method of quantization."""

    q_type: Literal["symmetric", "asymmetric"] = Field(
        default="symmetric", description="With or without a zero point."
    )
    rounding: Literal["nearest", "stochastic"] = Field(
        default="nearest", description="How values are rounded."
    )


class QuantizeTrainingConfig(LenientConfigModel):
    """MoQ: after each update the 16-bit weights are quantized, in fewer and fewer bits."""

    enabled: bool = Field(default=False, description="Turn it on.")
    quantize_verbose: bool = Field(default=False, description="Log each change of bits.")
    quantizer_kernel: bool = Field(default=False, description="Accepted; the arithmetic is the same.")
    quantize_type: Literal["symmetric", "asymmetric"] | None = Field(
        default=None, description="Short for `quantize_algo.q_type`."
    )
    quantize_algo: QuantizeAlgorithmConfig = section(QuantizeAlgorithmConfig, "How values are quantized.")
    quantize_bits: QuantizeBitsConfig = section(QuantizeBitsConfig, "How many bits.")
    quantize_schedule: QuantizeScheduleConfig = section(QuantizeScheduleConfig, "When they fall.")
    quantize_groups: Int = Field(default=1, ge=1, description="Groups of values with a scale of their own.")
    fp16_mixed_quantize: FP16MixedQuantizeConfig = section(FP16MixedQuantizeConfig, "Gradual change.")
    eigenvalue: EigenvalueConfig | None = Field(default=None, description="Curvature of each block.")


class WeightQuantConfig(LenientConfigModel):
    """Quantized weights for inference with ZeRO."""

    enabled: bool = Field(default=True, description="Turn it on.")
    num_bits: Int = Field(default=8, ge=1, description="Bits.")
    q_type: Literal["asymmetric", "symmetric"] = Field(
        default="symmetric", description="With or without a zero point."
    )
    q_groups: Int = Field(default=1, ge=1, description="Groups of values with a scale of their own.")
    quantized_initialization: dict[str, Any] = Field(
        default={}, description="Quantize while the model is built: `num_bits`, `group_size`, ..."
    )
    post_init_quant: dict[str, Any] = Field(
        default={}, description="Quantize the built model: module name to `num_bits`, `group_size`, ..."
    )


# Documented functions that read a config as written. ---------------------------------------------------------

Section = dict[str, Any]


def get_compression_config(param_dict: Mapping[str, Any]) -> Section:
    """The section `compression_training` of a config, with the defaults of what it leaves out."""
    return CompressionConfig.model_validate(param_dict.get("compression_training", {})).model_dump()
