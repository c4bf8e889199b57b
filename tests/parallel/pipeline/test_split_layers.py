"""Layers with split backward: gradients equal autograd's bit for bit, and weight gradients are deferred."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import deepspeed
from deepspeed.engine.pipeline.engine import PipelineEngine
from deepspeed.parallel.pipeline import PipelineModule
from deepspeed.parallel.pipeline.split_backward import WeightQueue, join_layers, split_layers
from deepspeed.zero.tensor_fragment import safe_get_full_fp32_param
from tests.pool import distributed


class Conv1D(nn.Module):
    """Computes what the layer of this name in Transformers does: its weight is [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


def vectors(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(6, 5), lambda: vectors(2, 3, 6)),
    "linear without bias": (lambda: nn.Linear(6, 5, bias=False), lambda: vectors(4, 6)),
    "Conv1D": (lambda: Conv1D(5, 6), lambda: vectors(2, 3, 6)),
    "embedding": (lambda: nn.Embedding(7, 4), lambda: torch.randint(7, (3, 5))),
    "embedding with padding": (lambda: nn.Embedding(7, 4, padding_idx=2), lambda: torch.randint(7, (3, 5))),
    "embedding by frequency": (
        lambda: nn.Embedding(7, 4, scale_grad_by_freq=True),
        lambda: torch.randint(7, (3, 5)),
    ),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), lambda: vectors(2, 4, 9, 9)),
    "convolution in groups": (
        lambda: nn.Conv2d(4, 6, 3, groups=2, dilation=2, bias=False),
        lambda: vectors(2, 4, 9, 9),
    ),
    "one dimension": (lambda: nn.Conv1d(4, 6, 3), lambda: vectors(2, 4, 9)),
    "three dimensions": (lambda: nn.Conv3d(2, 3, 2), lambda: vectors(2, 2, 4, 4, 4)),
    "transposed": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2),
        lambda: vectors(2, 4, 5, 5),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "autocast"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_bits_of_autograd(name: str, dtype: torch.dtype | str) -> None:
    make, inputs_of = LAYERS[name]
    torch.manual_seed(4)
    layer, inputs = make(), inputs_of()
    if isinstance(dtype, torch.dtype):
        layer = layer.to(dtype)
        if inputs.is_floating_point():
            inputs = inputs.detach().to(dtype).requires_grad_()
    params = list(layer.parameters())

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
            return layer(inputs)

    outputs = forward()
    grad = torch.randn_like(outputs)
    outputs.backward(grad)
    expected, grad_inputs = [param.grad for param in params], inputs.grad
    layer.zero_grad(set_to_none=True)
    inputs.grad = None
    found: dict[int, Tensor] = {}
    queue = WeightQueue(lambda number, value: found.__setitem__(number, value.clone()))
    split = split_layers(nn.Sequential(layer), {id(p): n for n, p in enumerate(params)}, queue)
    assert split == [layer]
    queue.active, queue.part = True, (0, 0)
    again = forward()
    assert again.dtype == outputs.dtype and torch.equal(again, outputs)
    again.backward(grad)
    assert not found and all(param.grad is None for param in params)
    assert (inputs.grad is None) == (grad_inputs is None)
    assert grad_inputs is None or torch.equal(inputs.grad, grad_inputs)  # type: ignore[arg-type]
    queue.compute((0, 0))
    assert sorted(found) == list(range(len(params)))
    for number, value in enumerate(expected):
        assert value is not None and found[number].dtype == value.dtype and torch.equal(found[number], value)
    join_layers(split)
    layer(inputs).backward(grad)
    assert params[0].grad is not None


@pytest.mark.parametrize("name", ["linear", "Conv1D", "convolution"])
def test_what_follows_may_write_into_the_output(name: str) -> None:
    make, inputs_of = LAYERS[name]
    layer, inputs = make(), inputs_of()
    functional.relu(layer(inputs)).sum().backward()
    params = list(layer.parameters())
    expected, grad_inputs = [param.grad for param in params], inputs.grad
    inputs.grad = None
    found: dict[int, Tensor] = {}
    queue = WeightQueue(lambda number, value: found.__setitem__(number, value.clone()))
    split_layers(nn.Sequential(layer), {id(p): n for n, p in enumerate(params)}, queue)
    queue.active, queue.part = True, (0, 0)
    functional.relu_(layer(inputs)).sum().backward()
    queue.compute((0, 0))
    assert torch.equal(inputs.grad, grad_inputs)  # type: ignore[arg-type]
    assert all(torch.equal(found[number], value) for number, value in enumerate(expected))  # type: ignore[arg-type]


def test_what_is_not_split() -> None:
    class Own(nn.Linear):
        pass

    shared = nn.Linear(4, 4)
    module = nn.ModuleDict(
        {
            "subclass": Own(4, 4),
            "once": shared,
            "twice": shared,
            "circular": nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"),
            "same": nn.Conv2d(1, 1, 3, padding="same"),
            "sparse": nn.Embedding(4, 4, sparse=True),
            "norm": nn.LayerNorm(4),
        }
    )
    module.add_module("tied", nn.Linear(4, 4))
    module["once"].weight = module.tied.weight  # type: ignore[union-attr]
    numbers = {id(p): n for n, p in enumerate(module.parameters())}
    assert split_layers(module, numbers, WeightQueue(lambda number, value: None)) == []
    single = nn.Conv1d(2, 3, 2)
    queue = WeightQueue(lambda number, value: None)
    split_layers(nn.Sequential(single), {id(p): n for n, p in enumerate(single.parameters())}, queue)
    queue.active = True
    single(torch.randn(2, 5)).sum().backward()  # one sample, without an axis for the batch
    assert single.weight.grad is not None


def test_a_copy_of_a_split_layer_is_whole() -> None:
    layer = nn.Linear(3, 2)
    queue = WeightQueue(lambda number, value: None)
    split_layers(nn.Sequential(layer), {id(p): n for n, p in enumerate(layer.parameters())}, queue)
    queue.active = True
    twin = copy.deepcopy(layer)
    inputs = torch.randn(4, 3)
    with torch.no_grad():
        twin.weight.add_(1.0)
    twin(inputs).sum().backward()
    torch.testing.assert_close(twin.weight.grad, inputs.sum(0).expand(2, 3))
    assert layer.weight.grad is None
    assert torch.equal(twin(inputs), functional.linear(inputs, layer.weight + 1.0, layer.bias))


def images() -> list[nn.Module]:
    """A small AlexNet."""
    return [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(8 * 16, 10),
    ]


def pairs() -> Iterator[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(2)
    while True:
        yield torch.randn(2, 3, 8, 8, generator=source), torch.randint(10, (2,), generator=source)


def trained(schedule: str, stage: int, autocast: bool) -> tuple[list[Tensor], list[Tensor], int]:
    torch.manual_seed(1)
    module = PipelineModule(
        images(), num_stages=2, loss_fn=functional.cross_entropy, partition_method="uniform"
    )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "pipeline": {"schedule": schedule},
        "torch_autocast": {"enabled": autocast, "dtype": "bfloat16"},
    }
    engine = deepspeed.initialize(model=module, config=config)[0]
    assert isinstance(engine, PipelineEngine)
    data = pairs()
    losses = [engine.train_batch(data) for _ in range(3)]
    weights = [safe_get_full_fp32_param(param) for param in module.parameters()]
    split = len(engine._split)
    engine.destroy()
    return losses, weights, split


@pytest.mark.parametrize(("stage", "autocast"), [(1, False), (3, False), (2, True)])
@distributed(world_size=2)
def test_convolutions_train_to_the_same_bits(stage: int, autocast: bool) -> None:
    losses, weights, split = trained("1f1b", stage, autocast)
    others, values, parts = trained("zero-bubble", stage, autocast)
    assert split == 0 and parts == sum(weight.dim() > 1 for weight in weights) > 0
    assert all(map(torch.equal, losses, others)) and all(map(torch.equal, weights, values))
