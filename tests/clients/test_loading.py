"""Transformers builds and loads models under `zero.Init`: configs, weights, tying, missing keys, new vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients.kit import (
    VOCAB,
    assert_same_weights,
    auto_config,
    clean_clients,
    llama,
    llama_config,
    whole_weights,
)
from tests.pool import distributed

pytest.importorskip("transformers", reason="the clients extra is not installed")
pytest.importorskip("accelerate", reason="the clients extra is not installed")


def zero3() -> Any:
    """Put Transformers under `zero.Init` for as long as the returned object lives."""
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(auto_config(3) | {"train_micro_batch_size_per_gpu": 1})


def partitioned(model: torch.nn.Module) -> bool:
    return all(hasattr(p, "ds_id") and p.numel() == 0 for p in model.parameters())


def saved(folder: Path, model: Any = None) -> dict[str, torch.Tensor]:
    """Save a whole model from rank 0; its weights."""
    model = model if model is not None else llama()
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(folder)
    torch.distributed.barrier()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
@distributed(world_size=2)
def test_from_pretrained(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    with clean_clients():
        whole = saved(tmp_path, llama(tie_word_embeddings=tied))
        keep = zero3()
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert partitioned(model) and keep.is_zero3()
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert_same_weights(whole_weights(model), whole)


@distributed(world_size=2)
def test_ranks_hold_their_part_only(tmp_path: Path) -> None:
    """Counted: elements in the slices are 1/ranks of the model, padding aside."""
    from transformers import AutoModelForCausalLM

    with clean_clients():
        whole = saved(tmp_path)
        keep = zero3()
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        held = sum(p.ds_tensor.numel() for p in model.parameters())
        assert held * 2 - sum(w.numel() for w in whole.values()) <= len(whole)
        del keep


@distributed(world_size=2)
def test_missing_keys_are_initialised_alike_on_all_ranks(tmp_path: Path) -> None:
    from transformers import LlamaForSequenceClassification

    with clean_clients():
        whole = saved(tmp_path)
        keep = zero3()
        torch.manual_seed(torch.distributed.get_rank())
        model = LlamaForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
        ours = whole_weights(model)
        head = ours.pop("score.weight")
        assert head.shape == (3, 16) and 0 < head.std() < 0.1
        whole.pop("lm_head.weight")
        assert_same_weights(ours, whole)
        other = head.clone()
        torch.distributed.broadcast(other, src=0)
        assert torch.equal(head, other)
        del keep


@distributed(world_size=1)
def test_mismatched_sizes_are_an_error_that_names_the_tensors(tmp_path: Path) -> None:
    """Transformers has no `ignore_mismatched_sizes` at stage 3; what it reports needs whole shapes from us."""
    from transformers import LlamaForCausalLM

    with clean_clients():
        saved(tmp_path)
        keep = zero3()
        config = llama_config(vocab_size=VOCAB + 6)
        with pytest.raises(RuntimeError, match=r"size mismatch for lm_head.weight.*\[64, 16\].*\[70, 16\]"):
            LlamaForCausalLM.from_pretrained(tmp_path, config=config)
        del keep


@pytest.mark.parametrize("size", [VOCAB - 8, VOCAB + 8])
@pytest.mark.parametrize("tied", [False, True])
@distributed(world_size=2)
def test_resize_token_embeddings_then_train(tmp_path: Path, tied: bool, size: int) -> None:
    from transformers import AutoModelForCausalLM

    import deepspeed

    with clean_clients():
        whole = saved(tmp_path, llama(tie_word_embeddings=tied))
        keep = zero3()
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        model.resize_token_embeddings(size, mean_resizing=False)
        ours = whole_weights(model)
        common = min(size, VOCAB)
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in ours:
                assert ours[name].shape == (size, 16)
                assert torch.equal(ours[name][:common], whole[name][:common])
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3},
        }
        engine, *_ = deepspeed.initialize(model=model, config=config)
        ids = torch.randint(3, common, (2, 8))
        first = None
        for _ in range(3):
            loss = engine(input_ids=ids, labels=ids).loss
            first = first if first is not None else loss.item()
            engine.backward(loss)
            engine.step()
        assert loss.item() < first
        del keep


@distributed(world_size=2)
def test_resize_of_a_trained_model_with_mean_resizing(tmp_path: Path) -> None:
    """The default of Transformers draws new rows around the mean of the old: a gather with modifier_rank=None."""
    from transformers import AutoModelForCausalLM

    with clean_clients():
        saved(tmp_path)
        keep = zero3()
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        model.resize_token_embeddings(VOCAB + 4)
        new = whole_weights(model)["model.embed_tokens.weight"]
        other = new.clone()
        torch.distributed.broadcast(other, src=0)
        assert new.shape == (VOCAB + 4, 16) and torch.equal(new, other) and torch.isfinite(new).all()
        del keep


@distributed(world_size=2)
def test_moe_weights_are_converted_while_loading(tmp_path: Path) -> None:
    """Mixtral keeps one tensor per expert in files and one per layer in memory."""
    from transformers import MixtralConfig, MixtralForCausalLM

    with clean_clients():
        config = MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            max_position_embeddings=64,
        )
        torch.manual_seed(0)
        whole = saved(tmp_path, MixtralForCausalLM(config))
        keep = zero3()
        model = MixtralForCausalLM.from_pretrained(tmp_path)
        assert partitioned(model)
        assert_same_weights(whole_weights(model), whole)
        del keep


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@distributed(world_size=1)
def test_from_config_takes_the_precision_of_the_json(dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    with clean_clients():
        section = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        keep = HfDeepSpeedConfig(
            auto_config(3) | {section: {"enabled": True}, "train_micro_batch_size_per_gpu": 1}
        )
        model = AutoModelForCausalLM.from_config(llama_config())
        assert partitioned(model) and {p.dtype for p in model.parameters()} == {dtype}
        rotary = model.model.rotary_emb.inv_freq
        assert rotary.dtype == torch.float32, "positions must not be rounded"
        del keep


@distributed(world_size=1)
def test_from_config_equals_construction_without_zero(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    with clean_clients():
        plain = {n: p.detach().clone() for n, p in llama(seed=3).named_parameters()}
        keep = zero3()
        torch.manual_seed(3)
        model = LlamaForCausalLM._from_config(llama_config())
        ours = whole_weights(model)
        assert ours.keys() == plain.keys()
        for name in ours:  # drawn in another order, from the same distributions
            assert ours[name].shape == plain[name].shape
            assert ours[name].std().item() == pytest.approx(plain[name].std().item(), abs=0.01)
        del keep


@distributed(world_size=2)
def test_quantized_weights_stay_opaque_bytes() -> None:
    """Packed uint8 weights (4-bit formats) are cut and gathered without a cast, and frozen."""
    import deepspeed

    packed = torch.randint(0, 255, (33,), dtype=torch.uint8)

    class Packed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bytes = torch.nn.Parameter(packed.clone(), requires_grad=False)
            self.scale = torch.nn.Parameter(torch.ones(33))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale * self.bytes.to(x.dtype)

    with deepspeed.zero.Init(config_dict_or_path={"bf16": {"enabled": True}, "train_batch_size": 2}):
        model = Packed()
    assert model.bytes.dtype == torch.uint8 and model.bytes.numel() == 0
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for _ in range(2):
        engine.backward(engine(torch.ones(33, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
    assert torch.equal(whole_weights(model)["bytes"], packed)


@distributed(world_size=2)
def test_external_parameters_of_weight_norm(tmp_path: Path) -> None:
    """Wav2Vec2's positional convolution registers its weight-norm parameters for use elsewhere."""
    from transformers import Wav2Vec2Config
    from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2PositionalConvEmbedding

    import deepspeed

    with clean_clients():
        config = Wav2Vec2Config(
            hidden_size=16,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=2,
        )
        keep = zero3()
        with deepspeed.zero.Init():
            model = Wav2Vec2PositionalConvEmbedding(config)
        assert partitioned(model)
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        }
        engine, *_ = deepspeed.initialize(model=model, config=settings)
        before = whole_weights(model)
        engine.backward(engine(torch.randn(1, 20, 16)).square().mean())
        engine.step()
        after = whole_weights(model)
        assert len(after) == 3 and not any(torch.equal(before[name], after[name]) for name in after)
        del keep
