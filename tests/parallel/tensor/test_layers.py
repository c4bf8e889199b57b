"""Parallel layers against the whole ones: loss and every gradient, in fp32."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import deepspeed
from deepspeed.checkpoint.placement import placement_of
from deepspeed.compat.module_inject.layers import GatherReplacedLayerParams
from deepspeed.compat.runtime_utils import is_model_parallel_parameter
from deepspeed.parallel.tensor.cuts import Cut, even_sizes
from deepspeed.parallel.tensor.embedding import VocabParallelEmbedding
from deepspeed.parallel.tensor.layers import LinearAllreduce, LinearLayer
from tests.parallel.tensor.blocks import Conv1D, Model, batch, split, tensor_parallel
from tests.pool import distributed

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def own_part(whole: Tensor, param: nn.Parameter) -> Tensor:
    """Return this rank's part of a tensor of the whole model."""
    placement = placement_of(param)
    if not placement.boxes:
        return whole
    parts = [whole[tuple(slice(*side) for side in box)] for box in placement.boxes]
    sizes = [{box[dim] for box in placement.boxes} for dim in range(whole.dim())]
    dim = next((dim for dim, found in enumerate(sizes) if len(found) > 1), 0)
    return torch.cat(parts, dim)


def assert_gradients(module: nn.Module, reference: nn.Module) -> None:
    whole = dict(reference.named_parameters())
    for name, param in module.named_parameters():
        expected = whole[name].grad
        assert expected is not None and param.grad is not None, name
        scale = expected.abs().max().item()
        torch.testing.assert_close(
            param.grad,
            own_part(expected, param),
            msg=lambda m, n=name: f"{n}: {m}",
            rtol=1e-5,
            atol=1e-5 * scale,
        )


@pytest.mark.parametrize("by_sequence", [False, True])
@pytest.mark.parametrize(
    ("world_size", "heads"), [(2, (6, 2)), (2, (5, 1)), (3, (4, 2)), (4, (6, 2)), (4, (3, 3))]
)
@distributed()
def test_a_block_in_parts_computes_like_a_whole_one(
    world_size: int, heads: tuple[int, int], by_sequence: bool
) -> None:
    reference = Model(*heads)
    expected = reference(*batch())
    expected.backward()
    model = split(Model(*heads), tensor_parallel().communicator("tp"), by_sequence=by_sequence)
    loss = model(*batch())
    loss.backward()
    torch.testing.assert_close(loss, expected, **CLOSE)
    assert_gradients(model, reference)


@pytest.mark.parametrize("by_sequence", [False, True])
@pytest.mark.parametrize("how", ["reentrant", "non-reentrant", "deepspeed"])
@distributed(world_size=2)
def test_recomputed_blocks(how: str, by_sequence: bool) -> None:
    reference = Model()
    reference(*batch()).backward()
    model = split(Model(), tensor_parallel().communicator("tp"), by_sequence=by_sequence)
    model.checkpoint = {
        "reentrant": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
        "non-reentrant": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
        "deepspeed": deepspeed.transforms.recompute.checkpointing.checkpoint,
    }[how]
    model(*batch()).backward()
    assert_gradients(model, reference)


@pytest.mark.parametrize("by_sequence", [False, True])
@distributed(world_size=2)
def test_overlapped_communication_gives_the_same_bits(by_sequence: bool) -> None:
    found = []
    for overlap in (False, True):
        group = tensor_parallel().communicator("tp")
        model = split(Model(), group, by_sequence=by_sequence, overlap=overlap)
        group.reset_counters()
        model(*batch()).backward()
        found.append(([param.grad for param in model.parameters()], dict(group.collectives)))
    (one, counts), (other, same_counts) = found
    assert counts == same_counts
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("by_sequence", [False, True])
@distributed(world_size=2)
def test_copies_evaluation_and_16_bit(by_sequence: bool) -> None:
    model = split(Model(), tensor_parallel().communicator("tp"), by_sequence=by_sequence)
    model = copy.deepcopy(model)
    assert isinstance(model.blocks[0].qkv, nn.Linear) and isinstance(model.blocks[0].up, Conv1D)
    assert isinstance(model.embed, nn.Embedding) and model.head.weight is model.embed.weight
    expected = Model()(*batch())
    with torch.no_grad():
        torch.testing.assert_close(model(*batch()), expected.detach(), **CLOSE)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(*batch()), expected, rtol=0.03, atol=0.03)
    loss = model.to(torch.bfloat16)(*batch())
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=0.03, atol=0.03)
    assert all(param.grad is not None and param.grad.dtype == torch.bfloat16 for param in model.parameters())


@distributed(world_size=2)
def test_compiled_with_breaks() -> None:
    reference = Model(blocks=1)
    expected = reference(*batch())
    expected.backward()
    model = split(Model(blocks=1), tensor_parallel().communicator("tp"))
    init = nn.Module.__init__
    try:
        torch._dynamo.reset()
        loss = torch.compile(model, backend="eager")(*batch())
        loss.backward()
    finally:
        nn.Module.__init__ = init  # torch's compiler patches it for good
    torch.testing.assert_close(loss, expected, **CLOSE)
    assert_gradients(model, reference)


@distributed(world_size=2)
def test_bytes_of_a_block() -> None:
    """Two all-gathers and two reduce-scatters per block forward, the same backward; or two all-reduces each way."""
    width = 2 * 8 * 24 * 4  # bytes of [2, 8, width] fp32
    for by_sequence in (False, True):
        group = tensor_parallel().communicator("tp")
        model = split(Model(), group, by_sequence=by_sequence)
        block = model.blocks[0]
        hidden = torch.randn(2, 8, 24, requires_grad=True)
        if by_sequence:
            assert model.sequence is not None
            hidden = model.sequence.enter(hidden).detach().requires_grad_()
        group.reset_counters()
        made = block(hidden)
        assert made.shape == hidden.shape
        if by_sequence:
            assert group.collectives == {"all_gather": 2, "reduce_scatter": 2}
        else:
            assert group.collectives == {"all_reduce": 2}
        assert group.bytes_sent == 2 * width
        group.reset_counters()
        torch.autograd.grad(made.sum(), [hidden])
        if by_sequence:
            assert group.collectives == {"all_gather": 2, "reduce_scatter": 2}
        else:
            assert group.collectives == {"all_reduce": 2}
        assert group.bytes_sent == 2 * width


@distributed(world_size=2)
def test_activations_between_regions_are_shards() -> None:
    """Return what autograd saves for norms, dropouts and residuals."""

    def kept(by_sequence: bool) -> int:
        model = split(
            Model(blocks=1, dropout=0.1), tensor_parallel().communicator("tp"), by_sequence=by_sequence
        )
        model.sequence and model.sequence.enter(torch.zeros(2, 8, 24))
        hidden = torch.randn(2, 4 if by_sequence else 8, 24, requires_grad=True)
        weights = {param.data_ptr() for param in model.parameters()}
        found: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in weights:
                found[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        block = model.blocks[0]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            made = hidden + block.dropout(block.norm(hidden))
        assert made.shape == hidden.shape
        return sum(found.values())

    assert 2 * kept(True) == kept(False) > 0


@distributed(world_size=3)
def test_gathered_outputs_and_split_inputs() -> None:
    group = tensor_parallel().communicator("tp")
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 5))
    cut = Cut(0, 12, (((8, 12), (0, 2)), ((0, 2), (4, 8)), ((2, 4),)))  # out of order, and two in common
    parts = nn.Sequential(
        LinearLayer(whole[0], group, cut=cut, gather_output=True),
        nn.Tanh(),
        LinearAllreduce(whole[2], group, split_input=True),
    )
    inputs = torch.randn(3, 7, requires_grad=True)
    expected = torch.autograd.grad(whole(inputs).square().sum(), [inputs, *whole.parameters()])
    found = torch.autograd.grad(parts(inputs).square().sum(), [inputs, *parts.parameters()])
    torch.testing.assert_close(found[0], expected[0], **CLOSE)
    for wanted, grad, param in zip(expected[1:], found[1:], parts.parameters(), strict=True):
        torch.testing.assert_close(grad, own_part(wanted, param), **CLOSE)


@pytest.mark.parametrize("stage", [0, 2])
@distributed(world_size=2)
def test_parameters_become_whole_and_parts_again(stage: int) -> None:
    class Planned(nn.Module):
        config = SimpleNamespace(base_model_tp_plan={"*.up": "colwise", "*.down": "rowwise"})

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.ModuleDict({"up": nn.Linear(6, 8), "down": nn.Linear(8, 6)})

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layer["down"](self.layer["up"](inputs).tanh())

    def trained(look: bool) -> list[Tensor]:
        model = Planned()
        whole = {name: param.detach().clone() for name, param in model.named_parameters()}
        config = {
            "train_micro_batch_size_per_gpu": 3,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "zero_optimization": {"stage": stage},
            "tensor_parallel": {"autotp_size": 2},
        }
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        torch.manual_seed(1)
        inputs = torch.randn(3, 6)
        split = {n: p for n, p in model.named_parameters() if is_model_parallel_parameter(p)}
        assert set(split) == {"layer.up.weight", "layer.up.bias", "layer.down.weight"}
        for name, param in split.items() if look else ():
            part = param.detach().clone()
            param.gather_params([param])
            torch.testing.assert_close(param.detach(), whole[name], rtol=0, atol=0)
            param._tp_partition([param])
            torch.testing.assert_close(param.detach(), part, rtol=0, atol=0)
        with GatherReplacedLayerParams(model.parameters(), model, enabled=look):
            for name, param in model.named_parameters() if look else ():
                torch.testing.assert_close(param.detach(), whole[name], rtol=0, atol=0)
        for _ in range(2):
            engine.backward(engine(inputs).square().mean())
            engine.step()
        return [param.detach().clone() for param in model.parameters()]

    torch.testing.assert_close(trained(look=True), trained(look=False), rtol=0, atol=0)


@distributed(world_size=2)
def test_weights_on_meta_and_of_zero_init() -> None:
    group = tensor_parallel().communicator("tp")
    meta = LinearLayer(nn.Linear(4, 6, device="meta"), group)
    assert meta.weight.is_meta and meta.weight.shape == (3, 4) and meta.out_features == 3
    with deepspeed.zero.Init():
        torch.manual_seed(0)
        sharded = nn.Linear(4, 6)
    with deepspeed.zero.GatheredParameters(list(sharded.parameters())):
        whole = sharded.weight.detach().clone()
    layer = LinearAllreduce(sharded, group)
    assert torch.equal(layer.weight, whole.chunk(2, 1)[group.rank])
    assert not hasattr(layer.weight, "ds_id") and layer.in_features == 2


@distributed(world_size=2)
def test_parts_that_are_there_already() -> None:
    group = tensor_parallel().communicator("tp")
    own = nn.Linear(4, 3 + group.rank)
    layer = LinearLayer(own, group.group, skip_partition=True)
    assert placement_of(layer.weight).global_shape == (7, 4)
    assert placement_of(layer.weight).boxes[0][0] == ((0, 3), (3, 7))[group.rank]
    assert torch.equal(layer.weight, own.weight)


@distributed(world_size=2)
def test_refusals() -> None:
    group = tensor_parallel().communicator("tp")

    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    with pytest.raises(ValueError, match="Scaled does not compute the same"):
        LinearLayer(Scaled(4, 4), group)
    with pytest.raises(ValueError, match="summed twice"):
        LinearAllreduce(nn.Linear(4, 4), group, cut=Cut.whole(0, 4, 2))
    with pytest.raises(ValueError, match="does not fit a layer that is 4 wide"):
        LinearLayer(nn.Linear(4, 4), group, cut=Cut.even(0, 6, 2))
    with pytest.raises(ValueError, match="max_norm"):
        VocabParallelEmbedding(nn.Embedding(4, 4, max_norm=1.0), group)


def test_cuts() -> None:
    assert even_sizes(7, 3) == (3, 2, 2) and even_sizes(12, 3, 4) == (4, 4, 4)
    gated = Cut.even(0, 12, 2, blocks=2)
    assert gated.parts == (((0, 3), (6, 9)), ((3, 6), (9, 12))) and not gated.is_plain
    heads = Cut(0, 8, (((0, 4),), ((2, 4), (4, 6)), ((6, 8), (2, 3))))
    assert heads.shared() == ((2, 4),)
    assert [heads.elsewhere(rank) for rank in range(3)] == [(), ((2, 4),), ((2, 3),)]
    assert heads.local(2, [(2, 7)]) == (((0, 1), (6, 7)), ((2, 3), (2, 3)))
    whole = torch.arange(8.0)
    assert torch.equal(heads.joined([heads.take(whole, rank) for rank in range(3)]), whole)
    for parts in ([((0, 3),), ((4, 8),)], [((0, 8), (7, 8))], [((0, 9),)]):
        with pytest.raises(ValueError):
            Cut(0, 8, tuple(parts))
    with pytest.raises(ValueError, match="a multiple of 4"):
        even_sizes(6, 2, 4)
