"""Domino's transformer against the same in plain PyTorch on one rank, and the order of its sums and computations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import deepspeed
from deepspeed.comm.collectives import Communicator
from deepspeed.parallel.tensor.domino import halves
from deepspeed.parallel.tensor.domino.transformer import (
    AttnMaskType,
    DominoTransformer,
    DominoTransformerLayer,
    ModelType,
)
from tests.pool import distributed

SEQUENCE, BATCH, HIDDEN, HEADS, LAYERS = 6, 4, 16, 4, 3


class Mpu:
    """The part of Megatron-LM's parallel state that Domino and an engine use."""

    def __init__(self, size: int) -> None:
        ranks = range(dist.get_world_size() if dist.is_initialized() else 1)
        self.tensor = self.data = None
        if len(ranks) == 1:
            return
        for first in range(0, len(ranks), size):
            group = dist.new_group([*ranks[first : first + size]])
            self.tensor = group if dist.get_rank() // size == first // size else self.tensor
        for first in range(size):
            group = dist.new_group([*ranks[first::size]])
            self.data = group if dist.get_rank() % size == first else self.data

    def get_tensor_model_parallel_group(self) -> Any:
        return self.tensor

    def get_tensor_model_parallel_world_size(self) -> int:
        return 1 if self.tensor is None else dist.get_world_size(self.tensor)

    def get_tensor_model_parallel_rank(self) -> int:
        return 0 if self.tensor is None else dist.get_rank(self.tensor)

    get_model_parallel_group = get_tensor_model_parallel_group
    get_model_parallel_world_size = get_tensor_model_parallel_world_size
    get_model_parallel_rank = get_tensor_model_parallel_rank

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_world_size(self) -> int:
        return 1 if self.data is None else dist.get_world_size(self.data)

    def get_data_parallel_rank(self) -> int:
        return 0 if self.data is None else dist.get_rank(self.data)


def config(**changes: Any) -> Any:
    def drawn(weight: Tensor) -> None:
        nn.init.normal_(weight, std=0.2)

    values = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 24,
        "num_attention_heads": HEADS,
        "kv_channels": HIDDEN // HEADS,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "layernorm_epsilon": 1e-5,
        "add_bias_linear": True,
        "gated_linear_unit": False,
        "apply_residual_connection_post_layernorm": False,
        "params_dtype": torch.float32,
        "perform_initialization": True,
        "init_method": drawn,
        "output_layer_init_method": drawn,
        "domino_intra_layer_overlap": False,
    }
    return SimpleNamespace(**{**values, **changes})


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """[sequence, batch, heads, channels], as Megatron-LM's function takes it."""
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


ANGLES = torch.arange(SEQUENCE * HIDDEN // HEADS).float().view(SEQUENCE, 1, 1, -1) / 7


def built(mpu: Mpu, **changes: Any) -> DominoTransformer:
    torch.manual_seed(0)
    return DominoTransformer(config(**changes), mpu, rotated, ModelType.encoder_or_decoder)


def plain(model: Any, hidden: Tensor, rotary: Tensor | None) -> Tensor:
    """Compute a model with whole layers, by PyTorch's functions alone."""
    for layer in model.layers:
        attention = layer.self_attention
        normed = layer.input_layernorm(hidden)
        residual = normed if layer.apply_residual_connection_post_layernorm else hidden
        mixed = functional.linear(normed, attention.query_key_value.weight, attention.query_key_value.bias)
        mixed = mixed.view(SEQUENCE, -1, HEADS, 3, HIDDEN // HEADS)
        query, key, value = mixed.unbind(3)
        if rotary is not None:
            query, key = rotated(query, rotary), rotated(key, rotary)
        scores = torch.einsum("qbhc,kbhc->bhqk", query, key) / (HIDDEN // HEADS) ** 0.5
        scores = scores.masked_fill(torch.ones(SEQUENCE, SEQUENCE).triu(1).bool(), float("-inf"))
        context = torch.einsum("bhqk,kbhc->qbhc", scores.softmax(-1), value).flatten(2)
        hidden = residual + functional.linear(context, attention.dense.weight, attention.dense.bias)
        normed = layer.post_attention_layernorm(hidden)
        residual = normed if layer.apply_residual_connection_post_layernorm else hidden
        wide = functional.linear(normed, layer.linear_fc1.weight, layer.linear_fc1.bias)
        if layer.is_gated:
            gate, up = wide.chunk(2, -1)
            wide = functional.silu(gate) * up
        else:
            wide = functional.gelu(wide)
        hidden = residual + functional.linear(wide, layer.linear_fc2.weight, layer.linear_fc2.bias)
    return model.final_layernorm(hidden)


def part_of(name: str, grad: Tensor, mpu: Mpu, gated: bool) -> Tensor:
    """Return this rank's part of a whole parameter's gradient."""
    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    if "query_key_value" in name:
        return grad.chunk(size)[rank]
    if "linear_fc1" in name:
        return torch.cat([block.chunk(size)[rank] for block in grad.chunk(2 if gated else 1)])
    if name.endswith(("dense.weight", "linear_fc2.weight")):
        return grad.chunk(size, dim=1)[rank]
    return grad


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "each layer alone": {"domino_intra_layer_overlap": True},
    "gated, without biases": {"gated_linear_unit": True, "add_bias_linear": False},
    "residual behind the norm": {"apply_residual_connection_post_layernorm": True},
}


@distributed(world_size=[1, 2, 4])
def test_equals_one_rank(world_size: int) -> None:
    mpu = Mpu(world_size)
    for changes in CASES.values():
        for batch in (BATCH, 3, 1):
            whole, model = built(Alone(), **changes), built(mpu, **changes)
            torch.manual_seed(1)
            hidden = torch.randn(SEQUENCE, batch, HIDDEN, requires_grad=True)
            twin = hidden.detach().clone().requires_grad_()
            rotary = ANGLES if batch == BATCH else None
            expected = plain(whole, twin, rotary)
            output = model(hidden, None, rotary)
            torch.testing.assert_close(output, expected)
            expected.square().sum().backward()
            output.square().sum().backward()
            torch.testing.assert_close(hidden.grad, twin.grad, rtol=1e-4, atol=1e-4)
            found = dict(model.named_parameters())
            for name, param in whole.named_parameters():
                assert param.grad is not None
                part = part_of(name, param.grad, mpu, model.layers[0].is_gated)
                torch.testing.assert_close(found[name].grad, part, rtol=1e-4, atol=1e-4)
            with torch.no_grad():
                assert torch.equal(model(hidden, None, rotary), output)


class Alone(Mpu):
    def __init__(self) -> None:
        self.tensor = self.data = None


@distributed(world_size=2)
def test_every_sum_is_overlapped() -> None:
    """Between the begin of a sum and the wait for it, the other half computes a sublayer's products, there and back."""
    model, events = built(Mpu(2)), list[str]()
    reduce, compute, backward = Communicator.all_reduce, halves._Half.compute, halves._Piece.backward

    class Waited:
        def __init__(self, pending: Any, number: int) -> None:
            self.pending, self.number = pending, number

        def wait(self) -> None:
            events.append(f"wait {self.number}")
            self.pending.wait()

    def all_reduce(self: Communicator, tensor: Tensor, **options: Any) -> Any:
        number = sum(event.startswith("begin") for event in events)
        events.append(f"begin {number}")
        return Waited(reduce(self, tensor, **options), number)

    def computed(self: Any, number: int) -> None:
        events.append("compute")
        compute(self, number)

    def went_back(self: Any, grads: Any) -> Any:
        events.append("compute" if len(self.outputs) == 1 and len(self.leaves) == 1 else "norm")
        return backward(self, grads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "all_reduce", all_reduce)
        patch.setattr(halves._Half, "compute", computed)
        patch.setattr(halves._Piece, "backward", went_back)
        hidden = torch.randn(SEQUENCE, BATCH, HIDDEN)
        output = model(hidden, None)
        forward_events = events[:]
        events.clear()
        output.sum().backward()
    for found in (forward_events, events):
        sums = 2 * 2 * LAYERS
        assert sum(event.startswith("begin") for event in found) == sums
        for number in range(sums - 1):  # behind the last one nothing is left to compute
            between = found[found.index(f"begin {number}") : found.index(f"wait {number}")]
            assert "compute" in between, (number, found)


def test_graphs_of_other_tools() -> None:
    """Checkpointing of the whole, of both kinds; frozen weights; a second backward; dropout in training only."""
    model = built(Alone())
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, requires_grad=True)

    def gradients(run: Callable[[], Tensor]) -> list[Tensor]:
        model.zero_grad()
        hidden.grad = None
        run().square().sum().backward()
        assert hidden.grad is not None
        return [hidden.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    expected = gradients(lambda: model(hidden, None))
    for reentrant in (True, False):
        found = gradients(
            lambda reentrant=reentrant: torch.utils.checkpoint.checkpoint(
                model, hidden, None, use_reentrant=reentrant
            )
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    output = model(hidden, None)
    output.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward through a Domino transformer"):
        output.sum().backward()
    model.requires_grad_(False)
    model.layers[1].linear_fc1.weight.requires_grad_()
    assert len(gradients(lambda: model(hidden, None))) == 2
    model.requires_grad_(False)
    assert not model(hidden.detach(), None).requires_grad
    dropping = built(Alone(), hidden_dropout=0.5, attention_dropout=0.5)
    assert not torch.equal(dropping(hidden, None), dropping(hidden, None))
    dropping.eval()
    assert torch.equal(dropping(hidden, None), dropping(hidden, None))


def test_padding_masks_and_dropped_paths() -> None:
    torch.manual_seed(0)
    arguments: Any = (config(), Alone(), rotated)
    model = DominoTransformer(*arguments, None, self_attn_mask_type=AttnMaskType.padding)
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN)
    mask = torch.zeros(BATCH, 1, SEQUENCE, SEQUENCE, dtype=torch.bool)
    mask[3, :, :, 4:] = True  # padding of the last sequence
    output, changed = model(hidden, mask), hidden.clone()
    changed[4:, 3] = 0
    after = model(changed, mask)
    torch.testing.assert_close(after[:4], output[:4])
    assert not torch.allclose(model(changed, None)[:4], model(hidden, None)[:4])
    dropped = DominoTransformerLayer(*arguments, 1, drop_path_rate=0.999999)
    for kept, given in zip(dropped((hidden, hidden + 1), None), (hidden, hidden + 1), strict=True):
        assert torch.equal(kept, given)


def test_refusals() -> None:
    class Three(Alone):
        def get_tensor_model_parallel_world_size(self) -> int:
            return 3

    with pytest.raises(ValueError, match="num_attention_heads=4 cannot be divided among 3"):
        built(Three())
    with pytest.raises(ValueError, match="ffn_hidden_size=25 cannot be divided among 3"):
        built(Three(), num_attention_heads=3, ffn_hidden_size=25)


class Model(nn.Module):
    def __init__(self, mpu: Mpu, **changes: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(11, HIDDEN)
        self.encoder = built(mpu, **changes)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.encoder(self.embedding(tokens[:, :-1]).transpose(0, 1), None, ANGLES)
        logits = functional.linear(hidden, self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].t().flatten())


def losses(model: nn.Module, step: Callable[[Tensor], Tensor], rank: int, ranks: int) -> list[float]:
    draw = torch.Generator().manual_seed(5)
    found = []
    for _ in range(5):
        tokens = torch.randint(0, 11, (4 * 2, SEQUENCE + 1), generator=draw)
        loss = step(tokens.chunk(ranks)[rank]).detach()
        if ranks > 1:
            dist.all_reduce(loss, op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
            loss /= dist.get_world_size()
        found.append(loss.item())
    return found


def oracle() -> list[float]:
    model = Model(Alone())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    return losses(model, step, 0, 1)


@distributed(world_size=2)
def test_checkpoints_hold_whole_weights(tmp_path: Path) -> None:
    """Saved by two tensor-parallel ranks, loaded by two data-parallel ones."""
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1},
    }
    tokens = torch.randint(0, 11, (4, SEQUENCE + 1), generator=torch.Generator().manual_seed(5))
    found = []
    for size in (2, 1):
        mpu = Mpu(size)
        model = Model(mpu, gated_linear_unit=True)
        engine = deepspeed.initialize(model=model, config=settings, mpu=mpu)[0]
        if size == 1:
            engine.load_checkpoint(str(tmp_path))
        for _ in range(3):
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
            if size == 2 and len(found) == 1:
                engine.save_checkpoint(str(tmp_path))
        engine.destroy()
    assert found[3:5] == pytest.approx(found[1:3], rel=1e-5)


@distributed(world_size=4)
def test_trains_in_an_engine() -> None:
    """Two tensor-parallel ranks by two data-parallel ones; all stages of ZeRO give what one rank gives."""
    mpu, expected = Mpu(2), oracle()
    assert expected[-1] < expected[0]
    for stage in (0, 1, 2, 3):
        model = Model(mpu)
        settings = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}},
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": stage},
        }
        engine = deepspeed.initialize(model=model, config=settings, mpu=mpu)[0]

        def step(tokens: Tensor, engine: Any = engine) -> Tensor:
            loss = engine(tokens)
            engine.backward(loss)
            engine.step()
            return loss

        found = losses(model, step, mpu.get_data_parallel_rank(), 2)
        assert found == pytest.approx(expected, rel=2e-4), stage
        engine.destroy()
