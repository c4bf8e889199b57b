"""Attention, feed-forward layer and loss in chunks equal the plain ones, on one rank and over shards."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed
from deepspeed.parallel.sequence import fpdt_layer
from deepspeed.parallel.sequence.chunks import Prefetcher, SequenceChunk
from deepspeed.parallel.sequence.fpdt_layer import (
    FPDT_FFN,
    FPDT_Attention,
    FPDT_InputConstruct,
    FPDT_LogitsLoss,
)
from deepspeed.parallel.sequence.hf import parallel_state_sp
from deepspeed.parallel.sequence.layer import apply_rotary_pos_emb
from deepspeed.transforms.recompute.side_stream import SideStream
from tests.meta_memory import MetaMemory
from tests.pool import distributed

BATCH, SIZE, HIDDEN = 2, 8, 20


def config(heads: int, kv_heads: int, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "kv_channels": SIZE, **changes}
    )


def weights(heads: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(2)
    rows = (heads + 2 * kv_heads) * SIZE
    shapes = [(rows, HIDDEN), (rows,), (HIDDEN, heads * SIZE), (HIDDEN,)]
    return [nn.Parameter(torch.randn(shape, generator=draw).to(dtype) / 4) for shape in shapes]


def tables(length: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(length), 1.0 / torch.arange(1, 4)).repeat(1, 2)[:, None, None]
    return angles.cos(), angles.sin()  # 6 of the 8 elements of a head are turned


def plain(x: Tensor, given: list[Tensor], heads: int, kv_heads: int, rotary: Any) -> Tensor:
    """[tokens, batch, hidden] -> the same, with the second bias."""
    qkv = nn.functional.linear(x, given[0], given[1])
    q, k, v = (
        each.unflatten(-1, (-1, SIZE))
        for each in qkv.split([n * SIZE for n in (heads, kv_heads, kv_heads)], -1)
    )
    if rotary is not None:
        q, k = apply_rotary_pos_emb(q, *rotary), apply_rotary_pos_emb(k, *rotary)
    q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
    k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
    scores = (q @ k.mT / math.sqrt(SIZE)).masked_fill(
        torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -math.inf
    )
    out = (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)
    return nn.functional.linear(out, given[2], given[3])


def sequence(length: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    x, grad = torch.randn(2, length, BATCH, HIDDEN, generator=draw).to(dtype).unbind()
    return x, grad


def assert_equal(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= tolerance * other.abs().max()


# heads, heads of keys, tokens, tokens of a chunk: even, uneven, one chunk, one token in each
CASES = [(4, 4, 12, 4), (4, 2, 13, 4), (3, 1, 11, 3), (2, 2, 5, 64), (1, 1, 3, 1)]


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "length", "chunk"), CASES)
def test_equals_plain_attention(heads: int, kv_heads: int, length: int, chunk: int, rotated: bool) -> None:
    rotary = tables(length + 2) if rotated else None
    given = weights(heads, kv_heads)
    layer = FPDT_Attention(config(heads, kv_heads), *given, None, return_bias=False, chunk_size=chunk)  # type: ignore[arg-type]
    x, grad = sequence(length)
    results = []
    for own in (True, False):
        leaf = x.clone().requires_grad_()
        cut = None if rotary is None else tuple(each[:length] for each in rotary)
        out = layer(leaf, None, None, rotary)[0] if own else plain(leaf, given, heads, kv_heads, cut)  # type: ignore[arg-type]
        results.append((out.detach(), *torch.autograd.grad(out, (leaf, *given), grad)))
    assert_equal(*results)


def test_backward_again_and_without_gradients() -> None:
    given = weights(2, 2)
    layer = FPDT_Attention(config(2, 2), *given, None, chunk_size=3)  # type: ignore[arg-type]
    x, grad = sequence(7)
    x.requires_grad_()
    out, bias = layer(x, None, None, None)
    assert bias is layer.qkv_dense_bias
    first = torch.autograd.grad(out, (x, given[0]), grad, retain_graph=True)
    assert_equal(torch.autograd.grad(out, (x, given[0]), grad), first)
    with torch.no_grad():
        assert_equal([layer(x, None, None, None)[0]], [out.detach()])
    frozen = weights(2, 2)
    for each in frozen:
        each.requires_grad_(False)
    layer = FPDT_Attention(config(2, 2), *frozen, None, chunk_size=3)  # type: ignore[arg-type]
    (of_x,) = torch.autograd.grad(layer(x, None, None, None)[0], x, grad)
    assert_equal([of_x], [first[0]])


def test_16_bit_and_autocast() -> None:
    x, grad = sequence(9)
    expected = plain(x, weights(2, 1), 2, 1, tables(9))  # type: ignore[arg-type]
    half = FPDT_Attention(config(2, 1), *weights(2, 1, torch.bfloat16), None, return_bias=False, chunk_size=4)  # type: ignore[arg-type]
    assert_equal([half(x.bfloat16(), None, None, tables(9))[0].float()], [expected], 3e-2)
    given = weights(2, 1)
    layer = FPDT_Attention(config(2, 1), *given, None, chunk_size=4)  # type: ignore[arg-type]
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = layer(x, None, None, tables(9))
    assert out.dtype == torch.bfloat16
    out.backward(grad.bfloat16())
    assert given[0].grad is not None and given[0].grad.dtype == torch.float32


def own_part(whole: Tensor, chunk: int, rank: int, size: int) -> Tensor:
    """[tokens, batch, ...] by the documented way."""
    args = SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=chunk)
    made = FPDT_InputConstruct(whole.transpose(0, 1), None, None, None, None, args, size, rank)
    return made.generate()[0].transpose(0, 1)


@pytest.mark.parametrize("offload", [True, False])
@distributed(world_size=[2, 3])
def test_over_ranks(world_size: int, offload: bool) -> None:
    rank = dist.get_rank()
    for heads, kv_heads, length, chunk in ((4, 4, 24, 12), (5, 1, 23, 7), (6, 2, 12, 4), (4, 2, 7, 3)):
        x, grad = sequence(length)
        rotary, given = tables(length), weights(heads, kv_heads)
        whole = x.clone().requires_grad_()
        expected = plain(whole, given, heads, kv_heads, rotary)  # type: ignore[arg-type]
        of_x, *of_weights = torch.autograd.grad(expected, (whole, *given), grad)
        layer = FPDT_Attention(
            config(heads, kv_heads),
            *given,  # type: ignore[arg-type]
            dist.group.WORLD,
            return_bias=False,
            chunk_size=chunk,
            enable_offloading=offload,
        )
        mine = own_part(x, chunk, rank, world_size).clone().requires_grad_()
        out, bias = layer(mine, None, None, rotary)
        assert bias is None  # it is added
        ours, *sums = torch.autograd.grad(out, (mine, *given), own_part(grad, chunk, rank, world_size))
        assert_equal(
            (out.detach(), ours),
            (own_part(expected.detach(), chunk, rank, world_size), own_part(of_x, chunk, rank, world_size)),
        )
        for each in sums:
            dist.all_reduce(each)
        assert_equal(sums, of_weights)


@distributed(world_size=2)
def test_what_attention_refuses() -> None:
    given: list[Any] = weights(2, 2)
    with pytest.raises(ValueError, match="1 heads for 2 ranks"):
        FPDT_Attention(config(1, 1), *weights(1, 1), dist.group.WORLD)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="first_weight has 48 rows.*need 32"):
        FPDT_Attention(config(2, 1), *given, dist.group.WORLD)
    x, _ = sequence(4 + dist.get_rank())
    layer = FPDT_Attention(config(2, 2), *given, dist.group.WORLD, chunk_size=3)
    with pytest.raises(ValueError, match=r"\(4, 5\) tokens.*FPDT_InputConstruct"):
        layer(x, None, None, None)
    with pytest.raises(ValueError, match="inference_params"):
        layer(x, None, object(), None)
    layer = FPDT_Attention(config(2, 2, attention_dropout=0.1), *given, dist.group.WORLD)
    with pytest.raises(ValueError, match="attention_dropout=0.1"):
        layer(x, None, None, None)


def test_inputs_of_ranks() -> None:
    tokens = torch.arange(20).view(2, 10)
    args = SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=4)
    made = [
        FPDT_InputConstruct(tokens, tokens + 1, tokens * 2, "mask", tokens % 10, args, 2, rank).generate()
        for rank in (0, 1)
    ]
    # chunks of 4, 3 and 3 tokens
    assert made[0][0].tolist()[0] == [0, 1, 4, 5, 7, 8]
    assert made[1][0].tolist()[0] == [2, 3, 6, 9]
    for own, labels, _, mask, positions in made:
        assert torch.equal(labels, own + 1) and torch.equal(positions, own % 10) and mask == "mask"
    assert torch.equal(made[0][2], 2 * torch.cat([made[0][0], made[1][0]], 1))  # in the order of the losses
    assert torch.equal(made[0][2], made[1][2])


@pytest.mark.parametrize("add_bias", [True, False])
def test_feed_forward(add_bias: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    given = [
        nn.Parameter(torch.randn(shape, generator=draw) / 3)
        for shape in ((30, HIDDEN), (30,), (HIDDEN, 30), (HIDDEN,))
    ]
    x, grad = sequence(7)
    results = []
    for own in (True, False):
        leaf = x.clone().requires_grad_()
        if own:
            out, bias = FPDT_FFN.apply(leaf, *given, add_bias, 3)  # type: ignore[arg-type]
            assert (bias is None) == add_bias
        else:
            inside = nn.functional.gelu(nn.functional.linear(leaf, given[0], given[1]), approximate="tanh")
            out, bias = nn.functional.linear(inside, given[2]), given[3]
        out = out if bias is None else out + bias
        results.append((out.detach(), *torch.autograd.grad(out, (leaf, *given), grad)))
    assert_equal(*results)


@distributed(world_size=[1, 2])
def test_loss_of_logits(world_size: int) -> None:
    draw = torch.Generator().manual_seed(1)
    weight = nn.Parameter(torch.randn(17, HIDDEN, generator=draw) / 3)
    x, _ = sequence(9)
    labels = torch.randint(17, (BATCH, 9), generator=draw)
    labels[0, 2] = -100
    parts = x.split([4, 5] if world_size == 2 else [9])
    rank = dist.get_rank()
    whole = x.clone().requires_grad_()
    expected = nn.functional.cross_entropy((whole @ weight.T).permute(1, 2, 0), labels, reduction="none")
    wanted = torch.autograd.grad(expected.mean(), (whole, weight))
    mine = parts[rank].clone().requires_grad_()
    own = labels.split([len(part) for part in parts], 1)[rank]
    losses = FPDT_LogitsLoss.apply(mine, own, weight, rank, world_size, dist.group.WORLD, 3)
    found = list(torch.autograd.grad(losses.mean(), (mine, weight)))
    for each in found:  # the engine averages over ranks
        each /= world_size
    dist.all_reduce(found[1])
    rows = wanted[0].split([len(part) for part in parts])[rank]
    assert_equal((losses.detach(), *found), (expected.detach(), rows, wanted[1]))


class Model(nn.Module):
    """Embedding, attention, feed-forward layer, loss: in chunks over ranks with a group, else plain."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.group = group
        self.embed = nn.Embedding(17, HIDDEN)
        self.attention = FPDT_Attention(config(4, 2), *weights(4, 2), group, chunk_size=CHUNK)  # type: ignore[arg-type]
        self.up, self.down = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)

    def forward(self, tokens: Tensor, labels: Tensor, loss_mask: Tensor, rotary: Any) -> Tensor:
        x = self.embed(tokens).transpose(0, 1)
        if self.group is None:
            given: list[Any] = list(self.attention.parameters())
            x = x + plain(x, given, 4, 2, rotary)
            x = x + self.down(nn.functional.gelu(self.up(x), approximate="tanh"))
            logits = (x @ self.embed.weight.T).permute(1, 2, 0)
            losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        else:
            attended, bias = self.attention(x, None, None, rotary)
            x = x + attended + bias
            up, down = self.up, self.down
            out, bias = FPDT_FFN.apply(x, up.weight, up.bias, down.weight, down.bias, False, 2)
            rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
            losses = FPDT_LogitsLoss.apply(
                x + out + bias, labels, self.embed.weight, rank, size, self.group, 3
            )
        return (losses * loss_mask).sum() / loss_mask.sum()


CHUNK, LENGTH = 5, 13


@pytest.mark.parametrize("stage", [0, 3])
@distributed(world_size=2)
def test_a_model_in_chunks_trains_as_the_plain_one(stage: int) -> None:
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    parallel_state_sp.initialize_sequence_parallel(2)
    group = parallel_state_sp.get_sequence_parallel_group()
    engine, *_ = deepspeed.initialize(model=Model(group), config=settings, mpu=parallel_state_sp)
    oracle = Model()
    optimizer = torch.optim.SGD(oracle.parameters(), lr=0.1)
    wanted = dict(oracle.named_parameters())
    args = SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=CHUNK)
    rotary, rank = tables(LENGTH), dist.get_rank()
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        tokens, labels = torch.randint(17, (2, BATCH, LENGTH), generator=draw)
        mask = (torch.rand(BATCH, LENGTH, generator=draw) < 0.7).float()
        expected = oracle(tokens, labels, mask, rotary)
        expected.backward()
        own = FPDT_InputConstruct(tokens, labels, mask, None, None, args, 2, rank).generate()
        loss = engine(*own[:3], rotary)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        engine.backward(loss)
        for name, parameter in engine.module.named_parameters():
            assert_equal([deepspeed.utils.safe_get_full_grad(parameter)], [wanted[name].grad])
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            assert_equal([parameter.detach()], [wanted[name].detach()])
    engine.destroy()


def test_small_functions() -> None:
    t, cosines, sines = torch.randn(3, 4, 1, 1, 6, dtype=torch.float64).unbind()
    t = torch.randn(4, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    grad = torch.randn_like(t)
    (expected,) = torch.autograd.grad(apply_rotary_pos_emb(t, cosines, sines), t, grad)
    assert_equal([fpdt_layer.apply_rotary_pos_emb_backward(grad, cosines, sines)], [expected])


class Log(SideStream):
    """Notes copies to ("load") and from ("store") the device, which is meta."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def copy(self, source: Tensor, target: Tensor) -> Tensor:
        self.events.append(f"{'load' if target.is_meta else 'store'} {target.numel()}")
        return target

    def arrived(self, target: Tensor) -> Tensor:
        self.events.append(f"use {target.numel()}")
        return target


def test_a_chunk_leaves_and_comes_back() -> None:
    log = Log()
    chunk = SequenceChunk(torch.empty(3, device="meta"), is_in_use=True, stream=log)
    assert chunk.cpu_chunk.device.type == "cpu" and chunk.get_gpu_chunk().is_meta
    chunk.overwrite_to_cpu()
    chunk.offload()
    with pytest.raises(RuntimeError, match="call load_to_gpu"):
        chunk.get_gpu_chunk()
    chunk.load_to_gpu()
    chunk.load_to_gpu()
    assert log.events == ["store 3", "use 3", "store 3", "load 3"]
    waiting = SequenceChunk(torch.zeros(2), device="meta", is_in_use=True, stream=log)
    assert waiting.get_gpu_chunk().is_meta
    here = SequenceChunk(torch.zeros(2))
    here.offload()
    assert here.get_gpu_chunk() is here.cpu_chunk


def test_chunks_are_fetched_one_ahead() -> None:
    log = Log()
    groups = [[SequenceChunk(torch.zeros(n), "meta", stream=log)] for n in (1, 2, 3)]
    ahead = Prefetcher(groups, written=(0,))
    for (tensor,) in ahead:
        log.events.append(f"compute {tensor.numel()}")
    assert log.events == (
        "load 1,use 1,load 2,compute 1,use 2,store 1,load 3,compute 2,use 3,store 2,compute 3,store 3"
    ).split(",")
    assert list(Prefetcher([])) == []


def peak(length: int, chunk: int, *, offload: bool) -> tuple[int, int]:
    """Bytes on the device and in the host beyond input, result and their gradients, fp32."""
    memory = MetaMemory()
    with torch.device("meta"):
        given: list[Any] = [nn.Parameter(torch.empty(each.shape)) for each in weights(4, 2)]
        x = torch.empty(length, BATCH, HIDDEN, requires_grad=True)
    layer = FPDT_Attention(config(4, 2), *given, None, chunk_size=chunk, enable_offloading=offload)
    with memory:
        out, _ = layer(x, None, None, None)
        out.backward(torch.empty_like(out))
    around = 4 * x.numel() * 4  # input, result, and their gradients
    return memory.peak - around, memory.host_peak


def test_memory_is_that_of_chunks() -> None:
    """With offload the device needs no more for four times the tokens; the host has them."""
    token = BATCH * SIZE * 4  # of one head
    short, in_host = peak(512, 128, offload=True)
    long, more_in_host = peak(2048, 128, offload=True)
    assert long == short
    assert long <= 128 * 80 * token  # two groups of chunks, what a block needs, and weights
    # Queries, outputs, log-sum-exps, keys, values, their gradients, inputs
    per_token = token * (4 + 4 + 2 * 2 + 2 * 2) + BATCH * 4 * 4 + BATCH * HIDDEN * 4
    assert more_in_host - in_host <= 1536 * per_token
    staying, nothing = peak(2048, 128, offload=False)
    assert nothing == 0 and staying > 3 * long
