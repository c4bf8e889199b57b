"""One model as the folders and files that servers read: the weights behind rivals.py.

plain: what save_pretrained writes, with a tokenizer of one word for each token. gptq: 4 bits in groups of 128 columns,
rounded to the nearest. int8: compressed-tensors' layout, with a scale for each row, and inputs rounded as they come.
P.gguf: llama.cpp's file in precision P.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gguf_file import write_gguf

VOCABULARY, LONGEST = 512, 1024
GROUP = 128
_HEADS = {"num_attention_heads": 12}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "88M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, **_HEADS},
    "moe-tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_local_experts": 4,
    },
    "moe": {
        "hidden_size": 768,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        **_HEADS,
        "num_local_experts": 8,
    },
}
"""A shape with ``num_local_experts`` is a Mixtral, which uses two of them for each token; the others are Llamas."""


def save_models(folder: Path, shape: str, precisions: Sequence[str]) -> None:
    """Write into ``folder`` what the servers need for these precisions."""
    model = make_model(shape)
    plain = folder / "plain"
    model.save_pretrained(plain)
    save_tokenizer(plain)
    if shape.startswith("moe"):
        return
    words = [f"w{index}" for index in range(VOCABULARY)]
    for precision in precisions:
        write_gguf(model, precision, folder / f"{precision}.gguf", words)
    if "int4" in precisions:
        _save_packed(model, folder / "gptq", _gptq, _GPTQ)
    if "int8" in precisions:
        _save_packed(model, folder / "int8", _int8, _INT8)


def make_model(shape: str) -> Any:
    """Return a model with random weights and no token that ends a text, the same every time."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    settings = {"vocab_size": VOCABULARY, "max_position_embeddings": LONGEST, **SHAPES[shape]}
    settings |= {"num_key_value_heads": settings["num_attention_heads"]}
    settings |= {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    if "num_local_experts" in settings:
        return MixtralForCausalLM(MixtralConfig(**settings)).eval()
    return LlamaForCausalLM(LlamaConfig(**settings)).eval()


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of one token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(folder)


def _save_packed(
    model: Any, folder: Path, pack: Callable[[Tensor], dict[str, Tensor]], quantized: dict[str, Any]
) -> None:
    """Save the model with the matrices of its layers packed. The embedding and the head stay as they are."""
    from safetensors.torch import save_file

    model.save_pretrained(folder)
    save_tokenizer(folder)
    stored: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if value.dim() == 2 and ".layers." in name:
            parts = pack(value)
            stored |= {
                f"{name.removesuffix('.weight')}.{part}": each.contiguous() for part, each in parts.items()
            }
        else:
            stored[name] = value.half().contiguous()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantized}))


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}


def _gptq(weight: Tensor) -> dict[str, Tensor]:
    """Levels of -8 to 7 times a scale; eight of a column in a word, the first in its lowest bits. A zero point of 8 is
    stored as 7."""
    grouped = weight.unflatten(1, (-1, GROUP))
    scales = (grouped.abs().amax(-1) / 7.5).clamp(min=1e-12)
    levels = (grouped / scales[..., None]).round().clamp(-8, 7).flatten(1).long() + 8
    zeros = torch.full(scales.shape, 7)
    return {
        "qweight": _words(levels).T,
        "qzeros": _words(zeros.T).contiguous(),
        "scales": scales.T.half(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }


def _words(numbers: Tensor) -> Tensor:
    """Pack eight neighbours of a row, of 4 bits each, into an int32."""
    shifted = numbers.unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    return shifted.sum(-1).to(torch.uint32).view(torch.int32)


_OF_EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
_INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_OF_EIGHT_BITS, "strategy": "channel", "dynamic": False},
            "input_activations": {**_OF_EIGHT_BITS, "strategy": "token", "dynamic": True},
        }
    },
}


def _int8(weight: Tensor) -> dict[str, Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
    return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales}
