from __future__ import annotations

import collections
import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed.transforms.recompute import checkpointing as ds
from tests.transforms.recompute.models import (
    WIDTH,
    Block,
    assert_same_bits,
    batch,
    gradients,
    plain,
    stack,
)

BOTH = pytest.mark.parametrize(
    "run", [ds.checkpoint, ds.non_reentrant_checkpoint], ids=["reentrant", "hooks"]
)


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    before, ds._state = ds._state, ds._CheckpointState()
    yield
    ds._state = before


@BOTH
@pytest.mark.parametrize(
    "options", [{}, {"partition_activations": True}, {"checkpoint_in_cpu": True}, "contiguous"]
)
def test_gradients_are_those_without_checkpointing(run: Any, options: Any) -> None:
    if options == "contiguous":
        options = {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 2}
    ds.configure(None, **options)
    model = stack()
    mask = torch.rand(5, WIDTH).gt(0.3)
    expected = gradients(model, plain, mask=mask)
    for _ in range(2):  # the buffers of the second step are those of the first
        assert_same_bits(gradients(model, run, mask=mask), expected)


@BOTH
def test_each_block_runs_twice(run: Any) -> None:
    model = stack()
    gradients(model, run)
    assert [block.calls for block in model.blocks] == [2, 2, 2]


@BOTH
def test_frozen_input_still_trains_the_parameters(run: Any) -> None:
    model = stack()
    model.embed.requires_grad_(False)  # so that no input of the first block requires a gradient
    expected = gradients(model, plain)
    assert "blocks.0.up.weight" in expected
    assert_same_bits(gradients(model, run), expected)


@BOTH
def test_frozen_parameters_between_trained_ones(run: Any) -> None:
    model = stack()
    model.blocks[1].requires_grad_(False)
    assert_same_bits(gradients(model, run), gradients(model, plain))


@BOTH
def test_nested_regions(run: Any) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()

        def forward(self, x: Tensor, inner: Any) -> Tensor:
            return inner(self.second, inner(self.first, x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.pair = nn.Linear(WIDTH, WIDTH), Pair()

        def forward(self, x: Tensor, run: Any) -> Tensor:
            return run(self.pair, self.embed(x), run).sum()

    torch.manual_seed(0)
    model = Model()
    expected = gradients(model, plain)
    ds.configure(None, checkpoint_in_cpu=True, partition_activations=True)
    assert_same_bits(gradients(model, run), expected)
    assert model.pair.first.calls >= 3  # once in forward, again for the outer and for the inner region


@BOTH
def test_structured_arguments_and_results(run: Any) -> None:
    layer: Any = nn.Linear(WIDTH, WIDTH)
    Result = collections.namedtuple("Result", "hidden note")

    def region(first: dict[str, Any], *, other: tuple[Tensor, str], flag: bool) -> dict[str, Any]:
        assert flag and other[1] == "text"
        h = layer(first["x"]) * other[0]
        return {"h": h, "list": [h + 1, None], "named": Result(h * 2, 7), "mask": h.detach() > 0}

    seen = []
    for how in (plain, run):
        layer.zero_grad()
        x: Any = batch().requires_grad_()
        factor: Any = torch.full((WIDTH,), 2.0, requires_grad=True)
        out = how(region, {"x": x, "unused": None}, other=(factor, "text"), flag=True)
        assert out["list"][1] is None and type(out["named"]).__name__ == "Result" and out["named"].note == 7
        assert out["mask"].dtype is torch.bool and not out["mask"].requires_grad
        (out["h"].sum() + out["list"][0].square().sum() + out["named"].hidden.sum()).backward()
        seen.append({"x": x.grad.clone(), "factor": factor.grad.clone(), "w": layer.weight.grad.clone()})
    assert_same_bits(seen[1], seen[0])


@BOTH
def test_one_result_in_a_tuple_is_that_result(run: Any) -> None:
    x = batch().requires_grad_()
    for wrap in (lambda t: t, lambda t: (t,), lambda t: [t]):
        assert torch.equal(run(lambda t, w=wrap: w(t * 2), x), x * 2)
    pair = run(lambda t: (t, 3), x)
    assert isinstance(pair, tuple) and pair[1] == 3


@BOTH
def test_without_gradients_nothing_is_kept(run: Any) -> None:
    block = Block()
    x = batch()
    with torch.no_grad():
        result = run(block, x)
    assert not result.requires_grad and block.calls == 1
    block.requires_grad_(False)
    assert not run(block, x).requires_grad


def test_reentrant_refuses_torch_autograd_grad_and_the_other_one_does_not() -> None:
    x, block = batch().requires_grad_(), Block(dropout=0.0)
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    with pytest.raises(RuntimeError, match=r"incompatible with \.grad\(\)"):
        torch.autograd.grad(ds.checkpoint(block, x).sum(), x)
    (got,) = torch.autograd.grad(ds.non_reentrant_checkpoint(block, x).sum(), x)
    assert torch.equal(got, expected)


@BOTH
def test_autocast_is_the_same_in_the_second_run(run: Any) -> None:
    model = stack(dropout=0.0)

    def step(how: Any) -> dict[str, Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch(), how)
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected = {name: grad.clone() for name, grad in step(plain).items()}
    assert_same_bits(step(run), expected)


@BOTH
def test_a_dead_input_is_freed_when_it_is_kept_elsewhere(run: Any) -> None:
    # In one process without a device, contiguous buffers are the way of keeping that copies.
    block = Block()

    def step() -> tuple[Any, Tensor]:
        h = batch().requires_grad_() * 2
        return weakref.ref(h.untyped_storage()), run(block, h)

    def alive(storage: Any) -> bool:
        gc.collect()
        return storage() is not None

    storage, output = step()
    assert alive(storage)
    ds.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=1)
    storage, output = step()
    assert not alive(storage)
    output.sum().backward()


def test_contiguous_buffers_are_used_again_and_grow() -> None:
    ds.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2)
    model = stack(depth=3)
    for _ in range(3):
        gradients(model, ds.checkpoint)
        arena = ds._state.process.arena
        assert arena is not None
        (free,) = arena._free.values()
        assert len(free) == 4  # two buffers of two, since three regions were kept at once
        assert len({piece.untyped_storage().data_ptr() for piece in free}) == 2
    ds.reset()
    assert not arena._free
    gradients(model, ds.checkpoint)


def test_forward_after_reset_does_not_touch_kept_inputs() -> None:
    ds.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=1)
    block = Block(dropout=0.0)
    x: Any = batch().requires_grad_()
    block(x * 3).sum().backward()
    expected, x = x.grad, batch().requires_grad_()
    first = ds.checkpoint(block, x * 3)
    ds.reset()
    second = ds.checkpoint(block, x * 5)
    first.sum().backward()
    assert torch.equal(x.grad, expected)
    second.sum().backward()


def test_checkpoint_function_itself() -> None:
    x = batch().requires_grad_()
    everything: list[Any] = []
    out = ds.CheckpointFunction.apply(lambda t: (t * 2, "note"), everything, x)
    assert everything[1] == out[1] == "note"
    out[0].sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 2.0))


@BOTH
@pytest.mark.parametrize("nested", [False, True])
def test_results_that_the_region_did_not_compute(run: Any, nested: bool) -> None:
    scale, bias = torch.full((WIDTH,), 3.0), nn.Parameter(torch.ones(WIDTH))

    def region(t: Tensor) -> tuple[Any, ...]:
        return (t * 2, [scale, None, (bias, 2.5)]) if nested else (t * 2, scale, bias)

    x = batch().requires_grad_()
    out, constant, rest = run(region, x) if not nested else (lambda a, b: (a, b[0], b[2][0]))(*run(region, x))
    assert torch.equal(constant, scale) and torch.equal(rest, bias)
    assert scale.grad_fn is None and not scale.requires_grad and bias.is_leaf
    (out * constant + rest).sum().backward()  # once went round and round in the same region
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 6.0))
    assert bias.grad is not None and torch.equal(bias.grad, torch.full_like(bias, x.numel() / WIDTH))


def test_profile_and_synchronize(capsys: pytest.CaptureFixture[str]) -> None:
    ds.configure(None, profile=True, synchronize=True)
    block = Block()
    ds.checkpoint(block, batch().requires_grad_()).sum().backward()
    lines = [line for line in capsys.readouterr().out.splitlines() if "checkpoint" in line]
    assert len(lines) == 2 and "forward Block" in lines[0] and "backward Block" in lines[1]
    assert all(" ms, " in line and "GB allocated" in line for line in lines)


# --- configure ------------------------------------------------------------------------------------


def test_configure_reads_a_config_and_arguments_override(tmp_path: Path) -> None:
    assert not ds.is_configured()
    config = {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    for given in (config, str(path)):
        ds.configure(None, given, checkpoint_in_cpu=False, num_checkpoints=7)
        section = ds._state.process.section
        assert (section.partition_activations, section.cpu_checkpointing) == (True, False)
        assert section.number_checkpoints == 7
    ds.configure(None, {"train_batch_size": 1})
    assert ds.is_configured() and not ds._state.process.section.partition_activations
    ds.set_num_layers(3)
    ds.partition_activations_in_checkpoint(True)
    assert (
        ds._state.process.section.number_checkpoints,
        ds._state.process.section.partition_activations,
    ) == (3, True)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"contiguous_checkpointing": True, "num_checkpoints": 2}, "partition_activations"),
        ({"contiguous_checkpointing": True, "partition_activations": True}, "number of layers"),
        ({"num_checkpoints": 0}, "number_checkpoints"),
        ({"deepspeed_config": {"activation_checkpointing": {"profile": 3}}}, "profile"),
        ({"deepspeed_config": object()}, "activation_checkpointing"),
    ],
)
def test_configure_refuses(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        ds.configure(None, **options)
    assert not ds.is_configured()


def test_lightning_call() -> None:
    ds.configure(
        mpu_=None,
        partition_activations=False,
        contiguous_checkpointing=False,
        checkpoint_in_cpu=False,
        profile=False,
    )
    assert ds.is_configured()
