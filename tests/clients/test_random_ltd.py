"""Random-LTD in models of Transformers as they are: what a layer gets, names, recomputation, tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import deepspeed
from deepspeed.runtime.data_pipeline.data_routing.basic_layer import RandomLayerTokenDrop
from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd, save_without_random_ltd
from tests.pool import distributed, run

transformers = pytest.importorskip("transformers")

LENGTH = 24
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
KINDS = {
    "gpt2": ("GPT2", "GPT2Block", "LMHeadModel"),
    "llama": ("Llama", "LlamaDecoderLayer", "ForCausalLM"),
    "qwen2": ("Qwen2", "Qwen2DecoderLayer", "ForCausalLM"),
    "bert": ("Bert", "BertLayer", "ForMaskedLM"),
}


def made(kind: str, **changes: Any) -> tuple[Any, type]:
    torch.manual_seed(0)
    family, layer, head = KINDS[kind]
    sizes = {
        **SIZES,
        "pad_token_id": 0,
        "attn_implementation": "eager" if kind == "bert" else "sdpa",
        **changes,
    }
    if kind == "gpt2":
        sizes |= {"n_positions": 64, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    elif kind == "bert":
        sizes |= {"intermediate_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    else:
        sizes |= {"intermediate_size": 64, "num_key_value_heads": 2}
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}{head}")(config)
    module = __import__(type(model).__module__, fromlist=[layer])
    return model, getattr(module, layer)


def settings(kind: str, kept: int = 8, batch: int = 4, **rest: Any) -> dict[str, Any]:
    ltd = {
        "enabled": True,
        "total_layer_num": 4,
        "random_ltd_layer_num": 2,
        "random_ltd_layer_id": [1, 2],
        "model_mask_name": "attention_mask",
        "model_type": "encoder" if kind == "bert" else "decoder",
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": kept,
            "max_value": LENGTH,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": 1000, "seq_per_step": kept},
        },
    }
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": batch,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": ltd}},
        **rest,
    }


def tokens(padded: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(1, 64, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, -7:] = 0
        mask[3, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def alone(layer: Any, hidden: Tensor, kept: Tensor, names: dict[str, Any]) -> Tensor:
    """One row of a batch through the plain layer, with its own tokens only."""
    given = {}
    if names.get("attention_mask") is not None:
        given["attention_mask"] = names["attention_mask"][:, :, kept][:, :, :, kept]
    if names.get("position_embeddings") is not None:
        given["position_embeddings"] = tuple(table[:, kept] for table in names["position_embeddings"])
    out = layer(hidden[kept][None], **given)
    out = out[0] if isinstance(out, tuple) else out
    return hidden.index_copy(0, kept, out[0])


@distributed(world_size=1)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_layer_gets_what_belongs_to_its_tokens(kind: str, padded: bool) -> None:
    model, layer_class = made(kind)
    engine, *_ = deepspeed.initialize(model=model, config=settings(kind))
    convert_to_random_ltd(engine, layer_class)
    seen: list[Any] = []
    for each in engine.module.modules():
        if isinstance(each, RandomLayerTokenDrop) and each.random_ltd_scheduler is not None:
            each.register_forward_hook(
                lambda wrapped, args, kwargs, out: seen.append((wrapped, args, kwargs, out)), with_kwargs=True
            )
    engine.train()
    loss = engine(**tokens(padded)).loss
    assert len(seen) == 2
    for wrapped, args, kwargs, out in seen:
        names = dict(zip(wrapped._names, args, strict=False)) | kwargs
        hidden = names["hidden_states"]
        kept = engine.random_ltd_scheduler.sampler.draw(
            wrapped.random_ltd_layer_id, 8, LENGTH, 4, hidden.device
        )
        found = out[0] if isinstance(out, tuple) else out
        for row in range(4):
            own = {
                "attention_mask": _row(names.get("attention_mask"), row),
                "position_embeddings": _row(names.get("position_embeddings"), row),
            }
            expected = alone(wrapped.random_ltd_layer, hidden[row], kept[row], own)
            valid = torch.arange(LENGTH) < int(tokens(padded)["attention_mask"][row].sum())
            torch.testing.assert_close(found[row][valid], expected[valid], rtol=1e-4, atol=1e-5)
    engine.backward(loss)
    engine.step()


def _row(value: Any, row: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_row(each, row) for each in value)
    return value if value is None or value.shape[0] == 1 else value[row : row + 1]


@distributed(world_size=1)
@pytest.mark.parametrize("kind", list(KINDS))
def test_it_learns_and_evaluates_as_the_plain_model(kind: str, tmp_path: Any) -> None:
    model, layer_class = made(kind)
    engine, *_ = deepspeed.initialize(model=model, config=settings(kind))
    convert_to_random_ltd(engine, layer_class)
    losses = []
    for _ in range(12):
        loss = engine(**tokens()).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.5
    plain, _ = made(kind)
    plain.load_state_dict(save_without_random_ltd(engine))
    engine.eval(), plain.eval()
    torch.testing.assert_close(engine(**tokens()).logits, plain(**tokens()).logits)
    engine.module.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(**tokens()).logits, plain(**tokens()).logits)


def trained(kind: str, *, recompute: bool | None = None, **rest: Any) -> list[float]:
    model, layer_class = made(kind)
    if recompute is not None:
        model.gradient_checkpointing_enable({"use_reentrant": recompute})
    engine, *_ = deepspeed.initialize(model=model, config=settings(kind, **rest))
    convert_to_random_ltd(engine, layer_class)
    losses = []
    for _ in range(4):
        loss = engine(**tokens()).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_recomputation(kind: str) -> None:
    expected = run(trained, 1, kind=kind)[0]
    for how in (True, False):
        assert run(trained, 1, kind=kind, recompute=how)[0] == pytest.approx(expected, rel=1e-4)


def test_ranks_that_share_layers_keep_the_same_tokens() -> None:
    expected = run(trained, 1, kind="llama")[0]
    found = run(trained, 2, kind="llama", tensor_parallel={"autotp_size": 2})
    assert found[0] == pytest.approx(expected, rel=1e-3) and found[0] == pytest.approx(found[1])


@distributed(world_size=1)
def test_a_filled_cache_is_refused() -> None:
    model, layer_class = made("llama")
    engine, *_ = deepspeed.initialize(model=model, config=settings("llama"))
    convert_to_random_ltd(engine, layer_class)
    batch = tokens(False)
    engine.eval()
    cache = engine(input_ids=batch["input_ids"], use_cache=True).past_key_values
    engine.train()
    with pytest.raises(ValueError, match="past_key_values holds earlier tokens"):
        engine(input_ids=batch["input_ids"], past_key_values=cache)
