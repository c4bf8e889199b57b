"""Compression of layers that tensor-parallel ranks share: the numbers of one process, and checkpoints for any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.compression import init_compression, redundancy_clean
from deepspeed.compression.basic_layer import Embedding_Compress, LinearLayer_Compress
from deepspeed.compression.config import get_compression_config
from deepspeed.compression.scheduler import compression_scheduler
from deepspeed.compression.techniques import Compressible
from deepspeed.parallel.tensor.embedding import VocabParallelEmbedding
from deepspeed.parallel.tensor.layers import LinearAllreduce, LinearLayer
from tests.compression.models import HEADS_HALF, ROWS, SNIP, config, technique
from tests.pool import distributed

pytest.importorskip("transformers")

STEPS = 6
WEIGHTS = technique(
    "weight_quantization",
    ["attention.self", "intermediate", "word_embeddings"],
    {"start_bits": 8, "target_bits": 4, "quantization_period": 2},
    quantize_weight_in_forward=True,
    quantize_groups=4,
)


def model_of(section: dict[str, Any]) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(7)
    shape = BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return init_compression(BertForSequenceClassification(shape), section)


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(0, 32, (4, 6), generator=generator),
        "labels": torch.randint(0, 3, (4,), generator=generator),
    }


def section_of(stage: int, ranges: str, ranks: int = 2, **more: Any) -> dict[str, Any]:
    inputs = technique(
        "activation_quantization",
        ["layer"],
        {"bits": 8},
        quantization_type="asymmetric",
        range_calibration=ranges,
    )
    if ranks > 1:
        more["tensor_parallel"] = {"autotp_size": ranks}
    return config(
        WEIGHTS,
        inputs,
        SNIP,
        ROWS,
        HEADS_HALF,
        zero_optimization={"stage": stage},
        optimizer={"type": "Adam", "params": {"lr": 0.01}},
        **more,
    )


def engine_of(section: dict[str, Any]) -> Any:
    engine, *_ = deepspeed.initialize(model=model_of(section), config=section)
    return engine


def alone(section: dict[str, Any]) -> tuple[list[float], Any]:
    """Losses and model of plain PyTorch."""
    model = model_of(section)
    scheduler = compression_scheduler(model, get_compression_config(section))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch(step)).loss
        losses.append(loss.item())
        loss.backward()
        for pruner in model.pruners:
            pruner.on_before_optimizer_step()
        optimizer.step()
        for pruner in model.pruners:
            pruner.on_after_optimizer_step()
        scheduler.step()
    return losses, model


def trained(engine: Any, first: int, last: int) -> list[float]:
    """Every rank has the same batches."""
    losses = []
    for step in range(first, last):
        loss = engine(**batch(step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@distributed(world_size=2)
@pytest.mark.parametrize(("stage", "ranges"), [(0, "dynamic"), (1, "static")])
def test_two_ranks_share_every_layer(stage: int, ranges: str, tmp_path: Path) -> None:
    section = section_of(stage, ranges)
    single = section_of(stage, ranges, ranks=1)
    expected, plain = alone(single)
    engine = engine_of(section)
    check_split(engine.module)
    torch.testing.assert_close(trained(engine, 0, 4), expected[:4], rtol=1e-5, atol=1e-6)
    engine.save_checkpoint(str(tmp_path / "checkpoint"))
    torch.testing.assert_close(trained(engine, 4, STEPS), expected[4:], rtol=1e-5, atol=1e-6)
    found = dict(engine.module.named_buffers())
    masks = [(name, mask) for name, mask in plain.named_buffers() if name.endswith("mask")]
    assert masks and all(torch.equal(mask, found[name]) for name, mask in masks)
    for name, scores in plain.named_parameters():
        if name.endswith("scores"):
            torch.testing.assert_close(engine.module.get_parameter(name), scores, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="split over tensor-parallel ranks"):
        redundancy_clean(engine, section)
    engine.destroy()

    whole = engine_of(single)
    whole.load_checkpoint(str(tmp_path / "checkpoint"))
    torch.testing.assert_close(trained(whole, 4, STEPS), expected[4:], rtol=1e-5, atol=1e-6)
    redundancy_clean(whole, single)
    assert whole.module.bert.encoder.layer[0].intermediate.dense.weight.shape[0] == 12


@pytest.mark.slow
@distributed(world_size=4)
def test_two_by_two_ranks_at_stage_3() -> None:
    expected, _ = alone(section_of(3, "dynamic", ranks=1))
    engine = engine_of(section_of(3, "dynamic"))
    torch.testing.assert_close(trained(engine, 0, STEPS), expected, rtol=1e-5, atol=1e-6)


def check_split(module: Any) -> None:
    attention = module.bert.encoder.layer[0].attention
    query, out = attention.self.query, attention.output.dense
    assert isinstance(query, LinearLayer) and isinstance(query, LinearLayer_Compress)
    assert isinstance(out, LinearAllreduce) and isinstance(out, LinearLayer_Compress)
    assert query.weight.shape == (8, 16) and out.weight.shape == (16, 8)
    words = module.bert.embeddings.word_embeddings
    assert isinstance(words, Embedding_Compress)


@distributed(world_size=2)
def test_weights_quantized_after_the_update() -> None:
    written = technique(
        "weight_quantization",
        ["attention.self", "output.dense"],
        {"start_bits": 6, "target_bits": 4, "quantization_period": 2},
        schedule_offset=1,
        quantize_groups=2,
        rounding="stochastic",
    )
    losses = {}
    for ranks in (1, 2):
        section = section_of(0, "dynamic", ranks, bf16={"enabled": True})
        section["compression_training"] = written
        engine = engine_of(section)
        losses[ranks] = trained(engine, 0, STEPS)
        query: Any = engine.module.bert.encoder.layer[0].attention.self.query
        assert isinstance(query, Compressible) and query.weight_quantize_bits == 4
        halves = query.whole(query.weight.detach()).view(2, -1)
        assert all(half.unique().numel() <= 16 for half in halves)
        engine.destroy()
    torch.testing.assert_close(losses[2], losses[1], rtol=2e-2, atol=2e-2)


@distributed(world_size=2)
def test_a_tied_vocabulary_in_parts() -> None:
    from transformers import BertConfig, BertForMaskedLM

    losses = {}
    for ranks in (1, 2):
        section = section_of(1, "dynamic", ranks)
        section["compression_training"] = WEIGHTS
        torch.manual_seed(7)
        shape = BertConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=4,
            intermediate_size=24,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        model = init_compression(BertForMaskedLM(shape), section)
        engine, *_ = deepspeed.initialize(model=model, config=section)
        if ranks == 2:
            words: Any = engine.module.get_submodule("bert.embeddings.word_embeddings")
            assert isinstance(words, VocabParallelEmbedding) and isinstance(words, Embedding_Compress)
        losses[ranks] = []
        for step in range(STEPS):
            tokens = batch(step)["input_ids"]
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses[ranks].append(loss.item())
        engine.destroy()
    torch.testing.assert_close(losses[2], losses[1], rtol=1e-5, atol=1e-6)
