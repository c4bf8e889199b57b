"""Attention over shards for a model of images and text, without changing its code."""

from __future__ import annotations

from typing import Any

from torch import nn

from deepspeed.parallel.sequence.autosp_detector import detect_model_sp_info
from deepspeed.parallel.sequence.autosp_vit import UlyssesSPViTAttention
from deepspeed.parallel.sequence.hf.attention import shard_attention

_CLASS_TOKENS = ("class_embedding", "cls_token", "class_token")


def auto_wrap_model_for_sp(model: nn.Module, process_group: Any) -> nn.Module:
    """Let the attention of a Transformers model work on shards: of the patches in its vision encoder, of the tokens in
    its language model.

    Attention modules of the vision encoder are wrapped by `UlyssesSPViTAttention` (class tokens are found by their
    name), those of the language model get `UlyssesSPAttentionHF`. Parameters stay the same objects, but for the
    ``attn.`` in the names of wrapped ones. The layers then take hidden states of this rank's shard; where images and
    text meet, the adapters of ``deepspeed.parallel.sequence.autosp_fusion`` take the projection's place.

    Args:
        model: is changed.
        process_group: the ranks that share a sequence, in its order.

    Returns:
        ``model``.

    Raises:
        ValueError: it has no attention modules that can be found, or its language model is none of Transformers, or one
            whose attention cannot work on shards.
    """
    info = detect_model_sp_info(model)
    if not info.vit_attn_modules and not info.llm_attn_modules:
        raise ValueError(
            f"{type(model).__name__} has no attention modules (classes named so, in a list of blocks) to work on "
            "shards; use deepspeed.parallel.sequence.layer.DistributedAttention in its code"
        )
    for path, attention in info.vit_attn_modules:
        parent, _, name = path.rpartition(".")
        wrapped = UlyssesSPViTAttention(attention, process_group, _has_class_token(model, path))
        setattr(model.get_submodule(parent), name, wrapped)
    if info.llm_attn_modules:
        shard_attention(model, process_group)
    return model


def _has_class_token(model: nn.Module, path: str) -> bool:
    """Return whether the encoder around an attention module has a class token."""
    names = path.split(".")
    for depth in reversed(range(len(names))):
        around = model.get_submodule(".".join(names[:depth]))
        if any(isinstance(each, (nn.Conv2d, nn.Conv3d)) for each in around.modules()):
            tensors = (*around.named_parameters(), *around.named_buffers())
            return any(name.rpartition(".")[2] in _CLASS_TOKENS for name, _ in tensors)
    return False
