"""Sequence parallelism for vision-language models, without changing their code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from deepspeed.base.sharded import full_shape
from deepspeed.parallel.sequence.autosp_vit import UlyssesSPViTAttention
from deepspeed.parallel.sequence.hf.attention import shard_attention

_CLASS_TOKENS = ("class_embedding", "cls_token", "class_token")


def auto_wrap_model_for_sp(model: nn.Module, process_group: Any) -> nn.Module:
    """Let the attention of a Transformers model work on sequence shards: of the patches in its vision encoder, of the
    tokens in its language model.

    Attention modules of the vision encoder are wrapped in `UlyssesSPViTAttention` (class tokens are found by their
    name), those of the language model get `UlyssesSPAttentionHF`. Parameters stay the same objects; names of wrapped
    ones gain ``attn.``. The layers then take hidden states of this rank's shard. To merge images and text, replace the
    projection by an adapter of ``deepspeed.parallel.sequence.autosp_fusion``.

    Args:
        model: changed in place.
        process_group: the ranks that share a sequence, in its order.

    Returns:
        ``model``.

    Raises:
        ValueError: no attention modules were found, or the language model is not from Transformers, or its attention
            cannot work on shards.
    """
    info = detect_model_sp_info(model)
    if not info.vit_attn_modules and not info.llm_attn_modules:
        raise ValueError(
            f"{type(model).__name__} has no attention modules (classes named so, in a list of blocks) to "
            "shard; use deepspeed.parallel.sequence.layer.DistributedAttention in its code"
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


# Detection of the parts of a vision-language model through which sequence shards pass.
#
# Attention modules are recognized by the word in their class name and by lying in a list of blocks; a vision encoder
# as the part without the token embedding that begins with a convolution (or declares pixels as its main input); the
# projection by its output width, that of the token embedding.


@dataclass
class SPModelInfo:
    """Paths and modules: attention of the language model and of the vision encoder, in model order, and the projection
    of visual features to the language model's width."""

    llm_attn_modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    vision_projection_module: tuple[str, nn.Module] | None = None
    vit_attn_modules: list[tuple[str, nn.Module]] = field(default_factory=list)


def detect_model_sp_info(model: nn.Module) -> SPModelInfo:
    """Find the attention modules of ``model``, by the part that they belong to, and its vision projection.

    A model without a token embedding is a vision encoder, one without a convolution a language model.
    """
    modules = dict(model.named_modules())
    embedding = _token_embedding(model, modules)
    info = SPModelInfo()
    for path in _attention_paths(modules):
        part = _part_of(path, embedding, modules)
        kind = info.vit_attn_modules if _sees_pixels(modules[part]) else info.llm_attn_modules
        kind.append((path, modules[path]))
    if info.vit_attn_modules and embedding is not None:
        info.vision_projection_module = _projection(model, modules, embedding, info)
    return info


def _token_embedding(model: nn.Module, modules: dict[str, nn.Module]) -> str | None:
    """Return the path of the token embedding: as the model declares it, else the embedding with the most rows."""
    getter: Any = getattr(model, "get_input_embeddings", lambda: None)
    try:
        own = getter()
    except (NotImplementedError, AttributeError):  # Transformers raises it for models with several
        own = None
    if isinstance(own, nn.Embedding):
        return next((path for path, each in modules.items() if each is own), None)
    found = {path: each.num_embeddings for path, each in modules.items() if isinstance(each, nn.Embedding)}
    return max(found, key=lambda path: found[path]) if found and not _is_encoder(modules) else None


def _is_encoder(modules: dict[str, nn.Module]) -> bool:
    """Return whether all embedding tables of a vision model are of positions."""
    tables = [path for path, each in modules.items() if isinstance(each, nn.Embedding)]
    return _sees_pixels(modules[""]) and all("pos" in each for each in tables)


_PATCHES = (nn.Conv2d, nn.Conv3d)


def _attention_paths(modules: dict[str, nn.Module]) -> Iterator[str]:
    """Yield the paths of the outermost attention modules with weights inside lists of blocks."""
    found: list[str] = []
    for path, module in modules.items():
        inside_block = any(part.isdigit() for part in path.split(".")[:-1])
        named = "attention" in type(module).__name__.lower() or type(module).__name__.lower().endswith("attn")
        weights = any(True for _ in module.parameters())
        if inside_block and named and weights and not any(path.startswith(f"{each}.") for each in found):
            found.append(path)
    return iter(found)


def _part_of(path: str, embedding: str | None, modules: dict[str, nn.Module]) -> str:
    """Return the largest part of the model around ``path`` that does not contain the token embedding."""
    names = path.split(".")
    for depth in range(len(names)):
        part = ".".join(names[:depth])
        if embedding is None or not _contains(part, embedding):
            return part
    return path


def _contains(part: str, path: str) -> bool:
    return not part or path == part or path.startswith(f"{part}.")


def _sees_pixels(part: nn.Module) -> bool:
    if getattr(part, "main_input_name", None) == "pixel_values":
        return True
    return any(isinstance(each, _PATCHES) for each in part.modules())


def _projection(
    model: nn.Module, modules: dict[str, nn.Module], embedding: str, info: SPModelInfo
) -> tuple[str, nn.Module] | None:
    """Return the largest module with a matrix of the text width that is not a block or output layer and contains no
    attention."""
    width = modules[embedding].embedding_dim  # type: ignore[union-attr]
    getter: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = getter()
    attention = [path for path, _ in (*info.llm_attn_modules, *info.vit_attn_modules)]
    lists = {_list_of(path) for path in attention}
    found = []
    for path, module in modules.items():
        inside = any(_contains(part, path) for part in lists) or any(
            _contains(path, each) for each in attention
        )
        if (
            not path
            or inside
            or module is head
            or isinstance(module, nn.Embedding)
            or _contains(path, embedding)
        ):
            continue
        if any(each.dim() == 2 and width in full_shape(each) for each in module.parameters()):
            found.append(path)
    # In some models it is the vision encoder's last module; a pooling head there of that width comes second to a module
    # outside.
    vision = _part_of(info.vit_attn_modules[0][0], embedding, modules)
    found.sort(key=lambda path: _contains(vision, path))
    return (found[0], modules[found[0]]) if found else None


def _list_of(path: str) -> str:
    """Return the path of the list of blocks that contains an attention module."""
    names = path.split(".")
    at = next(i for i, name in enumerate(names) if name.isdigit())
    return ".".join(names[:at])
