"""Transformers' models of images and text over shards: which parts are found, and a Llava that equals one rank's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.parallel.sequence.assignment import shard_lengths
from deepspeed.parallel.sequence.hf.loss import token_mean
from deepspeed.sequence import auto_wrap_model_for_sp, detect_model_sp_info
from deepspeed.sequence.autosp_fusion import LlavaFusionAdapter
from tests.clients.kit import clean_clients
from tests.pool import distributed

transformers = pytest.importorskip("transformers", reason="the clients extra is not installed")

IMAGE, VOCAB = 98, 99
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
}
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 2,
}


def llava() -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=IMAGE,
        vision_feature_layer=-1,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config)


def made(kind: str) -> nn.Module:
    if kind == "Llava":
        return llava()
    vision = {**VISION, "image_size": [8, 8], "patch_size": [2, 2]}
    configs: dict[str, Any] = {
        "InternVL": {"vision_config": vision, "text_config": {"model_type": "qwen2", **TEXT}},
        "Qwen2VL": {
            "vision_config": {
                "depth": 2,
                "embed_dim": 24,
                "num_heads": 2,
                "hidden_size": 32,
                "patch_size": 2,
            },
            "text_config": TEXT,
        },
        "Gemma3": {
            "vision_config": {"model_type": "siglip_vision_model", **VISION},
            "text_config": {"head_dim": 8, **TEXT},
        },
        "Idefics3": {"vision_config": VISION, "text_config": transformers.LlamaConfig(**TEXT)},
    }
    config = getattr(transformers, f"{kind}Config")(**configs[kind])
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


@pytest.mark.parametrize(
    ("kind", "vision", "text", "projection"),
    [
        (
            "Llava",
            "vision_tower.encoder.layers.0.self_attn",
            "language_model.layers.0.self_attn",
            "multi_modal_projector",
        ),
        (
            "InternVL",
            "vision_tower.encoder.layer.0.attention",
            "language_model.layers.0.self_attn",
            "multi_modal_projector",
        ),
        ("Qwen2VL", "visual.blocks.0.attn", "language_model.layers.0.self_attn", "visual.merger"),
        (
            "Gemma3",
            "vision_tower.encoder.layers.0.self_attn",
            "language_model.layers.0.self_attn",
            "multi_modal_projector",
        ),
        (
            "Idefics3",
            "vision_model.encoder.layers.0.self_attn",
            "text_model.layers.0.self_attn",
            "connector",
        ),
    ],
)
def test_parts_of_models(kind: str, vision: str, text: str, projection: str) -> None:
    with torch.device("meta"):
        model = made(kind)
    info = detect_model_sp_info(model)
    assert [path for path, _ in info.vit_attn_modules][:1] == [f"model.{vision}"]
    assert [path for path, _ in info.llm_attn_modules][:1] == [f"model.{text}"]
    assert len(info.vit_attn_modules) == len(info.llm_attn_modules) == 2
    assert info.vision_projection_module is not None
    assert info.vision_projection_module[0] == f"model.{projection}"


def test_models_of_one_kind() -> None:
    with torch.device("meta"):
        vision = transformers.ViTModel(transformers.ViTConfig(**VISION))
        text = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))
    info = detect_model_sp_info(vision)
    assert len(info.vit_attn_modules) == 2 and not info.llm_attn_modules
    info = detect_model_sp_info(text)
    assert len(info.llm_attn_modules) == 2 and not info.vit_attn_modules


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Pixels, tokens and labels of two rows, each with one image of 16 patches."""
    draw = torch.Generator().manual_seed(1)
    pixels = torch.randn(2, 3, 8, 8, generator=draw)
    ids = torch.randint(3, 90, (2, 27), generator=draw)
    ids[0, 2:18] = ids[1, 5:21] = IMAGE
    labels = ids.masked_fill(ids == IMAGE, -100)
    labels[0, 20:] = -100
    return pixels, ids, labels


def on_shards(model: Any, group: Any, pixels: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """Train with the parts of a Llava as a script does: patches, layers, adapter, layers, loss."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    tower = model.model.vision_tower
    hidden = tower.pre_layrnorm(tower.embeddings(pixels))
    patches = hidden[:, 1:].split(shard_lengths(hidden.shape[1] - 1, ranks), 1)[rank]
    hidden = tower.encoder(inputs_embeds=torch.cat((hidden[:, :1], patches), 1)).last_hidden_state
    join = LlavaFusionAdapter(model.model.multi_modal_projector, group, IMAGE)
    embeds = join(hidden[:, 1:], model.get_input_embeddings()(ids), ids)
    lengths = shard_lengths(ids.shape[1], ranks)
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    positions, shifted = (each.split(lengths, 1)[rank] for each in (positions, shifted))
    out = model.model.language_model(inputs_embeds=embeds, position_ids=positions, use_cache=False)
    logits = model.lm_head(out.last_hidden_state)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten())
    return token_mean(loss, (shifted != -100).sum(), group)


@distributed(world_size=[2, 3])
def test_a_llava_over_shards(world_size: int) -> None:
    with clean_clients():
        pixels, ids, labels = batch()
        plain = llava()
        expected = plain(pixel_values=pixels, input_ids=ids, labels=labels).loss
        expected.backward()
        model = auto_wrap_model_for_sp(llava(), dist.group.WORLD)
        loss = on_shards(model, dist.group.WORLD, pixels, ids, labels)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0.0)
        loss.backward()
    wanted = {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}
    # The gradient of the keys' bias is 0 but for rounding: what all keys have in common, softmax does not see.
    least = 1e-3 * max(each.abs().max() for each in wanted.values())
    for name, each in model.named_parameters():
        name = name.replace("self_attn.attn.", "self_attn.")
        if name not in wanted:  # what follows the vision encoder's last layer
            assert each.grad is None, name
            continue
        found = torch.zeros_like(each) if each.grad is None else each.grad
        dist.all_reduce(found)
        found /= world_size  # as the engine does
        error = (found - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=least)
        assert error <= 1e-5, f"{name}: {error:.1e}"
