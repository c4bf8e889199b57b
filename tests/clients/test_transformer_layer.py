"""The training layer instead of the layers of Transformers' BERT, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed import DeepSpeedTransformerLayer
from deepspeed.module_inject.inject import module_inject
from deepspeed.module_inject.replace_module import revert_transformer_layer

transformers = pytest.importorskip("transformers")


def bert(implementation: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation=implementation,
    )
    return transformers.BertForMaskedLM(config)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_same_model_with_the_same_gradients_and_back(implementation: str) -> None:
    from transformers.models.bert.modeling_bert import BertLayer

    plain, model = bert(implementation), bert(implementation)
    module_inject(BertLayer, model, model.config, 2, 20, 1, False, False, gelu_checkpoint=True)
    assert all(isinstance(layer, DeepSpeedTransformerLayer) for layer in model.bert.encoder.layer)
    ids = torch.randint(2, 64, (2, 20))
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    outputs = [each(input_ids=ids, attention_mask=mask, labels=ids) for each in (plain, model)]
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits, rtol=1e-5, atol=1e-5)
    for output in outputs:
        output.loss.backward()
    old, new = plain.bert.encoder.layer[0], model.bert.encoder.layer[0]
    attention = old.attention.self
    wanted = torch.cat([part.weight.grad for part in (attention.query, attention.key, attention.value)])
    torch.testing.assert_close(new.attn_qkvw.grad, wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(new.norm_w.grad, old.output.LayerNorm.weight.grad, rtol=1e-4, atol=1e-6)
    revert_transformer_layer(BertLayer, model, model.config)
    state = plain.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    again = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(again, outputs[0].logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="no layers of class DeepSpeedTransformerLayer"):
        revert_transformer_layer(BertLayer, model, model.config)
