"""Models of images and text over shards: what is found in them, and where the two meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed.parallel.sequence import auto_wrap_model_for_sp, detect_model_sp_info
from deepspeed.parallel.sequence.assignment import shard_lengths
from deepspeed.parallel.sequence.autosp_fusion import (
    InternVLFusionAdapter,
    LlavaFusionAdapter,
    ModalityFusionSPAdapter,
    Qwen2VLFusionAdapter,
)
from deepspeed.parallel.sequence.autosp_vit import UlyssesSPViTAttention
from deepspeed.transforms.compile.passes.sp_compile import prepare_autosp_inputs
from tests.pool import distributed

VISION, TEXT = 6, 8


class SelfAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden_states: Tensor) -> Tensor:
        q, k, v = self.qkv(hidden_states).chunk(3, -1)
        return self.out((q @ k.mT).softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.mlp = SelfAttention(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, VISION, 2, 2)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, VISION))
        self.positions = nn.Embedding(99, VISION)
        self.blocks = nn.ModuleList(Block(VISION) for _ in range(2))


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(100, TEXT)
        self.blocks = nn.ModuleList(Block(TEXT) for _ in range(3))


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.text = Vision(), Text()
        self.connector = nn.Sequential(nn.Linear(VISION, 5), nn.GELU(), nn.Linear(5, TEXT))
        self.head = nn.Linear(TEXT, 100, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_what_is_found_in_models() -> None:
    info = detect_model_sp_info(Both())
    assert [path for path, _ in info.vit_attn_modules] == [f"vision.blocks.{n}.attention" for n in range(2)]
    assert [path for path, _ in info.llm_attn_modules] == [f"text.blocks.{n}.attention" for n in range(3)]
    assert info.vision_projection_module is not None and info.vision_projection_module[0] == "connector"
    info = detect_model_sp_info(Vision())
    assert len(info.vit_attn_modules) == 2 and not info.llm_attn_modules
    info = detect_model_sp_info(Text())
    assert len(info.llm_attn_modules) == 3 and not info.vit_attn_modules
    assert info.vision_projection_module is None
    assert detect_model_sp_info(nn.Linear(2, 2)).vit_attn_modules == []


def test_what_cannot_be_wrapped() -> None:
    with pytest.raises(ValueError, match="no attention modules"):
        auto_wrap_model_for_sp(nn.Linear(2, 2), None)
    with pytest.raises(ValueError, match="Text has no config"):
        auto_wrap_model_for_sp(Text(), None)


@distributed(world_size=2)
def test_a_vision_encoder_on_shards() -> None:
    torch.manual_seed(0)
    model = Vision()
    x = torch.randn(2, 1 + 5, VISION)
    leaf = x.clone().requires_grad_()
    expected = leaf
    for block in model.blocks:
        expected = block(expected)
    (wanted,) = torch.autograd.grad(expected[:, 1:].sum(), leaf)
    assert auto_wrap_model_for_sp(model, dist.group.WORLD) is model
    wrapped = [block.attention for block in model.blocks]
    assert all(isinstance(each, UlyssesSPViTAttention) and each.has_cls_token for each in wrapped)
    rank, lengths = dist.get_rank(), (3, 2)
    own = x[:, 1:].split(lengths, 1)[rank].clone().requires_grad_()
    out = torch.cat((x[:, :1], own), 1)
    for block in model.blocks:
        out = block(out)
    torch.testing.assert_close(out[:, 1:], expected[:, 1:].split(lengths, 1)[rank])
    torch.testing.assert_close(out[:, :1], expected[:, :1])
    (found,) = torch.autograd.grad(out[:, 1:].sum(), own)
    torch.testing.assert_close(found, wanted[:, 1:].split(lengths, 1)[rank])


def fused(
    adapter: ModalityFusionSPAdapter, images: Tensor, text: Tensor, ids: Tensor, expected: Tensor
) -> None:
    """The shards of ``expected``, and the gradients of images and text, for the loss sum(result * weights)."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dim = images.dim() - 2
    cut = shard_lengths(images.shape[dim], ranks)
    leaf, words = images.split(cut, dim)[rank].clone().requires_grad_(), text.clone().requires_grad_()
    out = adapter(leaf, words, ids)
    lengths = shard_lengths(expected.shape[1], ranks)
    torch.testing.assert_close(out, expected.split(lengths, 1)[rank])
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    given = [each for each in (images, text) if each.requires_grad]
    wanted = torch.autograd.grad((expected * weights).sum(), given, retain_graph=True)
    found = list(torch.autograd.grad((out * weights.split(lengths, 1)[rank]).sum(), (leaf, words)))
    dist.all_reduce(found[1])
    torch.testing.assert_close(found[0], wanted[0].split(cut, dim)[rank])
    torch.testing.assert_close(found[1], wanted[1])


def case(*shape: int) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    projection = nn.Linear(VISION, TEXT)
    images = torch.randn(*shape, VISION, requires_grad=True)
    return projection, images, torch.randn(2, 9, TEXT, requires_grad=True)


@distributed(world_size=[1, 2, 3])
def test_a_place_for_each_visual_token(world_size: int) -> None:
    projection, images, text = case(2, 3)
    ids = torch.arange(18).view(2, 9)
    ids[0, 2:5] = ids[1, [0, 4, 8]] = 77
    expected = text.masked_scatter((ids == 77).unsqueeze(-1), projection(images))
    for kind in (ModalityFusionSPAdapter, LlavaFusionAdapter, InternVLFusionAdapter):
        fused(kind(projection, dist.group.WORLD, 77), images, text, ids, expected)


@distributed(world_size=[1, 2])
def test_a_place_for_each_image(world_size: int) -> None:
    projection, images, text = case(2, 3)
    ids = torch.arange(18).view(2, 9)
    ids[0, 2] = ids[1, 8] = -200
    visual = projection(images)
    rows = [torch.cat([text[0, :2], visual[0], text[0, 3:]]), torch.cat([text[1, :8], visual[1]])]
    fused(LlavaFusionAdapter(projection, dist.group.WORLD), images, text, ids, torch.stack(rows))
    adapter = InternVLFusionAdapter(projection, dist.group.WORLD)
    own = images.detach().split(shard_lengths(3, world_size), 1)[dist.get_rank()]
    with pytest.raises(ValueError, match="2 places for 6 visual tokens"):
        adapter(own, text, ids)
    ids[1, 8] = 0
    with pytest.raises(ValueError, match="1 places for 2 x 3 visual tokens"):
        LlavaFusionAdapter(projection, dist.group.WORLD)(own, text, ids)
    ids[0, 5] = -200
    with pytest.raises(ValueError, match="different numbers of images"):
        LlavaFusionAdapter(projection, dist.group.WORLD)(own, text, ids)


@distributed(world_size=2)
def test_places_between_two_tokens() -> None:
    projection, images, text = case(5)
    ids = torch.arange(18).view(2, 9)
    ids[0, [1, 6]] = ids[1, [4, 7]] = 90
    start, end = 91, 92
    ids[0, 1], ids[0, 4], ids[0, 5], ids[0, 7] = start, end, start, end  # 2 and 1 places
    ids[1, 4], ids[1, 7] = start, end
    places = torch.zeros(2, 9, dtype=torch.bool)
    places[0, [2, 3, 6]] = places[1, [5, 6]] = True
    expected = text.masked_scatter(places.unsqueeze(-1), projection(images))
    fused(Qwen2VLFusionAdapter(projection, dist.group.WORLD, start, end), images, text, ids, expected)


@distributed(world_size=2)
def test_tokens_of_an_image_take_the_place_of_what_lies_between_its_two() -> None:
    projection, images, text = case(2, 3)
    start, end = 91, 92
    ids = torch.arange(18).view(2, 9)
    ids[0, 1], ids[0, 2], ids[1, 5], ids[1, 6] = start, end, start, end  # nothing between them
    visual = projection(images)
    rows = [
        torch.cat([text[0, :2], visual[0], text[0, 2:]]),
        torch.cat([text[1, :6], visual[1], text[1, 6:]]),
    ]
    adapter = Qwen2VLFusionAdapter(projection, dist.group.WORLD, start, end)
    fused(adapter, images, text, ids, torch.stack(rows))
    ids[0, 2], ids[0, 3], ids[1, 6], ids[1, 7] = 0, end, 0, end  # one token that stands for all
    rows = [
        torch.cat([text[0, :2], visual[0], text[0, 3:]]),
        torch.cat([text[1, :6], visual[1], text[1, 7:]]),
    ]
    fused(adapter, images, text, ids, torch.stack(rows))
    ids[1, 7] = 0
    own = images.detach().split(shard_lengths(3, 2), 1)[dist.get_rank()]
    with pytest.raises(ValueError, match="2 tokens start an image but 1 end one"):
        adapter(own, text, ids)


@distributed(world_size=2)
def test_text_without_places_passes_through() -> None:
    projection, images, text = case(2, 3)
    ids = torch.arange(18).view(2, 9)
    own = images.detach().split(shard_lengths(3, 2), 1)[dist.get_rank()]
    shard = text.split(shard_lengths(9, 2), 1)[dist.get_rank()]
    plain = [kind(projection, dist.group.WORLD, 77) for kind in (LlavaFusionAdapter, InternVLFusionAdapter)]
    for adapter in (*plain, Qwen2VLFusionAdapter(projection, dist.group.WORLD, 91, 92)):
        assert torch.equal(adapter(own, text, ids), shard)


def test_inputs_are_marked() -> None:
    ids = torch.zeros(2, 5, dtype=torch.int64)
    found: Any = prepare_autosp_inputs(ids, ids + 1, ids + 2, seq_dim=1)
    assert found[0] is ids and found.attention_mask is None
    assert [each.tag for each in found[:3]] == ["input_id", "label_id", "position_id"]
    assert 1 in ids._dynamo_dynamic_indices  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"seq_dim=2 is not a dimension of input_id of shape \[2, 5\]"):
        prepare_autosp_inputs(ids, None, seq_dim=2)
    with pytest.raises(ValueError, match="input_id is None"):
        prepare_autosp_inputs(None, None)  # type: ignore[arg-type]
