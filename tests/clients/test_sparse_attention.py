"""Block-sparse attention in models of Transformers: through their attention interface, in place of BERT's own, and
from a config."""

from __future__ import annotations

import argparse
import random
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.ops.sparse_attention import (
    BertSparseSelfAttention,
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    SparseAttentionUtils,
)
from deepspeed.transforms.errors import TransformError
from tests.pool import distributed

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
FIXED = {"mode": "fixed", "block": 16, "num_local_blocks": 2, "attention": "unidirectional"}


def llama(**sizes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES, num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, **sizes
    )
    return transformers.LlamaForCausalLM(config).eval()


def bert(kind: str = "Bert") -> Any:
    torch.manual_seed(0)
    positions = 130 if kind == "Roberta" else 128
    config = getattr(transformers, f"{kind}Config")(
        **SIZES, max_position_embeddings=positions, pad_token_id=1
    )
    return getattr(transformers, f"{kind}ForMaskedLM")(config).eval()


def tokens(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(1))


def with_mask(model: Any, ids: torch.Tensor, mask: torch.Tensor, layout: torch.Tensor, causal: bool) -> Any:
    """Return the result of the dense model with the layout as an explicit mask."""
    seen = layout.bool().repeat_interleave(16, 1).repeat_interleave(16, 2)[0, : ids.shape[1], : ids.shape[1]]
    if causal:
        seen = seen.tril()
    seen = seen[None, None] & mask[:, None, None, :].bool()
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return model(input_ids=ids, attention_mask=bias)


@pytest.mark.parametrize("length", [96, 90])
def test_a_decoder_sees_its_layout_and_no_later_token(length: int) -> None:
    ids = tokens(length)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    pattern = FixedSparsityConfig(4, num_local_blocks=2, attention="unidirectional")
    expected = with_mask(llama(), ids, mask, pattern.make_layout(2048), True).logits
    model = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        llama(), 512, pattern
    )
    found = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1, 7:], expected[1, 7:], rtol=1e-5, atol=1e-5)


def test_generating_with_a_cache_equals_generating_without() -> None:
    pattern = BSLongformerSparsityConfig(4, num_sliding_window_blocks=1, attention="unidirectional")
    model = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        llama(), 512, pattern
    )
    ids = tokens(75, batch=1)
    found = [
        model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=cache) for cache in (True, False)
    ]
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_bert_with_all_blocks_is_bert(kind: str) -> None:
    ids = tokens(90)
    mask = torch.ones_like(ids)
    mask[1, 60:] = 0
    expected = bert(kind)(input_ids=ids, attention_mask=mask).logits
    model = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        bert(kind), 128, DenseSparsityConfig(4)
    )
    layer = getattr(model, kind.lower()).encoder.layer[1]
    assert isinstance(layer.attention.self, BertSparseSelfAttention)
    found = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1, :60], expected[1, :60], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_longer_positions(kind: str) -> None:
    model = bert(kind)
    embeddings = getattr(model, kind.lower()).embeddings
    before = embeddings.position_embeddings.weight.detach().clone()
    reserved = 2 if kind == "Roberta" else 0
    SparseAttentionUtils.extend_position_embedding(model, 300)
    after = embeddings.position_embeddings.weight
    assert after.shape[0] == 300 + reserved
    assert torch.equal(after[:130][: len(before)], before)
    assert torch.equal(after[reserved + 128 : reserved + 256], before[reserved:])
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        model, 300, FixedSparsityConfig(4)
    )
    assert model(input_ids=tokens(288)).logits.shape == (2, 288, 64)
    with pytest.raises(ValueError, match="already has 300 positions"):
        SparseAttentionUtils.extend_position_embedding(model, 300)


def test_the_tokenizer_follows() -> None:
    class Tokenizer:
        def __init__(self) -> None:
            self.init_kwargs: dict[str, Any] = {}

    tokenizer = SparseAttentionUtils.update_tokenizer_model_max_length(Tokenizer(), 4096)
    assert tokenizer.model_max_length == 4096 and tokenizer.init_kwargs == {"model_max_length": 4096}


def test_what_a_layout_does_not_have_is_refused() -> None:
    use = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention
    with pytest.raises(ValueError, match="4 heads, but the sparsity config has num_heads=8"):
        use(llama(), 512, FixedSparsityConfig(8))
    with pytest.raises(ValueError, match="neither BERT nor RoBERTa"):
        use(torch.nn.Linear(2, 2), 512, FixedSparsityConfig(4))
    packed = use(llama(), 512, FixedSparsityConfig(4))
    positions = torch.cat([torch.arange(40), torch.arange(56)])[None]
    with pytest.raises(ValueError, match="pad instead of packing"):
        packed(input_ids=tokens(96, batch=1), position_ids=positions, use_cache=False)


def config(**sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
        **sections,
    }


def losses(engine: Any) -> list[float]:
    found = []
    for _ in range(3):
        ids = tokens(96)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def trained(model: Any, layout: torch.Tensor) -> list[float]:
    """By torch alone, with the layout written out as a mask."""
    seen = layout.bool().repeat_interleave(16, 1).repeat_interleave(16, 2)[0].tril()[None, None]
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0), []
    for _ in range(3):
        ids = tokens(96)
        loss = model(input_ids=ids, attention_mask=bias, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@distributed(world_size=1)
def test_the_section_and_the_flag() -> None:
    pattern = FixedSparsityConfig(4, num_local_blocks=2, attention="unidirectional")
    section = config(sparse_attention=FIXED)
    engine, *_ = deepspeed.initialize(model=llama(), config=section)
    assert any("fixed pattern" in report.summary for report in engine.module_transforms.reports)
    expected = trained(llama(), pattern.make_layout(96))
    assert losses(engine) == pytest.approx(expected, rel=1e-5)
    for flag, sparse in ((True, True), (False, False)):
        args = argparse.Namespace(deepspeed_sparse_attention=flag)
        engine, *_ = deepspeed.initialize(args=args, model=llama(), config=section)
        assert ("deepspeed_sparse" in engine.module.config._attn_implementation) == sparse
    own = bert()
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(own, 128, pattern)
    engine, *_ = deepspeed.initialize(model=own, config=section)
    assert "own" in engine.module_transforms.reports[-1].summary
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 2), config=section)
    assert "for the model to read" in engine.module_transforms.reports[-1].summary
    with pytest.raises(TransformError, match="multiple of num_global_blocks=3"):
        deepspeed.initialize(model=llama(), config=config(sparse_attention={**FIXED, "num_global_blocks": 3}))


@distributed(world_size=2)
def test_random_blocks_are_those_of_the_first_rank() -> None:
    rank = torch.distributed.get_rank()
    random.seed(rank)
    model = bert()
    pattern = BigBirdSparsityConfig(4, num_random_blocks=2)
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(model, 128, pattern)
    engine, *_ = deepspeed.initialize(model=model, config=config())
    layout = engine.module.bert.encoder.layer[0].attention.self.sparse_self_attention.master_layout
    both = [torch.empty_like(layout) for _ in range(2)]
    torch.distributed.all_gather(both, layout)
    assert torch.equal(both[0], both[1])


@pytest.mark.parametrize("kind", ["llama", "bert"])
@distributed(world_size=2)
def test_heads_that_ranks_share(kind: str) -> None:
    """Split over two ranks, a model trains as on one."""
    from tests.clients.kit import clean_clients

    section = {**FIXED, "attention": "unidirectional" if kind == "llama" else "bidirectional"}
    found = []
    with clean_clients():
        for ranks in (1, 2):
            model = llama() if kind == "llama" else bert()
            parallel = {"tensor_parallel": {"autotp_size": ranks}} if ranks > 1 else {}
            engine, *_ = deepspeed.initialize(
                model=model, config=config(sparse_attention=section, **parallel)
            )
            assert "deepspeed_sparse" in engine.module.config._attn_implementation
            found.append(losses(engine))
            query = next(x for name, x in engine.module.named_parameters() if "q" in name.split(".")[-2])
            assert query.shape[0] == 32 // ranks
            engine.destroy()
        assert found[0] == pytest.approx(found[1], rel=1e-5)
        apart = {**section, "different_layout_per_head": True, "num_different_global_patterns": 2}
        both = config(sparse_attention=apart, tensor_parallel={"autotp_size": 2})
        with pytest.raises(TransformError, match="set different_layout_per_head to false"):
            deepspeed.initialize(model=llama(), config=both)
        replaced = SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
            bert(), 128, DenseSparsityConfig(4)
        )
        with pytest.raises(TransformError, match="keep the attention of a Transformers model"):
            deepspeed.initialize(model=replaced, config=config(tensor_parallel={"autotp_size": 2}))


def test_heads_with_layouts_of_their_own_are_not_guessed() -> None:
    model = llama()
    pattern = FixedSparsityConfig(
        4, num_local_blocks=2, different_layout_per_head=True, num_different_global_patterns=2
    )
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(model, 512, pattern)
    for layer in model.model.layers:  # as if a rank had half of the heads
        for each in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            each.weight.data = each.weight.data[: len(each.weight) // 2]
        layer.self_attn.o_proj.weight.data = layer.self_attn.o_proj.weight.data[:, :16]
    with pytest.raises(
        ValueError, match="2 attention heads on this rank, but per-head layouts were made for num_heads=4"
    ):
        model(input_ids=tokens(96))
