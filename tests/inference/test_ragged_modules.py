"""FastGen's exchangeable parts, and containers of weights, against PyTorch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from deepspeed.inference.v2.inference_parameter import InferenceParameter
from deepspeed.inference.v2.inference_utils import ActivationType
from deepspeed.inference.v2.model_implementations.common_parameters import (
    GatedMLPParameter,
    GQAMegatronQKVParameter,
    UnfusedMoEMLP1Parameter,
    UnfusedQKVParameter,
)
from deepspeed.inference.v2.model_implementations.flat_model_helpers import (
    flatten_inference_model,
    restore_inference_model,
)
from deepspeed.inference.v2.model_implementations.inference_transformer_base import DSTransformerModelBase
from deepspeed.inference.v2.model_implementations.layer_container_base import LayerContainer
from deepspeed.inference.v2.model_implementations.parameter_base import ParameterBase, ParamList
from deepspeed.inference.v2.model_implementations.sharding import (
    attn_out_in_features,
    get_local_heads,
    get_shard_endpoints,
    qkv_out_features,
    shard_attn_out_param,
    shard_mlp_1_param,
    shard_mlp_2_param,
    shard_qkv_param,
    shard_unembed_param,
    sharded_intermediate_dim,
    sharded_unembed_dim,
)
from deepspeed.inference.v2.modules import ConfigBundle
from deepspeed.inference.v2.modules.configs import DSLinearConfig, DSMoEConfig, DSNormConfig
from deepspeed.inference.v2.modules.interfaces import (
    DSLinearRegistry,
    DSMoERegistry,
    DSPostNormBase,
    DSPostNormRegistry,
    DSPreNormRegistry,
)

FP32 = {"input_dtype": "fp32", "output_dtype": "fp32"}


def norm_config(kind: str) -> DSNormConfig:
    return DSNormConfig(max_tokens=8, type=kind, channels=16, residual_dtype="fp32", **FP32)  # type: ignore[arg-type]


def bundle(name: str, config: Any, **more: Any) -> ConfigBundle:
    return ConfigBundle(name=name, config=config, implementation_config=more)


def test_parts_are_chosen_by_name() -> None:
    config = norm_config("layer_norm")
    with pytest.raises(KeyError, match="cuda_post_ln"):
        DSPostNormRegistry.instantiate_config(bundle("no_such", config))
    with pytest.raises(ValueError, match="cuda_pre_rms"):
        DSPreNormRegistry.instantiate_config(bundle("cuda_pre_rms", config))
    with pytest.raises(TypeError, match="DSPostNormBase"):
        DSPostNormRegistry.register_module(torch.nn.Linear)

    @DSPostNormRegistry.register_module
    class Doubling(DSPostNormBase):
        @staticmethod
        def name() -> str:
            return "doubling"

        @staticmethod
        def supports_config(config: Any) -> bool:
            return True

        def transform_param(self, param: Tensor) -> InferenceParameter:
            return InferenceParameter.initialize(param)

        def forward(self, residual: Tensor, *_: Any) -> Any:
            return residual, residual * self._implementation_config["times"]

    try:
        made = DSPostNormRegistry.instantiate_config(bundle("doubling", config, times=2))
        assert made(torch.ones(1), None, None)[1].item() == 2 and made.config_class() is DSNormConfig
    finally:
        del DSPostNormRegistry.registry["doubling"]


def test_norms() -> None:
    residual, hidden, weight, bias = torch.randn(4, 16), torch.randn(4, 16), torch.randn(16), torch.randn(16)
    total = residual + hidden
    post: Any = DSPostNormRegistry.instantiate_config(bundle("cuda_post_ln", norm_config("layer_norm")))
    gamma, beta = post.transform_param(weight), post.transform_param(bias)
    given = residual.clone()
    kept, made = post(given, hidden, gamma, beta)
    assert kept is given
    torch.testing.assert_close(made, F.layer_norm(total, (16,), weight, bias))
    before: Any = DSPreNormRegistry.instantiate_config(bundle("cuda_pre_ln", norm_config("layer_norm")))
    kept, made = before(residual, hidden, gamma, beta)
    torch.testing.assert_close(kept, total)
    torch.testing.assert_close(made, F.layer_norm(total, (16,), weight, bias))
    rms: Any = DSPreNormRegistry.instantiate_config(bundle("cuda_pre_rms", norm_config("rms_norm")))
    kept, made = rms(residual, None, gamma)
    assert kept is residual
    torch.testing.assert_close(made, F.rms_norm(residual, (16,), weight, 1e-5))


@pytest.mark.parametrize("activation", [ActivationType.RELU, ActivationType.SiGLU])
def test_a_linear_layer_and_its_activation(activation: ActivationType) -> None:
    config = DSLinearConfig(max_tokens=8, in_channels=16, out_channels=4, activation=activation, **FP32)  # type: ignore[arg-type]
    layer: Any = DSLinearRegistry.instantiate_config(bundle("blas_fp_linear", config))
    weight, bias, inputs = torch.randn(8, 16), torch.randn(8), torch.randn(3, 16)
    if activation is ActivationType.RELU:
        weight, bias = weight[:4], bias[:4]
        expected = F.relu(F.linear(inputs, weight, bias))
    else:
        both = F.linear(inputs, weight, bias)
        expected = F.silu(both[:, 0::2]) * both[:, 1::2]
    made = layer(inputs, layer.transform_param(weight), layer.transform_param(bias))
    torch.testing.assert_close(made, expected)
    assert layer.output.shape == (8, 4) and type(made) is Tensor


def test_experts() -> None:
    config = DSMoEConfig(
        max_tokens=8,
        model_dim=6,
        intermediate_features=5,
        n_experts=3,
        top_k=2,
        normalize_scores=True,
        **FP32,
    )  # type: ignore[arg-type]
    layer: Any = DSMoERegistry.instantiate_config(bundle("cutlass_multi_gemm_moe", config))
    gate, first, second = torch.randn(3, 6), torch.randn(3, 5, 6), torch.randn(3, 6, 5)
    inputs = torch.randn(4, 6)
    made = layer(
        inputs,
        layer.transform_gate_param(gate),
        layer.transform_moe_mlp_1_param(first),
        layer.transform_moe_mlp_2_param(second),
    )
    documented = {"gate_w": gate, "mlp_1_w": first, "mlp_2_w": second}
    assert torch.equal(layer(inputs, object(), gate, first, mlp_2_w=second), made)
    assert torch.equal(layer(inputs, **documented), made)
    for token, result in zip(inputs, made, strict=True):
        scores = (gate @ token).softmax(0)
        chosen = scores.topk(2).indices
        parts = [scores[e] * (second[e] @ (first[e] @ token)) for e in chosen]
        torch.testing.assert_close(result, sum(parts) / scores[chosen].sum(), rtol=1e-4, atol=1e-4)


# -------------------------------------------------------------------------------------------------- containers


class Plain(ParameterBase):
    value: Tensor

    def finalize(self) -> Any:
        return InferenceParameter.initialize(self.value)


class Several(ParameterBase):
    items: ParamList("count")  # type: ignore[valid-type]
    scale: Tensor

    def finalize(self) -> Any:
        return InferenceParameter.initialize(torch.stack(list(self.items)) * self.scale)


class Base(LayerContainer):
    first: Plain
    PARAM_MAPPING = {"a.weight": "first.value"}


class Layer(Base):
    second: Several
    third: Plain
    PARAM_MAPPING = {"b.*.weight": "second.items", "scale": ["second.scale", "third.value"]}


MODEL = SimpleNamespace(count=2)


def test_a_layer_is_filled_from_a_checkpoint() -> None:
    layer: Any = Layer(MODEL)
    assert layer.n_params == 3 and set(layer.annotation_attrs) == {"first", "second", "third"}
    layer.set_dependency("b.1.weight", torch.tensor([3.0]))
    layer.set_dependency("a.weight", torch.tensor([1.0]))
    assert isinstance(layer.first, InferenceParameter) and isinstance(layer.second, Several)
    assert not layer.is_populated and not layer.is_initialized
    layer.set_dependency("scale", torch.tensor([10.0]))
    layer.set_dependency("b.0.weight", torch.tensor([2.0]))
    assert layer.second.tolist() == [[20.0], [30.0]] and layer.third.tolist() == [10.0]
    assert layer.is_populated and layer.is_initialized
    with pytest.raises(ValueError, match="no place"):
        layer.set_dependency("no.such", torch.ones(1))
    other: Any = Layer(MODEL)
    other.set_dependency("b.0.weight", torch.ones(1))
    with pytest.raises(ValueError, match="twice"):
        other.set_dependency("b.0.weight", torch.ones(1))
    with pytest.raises(ValueError, match="is a list"):
        other.second.items = torch.ones(1)
    other.direct_injection("third", None)
    with pytest.raises(ValueError, match="fourth"):
        other.direct_injection("fourth", None)
    with pytest.raises(ValueError, match="count"):
        Layer(SimpleNamespace())


@pytest.mark.parametrize(
    ("mapping", "told"),
    [
        ({"a": "first.value"}, "nothing goes to"),
        ({"a": "no.value", "b": "first.value"}, "no.value"),
        ({"a": "first.no"}, "first.no"),
        ({"a": "first.value", "c": "first.value"}, "two sources"),
        ({"a": "first.value", "x": "second.items", "s": "second.scale"}, "one star"),
        ({"a": "first.value", "x.*": ["second.items", "second.scale"]}, "single tensors"),
    ],
)
def test_a_mapping_that_is_not_right_is_refused_with_its_class(mapping: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        type(
            "Wrong",
            (LayerContainer,),
            {"PARAM_MAPPING": mapping, "__annotations__": {"first": Plain, "second": Several}},
        )


def test_common_weights() -> None:
    same = dict.fromkeys(("qkv", "mlp_1", "moe_mlp_1"))
    model = SimpleNamespace(
        n_experts=2,
        head_size=1,
        n_heads_q=4,
        n_heads_kv=2,
        **{f"transform_{name}_param": InferenceParameter.initialize for name in same},
    )

    class Decoder(LayerContainer):
        qkv: UnfusedQKVParameter
        gated: GatedMLPParameter
        experts: UnfusedMoEMLP1Parameter
        grouped: GQAMegatronQKVParameter

    layer: Any = Decoder(model)
    layer.qkv.q_params, layer.qkv.k_params = torch.zeros(2, 3), torch.ones(1, 3)
    layer.qkv.v_params = torch.full((1, 3), 2.0)
    assert layer.qkv[:, 0].tolist() == [0, 0, 1, 2]
    layer.gated.gate_params = torch.tensor([[1.0], [2.0]])
    layer.gated.up_params = torch.tensor([[10.0], [20.0]])
    assert layer.gated[:, 0].tolist() == [1, 10, 2, 20]
    for expert in (1, 0):
        layer.experts.experts[expert] = torch.full((1, 1), float(expert))
    assert layer.experts[:, 0, 0].tolist() == [0, 1]
    layer.grouped.params = torch.arange(8.0)
    assert layer.grouped.tolist() == [0, 1, 4, 5, 2, 6, 3, 7] and layer.is_populated


# ----------------------------------------------------------------------------------------------- shards of weights


@pytest.mark.parametrize(("q", "kv", "ranks"), [(4, 4, 2), (6, 6, 4), (8, 4, 2), (8, 2, 4), (6, 2, 4)])
def test_shards_of_attention_make_up_the_whole(q: int, kv: int, ranks: int) -> None:
    size = 3
    weight, out = torch.arange((q + 2 * kv) * size * 2.0).view(-1, 2), torch.randn(5, q * size)
    parts = [shard_qkv_param(weight, rank, ranks, size, q, kv) for rank in range(ranks)]
    heads = [get_local_heads(rank, ranks, q, kv) for rank in range(ranks)]
    for rank, (part, (own_q, own_kv)) in enumerate(zip(parts, heads, strict=True)):
        assert part.shape[0] == (own_q + 2 * own_kv) * size
        assert part.shape[0] == qkv_out_features(q * size, rank, ranks, size, q, kv)
        columns = shard_attn_out_param(out, rank, ranks, size, q, kv)
        assert columns is not None
        assert columns.shape[1] == own_q * size == attn_out_in_features(q * size, rank, ranks, size, q, kv)
    queries = torch.cat([part[: own_q * size] for part, (own_q, _) in zip(parts, heads, strict=True)])
    assert torch.equal(queries, weight[: q * size])
    keys = [
        part[own_q * size : (own_q + own_kv) * size]
        for part, (own_q, own_kv) in zip(parts, heads, strict=True)
    ]
    each = torch.cat(keys).unflatten(0, (-1, size)).unique(dim=0)
    assert torch.equal(each.flatten(0, 1), weight[q * size : (q + kv) * size])
    columns = [shard_attn_out_param(out, rank, ranks, size, q, kv) for rank in range(ranks)]
    assert torch.equal(torch.cat([each for each in columns if each is not None], 1), out)
    bias = torch.randn(5)
    assert (
        shard_attn_out_param(bias, 0, ranks, size) is bias
        and shard_attn_out_param(bias, 1, ranks, size) is None
    )


def test_shards_of_the_other_weights() -> None:
    assert [get_shard_endpoints(160, rank, 2) for rank in (0, 1)] == [(0, 96), (96, 160)]
    weight, bias = torch.randn(160, 4), torch.randn(160)
    parts = [shard_mlp_1_param(weight, rank, 2) for rank in (0, 1)]
    assert torch.equal(torch.cat([part for part in parts if part is not None]), weight)
    assert sharded_intermediate_dim(160, 2, 0) == 96
    gated = shard_mlp_1_param(torch.randn(256), 0, 2, gated=True)
    assert gated is not None and gated.shape == (128,)
    experts = shard_mlp_1_param(torch.randn(3, 160), 1, 2, is_moe=True)
    assert experts is not None and experts.shape == (3, 64)
    columns = shard_mlp_2_param(torch.randn(4, 160), 1, 2)
    assert columns is not None and columns.shape == (4, 64)
    assert shard_mlp_2_param(bias, 1, 2) is None and shard_mlp_2_param(bias, 0, 2) is bias
    rows = shard_unembed_param(torch.randn(7, 2), 1, 2)
    assert rows is not None and rows.shape == (3, 2) and sharded_unembed_dim(7, 0, 2) == 4
    with pytest.raises(AssertionError, match="32"):
        get_shard_endpoints(33, 0, 2)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((None, 0, 2, 4), "None"),
        ((torch.ones(20, 1), 0, 2, 4), "20 rows"),
        ((torch.ones(24, 1), 0, 2, 4, None, 2), "without n_heads_q"),
        ((torch.ones(24, 1), 0, 4, 4), "too few"),
        ((torch.ones(28, 1), 0, 2, 4, 3, 2), "no multiple"),
        ((torch.ones(48, 1), 0, 2, 4, 6, 3), "evenly"),
        ((torch.ones(48, 1), 0, 4, 4, 6, 3), "evenly"),
        ((torch.ones(24, 1), 0, 2, 4, 4, 2), "rows"),
    ],
)
def test_heads_that_cannot_be_dealt_are_refused(arguments: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        shard_qkv_param(*arguments)


class _Kept(ParameterBase):
    """A weight with scales, or none."""

    source: torch.Tensor

    def finalize(self) -> InferenceParameter | None:
        if not self.source.numel():
            return None
        return InferenceParameter.initialize(self.source, scales=torch.full((3,), 2.0))


class _Two(LayerContainer):
    PARAM_MAPPING = {"a": "first.source", "b": "second.source"}

    first: _Kept
    second: _Kept


def test_weights_of_containers_lie_in_one_tensor() -> None:
    """Strides are kept; two containers filled from the bytes share them."""
    model = SimpleNamespace()
    given = [torch.rand(5, 3).t(), torch.arange(7, dtype=torch.int8), torch.rand(4, 4).half(), torch.empty(0)]
    layer, rest = _Two(model), _Two(model)
    with pytest.raises(ValueError, match="transformer_layer_0 is not filled"):
        flatten_inference_model([layer], rest, "Mine")
    for container, (a, b) in ((layer, given[:2]), (rest, given[2:])):
        container.set_dependency("a", a)
        container.set_dependency("b", b)
    buffer, described = flatten_inference_model([layer], rest, "Mine")
    restored = _Two(model), _Two(model)
    restore_inference_model(buffer, type(described)(**described.model_dump()), [restored[0]], restored[1])
    assert described.policy == "Mine"
    for made in ((layer, rest), restored):
        found = [made[0].first, made[0].second, made[1].first]
        for weight, source in zip(found, given, strict=False):
            assert torch.equal(weight, source) and weight.stride() == source.stride()
            assert weight.scales.tolist() == [2.0] * 3
            assert weight.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert made[1].second is None and made[0].is_initialized and made[1].is_initialized


def test_sizes_of_a_described_decoder() -> None:
    sizes = {
        "num_layers": 2,
        "model_dim": 32,
        "vocab_size": 100,
        "head_size": 8,
        "n_heads": 4,
        "n_heads_kv": 2,
    }
    kinds = {"activation_dtype": torch.float32, "norm_type": None, "mlp_activation_fn": ActivationType.SiGLU}
    made: Any = type("Described", (DSTransformerModelBase,), {**sizes, **kinds, "intermediate_dim": 64})
    model = made(SimpleNamespace(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}))
    assert (model.n_heads_q_local, model.n_heads_kv_local, model.gated_mlp) == (4, 2, True)
    assert (model.tp_size, model.tp_rank, model.rope_theta) == (1, 0, 5e5)
    model._config = SimpleNamespace(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=1e4)
    with pytest.raises(ValueError, match="rope_type='linear'"):
        _ = model.rope_theta
