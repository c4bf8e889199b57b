"""A Transformers model with embedding and head split by the vocabulary: its own loss, of logits in parts."""

from __future__ import annotations

import pytest
import torch

from deepspeed.module_inject import LinearLayer
from deepspeed.parallel.sequence.cross_entropy import VocabParallelCausalLMLoss
from deepspeed.parallel.tensor.embedding import VocabParallelEmbedding
from tests.parallel.tensor.blocks import tensor_parallel
from tests.parallel.tensor.test_layers import own_part
from tests.pool import distributed

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("tied", [False, True])
@distributed(world_size=2)
def test_llama(tied: bool) -> None:
    config = transformers.LlamaConfig(
        vocab_size=51,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=tied,
    )
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(transformers.LlamaForCausalLM(config))
    whole, parts = models
    group = tensor_parallel().communicator("tp")
    parts.set_input_embeddings(VocabParallelEmbedding(parts.get_input_embeddings(), group))
    parts.lm_head = LinearLayer(
        parts.lm_head,
        group,
        weight=parts.get_input_embeddings().weight if tied else None,
        gather_in_evaluation=True,
    )
    parts.loss_function = VocabParallelCausalLMLoss(group, otherwise=parts.loss_function)

    tokens = torch.randint(51, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = tokens.masked_fill(tokens % 7 == 0, -100)
    for more in ({}, {"num_items_in_batch": 11}):
        expected, found = whole(tokens, labels=labels, **more), parts(tokens, labels=labels, **more)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
        assert found.logits.shape[-1] in (25, 26)
    expected.loss.backward(), found.loss.backward()
    for (name, param), other in zip(parts.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(
            param.grad, own_part(other.grad, param), rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    parts.eval(), whole.eval()
    with torch.no_grad():
        expected, found = whole(tokens, labels=labels), parts(tokens, labels=labels)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-6)
    assert torch.equal(
        parts.generate(tokens[:, :4], max_new_tokens=5, do_sample=False),
        whole.generate(tokens[:, :4], max_new_tokens=5, do_sample=False),
    )
