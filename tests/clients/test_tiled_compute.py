"""One config section on Transformers models as they are: the same training, without whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.parallel.sequence.tiled.lazy_logits import LazyLogits
from deepspeed.transforms import TransformError
from tests.clients.kit import VOCAB, llama, lora
from tests.pool import distributed

pytest.importorskip("transformers")

TILED = {"enabled": True, "mlp_shards": 3, "loss_shards": 4}


def tiny(kind: str, **changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if kind == "GPT2":
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_inner": 32}
    if kind == "Gemma2":
        sizes |= {"final_logit_softcapping": 5.0}
    config = getattr(transformers, f"{kind}Config")(**sizes | changes)
    return getattr(transformers, "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)


def batch(seed: int = 0, length: int = 13) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (2, length), generator=draw)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.3, -100)
    return {"input_ids": ids, "labels": labels}


def train(
    model: Any, stage: int = 2, steps: int = 2, **sections: Any
) -> tuple[list[float], dict[str, Any], Any]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **sections,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    losses = []
    for step in range(steps):
        loss = engine(**batch(step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    return losses, weights, engine


def assert_same_training(make: Any, **options: Any) -> Any:
    losses, weights, engine = train(make(), **options)
    engine.destroy()
    tiled_losses, tiled_weights, engine = train(make(), tiled_compute=TILED, **options)
    assert tiled_losses == pytest.approx(losses, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(tiled_weights[name], value, rtol=1e-5, atol=1e-6, msg=name)
    return engine


@distributed(world_size=1)
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Phi3", "Gemma2", "GPT2", "Mistral", "Cohere", "Granite"])
def test_models_train_as_without_tiles(kind: str) -> None:
    engine = assert_same_training(lambda: tiny(kind))
    (report,) = engine.module_transforms.reports
    assert "2 " in report.summary and "in tiles" in report.summary and "lm_head" in report.summary
    outputs = engine(**batch())
    assert type(outputs.logits) is LazyLogits and outputs.logits.shape == (2, 13, VOCAB)
    assert outputs.logits._whole is None  # the loss took tiles
    with torch.no_grad():
        expected = engine(**batch()).logits  # nothing is to be trained: at once
    assert type(expected) is torch.Tensor
    torch.testing.assert_close(outputs.logits.detach() + 0, expected)
    engine.destroy()


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 3])
def test_with_gradient_checkpointing_and_adapters(stage: int) -> None:
    def make() -> Any:
        model = llama()
        model.gradient_checkpointing_enable()
        return model

    assert_same_training(make, stage=stage).destroy()
    assert_same_training(lambda: lora(llama(), target_modules=["q_proj", "up_proj"]), stage=stage).destroy()


CHUNKED = TILED | {"attention_chunk": 4}


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 3])
def test_attention_in_chunks(stage: int) -> None:
    """13 tokens in chunks of 4, alone and with layers computed again, biases and shared heads of keys."""

    def make(kind: str, checkpointed: bool) -> Any:
        model = tiny(kind, num_key_value_heads=1, use_cache=False)
        if checkpointed:
            model.gradient_checkpointing_enable()
        return model

    for kind, checkpointed in (("Qwen2", False), ("Llama", True)):
        losses, weights, engine = train(make(kind, checkpointed), stage=stage)
        engine.destroy()
        found, found_weights, engine = train(make(kind, checkpointed), stage=stage, tiled_compute=CHUNKED)
        (report,) = engine.module_transforms.reports
        assert "2 attention modules in chunks of 4 tokens" in report.summary
        assert found == pytest.approx(losses, rel=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(found_weights[name], value, rtol=1e-5, atol=1e-6, msg=name)
        if kind == "Qwen2":
            mask = torch.ones(2, 13, dtype=torch.int64)
            mask[:, 10:] = 0
            with pytest.raises(ValueError, match="got an attention mask for 13 tokens"):
                engine(**batch(), attention_mask=mask)
        engine.destroy()


@distributed(world_size=1)
def test_what_attention_in_chunks_refuses() -> None:
    for kind, changes, why in (
        ("Qwen3", {}, "something else than causal attention"),  # norms of queries and keys
        ("Mistral", {"sliding_window": 4096}, "window of 4096"),
        ("Llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("Llama", {"attn_implementation": "eager"}, "attn_implementation='eager'"),
        ("GPT2", {}, "no module has q_proj"),
    ):
        with pytest.raises(TransformError, match=why):
            train(tiny(kind, **changes), tiled_compute=CHUNKED)
    _, _, engine = train(tiny("Llama", use_cache=True), tiled_compute=CHUNKED, steps=0)
    with pytest.raises(ValueError, match="use_cache to False"):
        engine(**batch())
    engine.destroy()


@distributed(world_size=1)
def test_other_readers_get_the_logits() -> None:
    _, _, engine = train(llama(), tiled_compute=TILED, steps=0)
    ids = batch()["input_ids"]
    logits = engine(input_ids=ids).logits
    loss = torch.nn.functional.nll_loss(logits.log_softmax(-1)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    engine.backward(loss)
    engine.step()
    plain = llama()
    expected = torch.nn.functional.cross_entropy(
        plain(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    engine.eval()
    assert engine.module.generate(ids[:, :4], max_new_tokens=3, do_sample=False).shape == (2, 7)
    engine.destroy()


@distributed(world_size=1)
def test_what_cannot_be_tiled_is_named() -> None:
    import transformers

    model = transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            ffn_dim=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            word_embed_proj_dim=16,
        )  # fmt: skip
    )
    with pytest.raises(TransformError, match=r"OPTDecoderLayer .*tiled_compute\.mlp"):
        train(model, tiled_compute=TILED)
    _, _, engine = train(model, tiled_compute=TILED | {"mlp": False})
    engine.destroy()
    with pytest.raises(TransformError, match=r"get_output_embeddings.*tiled_compute\.loss"):
        train(torch.nn.Linear(4, 4), tiled_compute=TILED | {"mlp": False})
