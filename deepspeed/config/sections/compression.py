"""The sections `compression_training`, `quantize_training` and `weight_quantization`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from deepspeed.config.section import (
    AllowedValues,
    Float,
    Int,
    LenientConfigModel,
    LenientSwitched,
    key,
    required,
    section,
)


class LayerReductionConfig(LenientSwitched):
    """A student with fewer layers, started from some of the teacher's."""

    keep_number_layer: Int | None = required("Layers of the student.")
    module_name_prefix: str | None = required("Module name prefix before the layer number.")
    teacher_layer: list[Int] | None = required("Teacher layers to copy.")
    other_module_name: list[str] | None = required("Other modules to copy.")


class FP16MixedQuantizeConfig(LenientSwitched):
    """Gradual transition from fp16 to quantized weights."""

    quantize_change_ratio: Float = key(0.001, "Change of the mixing ratio per step.", ge=0.0)


class _Group(LenientConfigModel):
    modules: Annotated[list[str] | Literal["*"], AllowedValues("a list of regular expressions, or '*'")] = (
        key("*", "Regular expressions on module names.")
    )
    related_modules: list[list[str]] | None = key(None, "Modules pruned together with them.")


class WeightQuantizationGroupParams(LenientConfigModel):
    start_bits: Int = Field(ge=1, description="Bits at the start.")
    target_bits: Int = Field(ge=1, description="Bits at the end.")
    quantization_period: Int = key(1, "Steps per reduction of the bits.", ge=0)

    @model_validator(mode="after")
    def _not_more_bits(self) -> WeightQuantizationGroupParams:
        if self.target_bits > self.start_bits:
            raise ValueError(f"target_bits={self.target_bits} must be at most start_bits={self.start_bits}")
        return self


class WeightQuantizationGroup(_Group):
    params: WeightQuantizationGroupParams = Field(description="Parameters of the group.")


class WeightQuantizationShared(LenientSwitched):
    quantizer_kernel: bool = key(False, "Accepted; the arithmetic is the same.")
    schedule_offset: Int = key(0, "First step that quantizes.", ge=0)
    quantize_groups: Int = key(1, "Number of groups of values, each with its own scale.", ge=1)
    quantize_verbose: bool = key(False, "Log what is quantized.")
    quantization_type: Literal["symmetric", "asymmetric"] = key("symmetric", "With or without a zero point.")
    rounding: Literal["nearest", "stochastic"] = key("nearest", "Rounding.")
    quantize_weight_in_forward: bool = key(False, "Quantize in forward; false: in the optimizer (MoQ).")
    fp16_mixed_quantize: FP16MixedQuantizeConfig | None = key(
        None, "Gradual transition from unquantized to quantized weights."
    )


class WeightQuantizationTraining(LenientConfigModel):
    """Quantization-aware training of weights."""

    shared_parameters: WeightQuantizationShared = section("For all groups.")
    different_groups: dict[str, WeightQuantizationGroup] = key({}, "Groups, by any name.")


class ActivationQuantizationGroupParams(LenientConfigModel):
    bits: Int = Field(ge=4, description="Bits.")


class ActivationQuantizationGroup(_Group):
    params: ActivationQuantizationGroupParams = Field(description="Parameters of the group.")


class ActivationQuantizationShared(LenientSwitched):
    quantization_type: Literal["symmetric", "asymmetric"] = key("symmetric", "With or without a zero point.")
    range_calibration: Literal["dynamic", "static"] = key("dynamic", "Range per batch, or a running one.")
    schedule_offset: Int = key(0, "First step that quantizes.", ge=0)


class ActivationQuantizationTraining(LenientConfigModel):
    """Quantization-aware training of activations."""

    shared_parameters: ActivationQuantizationShared = section("For all groups.")
    different_groups: dict[str, ActivationQuantizationGroup] = key({}, "Groups, by any name.")


class PruningGroupParams(LenientConfigModel):
    dense_ratio: Float = Field(ge=0.0, le=1.0, description="Fraction to keep.")


class PruningGroup(_Group):
    params: PruningGroupParams = Field(description="Parameters of the group.")


class _PruningShared(LenientSwitched):
    schedule_offset: Int = key(0, "First step that prunes.", ge=0)


class SparsePruningShared(_PruningShared):
    method: Literal["l1", "topk", "snip_momentum"] = key("l1", "Criterion for values to prune.")
    schedule_offset_end: Int = key(1000, "Last step that prunes (snip_momentum).", ge=0)
    schedule_offset_stride: Int = key(1, "Steps between prunings (snip_momentum).", ge=1)
    block_pattern: str = key("4x1", "Shape of the blocks (snip_momentum).")
    dense_ratio: Float = key(0.1, "Fraction to keep (snip_momentum).", ge=0.0, le=1.0)
    excluded_modules: list[str] = key([], "Modules not to prune.")


class RowPruningShared(_PruningShared):
    method: Literal["l1", "topk"] = key("l1", "Criterion for rows to prune.")


class ChannelPruningShared(_PruningShared):
    method: Literal["l1", "topk"] = key("l1", "Criterion for channels to prune.")


class HeadPruningShared(_PruningShared):
    method: Literal["l1", "topk"] = key("topk", "Criterion for heads to prune.")
    num_heads: Int | None = required("Attention heads per layer.")


class SparsePruningTraining(LenientConfigModel):
    """Single weights set to zero."""

    shared_parameters: SparsePruningShared = section("For all groups.")
    different_groups: dict[str, PruningGroup] = key({}, "Groups, by any name.")


class RowPruningTraining(LenientConfigModel):
    """Rows removed."""

    shared_parameters: RowPruningShared = section("For all groups.")
    different_groups: dict[str, PruningGroup] = key({}, "Groups, by any name.")


class HeadPruningTraining(LenientConfigModel):
    """Attention heads removed."""

    shared_parameters: HeadPruningShared = section("For all groups.")
    different_groups: dict[str, PruningGroup] = key({}, "Groups, by any name.")


class ChannelPruningTraining(LenientConfigModel):
    """Channels of convolutions removed."""

    shared_parameters: ChannelPruningShared = section("For all groups.")
    different_groups: dict[str, PruningGroup] = key({}, "Groups, by any name.")


class CompressionConfig(LenientConfigModel):
    """Quantization, pruning and layer reduction while training."""

    layer_reduction: LayerReductionConfig = section("Fewer layers.")
    weight_quantization: WeightQuantizationTraining = section("Weights in few bits.")
    activation_quantization: ActivationQuantizationTraining = section("Activations in few bits.")
    sparse_pruning: SparsePruningTraining = section("Fewer weights.")
    row_pruning: RowPruningTraining = section("Fewer rows.")
    head_pruning: HeadPruningTraining = section("Fewer heads.")
    channel_pruning: ChannelPruningTraining = section("Fewer channels.")


class EigenvalueConfig(LenientSwitched):
    """Curvature of each block, by power iteration."""

    verbose: bool = key(False, "Log the values.")
    max_iter: Int = key(100, "Most iterations.", ge=1)
    tol: Float = key(1e-2, "Relative change at which the iteration stops.", ge=0.0)
    stability: Float = key(1e-6, "Added to denominators.", ge=0.0)
    gas_boundary_resolution: Int = key(1, "Optimizer steps between measurements.", ge=1)
    layer_name: str = key("bert.encoder.layer", "Name of the list of blocks.")
    layer_num: Int = key(0, "Number of blocks.", ge=0)


class QuantizeBitsConfig(LenientConfigModel):
    """From many bits to few."""

    start_bits: Int = key(16, "Bits at the start.", ge=1)
    target_bits: Int = key(8, "Bits at the end.", ge=1)


class QuantizeScheduleConfig(LenientConfigModel):
    """Steps at which the number of bits is reduced."""

    quantize_period: Int = key(100, "Steps until the first bit is dropped; doubles with each bit.", ge=1)
    schedule_offset: Int = key(100, "Steps before quantization starts.", ge=0)


class QuantizeAlgorithmConfig(LenientConfigModel):
    """Method of quantization."""

    q_type: Literal["symmetric", "asymmetric"] = key("symmetric", "With or without a zero point.")
    rounding: Literal["nearest", "stochastic"] = key("nearest", "Rounding.")


class QuantizeTrainingConfig(LenientSwitched):
    """MoQ: after each update the 16-bit weights are quantized, in fewer and fewer bits."""

    quantize_verbose: bool = key(False, "Log each change of bits.")
    quantizer_kernel: bool = key(False, "Accepted; the arithmetic is the same.")
    quantize_type: Literal["symmetric", "asymmetric"] | None = key(
        None, "Short form of `quantize_algo.q_type`."
    )
    quantize_algo: QuantizeAlgorithmConfig = section("Quantization algorithm.")
    quantize_bits: QuantizeBitsConfig = section("Number of bits.")
    quantize_schedule: QuantizeScheduleConfig = section("Schedule of the bits.")
    quantize_groups: Int = key(1, "Number of groups of values, each with its own scale.", ge=1)
    fp16_mixed_quantize: FP16MixedQuantizeConfig = section(
        "Gradual transition from unquantized to quantized weights."
    )
    eigenvalue: EigenvalueConfig | None = key(None, "Curvature of each block.")


class WeightQuantConfig(LenientConfigModel):
    """Quantized weights for inference with ZeRO."""

    enabled: bool = key(True, "Turn it on.")
    num_bits: Int = key(8, "Bits.", ge=1)
    q_type: Literal["asymmetric", "symmetric"] = key("symmetric", "With or without a zero point.")
    q_groups: Int = key(1, "Number of groups of values, each with its own scale.", ge=1)
    quantized_initialization: dict[str, Any] = key(
        {}, "Quantize while the model is built: `num_bits`, `group_size`, ..."
    )
    post_init_quant: dict[str, Any] = key(
        {}, "Quantize the built model: module name to `num_bits`, `group_size`, ..."
    )


# Documented functions that read a raw config. -----------------------------------------------------------------

Section = dict[str, Any]


def get_compression_config(param_dict: Mapping[str, Any]) -> Section:
    """Return the section `compression_training` of a config, with defaults for missing keys."""
    return CompressionConfig.model_validate(param_dict.get("compression_training", {})).model_dump()
