"""Tiny models of Transformers for cells; only where it is installed. The oracle trains the same classes, alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from tests.cells.cell import Cell

WORDS, SIZE, LAYERS, HEADS, MAX_TOKENS = 24, 16, 2, 4, 32


def made(family: str) -> nn.Module:
    """Without dropout, in fp32. ImportError: no Transformers."""
    import transformers as hf

    decoder = {
        "vocab_size": WORDS,
        "hidden_size": SIZE,
        "intermediate_size": 2 * SIZE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": MAX_TOKENS,
    }
    still: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    match family:
        case "llama":
            return hf.LlamaForCausalLM(hf.LlamaConfig(**decoder, num_key_value_heads=2))
        case "mixtral":
            return hf.MixtralForCausalLM(
                hf.MixtralConfig(**decoder, num_key_value_heads=2, num_local_experts=4, sliding_window=None)
            )
        case "gpt2":
            size = {"n_embd": SIZE, "n_layer": LAYERS, "n_head": HEADS, "n_positions": MAX_TOKENS}
            still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=WORDS, **size, **still))
        case "bert":
            return hf.BertForMaskedLM(hf.BertConfig(**decoder, **still))
        case "t5":
            size = {"d_model": SIZE, "d_kv": 4, "d_ff": 2 * SIZE, "num_layers": LAYERS, "num_heads": HEADS}
            return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=WORDS, **size, dropout_rate=0.0))
        case _:
            del decoder["vocab_size"], decoder["max_position_embeddings"]
            shape = {"image_size": (8, WORDS), "patch_size": 4, "num_channels": 1, "num_labels": WORDS}
            return hf.ViTForImageClassification(hf.ViTConfig(**decoder, **still, **shape))


class Family(nn.Module):
    """``forward(input_ids)`` gives logits, with ``labels`` the loss. An image is the tokens' one-hot codes, and its
    class the last label."""

    balance: Tensor | None = None
    with_sometimes = False

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.family = cell.model
        self.model: Any = made(cell.model)
        self.config = self.model.config

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        from tests.cells.models import mean_loss

        if self.family == "vit":
            dtype = next(self.model.parameters()).dtype
            image = functional.one_hot(input_ids, WORDS).to(dtype)[:, None]
            logits, labels = (
                self.model(pixel_values=image).logits[:, None],
                None if labels is None else labels[:, -1:],
            )
        elif self.family == "t5":
            logits = self.model(input_ids=input_ids, decoder_input_ids=input_ids).logits
        else:
            more = {} if self.family == "bert" else {"use_cache": False}
            logits = self.model(input_ids=input_ids, **more).logits
        return logits if labels is None else mean_loss(logits, labels)
