"""A Llama of Transformers as a file of llama.cpp (GGUF, version 3): for side-by-side measurements of one model.

All matrices have the precision that is asked for, norms are fp32. int8 becomes q8_0 and int4 q4_0, which have a scale
in fp16 for each 32 numbers of a row.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 32
GROUP = 32
_UINT32, _INT32, _FLOAT32, _STRING, _ARRAY = 4, 5, 6, 8, 9
_ORDINARY = 1  # the kind of a token that is neither a mark nor a byte


def write_gguf(model: Any, precision: str, path: Path, words: Sequence[str] | None = None) -> None:
    """``precision``: fp32, bf16, int8 or int4. ``words``: the text of each token; None: the file has no tokenizer. The
    file appears when it is whole."""
    fields, tensors = list(_fields(model.config, words)), list(_tensors(model))
    code, encode = _ENCODINGS[precision]
    described, data, offset = [], [], 0
    for name, tensor in tensors:
        kind, blob = (code, encode(tensor)) if tensor.dim() == 2 else (0, _float32(tensor))
        sizes = list(reversed(tensor.shape))
        described.append(_string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset))
        blob += bytes(-len(blob) % ALIGNMENT)
        data.append(blob)
        offset += len(blob)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)) + b"".join(fields + described)
    part = path.with_suffix(".part")
    part.write_bytes(header + bytes(-len(header) % ALIGNMENT) + b"".join(data))
    part.rename(path)


def _fields(config: Any, words: Sequence[str] | None) -> Iterator[bytes]:
    size = config.hidden_size // config.num_attention_heads
    theta = float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0))
    texts = {"general.architecture": "llama", "general.name": "random"}
    texts["tokenizer.ggml.model"] = "none" if words is None else "llama"
    numbers = {
        "general.alignment": ALIGNMENT,
        "llama.vocab_size": config.vocab_size,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.rope.dimension_count": size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
    }
    floats = {"llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps, "llama.rope.freq_base": theta}
    for name, text in texts.items():
        yield _string(name) + struct.pack("<I", _STRING) + _string(text)
    for name, number in numbers.items():
        yield _string(name) + struct.pack("<II", _UINT32, number)
    for name, value in floats.items():
        yield _string(name) + struct.pack("<If", _FLOAT32, value)
    if words is not None:
        yield from _vocabulary(words)


def _vocabulary(words: Sequence[str]) -> Iterator[bytes]:
    """Tokens as SentencePiece has them: a mark instead of the space before a word, a score, and a kind."""
    count, spaced = len(words), [f"\u2581{word}" for word in words]

    def array(kind: int) -> bytes:
        return struct.pack("<IIQ", _ARRAY, kind, count)

    yield _string("tokenizer.ggml.tokens") + array(_STRING) + b"".join(map(_string, spaced))
    yield _string("tokenizer.ggml.scores") + array(_FLOAT32) + struct.pack(f"<{count}f", *[0.0] * count)
    yield (
        _string("tokenizer.ggml.token_type") + array(_INT32) + struct.pack(f"<{count}i", *[_ORDINARY] * count)
    )


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """By llama.cpp's names. It rotates neighbouring numbers of a head, Transformers numbers of its two halves."""
    config, body = model.config, model.model
    yield "token_embd.weight", body.embed_tokens.weight
    for index, layer in enumerate(body.layers):
        attention, mlp = layer.self_attn, layer.mlp
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        named = {
            "attn_norm": layer.input_layernorm.weight,
            "attn_q": _neighbours(attention.q_proj.weight, heads["q"]),
            "attn_k": _neighbours(attention.k_proj.weight, heads["k"]),
            "attn_v": attention.v_proj.weight,
            "attn_output": attention.o_proj.weight,
            "ffn_norm": layer.post_attention_layernorm.weight,
            "ffn_gate": mlp.gate_proj.weight,
            "ffn_up": mlp.up_proj.weight,
            "ffn_down": mlp.down_proj.weight,
        }
        for name, weight in named.items():
            yield f"blk.{index}.{name}.weight", weight
    yield "output_norm.weight", body.norm.weight
    yield "output.weight", model.lm_head.weight


def _neighbours(weight: Tensor, heads: int) -> Tensor:
    halves = weight.view(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def _float32(tensor: Tensor) -> bytes:
    return _bytes(tensor.detach().float())


def _bfloat16(tensor: Tensor) -> bytes:
    return _bytes(tensor.detach().bfloat16())


def _blocks(scales: Tensor, numbers: Tensor) -> bytes:
    """Of each group, its scale in fp16 and the bytes of its numbers."""
    return _bytes(torch.cat([scales.half().view(torch.uint8), numbers.view(torch.uint8)], dim=1))


def _int8(tensor: Tensor) -> bytes:
    groups = tensor.detach().float().view(-1, GROUP)
    scales = groups.abs().amax(1, keepdim=True) / 127
    return _blocks(scales, (groups / scales.clamp(min=1e-30)).round().to(torch.int8))


def _int4(tensor: Tensor) -> bytes:
    """The number of the largest magnitude becomes -8; of a byte, the lower half is of the first 16 numbers."""
    groups = tensor.detach().float().view(-1, GROUP)
    largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    scales = largest / -8
    divisors = torch.where(scales == 0, torch.ones_like(scales), scales)
    whole = (groups / divisors + 8).round().clamp(0, 15).to(torch.uint8)
    return _blocks(scales, whole[:, : GROUP // 2] | whole[:, GROUP // 2 :] << 4)


_ENCODINGS: dict[str, tuple[int, Callable[[Tensor], bytes]]] = {
    "fp32": (0, _float32),
    "bf16": (30, _bfloat16),
    "int8": (8, _int8),
    "int4": (2, _int4),
}
