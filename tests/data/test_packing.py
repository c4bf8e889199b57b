"""Documents in shared rows: what lies where, and that a plain attention keeps them apart."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from deepspeed.data.packing import IGNORED, PackingCollator, document_mask, pack_documents, plan_rows

NUMBERS = random.Random(0)
DOCUMENTS = [[NUMBERS.randrange(1, 30) for _ in range(NUMBERS.randrange(1, 17))] for _ in range(40)]


def test_rows_hold_every_document_once() -> None:
    packed = pack_documents(DOCUMENTS, 20, pad_token_id=0)
    found = []
    for ids, labels, positions in zip(packed.input_ids, packed.labels, packed.position_ids, strict=True):
        starts = [*(positions == 0).nonzero()[:, 0].tolist(), 20]
        for start, end in zip(starts[:-1], starts[1:], strict=True):
            document = ids[start:end].tolist()
            assert positions[start:end].tolist() == list(range(end - start))
            if document[0]:  # not padding
                found.append(document)
                assert labels[start:end].tolist() == [IGNORED, *document[1:]]
            else:
                assert set(document) == {0} and set(labels[start:end].tolist()) == {IGNORED}
    assert sorted(found) == sorted(DOCUMENTS)
    tokens = sum(map(len, DOCUMENTS))
    assert packed.padding == packed.input_ids.numel() - tokens == int((packed.input_ids == 0).sum())
    assert len(packed.input_ids) <= 11 / 9 * -(-tokens // 20) + 1  # what best fit, long ones first, promises


def test_rows_follow_the_order_of_the_documents() -> None:
    assert plan_rows([4, 6, 3, 3, 4], 10) == [[0, 1], [2, 3, 4]]
    assert plan_rows([5, 0, 5], 10) == [[0, 2]]
    assert plan_rows([], 10) == []
    with pytest.raises(ValueError, match="document 1 has 11 tokens and max_length=10"):
        plan_rows([1, 11], 10)
    with pytest.raises(ValueError, match="max_length=0"):
        plan_rows([1], 0)


def test_long_documents_are_split_on_request() -> None:
    packed = pack_documents([list(range(1, 13)), [20, 21]], 5, split=True)
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 20, 21, 0]]
    assert packed.position_ids.tolist()[2] == [0, 1, 0, 1, 0]
    assert packed.labels.tolist()[1:] == [[IGNORED, 7, 8, 9, 10], [IGNORED, 12, IGNORED, 21, IGNORED]]
    assert packed.padding == 1


class Attention(nn.Module):
    """Embedding, positions, one causal attention, vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(30, 8), nn.Embedding(20, 8)
        self.inner, self.out = nn.Linear(8, 24), nn.Linear(8, 30)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inner(self.words(ids) + self.places(positions)).unsqueeze(1).chunk(3, dim=-1)
        return self.out(scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0])


def test_loss_and_gradients_are_those_of_documents_alone() -> None:
    collator = PackingCollator(20, mask=True)
    batch = collator(DOCUMENTS)
    model = Attention()
    logits = model(batch["input_ids"], batch["position_ids"], batch["attention_mask"])
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    found = torch.autograd.grad(loss, list(model.parameters()))
    total, predicted = torch.zeros(()), 0
    for document in DOCUMENTS:
        ids = torch.tensor([document])
        alone = model(
            ids, torch.arange(len(document))[None], torch.ones(len(document), len(document)).tril().bool()
        )
        total = total + cross_entropy(alone[0, :-1], ids[0, 1:], reduction="sum")
        predicted += len(document) - 1
    wanted = torch.autograd.grad(total / predicted, list(model.parameters()))
    torch.testing.assert_close(loss, total / predicted, rtol=1e-5, atol=1e-6)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert (collator.tokens, collator.padding) == (
        sum(map(len, DOCUMENTS)),
        int((batch["input_ids"] == 0).sum()),
    )


def test_the_mask_of_documents() -> None:
    mask = document_mask(torch.tensor([[0, 1, 0, 0, 1]]))
    assert mask.int().tolist() == [
        [[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]]
    ]


def test_samples() -> None:
    collator = PackingCollator(6, pad_token_id=9)
    samples: list[dict[str, Any]] = [
        {"input_ids": [1, 2, 3, 0], "labels": [IGNORED, 2, 3, IGNORED], "attention_mask": [1, 1, 1, 0]},
        {"input_ids": torch.tensor([4, 5]), "labels": torch.tensor([IGNORED, IGNORED])},
    ]
    batch = collator(samples)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 9]]
    assert batch["labels"].tolist() == [[IGNORED, 2, 3, IGNORED, IGNORED, IGNORED]]
    assert batch["use_cache"] is False and "attention_mask" not in batch
    with pytest.raises(ValueError, match="1 of 2 samples have labels"):
        collator([samples[0], {"input_ids": [1]}])
    with pytest.raises(ValueError, match="document 0 has 2 tokens and 1 labels"):
        collator([{"input_ids": [1, 2], "labels": [1]}])
