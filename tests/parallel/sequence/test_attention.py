"""Attention over shards of a sequence equals attention on one rank: outputs and the gradients of query, key, value."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from deepspeed.comm.collectives import process_network
from deepspeed.ops.attention_blocks import (
    CAUSAL,
    CPU_FLASH,
    CUDA_FLASH,
    PLAIN,
    BlockKernel,
    JoinedBlocks,
    kernel_for,
)
from deepspeed.parallel.sequence import UlyssesSPViTAttention
from deepspeed.parallel.sequence.assignment import shard_lengths
from deepspeed.parallel.sequence.layer import DistributedAttention, single_all_to_all
from deepspeed.parallel.sequence.visibility import Visibility
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from tests.pool import distributed

BATCH, SIZE = 2, 8


def inputs(heads: int, kv_heads: int, length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key, value and the gradient of the output: [batch, heads, tokens, size]."""
    generator = torch.Generator().manual_seed(3)
    sizes = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(BATCH, n, length, SIZE, generator=generator).to(dtype) for n in sizes]


def own(tensor: Tensor, lengths: tuple[int, ...], dim: int = 2) -> Tensor:
    return tensor.split(lengths, dim)[dist.get_rank()].detach().clone()


def sdpa(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """An attention of Transformers' interface."""
    group = module.num_key_value_groups
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    causal = bool(kwargs["is_causal"]) and mask is None
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=kwargs.get("scaling"))
    return out.transpose(1, 2), None


def reference(given: list[Tensor], mask: Tensor) -> tuple[Tensor, list[Tensor]]:
    q, k, v, grad = given
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    wide = [leaves[0], *(each.repeat_interleave(group, 1) for each in leaves[1:])]
    out = scaled_dot_product_attention(*wide, attn_mask=mask)
    return out.detach(), list(torch.autograd.grad(out, leaves, grad))


def band(length: int, window: int | None = None) -> Tensor:
    at = torch.arange(length)
    seen = at[None, :] <= at[:, None]
    return seen if window is None else seen & (at[None, :] > at[:, None] - window)


def attention(heads: int, kv_heads: int, **changes: Any) -> UlyssesSPAttentionHF:
    settings: dict[str, Any] = {"seq_length_is_variable": True, **changes}
    return UlyssesSPAttentionHF(sdpa, BATCH, heads, SIZE, kv_heads, 1, dist.group.WORLD, **settings)


def compare(
    given: list[Tensor],
    lengths: tuple[int, ...],
    mask: Tensor,
    *,
    causal: bool = True,
    tolerance: float = 1e-5,
    **kwargs: Any,
) -> None:
    heads, kv_heads = given[0].shape[1], given[1].shape[1]
    out, grads = reference(given, mask)
    q, k, v = (own(each, lengths).requires_grad_() for each in given[:3])
    module = SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=causal, training=True)
    padding = kwargs.pop("padding", None)
    result, _ = attention(heads, kv_heads)(module, q, k, v, padding, scaling=SIZE**-0.5, **kwargs)
    ours = torch.autograd.grad(result, (q, k, v), own(given[3], lengths).transpose(1, 2))
    for found, expected in zip((result.transpose(1, 2), *ours), (out, *grads), strict=True):
        # Of the whole tensor: the first token sees itself only, so that its gradients are zero but for rounding.
        scale = expected.abs().max().clamp_min(0.1)
        assert (found - own(expected, lengths)).abs().max() <= tolerance * scale


# heads, heads of keys; with 2 to 4 ranks: even, uneven, shared, shared unevenly, fewer than ranks
HEADS = [(4, 4), (5, 5), (8, 2), (6, 3), (4, 1), (3, 1), (2, 2), (2, 1), (1, 1)]


@pytest.mark.parametrize("causal", [True, False])
@distributed(world_size=[2, 3, 4])
def test_any_number_of_heads(world_size: int, causal: bool) -> None:
    for heads, kv_heads in HEADS:
        length = 24
        mask = band(length) if causal else torch.ones(length, length, dtype=torch.bool)
        compare(inputs(heads, kv_heads, length), shard_lengths(length, world_size), mask, causal=causal)


@distributed(world_size=[3, 4])
def test_any_length_and_shards_of_any_length(world_size: int) -> None:
    for heads, lengths in ((4, (7, 1, 5, 2)), (3, (1, 9, 2, 3)), (1, (3, 4, 1, 6)), (2, (2, 1, 8, 1))):
        lengths = lengths[:world_size]
        compare(inputs(heads, 1, sum(lengths)), lengths, band(sum(lengths)))


@pytest.mark.parametrize("heads", [4, 1])
@distributed(world_size=2)
def test_windows_documents_and_padding_are_those_of_the_whole_sequence(heads: int) -> None:
    length = 21
    lengths, given = shard_lengths(length, 2), inputs(heads, 1, length)
    for window in (1, 3, 10, 30):
        compare(given, lengths, band(length, window), sliding_window=window)
    bounds = [
        (0, 4, 15, 21),
        (0, 13, 14, 21),
    ]  # one document crosses the shards, and one begins in the second
    positions = torch.stack(
        [torch.cat([torch.arange(b - a) for a, b in zip(row, row[1:], strict=False)]) for row in bounds]
    )
    documents = torch.stack(
        [torch.cat([torch.full((b - a,), a) for a, b in zip(row, row[1:], strict=False)]) for row in bounds]
    )
    together = (documents[:, :, None] == documents[:, None, :])[:, None]
    local = {"position_ids": own(positions, lengths, 1)}
    compare(given, lengths, together & band(length), **local)
    compare(given, lengths, together & band(length, 4), **local, sliding_window=4)
    compare(given, lengths, together, causal=False, **local)
    valid = torch.ones(BATCH, length, dtype=torch.bool)
    valid[0, 15:], valid[1, :2] = False, False  # the first rows of the second see nothing
    padded = valid[:, None, None] & band(length)
    compare(given, lengths, padded, padding=own(valid, lengths, 1))


@pytest.mark.parametrize("heads", [2, 1])
@distributed(world_size=2)
def test_16_bit(heads: int) -> None:
    given = inputs(heads, 1, 16, torch.bfloat16)
    compare(given, (8, 8), band(16), tolerance=3e-2)


@distributed(world_size=4)
def test_bytes_of_a_layer(world_size: int = 4) -> None:
    """Ulysses: 4Nh/P elements per layer and direction, of which the own part stays."""
    comm = process_network.communicator(dist.group.WORLD)  # type: ignore[arg-type]
    tokens, heads, size = 16, 8, SIZE
    q, k, v, grad = (own(each, (4,) * 4).requires_grad_() for each in inputs(heads, heads, tokens))
    module = SimpleNamespace(num_key_value_groups=1, is_causal=True, training=True)
    layer = attention(heads, heads, seq_length_is_variable=False)
    hidden = BATCH * tokens * heads * size  # N x h
    comm.reset_counters()
    out, _ = layer(module, q, k, v, None)
    wanted = 4 * (4 * hidden // world_size) * (world_size - 1) // world_size
    assert (comm.bytes_sent, dict(comm.collectives)) == (wanted, {"all_to_all": 2})
    comm.reset_counters()
    out.backward(grad.detach().transpose(1, 2))
    assert (comm.bytes_sent, dict(comm.collectives)) == (wanted, {"all_to_all": 2})


@distributed(world_size=4)
def test_bytes_of_a_ring() -> None:
    """Two groups of two ranks: half of what Ulysses sends around, and the keys and values of one part once."""
    comm = process_network.communicator(dist.group.WORLD)  # type: ignore[arg-type]
    q, k, v, _ = (own(each, (4,) * 4) for each in inputs(2, 2, 16))
    module = SimpleNamespace(num_key_value_groups=1, is_causal=True, training=True)
    comm.reset_counters()
    attention(2, 2, seq_length_is_variable=False)(module, q, k, v, None)
    shard = 4 * q.numel()
    assert comm.bytes_sent == 4 * shard // 2 + 2 * shard
    assert comm.collectives == {"all_to_all": 3}


class Local(nn.Module):
    """Attention of [tokens, batch, heads, size] or [batch, tokens, heads, size]; heads and size joined if asked."""

    def __init__(self, tokens_first: bool, join: bool) -> None:
        super().__init__()
        self.order = (1, 2, 0, 3) if tokens_first else (0, 2, 1, 3)
        self.back = (2, 0, 1, 3) if tokens_first else (0, 2, 1, 3)
        self.join = join

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0) -> Tensor:
        q, k, v = (each.permute(self.order) for each in (q, k, v))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).permute(self.back)
        return out.flatten(2) if self.join else out


@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("tokens_first", [True, False])
@distributed(world_size=3)
def test_distributed_attention(tokens_first: bool, join: bool) -> None:
    local = Local(tokens_first, join)
    gather, batch = (0, 1) if tokens_first else (1, 0)
    layer = DistributedAttention(local, dist.group.WORLD, 2, gather)
    for heads, kv_heads, lengths in (
        (3, 3, (4, 4, 4)),
        (5, 5, (2, 6, 3)),
        (6, 2, (1, 1, 1)),
        (4, 1, (3, 2, 5)),
    ):
        given = [each.permute(local.back) for each in inputs(heads, kv_heads, sum(lengths))]
        whole = [each.clone().requires_grad_() for each in given[:3]]
        expected = local(*whole, scale=0.3)
        grad = given[3].flatten(2) if join else given[3]
        grads = torch.autograd.grad(expected, whole, grad)
        mine = [own(each, lengths, gather).requires_grad_() for each in given[:3]]
        out = layer(*mine, batch, None, scale=0.3)
        ours = torch.autograd.grad(out, mine, own(grad, lengths, gather))
        torch.testing.assert_close(out, own(expected, lengths, gather), rtol=1e-5, atol=1e-5)
        for found, wanted in zip(ours, grads, strict=True):
            torch.testing.assert_close(found, own(wanted, lengths, gather), rtol=1e-5, atol=1e-5)


@distributed(world_size=2)
def test_distributed_attention_rotates_positions_of_the_whole_sequence() -> None:
    class First(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return q + 2 * k

    angles = torch.rand(6, 1, 1, SIZE // 2).repeat(1, 1, 1, 2)
    tables = (angles.cos(), angles.sin())
    q, k, v, _ = inputs(2, 2, 6)
    half = SIZE // 2

    def turned(x: Tensor) -> Tensor:
        cos, sin = (each.view(1, 1, 6, SIZE) for each in tables)
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    expected = turned(q) + 2 * turned(k)
    for gather, order in ((0, (2, 0, 1, 3)), (1, (0, 2, 1, 3))):
        layer = DistributedAttention(First(), dist.group.WORLD, 2, gather)
        mine = [own(each.permute(order), (3, 3), gather) for each in (q, k, v)]
        out = layer(*mine, 1 - gather, tables)
        torch.testing.assert_close(out, own(expected.permute(order), (3, 3), gather))


@distributed(world_size=3)
def test_what_distributed_attention_refuses() -> None:
    layer = DistributedAttention(Local(True, False), dist.group.WORLD)
    few = torch.zeros(2, 1, 2, SIZE)
    with pytest.raises(ValueError, match="2 heads for 3 ranks.*UlyssesSPAttentionHF"):
        layer(few, few, few, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernels_of_blocks_agree(dtype: torch.dtype) -> None:
    q, k, v, grad = inputs(4, 2, 9, dtype)
    k, v = k[:, :, :7], v[:, :, :7]
    mask = torch.rand(BATCH, 1, 9, 7, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[0, 0, 2] = False  # a row that sees nothing
    for seen in (None, mask):
        results = []
        for kernel in (PLAIN, CPU_FLASH):
            out, lse = kernel.forward(q, k, v, seen, 0.4)
            results.append((out, lse, *kernel.backward(grad, (q, k, v), out, lse, seen, 0.4)))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, check_dtype=False, rtol=1e-5, atol=1e-5)


def test_order_alone_needs_no_mask() -> None:
    q, k, v, grad = inputs(4, 2, 9)
    seen = Visibility(causal=True)
    assert seen.block(range(9), range(9), q.device) is CAUSAL
    assert isinstance(seen.block(range(9), range(8), q.device), Tensor)
    for visibility in (
        Visibility(causal=True, window=4),
        Visibility(causal=True, documents=torch.zeros(1, 9)),
    ):
        assert isinstance(visibility.block(range(9), range(9), q.device), Tensor)
    for kernel in (PLAIN, CPU_FLASH):
        results = []
        for mask in (CAUSAL, band(9)[None, None]):
            out, lse = kernel.forward(q, k, v, mask, 0.4)
            results.append((out, lse, *kernel.backward(grad, (q, k, v), out, lse, mask, 0.4)))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_kernels_by_device_dtype_and_mask() -> None:
    def chosen(device: str, dtype: torch.dtype, mask: Any, sizes: tuple[int, int] = (64, 64)) -> BlockKernel:
        with FakeTensorMode():
            q, v = (torch.empty(1, 2, 3, size, dtype=dtype, device=device) for size in sizes)
            return kernel_for(q, v, mask)

    some = torch.ones(3, 3, dtype=torch.bool)
    for mask in (None, CAUSAL):
        assert chosen("cuda", torch.bfloat16, mask) is CUDA_FLASH
        assert chosen("cuda", torch.float32, mask) is PLAIN
    assert chosen("cuda", torch.float16, some) is PLAIN
    assert chosen("cuda", torch.float16, None, (60, 60)) is PLAIN
    assert chosen("cuda", torch.float16, None, (64, 32)) is PLAIN
    assert chosen("cpu", torch.float32, some) is CPU_FLASH
    with pytest.raises(ValueError, match="does not support masks"):
        CUDA_FLASH.forward(some, some, some, some, 1.0)


@pytest.mark.parametrize("mask", [None, CAUSAL])
def test_flash_attention_for_cuda_is_called_as_torch_declares_it(mask: Any) -> None:
    """Shapes and arguments, without a device: tensors without values."""
    with FakeTensorMode():
        q, k, v, grad = (
            torch.empty(2, heads, 32, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2, 4)
        )
        out, lse = CUDA_FLASH.forward(q, k, v, mask, 0.4)
        assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
        grads = CUDA_FLASH.backward(grad, (q, k, v), out, lse, mask, 0.4)
        assert [each.shape for each in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_flash_attention_for_cuda_agrees(dtype: torch.dtype, kv_heads: int) -> None:
    """Two blocks of keys, joined; the second of them causal. Backward gets output and log-sum-exp of both."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((4, 128), (kv_heads, 256), (kv_heads, 256), (4, 128))
    q, k, v, grad = (
        torch.randn(BATCH, heads, rows, 64, generator=generator).to("cuda", dtype) for heads, rows in shapes
    )
    results = []
    for kernel in (CUDA_FLASH, PLAIN):
        joined, sums = JoinedBlocks(q, v), []
        blocks = [(k[:, :, :128], v[:, :, :128], None), (k[:, :, 128:], v[:, :, 128:], CAUSAL)]
        for key, value, mask in blocks:
            assert kernel_for(q, value, mask) is CUDA_FLASH
            joined.add(*kernel.forward(q, key, value, mask, 0.125))
        out = joined.out.to(dtype)
        for key, value, mask in blocks:
            sums.append(kernel.backward(grad, (q, key, value), out, joined.lse, mask, 0.125))
        (dq, dk, dv), (dq2, dk2, dv2) = sums
        results.append((out, joined.lse, dq + dq2, torch.cat([dk, dk2], 2), torch.cat([dv, dv2], 2)))
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() <= 2e-2 * other.abs().max()


class Mixed(nn.Module):
    """Some attention over patches, which returns its weights too."""

    def forward(self, hidden_states: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(scale * hidden_states @ hidden_states.mT, dim=-1)
        return weights @ hidden_states, weights


@pytest.mark.parametrize("has_cls_token", [True, False])
@distributed(world_size=3)
def test_patches_of_images(has_cls_token: bool) -> None:
    lengths, kept = (2, 4, 1), int(has_cls_token)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2, 7 + kept, 5, generator=generator, requires_grad=True)
    weights = torch.randn(2, 7 + kept, 5, generator=generator)
    expected = Mixed()(whole, 0.5)[0]
    (wanted,) = torch.autograd.grad((expected * weights)[:, kept:].sum(), whole)
    token = whole[:, :kept].detach()

    def shard(tensor: Tensor) -> Tensor:
        return own(tensor[:, kept:], lengths, 1)

    mine = shard(whole).requires_grad_()
    layer = UlyssesSPViTAttention(Mixed(), dist.group.WORLD, has_cls_token)
    out, _ = layer(torch.cat([token, mine], 1), scale=0.5)
    torch.testing.assert_close(out[:, kept:], shard(expected))
    torch.testing.assert_close(out[:, :kept], expected[:, :kept])
    (found,) = torch.autograd.grad((out[:, kept:] * shard(weights)).sum(), mine)
    torch.testing.assert_close(found, shard(wanted))


@distributed(world_size=3)
def test_single_all_to_all() -> None:
    whole = torch.arange(2 * 7 * 4).view(2, 7, 4)
    lengths, parts = (2, 4, 1), (2, 1, 1)
    rank = dist.get_rank()
    mine = whole.split(lengths, 1)[rank]
    heads = whole.split(parts, 2)[rank]
    assert torch.equal(single_all_to_all(mine, 2, 1, 0, dist.group.WORLD), heads)
    handle: dict[str, Any] = {}
    buffer = single_all_to_all(mine, 2, 1, 0, dist.group.WORLD, True, handle, "dq")
    handle["dq_work"].wait()
    assert handle["dq_grad"] is buffer
    assert torch.equal(handle["dq_post_all2all_func"](buffer), heads)
    with pytest.raises(ValueError, match="handle"):
        single_all_to_all(mine, 2, 1, 0, dist.group.WORLD, True)


@distributed(world_size=3)
def test_the_exchange_of_scripts_has_gradients_for_uneven_parts() -> None:
    """Weighting each element of the result by a number of its place gives the same numbers at its place before."""
    from deepspeed.sequence.layer import _DimZeroAllToAll, _SeqAllToAll

    whole, weights = torch.randn(2, 7, 4, 3), torch.randn(2, 7, 4, 3)
    lengths, parts = (2, 4, 1), (2, 1, 1)
    rank = dist.get_rank()
    for scatter, gather, sent, kept in ((2, 1, lengths, parts), (1, 2, parts, (3, 2, 2))):
        mine = whole.split(sent, gather)[rank].clone().requires_grad_()
        found = _SeqAllToAll.apply(dist.group.WORLD, mine, scatter, gather, 0, None, {}, "q")
        assert torch.equal(found, whole.split(kept, scatter)[rank])
        (found * weights.split(kept, scatter)[rank]).sum().backward()
        assert torch.equal(mine.grad, weights.split(sent, gather)[rank])
    rows = (torch.arange(3.0) + 10 * rank).requires_grad_()
    swapped = _DimZeroAllToAll.apply(dist.group.WORLD, rows)
    assert swapped.tolist() == [rank, 10 + rank, 20 + rank]
    (swapped**2).sum().backward()
    assert torch.equal(rows.grad, 2 * rows.detach())
    with pytest.raises(ValueError, match="over 3 ranks"):
        _SeqAllToAll.apply(dist.group.WORLD, whole[:, :, :2], 2, 1, 0)


@distributed(world_size=2)
def test_what_cannot_be_told_from_shards_is_refused() -> None:
    layer = attention(2, 2, seq_length_is_variable=False, local_seq_length=4)
    module = SimpleNamespace(num_key_value_groups=1, is_causal=True, training=True)
    q, k, v, _ = inputs(2, 2, 4)
    with pytest.raises(ValueError, match="disable_in_eval"):
        layer(module, q[:, :, :1], k, v, None)
    with pytest.raises(ValueError, match="seq_length_is_variable=True"):
        layer(module, q[:, :, :3], k[:, :, :3], v[:, :, :3], None)
    with pytest.raises(ValueError, match="position_bias"):
        layer(module, q, k, v, None, position_bias=torch.zeros(1))
    with pytest.raises(ValueError, match="for its shard of the sequence alone"):
        layer(module, q, k, v, torch.ones(1, 1, 4, 4))
    with pytest.raises(ValueError, match="causal attention only"):
        layer(module, q, k, v, None, is_causal=False, sliding_window=2)
    with pytest.raises(ValueError, match="does not support dropout"):
        attention(1, 1)(module, q[:, :1], k[:, :1], v[:, :1], None, dropout=0.1)
