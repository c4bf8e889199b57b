"""Weights that most decoders have, from the tensors of a checkpoint. Each asks the model to cut and transform it, by a
method called ``transform_..._param``.

Rows of a gated layer come in pairs, gate and value, unlike in most checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepspeed.inference.v2.model_implementations.parameter_base import ParameterBase, ParametrizedList

__all__ = [
    "AttentionOutputParameter",
    "EmbeddingParameter",
    "Experts",
    "FusedGatedMLPParameter",
    "FusedQKVParameter",
    "GQAMegatronQKVParameter",
    "GatedMLPParameter",
    "InvFreqParameter",
    "MLP1Parameter",
    "MLP2Parameter",
    "MegatronQKVParameter",
    "MoEGatingWeightParameter",
    "NormParameter",
    "UnembedParameter",
    "UnfusedMoEGatedMLPParameter",
    "UnfusedMoEMLP1Parameter",
    "UnfusedMoEMLP2Parameter",
    "UnfusedQKVParameter",
    "megatron_qkv_reshape",
    "transform_gqa_megatron",
]


class Experts(ParametrizedList):
    """One tensor of each expert."""

    count_attr = "n_experts"


class EmbeddingParameter(ParameterBase):
    """[vocabulary, width]."""

    params: Tensor

    def finalize(self) -> Any:
        return self.inference_model.transform_embedding_param(self.params)


class UnembedParameter(ParameterBase):
    """[vocabulary, width], often the embedding's."""

    params: Tensor

    def finalize(self) -> Any:
        return self.inference_model.transform_unembed_param(self.params)


class NormParameter(ParameterBase):
    params: Tensor

    def finalize(self) -> Any:
        return self.inference_model.transform_norm_param(self.params)


class InvFreqParameter(ParameterBase):
    """Frequencies of rotary positions, in the dtype of activations."""

    params: Tensor

    def finalize(self) -> Any:
        return self.params.to(self.inference_model.activation_dtype.value)


# --------------------------------------------------------------------------------------------------- attention


class AttentionOutputParameter(ParameterBase):
    params: Tensor

    def finalize(self) -> Any:
        return self.inference_model.transform_attn_out_param(self.params)


class FusedQKVParameter(ParameterBase):
    """All queries, then all keys, then all values."""

    params: Tensor

    def finalize(self) -> Any:
        return self.inference_model.transform_qkv_param(self.params)


class UnfusedQKVParameter(ParameterBase):
    q_params: Tensor
    k_params: Tensor
    v_params: Tensor

    def finalize(self) -> Any:
        return self.inference_model.transform_qkv_param(
            torch.cat([self.q_params, self.k_params, self.v_params], 0)
        )


class MegatronQKVParameter(ParameterBase):
    """Query, key and value of the first head, then of the next. The model has ``head_size`` and ``n_heads``."""

    params: Tensor

    def finalize(self) -> Any:
        model = self.inference_model
        return model.transform_qkv_param(megatron_qkv_reshape(self.params, model.head_size, model.n_heads))


class GQAMegatronQKVParameter(ParameterBase):
    """The queries of the first group, its key and its value, then of the next. The model has ``head_size``,
    ``n_heads_q`` and ``n_heads_kv``."""

    params: Tensor

    def finalize(self) -> Any:
        model = self.inference_model
        fused = transform_gqa_megatron(self.params, model.head_size, model.n_heads_q, model.n_heads_kv)
        return model.transform_qkv_param(fused)


def megatron_qkv_reshape(param: Tensor, head_size: int, n_heads: int) -> Tensor:
    """From [heads, 3, head size, ..] to [3, heads, head size, ..], as rows."""
    return transform_gqa_megatron(param, head_size, n_heads, n_heads)


def transform_gqa_megatron(src_param: Tensor, head_size: int, n_q_heads: int, n_kv_heads: int) -> Tensor:
    """From groups of heads one after the other to all queries, all keys, all values. AssertionError: the rows are not
    these heads."""
    rows = (n_q_heads + 2 * n_kv_heads) * head_size
    assert src_param.shape[0] == rows, f"{src_param.shape[0]} rows, where the heads have {rows}"
    group = n_q_heads // n_kv_heads
    by_group = src_param.unflatten(0, (n_kv_heads, group + 2, head_size))
    parts = by_group.split([group, 1, 1], 1)
    return torch.cat([part.flatten(0, 2) for part in parts], 0)


# ---------------------------------------------------------------------------------------- feed-forward part, experts


def _paired(gate: Tensor, value: Tensor) -> Tensor:
    """Rows of the two in turn. AssertionError: they are not equally many."""
    assert gate.shape[0] == value.shape[0], (
        f"{gate.shape[0]} rows of the gate, {value.shape[0]} of the values"
    )
    return torch.stack([gate, value], 1).flatten(0, 1)


class MLP1Parameter(ParameterBase):
    """Of the layer that goes in."""

    params: Tensor

    def finalize(self) -> Any:
        return self.inference_model.transform_mlp_1_param(self.params)


class MLP2Parameter(ParameterBase):
    """Of the layer that comes out."""

    params: Tensor

    def finalize(self) -> Any:
        return self.inference_model.transform_mlp_2_param(self.params)


class GatedMLPParameter(ParameterBase):
    gate_params: Tensor
    up_params: Tensor

    def finalize(self) -> Any:
        return self.inference_model.transform_mlp_1_param(_paired(self.gate_params, self.up_params))


class FusedGatedMLPParameter(ParameterBase):
    """All rows of the gate, then all of the values."""

    params: Tensor

    def finalize(self) -> Any:
        gate, value = self.params.chunk(2, 0)
        return self.inference_model.transform_mlp_1_param(_paired(gate, value))


class MoEGatingWeightParameter(ParameterBase):
    params: Tensor

    def finalize(self) -> Any:
        return self.inference_model.transform_moe_gate_param(self.params)


class UnfusedMoEMLP1Parameter(ParameterBase):
    experts: Experts

    def finalize(self) -> Any:
        return self.inference_model.transform_moe_mlp_1_param(torch.stack(list(self.experts)))


class UnfusedMoEMLP2Parameter(ParameterBase):
    experts: Experts

    def finalize(self) -> Any:
        return self.inference_model.transform_moe_mlp_2_param(torch.stack(list(self.experts)))


class UnfusedMoEGatedMLPParameter(ParameterBase):
    gating_experts: Experts
    up_experts: Experts

    def finalize(self) -> Any:
        pairs = zip(self.gating_experts, self.up_experts, strict=True)
        return self.inference_model.transform_moe_mlp_1_param(
            torch.stack([_paired(gate, value) for gate, value in pairs])
        )
