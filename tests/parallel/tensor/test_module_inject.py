"""What ``deepspeed.compat.module_inject`` documents for scripts that replace and split layers themselves."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepspeed
from deepspeed import comm as dist
from deepspeed.compat.module_inject import (
    AutoTPConfig,
    EmbeddingLayer,
    GroupQuantizer,
    HFBertLayerPolicy,
    LinearAllreduce,
    LinearLayer,
    Normalize,
    PartitionType,
    ReplaceWithTensorSlicing,
    TPLayerSpec,
    generic_injection,
    quantize_transformer_layer,
)
from deepspeed.compat.module_inject.auto_tp import AutoTP, Loading
from deepspeed.compat.module_inject.layers import (
    ColumnParallel,
    GateUpPack_LinearLayer,
    GatherFromTensorParallelRegion,
    GatherReplacedLayerParams,
    LmHeadLinearAllreduce,
    OPTEmbedding,
    RMSNormalize,
    RowParallel,
    TensorParallel_Layer,
)
from deepspeed.compat.module_inject.replace_module import (
    get_transformer_name,
    replace_module,
    skip_level_0_prefix,
)
from deepspeed.compat.module_inject.replace_policy import MegatronLayerPolicy, replace_policies
from deepspeed.compat.module_inject.tp_shard import (
    AutoTPMeta,
    get_num_kv_heads,
    get_shard_size,
    get_shard_size_list,
    set_num_kv_heads,
    set_tp_grain_size,
)
from tests.pool import distributed


class Block(nn.Module):
    """With the names of BERT's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Module()
        self.attention.self = nn.Module()
        for name in ("query", "key", "value"):
            setattr(self.attention.self, name, nn.Linear(8, 8))
        self.attention.self.num_attention_heads = 2
        self.attention.output = nn.Module()
        self.attention.output.dense, self.attention.output.LayerNorm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.intermediate, self.output = nn.Module(), nn.Module()
        self.intermediate.dense = nn.Linear(8, 16)
        self.output.dense, self.output.LayerNorm = nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, inputs: Tensor) -> Tensor:
        part = self.attention.self
        mixed = part.query(inputs).sigmoid() * part.key(inputs) * part.value(inputs)
        hidden = self.attention.output.LayerNorm(self.attention.output.dense(mixed))
        return self.output.LayerNorm(self.output.dense(F.relu(self.intermediate.dense(hidden))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return self.head(inputs)


def rules(*, strict: bool = False) -> AutoTPConfig:
    return AutoTPConfig(
        strict_mode=strict,
        layer_specs=[
            TPLayerSpec([r".*output\.dense\.weight$"], PartitionType.ROW),
            TPLayerSpec([r".*(query|key|value|intermediate\.dense)\.weight$"], PartitionType.COLUMN),
            TPLayerSpec([r"head\.weight$"], PartitionType.SKIP),
        ],
    )


def auto_tp(module: nn.Module, **more: Any) -> AutoTP:
    settings: dict[str, Any] = {
        "all_reduce_linears": [],
        "prefix": "",
        "state_dict": None,
        "linear_layer_setting": (nn.Linear, nn.Embedding),
        "orig_layer_impl": None,
    }
    return AutoTP(module=module, **{**settings, **more})


@pytest.mark.parametrize("by_rules", [True, False])
@distributed(world_size=2)
def test_a_model_that_auto_tp_split_computes_like_the_whole_one(by_rules: bool) -> None:
    whole = Model()
    for param in whole.parameters():
        dist.broadcast(param.data, 0)
    module = copy.deepcopy(whole)
    names = [] if by_rules else ["output.dense"]
    splitter = auto_tp(module, partition_config=rules() if by_rules else None, all_reduce_linears=names)
    splitter.set_tensor_parallel_config(2, dist.get_world_group())
    splitter.update_linear_policies()
    split = module if by_rules else module.layers
    assert splitter._replace_module(split) is split
    first: Any = module.layers[0]
    assert isinstance(first.output.dense, LinearAllreduce) and isinstance(
        first.attention.self.key, LinearLayer
    )
    assert type(module.head) is nn.Linear and first.attention.self.key.weight.shape == (4, 8)
    assert isinstance(first.output.dense, TensorParallel_Layer)
    assert (first.output.dense.tp_world_size, first.output.dense.tp_index) == (2, dist.get_rank())
    inputs = torch.randn(3, 8)
    dist.broadcast(inputs, 0)
    torch.testing.assert_close(module(inputs), whole(inputs), rtol=1e-5, atol=1e-6)
    assert first.attention.self.num_attention_heads == (2 if by_rules else 1)
    key = first.attention.self.key.weight
    with GatherReplacedLayerParams([key], module):
        torch.testing.assert_close(key.data, whole.layers[0].attention.self.key.weight.data)
    assert key.shape == (4, 8)


@distributed(world_size=2)
def test_the_regions_and_layers_of_scripts() -> None:
    group, rank = dist.get_world_group(), dist.get_rank()
    inputs = torch.full((2, 2), 1.0 + rank, requires_grad=True)
    summed = RowParallel.apply(group, inputs, False)
    assert summed.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    summed.sum().backward()
    assert inputs.grad is not None and inputs.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    inputs.grad = None
    (ColumnParallel.apply(group, inputs) * (1 + rank)).sum().backward()
    assert inputs.grad is not None and inputs.grad.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    joined = GatherFromTensorParallelRegion.apply(group, torch.full((1, 1 + rank), float(rank)), (1, 2))
    assert joined.tolist() == [[0.0, 1.0, 1.0]]

    torch.manual_seed(0)
    head, gated, given = nn.Linear(6, 4), nn.Linear(6, 8), torch.randn(2, 6)
    torch.testing.assert_close(LmHeadLinearAllreduce(copy.deepcopy(head), group)(given), head(given))
    mine = GateUpPack_LinearLayer(copy.deepcopy(gated), group)(given)
    halves = gated(given).unflatten(-1, (2, 2, 2))[:, :, rank].flatten(1)
    torch.testing.assert_close(mine, halves)


def test_strict_rules_name_the_layer_without_one() -> None:
    config = AutoTPConfig(strict_mode=True, layer_specs=[TPLayerSpec([r"head\.weight"], PartitionType.SKIP)])
    splitter = auto_tp(Model(), partition_config=config)
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.self\.query\.weight"):
        splitter._replace_module(splitter.module)
    with pytest.raises(ValueError, match="mp_size=2"):
        splitter.set_tensor_parallel_config(2, _Alone())


class _Alone:
    def size(self) -> int:
        return 1


def test_what_auto_tp_finds_in_a_model() -> None:
    model = Model()
    blocks = AutoTP.get_module_list(model)
    assert [type(each) for each in blocks] == [Block] and AutoTP.in_module_list(model.layers[1], blocks)
    assert AutoTP.get_layers("", model.layers[0])[3:5] == ["output.dense", "ln"]
    assert not AutoTP.kernel_supported(blocks) and AutoTP.supported(model)
    assert AutoTP.update_policy_list([(Block, ["a"])], blocks[0], ["b", "a"]) == [(Block, ["a", "b"])]
    assert AutoTP.tp_parser(model) == [(Block, ["output.dense"])]  # of the attention and behind it
    with pytest.raises(ValueError, match="injection_policy"):
        AutoTP.tp_parser(nn.Sequential(nn.ModuleList([nn.ReLU()])))
    config = type("Config", (), {"num_attention_heads": 8, "num_key_value_heads": 2})
    assert AutoTP.get_model_num_kv_heads(config) == 2
    assert get_transformer_name(model) == "layers"


def test_policies_read_a_layer() -> None:
    block = Block()
    policy = HFBertLayerPolicy(block, inference=False)
    part = block.attention.self
    weight, bias, out, out_bias = policy.attention()
    assert isinstance(weight, nn.Parameter) and not weight.requires_grad
    torch.testing.assert_close(
        weight.data, torch.cat([part.query.weight, part.key.weight, part.value.weight])
    )
    assert bias is not None and bias.shape == (24,) and out is block.attention.output.dense.weight
    assert out_bias is block.attention.output.dense.bias
    assert policy.mlp() == (
        block.intermediate.dense.weight,
        block.intermediate.dense.bias,
        block.output.dense.weight,
        block.output.dense.bias,
    )
    assert policy.layernorm()[2] is block.output.LayerNorm.weight
    assert policy.get_hidden_heads() == (8, 2, 1e-5, 16)
    for kind in replace_policies:
        assert kind(None)._orig_layer_class is None or kind._orig_layer_class
    assert MegatronLayerPolicy(None).is_megatron_v2


def test_layers_are_replaced_by_class() -> None:
    model = Model()
    seen: list[tuple[int, str]] = []

    def make(
        layer: nn.Module, policy: Any, number: int, prefix: str = "", state_dict: Any = None
    ) -> nn.Module:
        seen.append((number, prefix))
        return nn.Identity()

    assert replace_module(model, Block, make, None) is model
    assert seen == [(0, "layers.0"), (1, "layers.1")] and isinstance(model.layers[1], nn.Identity)
    replace_module(model, nn.Linear, lambda layer, policy, number: nn.Identity(), None)
    assert isinstance(model.head, nn.Identity)
    with pytest.raises(ValueError, match="Block"):
        replace_module(model, Block, make, None)
    assert skip_level_0_prefix(Model(), {"0.attention.output.dense.weight": 0}) is True
    assert skip_level_0_prefix(Model(), {"layers.0.attention.output.dense.weight": 0}) is False


def test_slices_of_whole_weights() -> None:
    slicing = ReplaceWithTensorSlicing(mp_size=2, out_dim=0, in_dim=1)
    whole = torch.arange(48.0).view(8, 6)
    rows, columns = (
        slicing.copy(torch.empty(4, 6), whole, int8=True),
        slicing.copy(torch.empty(8, 3), whole, int8=True),
    )
    assert rows is not None and columns is not None
    assert torch.equal(rows, whole[:4]) and torch.equal(columns, whole[:, :3])
    blocks = slicing.strided_copy(torch.empty(4, 6), whole, 2, int8=True)
    assert blocks is not None and torch.equal(blocks, torch.cat([whole[:2], whole[4:6]]))
    half = slicing.copy(torch.empty(4, dtype=torch.half), torch.arange(8.0))
    assert half is not None and half.dtype is torch.half and half.tolist() == [0, 1, 2, 3]
    assert slicing.copy(torch.empty(1), None) is None
    with pytest.raises(AssertionError, match="3 wide"):
        slicing.copy(torch.empty(4), torch.empty(3))

    layer = nn.Linear(6, 8)
    Loading.load(layer, {"a.weight": whole, "a.bias": torch.ones(8)}, "a.")
    assert torch.equal(layer.weight, whole) and layer.weight.requires_grad and layer.bias.sum() == 8
    assert Loading.is_load_module(layer) and not Loading.is_load_module(nn.ReLU())


def test_extents_of_ranks() -> None:
    try:
        set_num_kv_heads(3)
        assert get_num_kv_heads() == 3
        assert get_shard_size_list(96, 2, "layers.0.attn.q_proj") == [64, 32]
        assert get_shard_size(96, 2, "q_proj", rank=1) == 32
        assert get_shard_size_list(96, 2, "mlp.up_proj") == [48, 48]
        set_tp_grain_size(64)
        assert get_shard_size_list(192, 2, "lm_head") == [128, 64] and get_shard_size_list(
            97, 2, "lm_head"
        ) == [49, 48]
        assert get_shard_size_list(96, 2, "q_proj", num_kv_heads=2) == [48, 48]
    finally:
        set_num_kv_heads(None)
        set_tp_grain_size(1)


def test_extents_by_the_numbers_of_one_model() -> None:
    config = SimpleNamespace(text_config=SimpleNamespace(num_key_value_heads=3, hidden_size=96, n_head=6))
    meta = AutoTPMeta.from_model_config(config, tp_grain_size=64)
    assert meta == AutoTPMeta(num_kv_heads=3, num_attention_heads=6, n_embd=96, tp_grain_size=64)
    assert AutoTPMeta.from_model_config(None) == AutoTPMeta()
    assert get_shard_size_list(96, 2, meta, "q_proj") == [64, 32]
    assert get_shard_size_list(192, 2, name="up_proj", meta=meta) == [128, 64]
    assert get_shard_size_list(97, 2, meta, "lm_head") == [64, 33]
    assert get_shard_size(96, 2, meta, "q_proj", 1) == get_shard_size(96, 2, "q_proj", 1, meta=meta) == 32
    assert get_shard_size_list(96, 2, "q_proj") == [48, 48]  # the process knows nothing of it


def test_integers_of_a_weight() -> None:
    weight = torch.randn(4, 8)
    codes = GroupQuantizer(group_size=1).quantize(weight)
    scale: Tensor = codes.scale  # type: ignore[attr-defined]
    torch.testing.assert_close(codes.float() * scale[:, :1], weight, atol=float(scale.max()), rtol=0)
    assert codes.dtype is torch.int8 and scale.shape == (4, 3)
    assert GroupQuantizer(q_int8=False).quantize(weight).dtype is torch.float32

    model = Model()
    model.layers[0].output.dense.weight.data.fill_(3.0)
    quantize_transformer_layer(Block, model)
    stored = model.layers[0].output.dense.weight
    assert stored.dtype is torch.int8 and stored.eq(3).all() and model.head.weight.dtype is torch.float32


def test_plain_layers_of_given_weights() -> None:
    inputs, weight, bias = torch.randn(3, 8), torch.randn(8), torch.randn(8)
    norm = Normalize(weight=weight, bias=bias, eps=1e-3)
    torch.testing.assert_close(norm(inputs), F.layer_norm(inputs, (8,), weight, bias, 1e-3))
    torch.testing.assert_close(RMSNormalize(8)(inputs), F.rms_norm(inputs, (8,), torch.ones(8), 1e-5))
    table = torch.randn(12, 4)
    assert torch.equal(EmbeddingLayer(weight=table)(torch.tensor([3, 1])), table[[3, 1]])
    mask = torch.tensor([[0, 1, 1]])
    assert torch.equal(OPTEmbedding(weight=table)(mask), table[[1, 2, 3]][None])
    assert torch.equal(OPTEmbedding(weight=table)(mask, 2), table[[3]][None])
    bias = torch.ones(12).half()
    layer = LinearLayer.from_weights(weight=table.half(), bias=bias)
    given = torch.ones(1, 4).half()
    torch.testing.assert_close(layer(given), F.linear(given, table.half(), bias))
    assert LinearLayer.from_weights(weight_shape=(3, 4), dtype=torch.float).weight.shape == (3, 4)
    for made in (Normalize, RMSNormalize, EmbeddingLayer, LinearLayer.from_weights):
        with pytest.raises(ValueError, match="weight"):
            made()


def test_layers_for_training_and_for_inference_by_the_documented_name() -> None:
    model = Model()
    assert deepspeed.replace_transformer_layer(Block, model, None, {"dtype": torch.bfloat16}, None) is model
    assert model.head.weight.dtype is torch.bfloat16
    with pytest.raises(TypeError, match="no_such"):
        deepspeed.replace_transformer_layer(Block, model, None, {}, None, no_such=1)
    assert generic_injection(object.__new__(_Pipeline), torch.float16) is None
    with pytest.raises(ValueError, match="dtype"):
        generic_injection(object.__new__(_Pipeline), torch.int8)


class _Pipeline:
    """Without parts."""


def test_names_that_rules_are_asked_by_and_tied_heads() -> None:
    """Rules see whole names; a tied table whose output is whole anyway stays one table."""
    model: Any = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({"proj": nn.Linear(4, 4)}) for _ in range(2)])
    model.embed = nn.Embedding(10, 4)
    model.head = nn.Linear(4, 10, bias=False)
    model.head.weight = model.embed.weight
    rules = AutoTPConfig(
        layer_specs=[
            TPLayerSpec(patterns=[r"layers\.1\.proj\.weight$"]),
            TPLayerSpec(patterns=[r"head\.weight$"], gather_output=True),
        ]
    )
    AutoTP(model, partition_config=rules, prefix="model")._replace_module(model)
    assert [type(each["proj"]) for each in model.layers] == [nn.Linear, type(model.layers[1]["proj"])]
    assert isinstance(model.layers[1]["proj"], LinearLayer)
    assert type(model.head) is nn.Linear and model.head.weight is model.embed.weight
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    AutoTP(model, partition_config=rules)._replace_module(model)
    assert isinstance(model.head, LinearLayer) and model.head.gather_output


def test_base_of_rotary_positions_of_every_release() -> None:
    from deepspeed.inference.model.rope import rope_theta
    from deepspeed.module_inject.containers.llama import _get_rope_theta

    new = SimpleNamespace(rope_parameters={"rope_theta": 7.0, "rope_type": "default"})
    old = SimpleNamespace(rope_theta=8.0, rope_scaling=None)
    layered = {"rope_theta": 1.0, "full": {"rope_theta": 5.0}, "sliding": {"rope_theta": 5.0}}
    assert [rope_theta(each) for each in (new, old)] == [7.0, 8.0]
    assert rope_theta(SimpleNamespace(rope_parameters=layered)) == 5.0
    layered["full"] = {"rope_theta": 6.0}
    with pytest.raises(ValueError, match="different rope_theta per layer type"):
        rope_theta(SimpleNamespace(rope_parameters=layered))
    with pytest.raises(ValueError, match="no rope_theta"):
        rope_theta(SimpleNamespace())
    assert _get_rope_theta(SimpleNamespace(config=new, rope_theta=9.0)) == 7.0
    assert _get_rope_theta(SimpleNamespace(config=SimpleNamespace(), rope_theta=9.0)) == 9.0
    assert _get_rope_theta(SimpleNamespace(rope_theta=9.0)) == 9.0
    with pytest.raises(AttributeError):
        _get_rope_theta(SimpleNamespace(config=SimpleNamespace()))
    with pytest.raises(ValueError, match="rope_type='yarn'"):
        _get_rope_theta(
            SimpleNamespace(config=SimpleNamespace(rope_theta=1.0, rope_scaling={"type": "yarn"}))
        )


def test_weights_are_loaded_where_nothing_is_replaced(tmp_path: Any) -> None:
    whole = nn.Sequential(nn.InstanceNorm1d(4), nn.BatchNorm1d(4), nn.Linear(3, 2))
    whole[1].running_mean.fill_(2)
    torch.save(whole.state_dict(), tmp_path / "weights.pt")
    with torch.device("meta"):
        model = nn.Sequential(nn.InstanceNorm1d(4), nn.BatchNorm1d(4), nn.Linear(3, 2))
    replace_module(model, nn.ReLU, lambda layer, policy, number: layer, None, str(tmp_path / "weights.pt"))
    torch.testing.assert_close(model.state_dict(), whole.state_dict())
    with pytest.raises(ValueError, match="has no layer of ReLU"):
        replace_module(model, nn.ReLU, lambda layer, policy, number: layer, None)


@distributed(world_size=2)
def test_layers_in_parts_keep_them_under_a_config_that_shares_layers() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    whole = copy.deepcopy(model).state_dict()
    both = dist.new_group([0, 1])
    model[0], model[1] = LinearLayer(model[0], both), LinearAllreduce(model[1], both)
    rules = {
        "layer_specs": [{"patterns": [r".*\.weight$"], "partition_type": "skip"}],
        "use_default_specs": False,
    }
    parallel = {"autotp_size": 2, "partition_config": rules}
    settings = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": parallel}
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    found = engine._consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        torch.testing.assert_close(found, whole, rtol=0, atol=0)
    engine.destroy()
