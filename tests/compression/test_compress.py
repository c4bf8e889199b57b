"""`init_compression` and `redundancy_clean` on one rank: which modules, what forward computes, what is left after."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.compression.basic_layer import (
    BNLayer_Compress,
    Conv2dLayer_Compress,
    Embedding_Compress,
    LinearLayer_Compress,
)
from deepspeed.compression.compress import (
    get_compress_methods,
    init_compression,
    redundancy_clean,
    student_initialization,
)
from deepspeed.compression.helper import module_replacement, rewrite_optimizer_step
from deepspeed.compression.scheduler import compression_scheduler
from deepspeed.compression.techniques import Compressible
from deepspeed.compression.utils import AsymQuantizer, SymQuantizer
from deepspeed.config.sections.compression import get_compression_config
from tests.compression.models import (
    ACTIVATIONS,
    HEADS_HALF,
    HIDDEN,
    INNER,
    ROWS,
    SPARSE,
    WEIGHTS,
    Bert,
    ConvNet,
    batch,
    config,
    technique,
)

EIGHT, HALF = {"start_bits": 8, "target_bits": 8}, {"dense_ratio": 0.5}
OVERLAP = {
    "shared_parameters": {"enabled": True},
    "different_groups": {
        "a": {"params": EIGHT, "modules": ["query"]},
        "b": {"params": EIGHT, "modules": ["self"]},
    },
}


def scheduled(model: nn.Module, asked: dict[str, Any], step: int = 0) -> compression_scheduler:
    scheduler = compression_scheduler(model, get_compression_config(asked))
    scheduler.training_steps = step
    scheduler.check_all_modules()
    return scheduler


def test_only_what_the_patterns_find_changes_and_names_stay(tmp_path: Path) -> None:
    model = Bert()
    names, params = list(model.state_dict()), list(model.parameters())
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config(WEIGHTS, ACTIVATIONS)))
    assert deepspeed.compression.init_compression(model, str(path)) is model
    compressed = {name for name, module in model.named_modules() if isinstance(module, Compressible)}
    assert compressed == {
        name
        for name, module in Bert().named_modules()
        if isinstance(module, nn.Linear) and name != "classifier"
    }
    assert type(model.layer[0].attention.self.query) is LinearLayer_Compress
    assert list(model.state_dict()) == names
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))


def test_nothing_changes_before_the_schedule_begins() -> None:
    plain = Bert()
    model = copy.deepcopy(plain)
    asked = config(
        *(
            {name: {**section, "shared_parameters": {**section["shared_parameters"], "schedule_offset": 1}}}
            for each in (WEIGHTS, ACTIVATIONS, SPARSE, ROWS, HEADS_HALF)
            for name, section in each.items()
        )
    )
    init_compression(model, asked)
    scheduler = scheduled(model, asked)
    tokens, _ = batch(0)
    assert torch.equal(model(tokens), plain(tokens))
    scheduler.step()
    assert not torch.equal(model(tokens), plain(tokens))


@pytest.mark.parametrize(
    "technique", [WEIGHTS, ACTIVATIONS, SPARSE, ROWS, HEADS_HALF], ids=lambda each: next(iter(each))
)
def test_without_an_offset_a_technique_acts_from_the_first_step(technique: Any) -> None:
    def output(**offset: int) -> torch.Tensor:
        torch.manual_seed(0)
        model = Bert()
        ((name, section),) = technique.items()
        shared = {k: v for k, v in section["shared_parameters"].items() if k != "schedule_offset"} | offset
        asked = config({name: {**section, "shared_parameters": shared}})
        init_compression(model, asked)
        scheduled(model, asked)
        return model(batch(0)[0])

    assert torch.equal(output(), output(schedule_offset=0))
    assert not torch.equal(output(), output(schedule_offset=1))


def test_several_techniques_on_one_layer() -> None:
    linear = LinearLayer_Compress(8, 6)
    linear.enable_weight_quantization(4, 4, 1, True, "symmetric", 2)
    linear.enable_activation_quantization(8, "asymmetric", "dynamic")
    linear.enable_sparse_pruning(0.5, "l1")
    linear.enable_row_pruning(0.5, "topk")
    linear.enable_head_pruning(0.5, "topk", 4)
    names = (
        "weight_quantization",
        "activation_quantization",
        "sparse_pruning",
        "row_pruning",
        "head_pruning",
    )
    for name in names:
        setattr(linear, f"{name}_enabled", True)
    linear.weight_quantize_bits = 4
    x = torch.randn(3, 5, 8)
    sparse = linear.weight.abs() >= linear.weight.abs().flatten().sort(descending=True).values[23]
    scores: Any = linear
    rows = scores.row_mask_scores >= scores.row_mask_scores.flatten().sort(descending=True).values[2]
    heads = scores.head_pruning_scores >= scores.head_pruning_scores.flatten().sort(descending=True).values[1]
    weight = SymQuantizer.apply(linear.weight, 4, None, None, 2) * sparse * rows
    weight = weight * heads.view(-1).repeat_interleave(2)
    inputs = AsymQuantizer.apply(x, 8, None, None, 15)
    expected = inputs @ weight.T + linear.bias * rows.view(-1)
    torch.testing.assert_close(linear(x), expected)
    linear(x).square().sum().backward()
    for tensor in (linear.weight, linear.bias, linear.row_mask_scores, linear.head_pruning_scores):
        assert tensor.grad is not None and tensor.grad.abs().sum() > 0


def test_bits_fall_and_mix_in() -> None:
    mixed = copy.deepcopy(WEIGHTS)
    shared = mixed["weight_quantization"]["shared_parameters"]
    shared |= {"schedule_offset": 1, "fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.25}}
    asked = config(mixed)
    model = init_compression(Bert(), asked)
    scheduler = scheduled(model, asked)
    query: Any = model.layer[0].attention.self.query
    told = []
    for _ in range(8):
        told.append(
            (query.weight_quantization_enabled, query.weight_quantize_bits, query.weight_quantize_share)
        )
        scheduler.step()
    assert told[0][0] is False
    assert told[1:6] == [(True, 8, 0.25), (True, 8, 0.5), (True, 7, 0.75), (True, 7, 1.0), (True, 6, 1.0)]
    query.weight_quantize_bits, query.weight_quantize_share = 4, 0.25
    rounded = SymQuantizer.apply(query.weight, 4, None, None, 4)
    torch.testing.assert_close(query.compressed_weight(), 0.75 * query.weight + 0.25 * rounded)


ALL = config(WEIGHTS, SPARSE, ROWS, HEADS_HALF)


def test_the_clean_model_is_plain_smaller_and_computes_the_same() -> None:
    model = init_compression(Bert(), ALL).eval()
    scheduled(model, ALL, step=100)
    tokens, _ = batch(1)
    before = model(tokens)
    clean = deepspeed.compression.redundancy_clean(model, ALL)
    assert clean is model
    assert not any(isinstance(module, Compressible) for module in model.modules())
    for layer in model.layer:
        assert type(layer.intermediate["dense"]) is nn.Linear
        assert layer.intermediate["dense"].weight.shape == (INNER // 2, HIDDEN)
        assert layer.output["dense"].weight.shape == (HIDDEN, INNER // 2)
        assert layer.attention.self.query.weight.shape == (HIDDEN // 2, HIDDEN)
        assert layer.attention.output["dense"].weight.shape == (HIDDEN, HIDDEN // 2)
        assert (layer.attention.self.num_attention_heads, layer.attention.self.all_head_size) == (
            2,
            HIDDEN // 2,
        )
    assert vars(model.layer[0].intermediate["dense"]).keys() == vars(nn.Linear(2, 2)).keys()
    assert list(model.state_dict()) == list(Bert().state_dict())
    torch.testing.assert_close(model(tokens), before, rtol=1e-5, atol=1e-6)


def test_a_schedule_goes_on_after_the_layers_are_clean() -> None:
    model = init_compression(Bert(), ALL)
    scheduler = scheduled(model, ALL)
    deepspeed.compression.redundancy_clean(model, ALL)
    scheduler.step()
    assert vars(model.layer[0].intermediate["dense"]).keys() == vars(nn.Linear(2, 2)).keys()


def test_channels_are_removed_behind_their_batch_norm_too() -> None:
    asked = config(
        technique("channel_pruning", ["conv1"], {"dense_ratio": 0.5}, [["conv2", "bn1"]], method="topk"),
        technique(
            "weight_quantization",
            ["conv"],
            EIGHT,
            quantize_weight_in_forward=True,
        ),
        technique(
            "activation_quantization",
            ["conv"],
            {"bits": 8},
            quantization_type="symmetric",
            range_calibration="static",
        ),
    )
    model = init_compression(ConvNet(), asked)
    assert type(model.conv1) is Conv2dLayer_Compress and type(model.bn1) is BNLayer_Compress
    scheduler = scheduled(model, asked)
    images = torch.randn(6, 3, 8, 8)
    for _ in range(3):
        model(images).sum().backward()
    assert model.conv1.channel_mask_scores.grad.abs().sum() > 0
    model.eval()
    for module in (model.conv1, model.conv2):
        module.activation_quantization_enabled = False  # a range is no part of the plain model
    before = model(images)
    redundancy_clean(model, asked)
    assert model.conv1.weight.shape == (4, 3, 3, 3) and model.conv2.weight.shape == (4, 4, 3, 3)
    assert model.bn1.num_features == model.bn1.running_mean.numel() == 4
    assert type(model.bn1) is nn.BatchNorm2d and model.conv1.out_channels == model.conv2.in_channels == 4
    torch.testing.assert_close(model(images), before, rtol=1e-5, atol=1e-6)
    assert scheduler.training_steps == 0


@pytest.mark.parametrize("mode", ["zeros", "reflect"])
@pytest.mark.parametrize("padding", [1, "same", (2, 1)])
def test_convolutions_pad_as_torch(padding: Any, mode: str) -> None:
    conv = nn.Conv2d(3, 4, 3, padding=padding, padding_mode=mode)
    compressed = Conv2dLayer_Compress.take(copy.deepcopy(conv))
    images = torch.randn(2, 3, 8, 9)
    torch.testing.assert_close(compressed(images), conv(images))


def test_embeddings() -> None:
    asked = config(
        technique("weight_quantization", ["embeddings"], {"start_bits": 1, "target_bits": 1}, quantize_groups=32,
                  quantize_weight_in_forward=True)
    )  # fmt: skip
    model = init_compression(Bert(), asked)
    scheduled(model, asked)
    assert type(model.embeddings) is Embedding_Compress
    row = model.embeddings.weight[3]
    torch.testing.assert_close(
        model.embeddings(torch.tensor(3)), torch.where(row >= 0, 1.0, -1.0) * row.abs().mean()
    )


def test_tied_weights_are_rounded_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

    asked = config(technique("weight_quantization", ["embed", "head"], {"start_bits": 4, "target_bits": 4}))
    model = init_compression(Tied(), asked)
    expected = SymQuantizer.apply(model.embed.weight, 4)
    redundancy_clean(model, asked)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, expected)


def test_layer_reduction() -> None:
    teacher, student = Bert(layers=4), Bert(layers=4)
    section = {
        "layer_reduction": {
            "enabled": True,
            "keep_number_layer": 2,
            "module_name_prefix": "layer",
            "teacher_layer": [1, 3],
            "other_module_name": ["embeddings", "classifier"],
        }
    }
    with pytest.raises(ValueError, match="teacher_model"):
        init_compression(student, config(section))
    init_compression(student, config(section), teacher_model=teacher)
    assert len(student.layer) == 2
    for mine, other in ((student.layer[0], teacher.layer[1]), (student.layer[1], teacher.layer[3])):
        for a, b in zip(mine.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b) and a is not b
    assert torch.equal(student.embeddings.weight, teacher.embeddings.weight)
    section["layer_reduction"]["teacher_layer"] = [1, 9]
    with pytest.raises(ValueError, match=r"layer\.9 of the teacher"):
        student_initialization(student, teacher, config(section))


@pytest.mark.parametrize(
    "section, message",
    [
        ({"weight_quantization": OVERLAP}, "earlier group"),
        (technique("weight_quantization", ["query"], EIGHT, quantize_groups=7), "quantize_groups=7"),
        (technique("weight_quantization", ["query"], {"start_bits": 4, "target_bits": 8}), "target_bits=8"),
        (technique("activation_quantization", ["query"], {"bits": 3}), "bits"),
        (technique("head_pruning", ["output.dense"], HALF, num_heads=5), "num_heads=5"),
        (technique("head_pruning", ["output.dense"], HALF, num_heads=4, method="l1"), "topk"),
        (technique("row_pruning", ["intermediate.dense"], HALF, [["output.dense"]]), "exactly one"),
        (technique("sparse_pruning", ["query"], HALF, method="snip_momentum", block_pattern="4"), "block_pattern"),
    ],
)  # fmt: skip
def test_refusals_name_the_key(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        init_compression(Bert(), config(section))


def test_cleaning_what_was_not_prepared() -> None:
    with pytest.raises(ValueError, match="init_compression"):
        redundancy_clean(Bert(), config(WEIGHTS))


def test_the_documented_rows_of_methods() -> None:
    rows = get_compress_methods(Bert(), config(ROWS)["compression_training"])
    assert len(rows) == 1
    names, related, techniques = rows[0]
    assert names == [["layer.0.intermediate.dense", "layer.1.intermediate.dense"]]
    assert related == [[["layer.0.output.dense", "layer.1.output.dense"]]]
    assert techniques["row_pruning"]["dense_ratio"] == 0.5 and techniques["row_pruning"]["method"] == "topk"


def test_a_module_replaced_by_hand() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    module_replacement(model, "0")
    assert type(model[0]) is LinearLayer_Compress
    with pytest.raises(ValueError, match="ReLU"):
        module_replacement(model, "1")

    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    with pytest.raises(ValueError, match="Own"):
        module_replacement(nn.Sequential(Own(2, 2)), "0")


def test_pruners_without_an_engine() -> None:
    section = technique(
        "sparse_pruning",
        [],
        {"dense_ratio": 0.5},
        method="snip_momentum",
        schedule_offset_end=4,
        schedule_offset_stride=2,
        block_pattern="4x1",
        dense_ratio=0.4,
        excluded_modules=["classifier"],
    )
    section["sparse_pruning"]["different_groups"] = {}
    asked = config(section)
    model = init_compression(Bert(), asked)
    assert [type(each).__name__ for each in cast("Any", model.pruners)] == ["SnipMomentum"]
    assert not isinstance(model.classifier, Compressible)
    scheduler = scheduled(model, asked)
    optimizer = rewrite_optimizer_step(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer.pruners = model.pruners
    for step in range(6):
        optimizer.zero_grad()
        model(*batch(step)).backward()
        optimizer.step()
        scheduler.step()
    masks = [buffer for name, buffer in model.named_buffers() if name.endswith("sparse_pruning_mask")]
    kept = sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)
    assert abs(kept - 0.4) < 0.01
    before = model(batch(9)[0])
    redundancy_clean(model, asked)
    assert not list(model.buffers()) and "pruners" not in vars(model)
    torch.testing.assert_close(model(batch(9)[0]), before)


def test_an_encoder_of_torch_is_compressed_in_evaluation_too() -> None:
    params = {"start_bits": 2, "target_bits": 2}
    asked = config(
        technique("weight_quantization", ["linear", "out_proj"], params, quantize_weight_in_forward=True)
    )
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
    model = init_compression(copy.deepcopy(plain), asked)
    assert not isinstance(model.layers[0].self_attn.out_proj, Compressible)
    scheduled(model, asked)
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        training = model(x)
        torch.testing.assert_close(model.eval()(x), training)
        assert (plain.eval()(x) - training).abs().max() > 0.01
