"""Clean models of Transformers in folders that `from_pretrained` loads."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed.compression import init_compression, redundancy_clean
from deepspeed.compression.export import plain_state_dict, save_pretrained
from deepspeed.compression.helper import convert_conv1d_to_linear
from tests.compression.models import config, technique

transformers = pytest.importorskip("transformers")

HALF = {"dense_ratio": 0.5}
TOKENS = torch.arange(12).view(2, 6)
FOUR = technique(
    "weight_quantization",
    ["dense", "proj", "c_fc"],
    {"start_bits": 4, "target_bits": 4},
    quantize_groups=8,
    quantize_weight_in_forward=True,
)


def rows(modules: list[str], related: list[str]) -> dict[str, Any]:
    return technique("row_pruning", modules, HALF, [related], method="topk")


def bert() -> Any:
    settings = transformers.BertConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification(settings).eval()


def output(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def loaded(model: Any, folder: Path) -> Any:
    """Return the model that `from_pretrained` loads from the folder; its outputs are the original's."""
    save_pretrained(model, folder)
    assert (folder / "model.safetensors").exists()
    again, told = type(model).from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    again.eval()
    torch.testing.assert_close(output(again), output(model), rtol=1e-5, atol=1e-6)
    return again


@pytest.mark.parametrize("packed", [False, True])
def test_bert_with_fewer_layers_and_rows(packed: bool, tmp_path: Path) -> None:
    reduction = {
        "layer_reduction": {
            "enabled": True,
            "keep_number_layer": 2,
            "module_name_prefix": "bert.encoder.layer",
            "teacher_layer": [1, 3],
            "other_module_name": ["bert.embeddings", "bert.pooler", "classifier"],
        }
    }
    asked = config(reduction, FOUR, rows(["intermediate.dense"], ["layer.\\w+.output.dense"]))
    model = init_compression(bert(), asked, teacher_model=bert())
    redundancy_clean(model, asked, packed=packed)
    again = loaded(model, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["intermediate_size"], written["num_hidden_layers"]) == (12, 2)
    assert written["architectures"] == ["BertForSequenceClassification"]
    assert model.config.intermediate_size == 24  # the model's own is not touched
    theirs = again.state_dict()
    for name, tensor in plain_state_dict(model).items():
        assert torch.equal(theirs[name], tensor), name


def test_a_student_that_was_cut_by_hand(tmp_path: Path) -> None:
    model = bert()
    del model.bert.encoder.layer[1:]
    assert loaded(model, tmp_path).config.num_hidden_layers == 1


def test_heads_of_bert_cannot_be_said(tmp_path: Path) -> None:
    related = [["self.query", "self.key", "self.value"]]
    asked = config(
        technique("head_pruning", ["attention.output.dense"], HALF, related, method="topk", num_heads=4)
    )
    model = redundancy_clean(init_compression(bert(), asked), asked)
    assert output(model).shape == (2, 3)
    with pytest.raises(ValueError, match=r"query\.weight has shape \(8, 16\), but BertConfig .* \(16, 16\)"):
        save_pretrained(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_heads_of_llama(tmp_path: Path) -> None:
    settings = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
    )
    related = [["q_proj", "k_proj", "v_proj"]]
    asked = config(technique("head_pruning", ["o_proj"], HALF, related, method="topk", num_heads=4), FOUR)
    plain = transformers.LlamaForCausalLM(settings).eval()
    model = redundancy_clean(init_compression(copy.deepcopy(plain), asked), asked, packed=True)
    assert not torch.allclose(output(plain), output(model))
    again = loaded(model, tmp_path)
    assert (again.config.num_attention_heads, again.config.num_key_value_heads, again.config.head_dim) == (
        2,
        2,
        4,
    )


def test_gpt2_has_its_own_layers_back(tmp_path: Path) -> None:
    settings = transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(settings).eval()
    convert_conv1d_to_linear(model, transformers.pytorch_utils.Conv1D)
    asked = config(FOUR, rows(["c_fc"], ["mlp.c_proj"]))
    redundancy_clean(init_compression(model, asked), asked, packed=True)
    again = loaded(model, tmp_path)
    assert again.config.n_inner == 32 and again.lm_head.weight is again.transformer.wte.weight


def test_layers_of_different_sizes(tmp_path: Path) -> None:
    asked = config(rows(["layer.0.intermediate.dense"], ["layer.0.output.dense"]))
    model = redundancy_clean(init_compression(bert(), asked), asked)
    with pytest.raises(ValueError, match="same size"):
        save_pretrained(model, tmp_path)


def test_what_is_not_ready_or_not_theirs(tmp_path: Path) -> None:
    model = init_compression(bert(), config(FOUR))
    with pytest.raises(ValueError, match="redundancy_clean first"):
        save_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match="not a Transformers model"):
        save_pretrained(torch.nn.Linear(2, 2), tmp_path)
